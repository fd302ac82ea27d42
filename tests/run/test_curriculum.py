"""A curriculum: which phase when, and what cannot be one."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from redline import recipes
from redline.core import random
from redline.core.errors import UserError
from redline.envs import make_rules
from redline.recipes import Phase
from redline.run import evaluate, final_evaluation, train, trainer
from redline.run.checkpoint import Checkpoint, Checkpoints
from redline.run.curriculum import Curriculum, phases_of, read_phases
from redline.run.metrics_log import Metrics
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

RULES = make_rules("snake", {"width": 6, "height": 5})


def phase(name: str, start: float, end: float, **options: Any) -> Phase:
    return Phase(name, start, end, options)


def test_the_phase_at_each_share() -> None:
    made = Curriculum([phase("late", 0.5, 0.9, long_start=20), phase("early", 0.1, 0.5, long_start=9)], RULES)
    assert [each.name for each in made.phases] == ["base", "early", "late", "base 2"]
    assert [(each.start, each.end) for each in made.phases] == [(0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 1)]
    shares = {0.0: 0, 0.0999: 0, 0.1: 1, 0.4999: 1, 0.5: 2, 0.8999: 2, 0.9: 3, 1.0: 3, 7.0: 3}
    assert {progress: made.at(progress) for progress in shares} == shares
    assert [rules.config.long_start for rules in made.rules] == [0, 9, 20, 0]
    assert all(rules.config.width == 6 for rules in made.rules)


def test_phases_without_holes_stay_as_they_are() -> None:
    made = Curriculum([phase("a", 0, 0.3), phase("b", 0.3, 1.0, reward_step=-0.5)], RULES)
    assert made.describe() == [
        {"name": "a", "from": 0, "to": 0.3, "env": {}},
        {"name": "b", "from": 0.3, "to": 1.0, "env": {"reward_step": -0.5}},
    ]


def test_live_options_and_those_that_compile_again() -> None:
    options: list[dict[str, Any]] = [{"long_start": 9}, {"long_start": 20, "reward_food": 2.0}, {"starvation": 40}]
    made = Curriculum([phase(str(i), i / 3, (i + 1) / 3, **each) for i, each in enumerate(options)], RULES)
    assert made.live == ("long_start", "reward_food")
    assert made.fixed == ("starvation",)
    assert not made.compiles_again(0, 1)
    assert made.compiles_again(1, 2)
    assert made.compiles_again(0, 2)


@pytest.mark.parametrize(
    ("phases", "sentence"),
    [
        ([phase("a", 0.5, 0.5)], "Phase 'a' of the curriculum goes from 0.5 to 0.5; expected progress"),
        ([phase("a", 0.6, 0.5)], "Phase 'a' of the curriculum goes from 0.6 to 0.5"),
        ([phase("a", -0.1, 0.5)], "Phase 'a' of the curriculum goes from -0.1 to 0.5"),
        ([phase("a", 0, 1.5)], "Phase 'a' of the curriculum goes from 0 to 1.5"),
        ([phase("a", float("nan"), 1)], "Phase 'a' of the curriculum goes from nan to 1"),
        ([phase("b", 0.4, 1), phase("a", 0, 0.5)], "Phases 'a' and 'b' of the curriculum overlap: one ends at 0.5"),
        ([phase("a", 0, 0.5), phase("a", 0.5, 1)], "Two phases of the curriculum are called 'a'"),
        ([phase("a", 0, 1, long_strat=3)], "Phase 'a' of the curriculum: .*'long_strat'; did you mean 'long_start'"),
        (
            [phase("a", 0, 1, long_start="9")],
            "Phase 'a' of the curriculum: env.long_start is '9'; expected a whole number",
        ),
        (
            [phase("a", 0, 1, long_start=99)],
            "Phase 'a' of the curriculum: env.long_start is 99; a snake on a 6x5 board",
        ),
        ([phase("a", 0, 1, width=7)], "Phase 'a' of the curriculum sets env.width, which changes what the agent sees"),
        ([phase("a", 0, 1, view="centred")], "sets env.view, which changes what the agent sees"),
    ],
)
def test_what_cannot_be_a_curriculum(phases: list[Phase], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Curriculum(phases, RULES)


def test_an_option_that_only_changes_what_is_seen_is_found() -> None:
    """Shapes alone do not tell it: here an option is drawn into one corner of the observation."""
    assert Curriculum([phase("a", 0, 1, starvation=40)], RULES).fixed == ("starvation",)

    def observe(config: Any, state: Any) -> Any:
        obs = real(config, state)
        obs[:, 0, 0, 0] = config.starvation
        return obs

    real = RULES.game.observe
    rules = RULES._replace(game=dataclasses.replace(RULES.game, observe=observe))
    with pytest.raises(UserError, match=r"sets env.starvation, which changes what the agent sees"):
        Curriculum([phase("a", 0, 1, starvation=40)], rules)


def test_every_games_own_curriculum_is_one(game_name: str) -> None:
    rules = make_rules(game_name)
    if phases := phases_of(recipes.find(game_name).curriculum(rules.config)):
        made = Curriculum(phases, rules)
        assert not made.fixed  # a default never compiles again


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "phases.json"
    records = [{"name": "a", "from": 0, "to": 0.5, "env": {"long_start": 9}}]
    path.write_text(json.dumps(records))
    assert read_phases(str(path)) == [Phase("a", 0.0, 0.5, {"long_start": 9})]
    made = Curriculum(read_phases(str(path)), RULES)
    path.write_text(json.dumps(made.describe()))
    assert Curriculum(read_phases(str(path)), RULES).phases == made.phases  # what a run tells can be given to another


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[{", "is not JSON"),
        ("{}", "holds an object; expected a list of phases"),
        ("[]", "holds an empty list; expected a list of phases"),
        ("[3]", "Phase 1 of the curriculum is a number; expected an object with 'name', 'from', 'to', 'env'"),
        ('[{"name": "a", "from": 0, "to": 1}]', "Phase 1 of the curriculum lacks 'env'"),
        (
            '[{"name": "a", "form": 0, "to": 1, "env": {}}]',
            "Phase 1 of the curriculum has no 'form'; did you mean 'from'",
        ),
        ('[{"name": "a", "from": "0", "to": 1, "env": {}}]', "'from' is '0'; expected a number from 0 to 1"),
        ('[{"name": 1, "from": 0, "to": 1, "env": {}}]', "'name' is 1; expected a text"),
        ('[{"name": "a", "from": 0, "to": 1, "env": []}]', r"'env' is \[\]; expected an object of options"),
    ],
)
def test_files_that_are_no_curriculum(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "phases.json"
    path.write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_phases(str(path))
    with pytest.raises(UserError, match="could not be read: No such file"):
        read_phases(str(tmp_path / "none.json"))


# ---- training with one

LIVE = [
    {"name": "short", "from": 0.0, "to": 0.25, "env": {"reward_step": -0.5}},
    {"name": "long", "from": 0.25, "to": 0.75, "env": {"long_start": 12, "reward_step": 0.25}},
]
RESUME_FIXED = [LIVE[0], {"name": "hungry", "from": 0.25, "to": 0.75, "env": {"long_start": 12, "starvation": 4}}]


def settings(path: Path, phases: list[dict[str, Any]], **changes: Any) -> Settings:
    """640 steps, 16 an iteration: the phases change after iterations 10 and 30."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "phases.json").write_text(json.dumps(phases))
    chosen: dict[str, Any] = {
        "env": "snake",
        "run_dir": str(path / "run"),
        "curriculum_file": str(path / "phases.json"),
        "num_envs": 16,
        "batch_size": 16,
        "replay_capacity": 480,
        "n_step": 1,
        "backplay": 0.0,
        "steps": 640,
        "device": "cpu",
        "compile": False,
        "eval_episodes": 4,
        "env_options": {"width": 4, "height": 4},
        "algo_options": {"hidden": (16, 16), "learning_starts": 64, "learning_rate": 1e-3, "epsilon_steps": 400},
    }
    return Settings(**chosen | changes)


