"""`redline profile`: stages add up, the record has its keys, and a run folder is only read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.cli import run as redline_cli
from redline.core.errors import UserError
from redline.engine.stages import IDLE
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools import profile as profile_module
from redline.tools.profile import profile, settings_of_run
from redline.tools.profile_candidates import candidates, promising
from redline.tools.profile_report import KEYS
from redline.tools.profile_session import REPLAY, StagedSession, measure_stages, split_replays, warm_up

SMALL: dict[str, dict[str, Any]] = {
    "ppo": {"hidden": (16,), "net": "mlp", "rollout_steps": 4},
    "pqn": {"hidden": (16,), "net": "mlp", "rollout_steps": 4},
    "dqn": {"hidden": (16,), "net": "mlp", "batch_size": 16, "replay_capacity": 2048, "learning_starts": 64},
}
FAULTY = str(Path(__file__).parents[1] / "collect")


def settings_of(algo: str, **more: Any) -> Settings:
    more = {"num_envs": 16, "steps": 10**9, "device": "cpu", "compile": False, "threads": 1} | more
    return Settings("snake", algo, algo_options=SMALL[algo] | more.pop("algo_options", {}), **more)


@pytest.mark.parametrize("algo", SMALL)
def test_stages_add_up_to_the_wall_clock(algo: str) -> None:
    session = StagedSession(resolve(settings_of(algo)), pytest.fail)
    warm_up(session)
    measured = measure_stages(session, 0.3)
    session.close()
    assert measured.total == pytest.approx(measured.wall_seconds, rel=0.03)
    named = {"environment step", "observation", "inference", "replay write", "forward", "backward", "optimizer"}
    if algo == "dqn":
        named |= {"sample", "target network"}
    assert named <= measured.seconds.keys()
    assert sum(measured.seconds[name] for name in named) > 0.8 * measured.total, "hardly anything is unnamed"
    assert REPLAY not in measured.seconds


def test_a_staged_session_trains_as_a_session_does() -> None:
    """The stages are the session's own functions: the same weights come out."""
    weights = []
    for kind in (Session, StagedSession):
        session = kind(resolve(settings_of("dqn")), pytest.fail)
        session.iterate(12)
        weights.append(session.learner.optimizer.flat.clone())
        assert session.updates > 0
        session.close()
    assert torch.equal(*weights)


def test_replays_are_split_and_the_rest_is_idle() -> None:
    spent = {REPLAY: 1.0, IDLE: 0.1, "host-device copies": 0.2}
    split = split_replays(spent, {"forward": 0.6, "backward": 0.3})
    assert split == pytest.approx({"forward": 0.6, "backward": 0.3, IDLE: 0.2, "host-device copies": 0.2})
    noisy = split_replays(spent, {"forward": 0.8, "backward": 0.4})  # events of one replay may exceed the mean
    assert sum(noisy.values()) == pytest.approx(1.3)
    assert noisy["forward"] == pytest.approx(2 / 3)
    assert split_replays({REPLAY: 1.0}, {}) == {IDLE: 1.0}


