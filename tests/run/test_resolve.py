"""From requested settings to a plan: chosen values with source and reason, impossible values as sentences."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redline import recipes
from redline.algos import dqn, ppo
from redline.core.errors import UserError
from redline.core.records import Hardware
from redline.engine import hardware
from redline.recipes import Request
from redline.recipes.recipe import RUN_SETTINGS
from redline.run import memory
from redline.run.agent import load_agent
from redline.run.opening import opening_lines
from redline.run.resolve import resolve
from redline.run.settings import DEFAULT_MINUTES, Settings, from_words
from redline.run.train import train


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests are of a machine without a GPU, whatever they run on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def pretend(monkeypatch: pytest.MonkeyPatch, **machine: Any) -> None:
    """Resolve for another machine than this one."""
    found = Hardware(**{"name": "test", "cores": 8, "memory_gb": 80.0, "bf16": False, "compiler": "g++"} | machine)
    monkeypatch.setattr(hardware, "pick_device", lambda _: torch.device(found.device))
    monkeypatch.setattr(hardware, "detect", lambda _: found)


def test_automatic_settings_come_with_reasons() -> None:
    plan = resolve(Settings("snake"))
    assert plan.device == torch.device("cpu")
    assert (plan.precision, plan.graph) == ("fp32", False)
    assert str(plan.run_dir) == "runs/snake-ppo"
    assert {"num_envs", "batch_size", "precision", "compile", "graph"} <= plan.reasons.keys()
    assert all(plan.reasons.values())
    assert not [name for name, setting in plan.provenance.items() if setting.source == "requested"]
    recommended = recipes.collect(Request(plan.rules.game, plan.hardware, "ppo"))
    for name, setting in recommended.items():
        group, _, option = name.rpartition(".")
        owner = plan.rules.config if group else plan if name in RUN_SETTINGS else plan.algo_config
        assert plan.reasons[name] == setting.reason
        assert getattr(owner, option) == setting.value
    assert plan.algo_config.gae_lambda == ppo.Config().gae_lambda


def test_a_small_board_is_learned_whole() -> None:
    small = resolve(Settings("snake", device="cpu", env_options={"width": "6", "height": 6}))
    assert (small.rules.config.sight, small.algo_config.hidden, small.algo_config.gamma) == (0, (128, 128), 0.995)
    assert (small.algo_config.gamma_end, small.rules.config.view) == (0.999, "wrapped")
    asked = resolve(
        Settings("snake", device="cpu", env_options={"width": 6, "height": 6}, algo_options={"gamma": "0.9"})
    )
    assert (asked.algo_config.gamma, asked.algo_config.gamma_end) == (0.9, None), (
        "who asks for a discount means that one"
    )


def test_on_a_cpu_ppo_sees_medium_boards_whole_and_large_ones_in_part() -> None:
    medium = resolve(Settings("snake", device="cpu", env_options={"width": 6, "height": 8}))
    assert (medium.rules.config.view, medium.rules.config.mirror) == ("wrapped", False)
    assert (medium.algo_config.gamma_end, medium.backplay, medium.backplay_steps) == (0.999, 0.8, 8)
    assert medium.rules.config.show_hunger
    assert medium.rules.config.reward_starve == medium.rules.config.reward_death
    asked = resolve(Settings("snake", device="cpu", backplay_steps=24, env_options={"show_hunger": False}))
    assert (asked.backplay_steps, asked.rules.config.show_hunger) == (24, False)
    for options in ({"width": 6, "height": 13}, {"sight": 4}):
        large = resolve(Settings("snake", device="cpu", env_options=options))
        assert (large.rules.config.view, large.rules.config.sight, large.backplay) == ("centred", 4, 0.0)
        assert large.backplay_steps == 32
    dqn = resolve(Settings("snake", device="cpu", algo="dqn"))
    assert (dqn.rules.config.view, dqn.rules.config.mirror, dqn.backplay) == ("wrapped", False, 0.8)
    assert (dqn.rules.config.show_hunger, dqn.backplay_steps) == (False, 32)
    pqn = resolve(Settings("snake", device="cpu", algo="pqn"))
    assert (pqn.rules.config.view, pqn.rules.config.sight) == ("centred", 4)


def test_on_a_gpu_the_whole_board_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, device="cuda:0", bf16=True, capability=(9, 0))
    plan = resolve(Settings("snake"))
    assert plan.rules.config.view == "wrapped"
    convolved: dict[str, Any] = {"net": "cnn", "channels": "64,128,128", "stride": 2, "hidden": "512"}
    rates = {"learning_rate": 6e-4, "learning_rate_end": 1e-5}
    told = Settings("snake", num_envs=4096, batch_size=16384, algo_options=convolved | rates)
    assert plan.algo_config == resolve(told).algo_config
    assert plan.num_envs == 4096
    assert {"net", "num_envs", "batch_size"} <= set(plan.reasons)
    assert not plan.rules.config.mirror
    assert not plan.curriculum
    mirrored = resolve(Settings("snake", env_options={"mirror": True}))
    assert mirrored.rules.config.mirror
    assert [phase.name for phase in mirrored.curriculum.phases] == ["long", "base"]  # type: ignore[union-attr]
    larger = resolve(Settings("snake", env_options={"width": 20, "height": "20"}))
    assert (larger.algo_config.net, larger.algo_config.channels) == ("cnn", (64, 128, 128))
    assert larger.algo_config.stride == 2
    assert (larger.num_envs, larger.algo_config.hidden, larger.minutes) == (4096, (512,), 23.0)
    pqn = resolve(Settings("snake", algo="pqn"))
    assert (pqn.algo_config.net, pqn.algo_config.hidden, pqn.num_envs) == ("mlp", (1024, 512), 16_384)
    for plan in (larger, pqn):
        assert plan.rules.config.mirror
        assert plan.curriculum
    asked = resolve(Settings("snake", algo="ppo", algo_options={"net": "mlp"}))
    assert (asked.algo_config.hidden, asked.num_envs) == ((512, 512), 16_384), (
        "what goes with convolutions goes with them"
    )
    assert asked.algo_config.gamma == plan.algo_config.gamma
    planes = resolve(Settings("snake", env_options={"view": "planes"}))
    assert (planes.rules.config.view, planes.algo_config.net) == ("planes", "auto")


def test_an_option_that_came_later_makes_no_other_run() -> None:
    plan = resolve(Settings("gym:CartPole-v1", device="cpu", env_options={"sticky": 0.25, "obs_scale": (2.0,)}))
    older = plan.describe()
    del older["env_options"]["binary"]
    assert plan.identity(older) == plan.identity()
    assert plan.identity()["env_options"] == {"sticky": 0.25, "obs_scale": (2.0,)}


def test_what_is_asked_for_wins() -> None:
    asked: dict[str, Any] = {"num_envs": 8, "batch_size": 32, "n_step": 2, "replay_capacity": 999}
    plan = resolve(
        Settings(
            "snake", **asked, compile=True, precision="bf16", graph=False, run_dir="here", algo_options={"gamma": 0.5}
        )
    )
    assert plan.num_envs == 8
    assert {name: getattr(plan.algo_config, name) for name in asked if name != "num_envs"} == {
        "batch_size": 32,
        "n_step": 2,
        "replay_capacity": 999,
    }
    assert (plan.compile, plan.precision, plan.algo_config.gamma, str(plan.run_dir)) == (True, "bf16", 0.5, "here")
    for name in (*asked, "compile", "precision", "graph", "gamma"):
        assert plan.provenance[name].source == "requested"
        assert name not in plan.reasons  # the reason for another value does not explain this one
    record = plan.describe()
    assert {name: record[name] for name in asked} == asked
    assert json.loads(json.dumps(record))["algo_options"]["batch_size"] == 32


def test_an_option_of_the_group_wins_over_the_automatic_one() -> None:
    plan = resolve(Settings("snake", algo_options={"batch-size": "64"}))
    assert plan.algo_config.batch_size == 64
    assert "batch_size" not in plan.reasons


@pytest.mark.parametrize(
    ("machine", "precision", "compiles", "graphs"),
    [
        ({"device": "cuda:0", "bf16": True}, "bf16", True, True),
        ({"device": "cuda:0", "bf16": False}, "fp16", True, True),
        ({"device": "cuda:0", "capability": (6, 1)}, "fp32", False, True),  # too old for Triton
        ({"device": "mps"}, "fp32", False, False),
        ({"device": "cpu"}, "fp32", True, False),
        ({"device": "cpu", "compiler": ""}, "fp32", False, False),
        ({"device": "cuda:0", "compiler": "", "bf16": True}, "bf16", True, True),  # its compiler is Triton
    ],
)
def test_other_machines(
    machine: dict[str, Any],
    precision: str,
    compiles: bool,
    graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, **machine)
    plan = resolve(Settings("snake", "dqn"))
    assert (plan.precision, plan.compile, plan.graph) == (precision, compiles, graphs)
    assert plan.num_envs == recipes.collect(Request(plan.rules.game, plan.hardware, "dqn"))["num_envs"].value
    if machine == {"device": "cpu", "compiler": ""}:
        assert "g++ or clang++" in plan.reasons["compile"]


def test_graphs_can_be_switched_off_and_tf32_on_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, device="cuda:0")
    plan = resolve(Settings("snake", graph=False, precision="tf32"))
    assert (plan.graph, plan.precision) == (False, "tf32")
    assert [plan.provenance[name].source for name in ("graph", "precision")] == ["requested"] * 2


@pytest.mark.fault("H2")
@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        ({"num_envs": 0}, "num_envs is 0; expected at least 1"),
        ({"num_envs": -4}, "num_envs is -4; expected at least 1"),
        ({"steps": -5}, "steps is -5; expected a number above 0"),
        ({"steps": 0}, "steps is 0; expected a number above 0"),
        ({"episodes": 0}, "episodes is 0; expected a number above 0"),
        ({"minutes": -0.5}, "minutes is -0.5; expected a number above 0"),
        ({"accumulate": 0}, "accumulate is 0; expected at least 1"),
        ({"eval_episodes": -1}, "eval_episodes is -1; expected at least 0"),
        ({"seed": -1}, "seed is -1; expected at least 0"),
        ({"checkpoint_minutes": 0.0}, "checkpoint_minutes is 0.0; expected a number above 0"),
        ({"time_limit": -1}, "time_limit is -1; expected 0"),
        ({"batch_size": 0}, "dqn.batch_size is 0; expected at least 1"),
        ({"n_step": 0}, "dqn.n_step is 0; expected at least 1"),
        ({"replay_capacity": 0}, "dqn.replay_capacity is 0; expected at least 1"),
        ({"env": "snak"}, "There is no game 'snak'; did you mean 'snake'"),
        ({"algo": "dqm"}, "There is no algorithm 'dqm'; did you mean 'dqn'"),
        ({"device": "cuda"}, "device is 'cuda', but torch .* sees no CUDA device here; take --device auto"),
        ({"device": "cuda:3"}, "device is 'cuda:3', but torch .* sees no CUDA device here"),
        ({"device": "cud"}, "device is 'cud'; did you mean 'cuda'"),
        ({"device": "cpu:x"}, "device is 'cpu:x'.*Expected auto, cpu, cuda, cuda:N or mps"),
        ({"graph": True}, "graph needs a CUDA device; cpu has no CUDA graphs"),
        ({"precision": "tf32"}, "precision tf32 needs a CUDA device; cpu has none. Take fp32"),
        ({"precision": "fp8"}, "precision is 'fp8'; expected auto, fp32, tf32, bf16, fp16"),
        ({"env_options": {"width": 4, "height": 4, "start_length": 5}}, "env.start_length is 5; .*4x4 board"),
        ({"env_options": {"width": 2}}, "env.width is 2; a Snake board has 4 to 40"),
        ({"env_options": {"widht": 5}}, "There is no option env.widht; did you mean 'width'"),
        ({"env_options": {"width": 7.5}}, "env.width is 7.5; expected a whole number"),
        ({"env_options": {"view": "top"}}, "env.view is 'top'"),
        ({"algo_options": {"gama": 0.9}}, "There is no option dqn.gama; did you mean 'gamma'"),
        ({"algo_options": {"huber": 0.0}}, "dqn.huber is 0.0; expected a number above 0"),
        ({"algo_options": {"gamma": 1.5}}, "dqn.gamma is 1.5; expected a number from 0 to 1"),
        ({"algo_options": {"learning_rate": 0.0}}, "dqn.learning_rate is 0.0; expected a number above 0"),
        ({"algo_options": {"hidden": (64, 0)}}, "dqn.hidden is .*; expected layer widths"),
    ],
)
def test_impossible_wishes(wishes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        resolve(Settings(**{"env": "snake", "algo": "dqn", "device": "cpu"} | wishes))
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


def test_three_minutes_when_no_limit_is_given() -> None:
    assert resolve(Settings("snake")).minutes == DEFAULT_MINUTES == 3
    assert resolve(Settings("snake", steps=10)).minutes is None
    assert resolve(Settings("snake", episodes=10)).minutes is None
    assert resolve(Settings("snake", minutes=0.5)).minutes == 0.5
    assert resolve(Settings("snake", steps=10, minutes=7)).minutes == 7


def test_words() -> None:
    words = {"steps": "20M", "compile": False, "algo": "dqn", "minutes": "auto", "env.width": "7", "dqn.hidden": "8,8"}
    settings = from_words("snake", words)
    assert settings == Settings(
        "snake", "dqn", steps=20_000_000, compile=False, env_options={"width": "7"}, algo_options={"hidden": "8,8"}
    )
    plan = resolve(settings)
    assert plan.rules.config.width == 7
    assert plan.algo_config.hidden == (8, 8)


def test_the_algorithm_is_named_asked_for_by_its_options_or_chosen_by_the_game() -> None:
    assert resolve(from_words("snake", {})).settings.algo == "ppo"
    for of_a_memory in ("replay", "prioritized", "n_step"):
        words = {of_a_memory: {"replay": "pinned", "prioritized": "true", "n_step": "2"}[of_a_memory]}
        assert resolve(from_words("snake", words)).settings.algo == "dqn"
    assert resolve(from_words("snake", {"ppo.gamma": "0.9"})).settings.algo == "ppo"
    assert resolve(Settings("snake", prioritized=False, env_options={"sight": 4}, algo="dqn")).settings.algo == "dqn"
    with pytest.raises(UserError, match="There is no algorithm 'ppoo'; did you mean 'ppo'"):
        from_words("snake", {"algo": "ppoo", "ppo.clip_range": "0.1"})
    assert resolve(from_words("tetris", {"algo": "dqn"})).settings.algo == "dqn"
    plan = resolve(from_words("tetris", {"ppo.epochs": "5"}))
    assert plan.settings.algo == "ppo"
    assert plan.describe()["algo"] == "ppo"
    assert str(plan.run_dir) == "runs/tetris-ppo"
    assert plan.rules.config.view == "afterstates"
    assert plan.algo_config.hidden == (32,)
    assert plan.algo_config.epochs == 5
    assert "epochs" not in plan.reasons
    keys = resolve(from_words("tetris", {"env.actions": "keys"}))
    assert keys.rules.config.view == "planes"


@pytest.mark.fault("H1")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"envv.width": "5"}, r"There is no option group envv\.\*; there are env\.\* and those of the algorithms: dqn"),
        (
            {"algo": "dqn", "ppo.gamma": "0.9"},
            r"There is no option group ppo\.\*; with --algo dqn there are env\.\* and dqn",
        ),
        (
            {"dqn.gamma": "0.9", "ppo.gamma": "0.9"},
            "Options of dqn and ppo are given; choose one algorithm: --algo dqn",
        ),
        ({".gamma": "0.9"}, "There is no option group"),
        ({"stepz": "5"}, "There is no option stepz; did you mean 'steps'"),
        ({"env_options": "5"}, "There is no option env_options; use --env.NAME"),
        ({"algo_options": "5"}, "There is no option algo_options; use --env.NAME or --ALGO.NAME"),
        ({"steps": "soon"}, "steps is 'soon'; expected a number"),
        ({"save_replay": "perhaps"}, "save_replay is 'perhaps'; expected true or false"),
    ],
)
def test_wrong_words(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        from_words("snake", words)


def test_identity_is_what_a_continued_run_must_share() -> None:
    def identity(**changes: Any) -> str:
        return resolve(Settings(**{"env": "snake", "device": "cpu"} | changes)).identity_hash

    same = [
        {},
        {"steps": 5},
        {"precision": "bf16"},
        {"compile": False},
        {"batch_size": 8},
        {"algo_options": {"learning_rate": 1e-3}},
        {"run_dir": "elsewhere"},
    ]
    other = [
        {"seed": 1},
        {"num_envs": 8},
        {"time_limit": 9},
        {"n_step": 1},
        {"replay_capacity": 10_000},
        {"env_options": {"width": 9}},
        {"algo_options": {"hidden": (8,)}},
        {"algo_options": {"gamma": 0.5}},
    ]
    assert {identity(**changes) for changes in same} == {identity()}
    assert len({identity(**changes) for changes in other} | {identity()}) == len(other) + 1


def test_a_setting_the_algorithm_does_not_have_is_named() -> None:
    with pytest.raises(UserError, match=r"^ppo has no n_step; drop --n-step or choose another --algo\.$"):
        resolve(Settings("snake", "ppo", n_step=3))


@pytest.mark.parametrize("name", dqn.PRESETS)
def test_a_preset_is_a_set_of_options_with_reasons(name: str) -> None:
    plan = resolve(from_words("tetris", {"preset": name, "algo": "dqn", "env.view": "planes"}))
    for option, value in dqn.PRESETS[name].items():
        assert getattr(plan.algo_config, option) == value
        assert plan.provenance[option].source == f"preset {name}"
    record = json.loads(json.dumps(plan.describe()))
    assert record["preset"] == name
    assert record["prioritized"] is (name == "rainbow")
    assert record["algo_options"]["distribution"] == plan.algo_config.distribution
    plain = resolve(Settings("tetris", "dqn", env_options={"view": "planes"}))
    assert plain.describe()["preset"] is None
    assert plan.num_envs == plain.num_envs  # what follows from the hardware stays
    assert plan.algo_config.batch_size == plain.algo_config.batch_size
    assert (plan.identity_hash == plain.identity_hash) == (name == "plain")


def test_what_is_asked_for_wins_over_a_preset() -> None:
    asked = {"preset": "rainbow", "n_step": "5", "prioritized": False, "dqn.dueling": False, "dqn.v-max": "40"}
    plan = resolve(from_words("snake", asked))
    config = plan.algo_config
    assert (config.n_step, config.prioritized, config.dueling, config.v_max) == (5, False, False, 40.0)
    assert (config.distribution, config.noisy, config.double) == ("categorical", True, True)
    assert not {"n_step", "prioritized", "dueling", "v_max"} & plan.reasons.keys()


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        (
            {"preset": "rainbw"},
            r"^dqn has no preset 'rainbw'; did you mean 'rainbow'\? Presets: plain, rainbow, modern\.$",
        ),
        ({"preset": "xyzzy"}, r"^dqn has no preset 'xyzzy'\. Presets: plain, rainbow, modern\.$"),
        (
            {"preset": "rainbow", "algo": "ppo"},
            r"^ppo has no presets; drop --preset or choose an --algo that has: .*dqn.*\.$",
        ),
        ({"preset": "modern", "algo_options": {"double": True}}, r"^dqn.munchausen is on; expected dqn.double off"),
    ],
)
def test_a_preset_that_cannot_be(wishes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        resolve(Settings(**{"env": "snake", "device": "cpu"} | wishes))


@pytest.mark.parametrize("name", ["rainbow", "modern"])
def test_a_run_with_a_preset_is_continued_and_evaluated(name: str, tmp_path: Path) -> None:
    small = {"hidden": (8,), "learning_starts": 32, "atoms": 5}
    chosen: dict[str, Any] = {"num_envs": 8, "batch_size": 8, "replay_capacity": 400, "device": "cpu", "compile": False}
    chosen |= {"env_options": {"width": 4, "height": 4}, "eval_episodes": 2, "run_dir": str(tmp_path)}
    train(Settings("snake", "dqn", name, steps=80, algo_options=small, **chosen))
    run = train(Settings("snake", "dqn", name, steps=160, algo_options=small, resume="must", **chosen))
    assert run.result["env_steps"] == 160
    assert run.result["settings"]["preset"] == name
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["preset"] == name
    assert record["algo_options"]["atoms"] == 5
    agent = load_agent(tmp_path, "cpu")
    assert agent.evaluate(2)["episodes"] == 2
    with pytest.raises(UserError, match=r"cannot be continued with these settings: .*dqn.distribution was"):
        train(Settings("snake", "dqn", steps=240, algo_options=small, **chosen))


def test_every_setting_has_a_source() -> None:
    plan = resolve(Settings("snake", "dqn", "rainbow", device="cpu", n_step=5, env_options={"width": 8}))
    sources = {name: setting.source for name, setting in plan.provenance.items()}
    assert sources["n_step"] == sources["env.width"] == sources["algo"] == "requested"
    assert sources["dueling"] == "preset rainbow"
    assert sources["env.view"] == "recipe snake"
    assert sources["replay_capacity"] == f"default for tensor games on {plan.hardware.tier}"
    assert sources["munchausen"] == "algorithm default"
    assert sources["env.start_length"] == "environment default"
    assert sources["compile"] == "derived from the hardware"
    assert resolve(Settings("snake", device="cpu")).provenance["batch_size"].source == "derived from num_envs"
    assert all(sources.values())
    values = {name: setting.value for name, setting in plan.provenance.items()}
    assert (values["n_step"], values["env.width"], values["hidden"]) == (5, 8, plan.algo_config.hidden)
    assert {f"env.{name}" for name in vars(plan.rules.config)} | set(vars(plan.algo_config)) <= values.keys()
    record = json.loads(json.dumps(plan.describe()))["provenance"]
    assert record["dueling"] == {"value": True, "source": "preset rainbow", "reason": ""}


@pytest.mark.parametrize(
    ("machine", "env", "limit", "threads"),
    [
        ({"device": "cpu", "cores": 2}, "snake", "", 1),
        ({"device": "cpu", "cores": 16}, "snake", "", 16),
        ({"device": "cpu", "cores": 16}, "snake", "4", 4),
        ({"device": "cpu", "cores": 16}, "gym:CartPole-v1", "", 1),
        ({"device": "cuda:0", "cores": 16}, "snake", "", 0),
    ],
)
def test_small_networks_on_few_cores_use_one_thread(
    machine: dict[str, Any], env: str, limit: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, **machine)
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert resolve(Settings(env)).threads == threads
    assert resolve(Settings(env, threads=3)).threads == 3
    with pytest.raises(UserError, match="threads is 0; expected a number above 0"):
        resolve(Settings(env, threads=0))


def test_settings_are_importable_without_torch() -> None:
    code = "import sys, redline.run.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.fault("H2")
@pytest.mark.parametrize(
    ("requested", "blamed"),
    [
        ({"num_envs": 10**9}, "most of it is for num_envs: use a smaller one.$"),
        ({"num_envs": 10**9, "algo": "dqn"}, "most of it is for num_envs: use a smaller one.$"),
        ({"algo_options": {"rollout_steps": 10**9}}, "most of it is for rollout_steps: use a smaller one.$"),
        ({"replay_capacity": 10**15}, "most of it is for replay_capacity: use a smaller one.$"),
        ({"replay_capacity": 10**9}, "replay_capacity: use a smaller one, or --replay memmap.$"),
    ],
)
def test_the_option_that_does_not_fit_is_named(
    requested: dict[str, Any], blamed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "free_bytes", lambda _: 10**10)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    with pytest.raises(UserError, match=blamed):
        memory.check_memory(resolve(Settings("snake", device="cpu", **requested)))


def test_the_opening_names_the_source_of_settings() -> None:
    plan = resolve(Settings("tetris", device="cpu", num_envs=64))
    tier = plan.hardware.tier
    assert plan.name_sources() == (
        "Settings chosen for you: algo, curriculum, env.view, epochs, hidden (recipe tetris); "
        f"rollout_steps (default for tensor games on {tier}). config.json gives the reasons."
    )
    assert plan.name_sources() in opening_lines(plan)


@pytest.mark.parametrize(
    ("env", "machine", "requested", "line"),
    [
        ("snake", {"compiler": ""}, None, "no C++ compiler (g++ or clang++) was found; install one to train faster."),
        ("gym:CartPole-v1", {}, None, "compiling takes longer than it saves for small networks and CPU environments."),
        ("gym:CartPole-v1", {}, False, ""),  # whoever asked for it knows
        ("snake", {}, False, ""),
        ("snake", {}, None, None),
        ("gym:CartPole-v1", {}, True, None),
    ],
)
def test_the_opening_says_why_nothing_is_compiled(
    env: str,
    machine: dict[str, Any],
    requested: bool | None,
    line: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None: it is compiled. The reason is never that the environments take the time, which nobody has measured."""
    pretend(monkeypatch, **{"device": "cpu"} | machine)
    plan = resolve(Settings(env, compile=requested))
    lines = opening_lines(plan)
    assert [x for x in lines if x.startswith("Running without")] == (
        [f"Running without compilation: {line}"] if line else []
    )
    assert [x.split(":")[0] for x in lines if "Compiling" in x] == (["Compiling"] if line is None else [])
    assert ("compiled" in lines[0]) == plan.compile == (line is None)
    assert not any("take the time" in x for x in lines)


def test_a_run_in_a_folder_that_was_given_keeps_its_algorithm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"env": "snake", "algo": "dqn"}))
    kept = resolve(Settings("snake", device="cpu", run_dir=str(tmp_path)))
    assert (kept.settings.algo, kept.provenance["algo"].reason) == ("dqn", "the run began with it")
    assert resolve(Settings("snake", device="cpu", run_dir=str(tmp_path), resume="never")).settings.algo == "ppo"
    assert resolve(Settings("snake", "pqn", device="cpu", run_dir=str(tmp_path))).settings.algo == "pqn"
    assert resolve(Settings("tetris", device="cpu", run_dir=str(tmp_path))).settings.algo == "ppo"
    (tmp_path / "config.json").write_text("damaged")
    assert resolve(Settings("snake", device="cpu", run_dir=str(tmp_path))).settings.algo == "ppo"