def saved(path: Path) -> Checkpoint:
    found = Checkpoints(path / "run").load()
    assert found is not None
    return found


def metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def every_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "next_chunk", lambda *_: 1)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without generating code: tracing alone decides which options a compiled step sees.

    The generated code is tested in tests/envs/test_env_compiled.py and tests/engine/test_fast.py.
    """
    compile_function = torch.compile

    def trace(function: Any, *, fullgraph: bool, dynamic: bool, options: dict[str, Any]) -> Any:
        del options  # of the code generator
        return compile_function(function, fullgraph=fullgraph, dynamic=dynamic, backend="eager")

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", trace)


@pytest.mark.usefixtures("every_iteration")
@pytest.mark.parametrize("phases", [LIVE, RESUME_FIXED], ids=["live", "compiling again"])
def test_phases_begin_exactly_where_they_are_due(
    phases: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train.train(settings(tmp_path, phases)).result
    name = phases[1]["name"]
    logs = metrics(tmp_path)
    assert [log["phase"] for log in logs] == ["short"] * 10 + [name] * 20 + ["base"] * 10
    assert [log["phase_number"] for log in logs] == [1] * 10 + [2] * 20 + [3] * 10
    told = capsys.readouterr().err
    assert f"Curriculum: short 0-25 %, {name} 25-75 %, base 75-100 %" in told
    options = {"live": "env.long_start 12, env.reward_step 0.25", "hungry": "env.long_start 12, env.starvation 4"}
    assert told.count("Phase ") == 2
    assert f"Phase {name} (2 of 3): {options.get(name, options['live'])}." in told
    assert "Phase base (3 of 3): the run's own options." in told
    assert result["settings"]["curriculum"] is True
    assert [each["name"] for each in result["settings"]["phases"]] == ["short", name, "base"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["phases"] == result["settings"]["phases"]
    assert saved(tmp_path).state["session"]["phase"] == "base"
    assert result["settings"]["env_options"]["long_start"] == 0


def test_the_games_follow_the_phase(tmp_path: Path) -> None:
    """Snakes start long in the second phase and by no other rewards than its own."""
    session = Session(resolve(settings(tmp_path, LIVE)), print)
    rewards, longest = [], []
    for _ in range(40):
        session.iterate(1)
        rewards.append(float(session.collector.rules.config.reward_step))
        fresh = session.collector.envs.episode.length == 0
        longest.append(int(torch.where(fresh, session.collector.envs.game.length, 0).max()))
    assert rewards == [-0.5] * 10 + [0.25] * 20 + [0.0] * 10
    assert max(longest[:10]) <= 3
    assert max(longest[10:30]) > 6
    assert max(longest[30:]) <= 3


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_games_follow_options_that_are_not_live(compiled: bool, tmp_path: Path) -> None:
    """Nobody goes hungry for more than 4 moves in the phase that says so; before and after it some do."""
    options = {"algo_options": {"hidden": (8,), "learning_starts": 10**6, "epsilon_high": 1.0, "epsilon_low": 1.0}}
    messages: list[str] = []
    session = Session(resolve(settings(tmp_path, RESUME_FIXED, compile=compiled, **options)), messages.append)
    hunger = []
    for _ in range(40):
        session.iterate(1)
        hunger.append(int(session.collector.envs.game.hunger.max()))
    assert max(hunger[:10]) > 4
    assert max(hunger[11:30]) < 4
    assert max(hunger[30:]) > 4
    assert len(messages) == 2  # the phases, and no failed compilation


@pytest.fixture(scope="module", params=[LIVE, RESUME_FIXED], ids=["live", "compiling again"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """Phases, and the folder of a run through all of them without a stop."""
    path = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "next_chunk", lambda *_: 1)
        train.train(settings(path, request.param))
    return request.param, path


@pytest.mark.usefixtures("every_iteration")
@pytest.mark.parametrize("stop", [96, 160, 304, 560])
def test_a_continued_run_is_the_straight_one(
    straight: tuple[list[Any], Path], stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before, at and after a change of phases: every tensor bit for bit."""
    phases, straight_folder = straight
    write = Metrics.write

    def noisy(self: Metrics, record: dict[str, Any]) -> None:
        write(self, record)
        if record["env_steps"] == stop:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Metrics, "write", noisy)
    assert train.train(settings(tmp_path / "broken", phases)).result["stopped_by"] == "SIGINT"
    monkeypatch.setattr(Metrics, "write", write)
    assert saved(tmp_path / "broken").step == stop
    train.train(settings(tmp_path / "broken", phases))
    one, other = saved(tmp_path / "broken"), saved(straight_folder)
    assert one.state["session"] == other.state["session"]
    for group, tensors in other.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(one.tensors[group][name], tensor), f"{group} {name}"
    phase = [(log["env_steps"], log["phase"]) for log in metrics(tmp_path / "broken")]
    assert phase == [(log["env_steps"], log["phase"]) for log in metrics(straight_folder)]