def test_record_and_report(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    record = profile(settings_of("dqn"), 0.6, tmp_path / "report.md", probes=0, trace=trace, notify=lambda _: None)
    for key, (kind, _) in KEYS.items():
        assert isinstance(record[key], kind), key
    assert json.loads((tmp_path / "report.json").read_text()).keys() >= KEYS.keys()
    assert record["stages_over_wall"] == pytest.approx(1, abs=0.03)
    assert record["flops"]["per_step"] > 0
    assert record["memory"]["replay"] > 0
    assert record["host"]["checkpoint_copy"] > 0
    assert json.loads(trace.read_text())["traceEvents"]
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Profile of snake with dqn on ")
    assert record["bottleneck"] in text


def test_first_advice_is_tried() -> None:
    """Four times the environments of a loop that is all overhead: predicted from parts, then measured."""
    messages: list[str] = []
    settings = settings_of("ppo", num_envs=2)
    plan = resolve(settings)
    assert candidates(plan)[0].options == {"compile": True}
    with pytest.MonkeyPatch.context() as patch:  # compilation takes too long for a test
        only = [c for c in candidates(plan) if "num_envs" in c.options]
        patch.setattr("redline.tools.profile_candidates.candidates", lambda _: only)
        patch.setattr(profile_module, "_TRY_SECONDS", 0.4)
        record = profile(settings, 1.0, None, probes=1, notify=messages.append)
    assert record["advice"][0]["change"] == "num-envs 2 -> 8"
    tried = record["tried"]
    assert tried["predicted_gain"] > 1.5
    assert tried["measured_gain"] - 1 >= (tried["predicted_gain"] - 1) / 2
    assert any("Trying num-envs" in message for message in messages)


def test_candidates_that_aim_at_nothing_are_left_out() -> None:
    plan = resolve(settings_of("dqn"))
    chosen = promising(plan, {"learner": 0.02, "environment": 0.98}, 10)
    assert not any("batch_size" in candidate.options for candidate, _ in chosen)
    chosen = promising(plan, {"learner": 0.5, "environment": 0.5}, 10)
    assert any(candidate.options == {"batch_size": 64} for candidate, _ in chosen)


def gym_profile(actors: int, probes: int, **options: Any) -> dict[str, Any]:
    settings = Settings(
        "gym:faulty:Faulty-v0",
        "ppo",
        num_envs=4,
        actors=actors,
        device="cpu",
        threads=1,
        algo_options={"hidden": (16,), "net": "mlp", "batch_size": 8} | options,
    )
    return profile(settings, 1.5, None, probes, notify=lambda _: None)


def test_slow_environment_of_a_gym_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator is named, actors are advised and tried, and help."""
    monkeypatch.syspath_prepend(FAULTY)
    monkeypatch.setenv("FAULTY_SLOW", "0.02")
    monkeypatch.setattr(profile_module, "_TRY_SECONDS", 1.5)
    for attempt in range(2):  # others may be using this machine
        record = gym_profile(actors=0, probes=1, rollout_steps=2, epochs=1)
        assert "slow environment" in record["bottleneck"]
        assert record["advice"][0]["options"]["actors"] >= 2
        tried = record["tried"]
        helped = tried["measured_gain"] - 1 >= (tried["predicted_gain"] - 1) / 2
        if helped or attempt:
            break
    assert helped


def test_starved_actors_of_a_gym_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors that wait for a slow learner are named."""
    monkeypatch.syspath_prepend(FAULTY)
    record = gym_profile(actors=1, probes=0, rollout_steps=16, epochs=4)
    assert record["advice"][0]["cause"] == "starved actors"
    assert "starves its actors" in record["bottleneck"]
    assert {"rings", "actors' wait", "publication of weights"} <= record["stages"].keys()


def test_a_run_is_profiled_with_its_settings_and_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["snake", "--algo", "pqn", "--num-envs", "16", "--steps", "500", "--no-compile", "--eval-episodes", "0"]
    assert redline_cli(["train", *words, "--pqn.rollout-steps", "4", "--run-dir", "run", "--device", "cpu"]) == 0
    before = {path: path.stat().st_mtime_ns for path in sorted(Path("run").rglob("*"))}
    settings = settings_of_run(Path("run"))
    assert (settings.env, settings.algo, settings.num_envs) == ("snake", "pqn", 16)
    assert settings.algo_options["rollout_steps"] == 4
    capsys.readouterr()
    assert redline_cli(["profile", "run", "--seconds", "0.6", "--probes", "0", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["algo"] == "pqn"
    assert Path("profile.md").exists()
    assert {path: path.stat().st_mtime_ns for path in sorted(Path("run").rglob("*"))} == before


def test_the_page_names_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "profiling.md").read_text()
    assert [key for key in KEYS if f"| `{key}` |" not in page] == []


def test_usage_errors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for words, message in (
        (["snake", "--seconds", "0"], "seconds is 0"),
        (["snake", "--steps", "10"], "no option --steps"),
        ([str(tmp_path), "--num-envs", "8"], "profiled with its own settings; drop num_envs"),
    ):
        with pytest.raises(UserError, match=message):
            redline_cli(["profile", *words])