def test_a_longer_run_does_not_go_back_to_an_earlier_phase(tmp_path: Path) -> None:
    train.train(settings(tmp_path, LIVE, steps=320, eval_episodes=0))
    assert saved(tmp_path).state["session"]["phase"] == "base"
    train.train(settings(tmp_path, LIVE, steps=960, eval_episodes=0))  # a third of it is done: "long" would be due
    assert {log["phase"] for log in metrics(tmp_path) if log["env_steps"] > 320} == {"base"}


def test_evaluation_plays_by_the_runs_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Any] = []

    def watched(rules: Any, *arguments: Any, **options: Any) -> Any:
        played.append(rules.config)
        return evaluate.evaluate(rules, *arguments, **options)

    monkeypatch.setattr(final_evaluation, "evaluate", watched)
    always = [{"name": "all", "from": 0, "to": 1, "env": {"long_start": 12}}]
    train.train(settings(tmp_path, always))
    assert [config.long_start for config in played] == [0]


def test_another_curriculum_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.train(settings(tmp_path, LIVE, steps=320, eval_episodes=0))
    assert "another curriculum" not in capsys.readouterr().err
    other = [{"name": "other", "from": 0, "to": 1, "env": {"long_start": 12}}]
    train.train(settings(tmp_path, other, steps=640, eval_episodes=0))
    assert "Continuing with another curriculum" in capsys.readouterr().err
    assert saved(tmp_path).state["session"]["phase"] == "other"


def test_which_curriculum_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = (Phase("own", 0.0, 0.5, {"long_start": 9}),)
    recipe = recipes.find("snake")

    def replace_curriculum(*phases: Phase) -> None:
        replaced = dataclasses.replace(recipe, curriculum=lambda _: phases)
        monkeypatch.setattr(recipes, "find", lambda _: replaced)

    def named(**wishes: Any) -> list[str]:
        chosen = settings(tmp_path, LIVE, **{"curriculum_file": None} | wishes)
        curriculum = resolve(chosen).curriculum
        return [phase.name for phase in curriculum.phases] if curriculum else []

    file = str(tmp_path / "phases.json")
    assert named(env_options={"mirror": True}) == ["long", "base"]
    assert named() == named(env_options={"sight": 4}) == named(env_options={"view": "planes"}) == []
    asked_for = {"width": 4, "height": 4, "mirror": True, "long_start": 5}
    assert named(env_options=asked_for) == []  # of its phases nothing would be left
    replace_curriculum()
    assert named() == []
    with pytest.raises(UserError, match="snake has no curriculum of its own; give one with --curriculum-file"):
        named(curriculum=True)
    with pytest.raises(UserError, match="Both curriculum_file and no-curriculum are given"):
        named(curriculum=False, curriculum_file=file)
    assert named(curriculum_file=file) == ["short", "long", "base"]
    replace_curriculum(*own)
    assert named() == named(curriculum=True) == ["own", "base"]
    assert named(curriculum=False) == []
    assert named(curriculum_file=file) == ["short", "long", "base"]
    replace_curriculum(Phase("own", 0.0, 0.5, {"long_start": 99}))
    assert named() == []  # phases that nobody asked for and that do not fit a small board
    with pytest.raises(UserError, match=r"Phase 'own' of the curriculum: env.long_start is 99"):
        named(curriculum=True)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("phases", [LIVE, RESUME_FIXED], ids=["live", "compiling again"])
def test_compiled_training_follows_the_phases(phases: list[dict[str, Any]], tmp_path: Path) -> None:
    """Integers are the same compiled and eager; float sums are nearly so."""
    said: list[str] = []
    options = {
        "algo_options": {"hidden": (8,), "learning_starts": 10**6, "epsilon_high": 1.0, "epsilon_low": 1.0}
    }  # random play
    fast = Session(resolve(settings(tmp_path, phases, compile=True, **options)), said.append)
    slow = Session(resolve(settings(tmp_path, phases, **options)), lambda _: None)
    fast.iterate(40)
    slow.iterate(40)
    for name, tensor in slow.collector.tensors().items():
        assert torch.equal(fast.collector.tensors()[name], tensor) or tensor.is_floating_point(), name
    again = "; compiling again" if phases is RESUME_FIXED else ""
    assert len(said) == 2  # and nothing of compilation that failed
    assert all(text.endswith(f"{again}.") for text in said)


def test_a_games_own_phases_leave_what_was_asked_for_alone(tmp_path: Path) -> None:
    def phases(**wanted: Any) -> list[dict[str, Any]]:
        plan = resolve(Settings("tetris", device="cpu", run_dir=str(tmp_path), env_options=wanted))
        assert plan.curriculum
        return [dict(phase.options) for phase in plan.curriculum.phases]

    assert all({"reward_hole", "reward_height", "ceiling"} == phase.keys() for phase in phases())
    assert all({"reward_height", "ceiling"} == phase.keys() for phase in phases(reward_hole=-0.5))
    assert all({"reward_hole", "reward_height"} == phase.keys() for phase in phases(view="planes"))
    assert all({"reward_hole", "reward_height"} == phase.keys() for phase in phases(ceiling=12))
    assert all({"reward_hole", "reward_height"} == phase.keys() for phase in phases(height=14))


def test_progress_follows_the_steps_and_never_falls_behind_the_loops(tmp_path: Path) -> None:
    wanted = Settings(
        "snake", "dqn", device="cpu", compile=False, num_envs=4, steps=1_000_000, minutes=1, run_dir=str(tmp_path)
    )
    session = Session(resolve(wanted), lambda _: None)
    session.progress = 0.9
    session.iterate(1)
    assert session.progress == 0.9
    session.progress = 0.0
    session.iterate(1)
    assert session.progress == 4 / 1_000_000


def test_a_memory_whose_observations_hold_rewards_is_forgotten(tmp_path: Path) -> None:
    """After a change no sample is left that was paid by other rewards than its observation shows."""
    small = {"width": 4, "height": 8, "ceiling": 8, "start_height": 3}
    options = {"n_step": 1, "learning_starts": 64, "hidden": (8,), "replay_capacity": 2048}
    wanted = Settings(
        "tetris", "dqn", device="cpu", compile=False, num_envs=32, batch_size=32, steps=32 * 60, run_dir=str(tmp_path),
        env_options=small, algo_options=options,
    )  # fmt: skip
    session = Session(resolve(wanted), lambda _: None)
    disagreed = []
    for _ in range(60):
        session.iterate(1)
        if session.remembered > 3:
            batch = session.learner.memory.sample(random.seed_key(session.iterations), 256)
            shown = batch.obs[:, 0, 0]  # of the one afterstate that past States are observed by
            disagreed.append(bool((shown != batch.reward)[batch.discount > 0].any()))
    assert session.phase == 2
    assert len(disagreed) > 30
    assert not any(disagreed)
