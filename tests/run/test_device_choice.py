"""The device is measured, not guessed: which one is taken, what is said, what is remembered. No GPU is needed."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redline import algos
from redline.core.errors import UserError
from redline.engine import hardware
from redline.run import device_choice
from redline.run.device_choice import cache_file, decide, samples_per_second
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.settings import Settings
from redline.run.train import train

SNAKE = Settings("snake", "dqn")
# Games of the defaults for DQN on this machine's CPU and on the GPU it seems to have.
CHOSEN_ENVS = {"cpu": 512, "cuda": 2_048}


@pytest.fixture(autouse=True)
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A machine that seems to have one GPU, and a home of its own; called with a number, so many."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    properties = SimpleNamespace(name="Fast 9000", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    pretend(1)
    return pretend


class Stopwatch:
    """Measures what it is told to, and remembers what it was asked."""

    def __init__(self, **speeds: float) -> None:
        self.speeds, self.asked = speeds or {"cpu": 2e5, "cuda": 1.2e7}, list[Plan]()

    def __call__(self, plan: Plan) -> float:
        self.asked.append(plan)
        return self.speeds[plan.device.type]


def refuse(plan: Plan) -> float:
    pytest.fail(f"{plan.device} was measured")


def _values(plan: Plan) -> dict[str, Any]:
    """The values of a plan without their sources: a device may be requested or chosen."""
    return {name: value for name, value in plan.describe().items() if name != "provenance"}


# ---- the choice


@pytest.mark.parametrize(
    ("speeds", "device", "figures"),
    [
        ({"cpu": 2e5, "cuda": 1.2e7}, "cuda:0", "cpu 200 k, cuda:0 12 M samples/s"),
        ({"cpu": 3e5, "cuda": 2.5e5}, "cpu", "cpu 300 k, cuda:0 250 k samples/s"),
        ({"cpu": 5.0, "cuda": 5.0}, "cuda:0", "cpu 5, cuda:0 5 samples/s"),
    ],
)
def test_the_faster_device_is_taken_with_its_settings(speeds: dict[str, float], device: str, figures: str) -> None:
    watch = Stopwatch(**speeds)
    plan = decide(SNAKE, watch)
    assert str(plan.device) == plan.hardware.device == plan.describe()["device"] == device
    assert plan.reasons["device"] == f"measured before compilation: {figures}"
    assert plan.num_envs == CHOSEN_ENVS[plan.device.type]
    assert plan.graph == (device != "cpu")
    assert plan.settings.device == "auto"
    same = resolve(dataclasses.replace(SNAKE, device=device))
    assert _values(plan) == _values(same)
    assert {k: v for k, v in plan.provenance.items() if k != "device"} == {
        k: v for k, v in same.provenance.items() if k != "device"
    }


def test_both_devices_are_measured_at_the_work_of_the_gpu() -> None:
    """A small network, which recipes choose for a CPU, would make a CPU learn from more samples than a GPU from a large one."""
    watch = Stopwatch(cpu=1.0, cuda=2.0)
    decide(SNAKE, watch)
    on_gpu, on_cpu = watch.asked
    wanted, machine = (resolve(dataclasses.replace(SNAKE, device=name)) for name in ("cuda:0", "cpu"))
    assert _values(on_gpu) == _values(wanted)
    assert (on_cpu.algo_config, on_cpu.num_envs, on_cpu.rules) == (wanted.algo_config, wanted.num_envs, wanted.rules)
    assert on_cpu.algo_config != machine.algo_config
    for name in ("device", "precision", "compile", "graph", "threads"):
        assert getattr(on_cpu, name) == getattr(machine, name), name


def test_a_gpu_that_will_be_compiled_plays_many_games(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(device_choice, "_seconds_each", lambda _, size, __: (sizes.append(size), 1.0)[1])
    for compiled in (True, False):
        for requested in (None, 10):
            plan = dataclasses.replace(small_plan(num_envs=requested, batch_size=40), compile=compiled, graph=True)
            samples_per_second(plan)
    chosen = small_plan(num_envs=None).num_envs
    assert sizes == [65_536, 40, 10, 40, chosen, 40, 10, 40]


def test_without_a_gpu_nothing_is_measured(gpus: Callable[[int], None]) -> None:
    gpus(0)
    plan = decide(SNAKE, refuse)
    assert str(plan.device) == "cpu"
    assert plan.reasons["device"] == "there is only a CPU: no CUDA device was found"
    assert not cache_file().exists()


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0"])
def test_a_device_that_is_named_is_taken(device: str) -> None:
    plan = decide(Settings("snake", "dqn", device=device), refuse)
    assert plan.device.type == device.split(":")[0]
    assert plan.provenance["device"].source == "requested"


@pytest.mark.parametrize("wish", [{"graph": True}, {"precision": "tf32"}])
def test_what_only_a_gpu_can_do_is_done_there(wish: dict[str, Any]) -> None:
    plan = decide(Settings("snake", "dqn", **wish), refuse)
    assert str(plan.device) == "cuda:0"
    assert plan.reasons["device"] == "the requested settings need a CUDA device"


def test_impossible_wishes_are_told_before_anything_is_measured() -> None:
    with pytest.raises(UserError, match="num_envs is 0"):
        decide(Settings("snake", "dqn", num_envs=0), refuse)


@pytest.mark.parametrize("broken", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nMore."), "OutOfMemoryError: CUDA out of memory."),
        (OSError(), "OSError"),
    ],
)
def test_a_measurement_that_fails_means_the_gpu_and_is_said(error: Exception, told: str, broken: str) -> None:
    def fail(plan: Plan) -> float:
        if plan.device.type == broken:
            raise error
        return 1.0

    plan = decide(SNAKE, fail)
    assert str(plan.device) == "cuda:0"
    assert plan.reasons["device"] == f"the devices could not be measured ({told}); a GPU is usually faster"
    watch = Stopwatch(cpu=2.0, cuda=1.0)
    assert str(decide(SNAKE, watch).device) == "cpu"  # what failed is not remembered
    assert len(watch.asked) == 2


def test_an_interruption_is_no_failure() -> None:
    def interrupt(plan: Plan) -> float:
        raise KeyboardInterrupt(str(plan.device))

    with pytest.raises(KeyboardInterrupt):
        decide(SNAKE, interrupt)


# ---- what is remembered


def test_a_second_start_measures_nothing() -> None:
    first = decide(SNAKE, Stopwatch())
    for same in (SNAKE, Settings("snake", seed=5, steps=100, run_dir="elsewhere", algo="dqn", save_replay=False)):
        again = decide(same, refuse)
        assert (again.device, again.reasons["device"]) == (first.device, first.reasons["device"])


def other_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.9")


def other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)


def other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Slow 1", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def other_way_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "_VERSION", 0)


@pytest.mark.parametrize("change", [other_torch, other_threads, other_gpu, other_way_to_measure])
def test_another_machine_is_measured(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(SNAKE, Stopwatch())
    change(monkeypatch)
    watch = Stopwatch(cpu=2.0, cuda=1.0)
    assert str(decide(SNAKE, watch).device) == "cpu"
    assert len(watch.asked) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"env": "tetris", "algo": "dqn"},
        {"algo": "ppo"},
        {"num_envs": 16},
        {"batch_size": 32},
        {"precision": "fp32"},
        {"graph": False},
        {"env_options": {"width": 5}},
        {"algo_options": {"hidden": (8,)}},
    ],
)
def test_other_settings_are_measured(change: dict[str, Any]) -> None:
    decide(SNAKE, Stopwatch())
    other = Settings(**{"env": "snake", "algo": "dqn"} | change)
    watch = Stopwatch(cpu=2.0, cuda=1.0)
    assert str(decide(other, watch).device) == "cpu"
    assert len(watch.asked) == 2
    assert str(decide(SNAKE, refuse).device) == "cuda:0"  # both are kept
    assert str(decide(other, refuse).device) == "cpu"


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"x": 5}', '{"x": [1.0]}', '{"x": [1.0, "a"]}', '{"x": null}'])
def test_a_garbled_memory_is_begun_anew(text: str) -> None:
    decide(SNAKE, Stopwatch())
    (key,) = json.loads(cache_file().read_text())
    cache_file().write_text(text.replace("x", key))
    watch = Stopwatch()
    decide(SNAKE, watch)
    assert len(watch.asked) == 2
    decide(SNAKE, refuse)


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        watch = Stopwatch()
        assert str(decide(SNAKE, watch).device) == "cuda:0"
        assert len(watch.asked) == 2


def test_only_so_much_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "_CACHED", 3)
    for count in (1, 2, 3, 4):
        decide(Settings("snake", "dqn", num_envs=count), Stopwatch())
    assert len(json.loads(cache_file().read_text())) == 3
    decide(Settings("snake", "dqn", num_envs=4), refuse)
    decide(Settings("snake", "dqn", num_envs=1), watch := Stopwatch())
    assert len(watch.asked) == 2


def test_where_it_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_file() == tmp_path / "cache" / "redline" / "devices.json"
    monkeypatch.setenv("HOME", "/home/somebody")
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_file() == Path("/home/somebody/.cache/redline/devices.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_file() == Path("/home/somebody/.cache/redline/devices.json")


# ---- continued runs


def write_config(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(text)


@pytest.mark.parametrize("resume", ["auto", "must", "runs/snake-dqn/checkpoints/ckpt-000000000001"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_continued_run_stays_where_it_began(device: str, resume: str) -> None:
    write_config(Path("runs/snake-dqn"), json.dumps({"device": device}))
    Path("runs/snake-dqn/checkpoints/ckpt-000000000001").mkdir(parents=True)
    plan = decide(Settings("snake", "dqn", resume=resume), refuse)
    assert str(plan.device) == device
    assert plan.reasons["device"] == "the run began there"
    assert plan.num_envs == CHOSEN_ENVS[plan.device.type]


def test_a_run_continued_from_elsewhere_stays_where_that_one_began() -> None:
    write_config(Path("runs/snake-dqn"), json.dumps({"device": "cuda:0"}))
    write_config(Path("other"), json.dumps({"device": "cpu"}))
    Path("other/checkpoints/ckpt-1").mkdir(parents=True)
    assert str(decide(Settings("snake", "dqn", resume="other/checkpoints/ckpt-1"), refuse).device) == "cpu"


@pytest.mark.parametrize(
    ("text", "resume"),
    [
        (json.dumps({"device": "cpu"}), "never"),
        (json.dumps({"device": "cuda:3"}), "auto"),  # there is no such device any more
        (json.dumps({"device": None}), "auto"),
        (json.dumps({}), "auto"),
        (json.dumps([]), "auto"),
        ("{", "auto"),
    ],
)
def test_a_run_that_begins_is_measured(text: str, resume: str) -> None:
    write_config(Path("runs/snake-dqn"), text)
    watch = Stopwatch(cpu=2.0, cuda=1.0)
    assert str(decide(Settings("snake", "dqn", resume=resume), watch).device) == "cpu"
    assert len(watch.asked) == 2


def test_a_run_that_starts_anew_asks_no_folder_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`never` is no path: what lies two folders above it is not this run's."""
    (tmp_path / "config.json").write_text(json.dumps({"device": "cpu"}))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert str(decide(Settings("snake", "dqn", resume="never"), Stopwatch()).device) == "cuda:0"


def test_training_measures_once_says_so_and_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small: dict[str, Any] = {"num_envs": 4, "batch_size": 4, "replay_capacity": 256, "compile": False}
    small |= {"eval_episodes": 0, "algo_options": {"hidden": (8,), "learning_starts": 16}}
    watch = Stopwatch(cpu=300.0, cuda=200.0)
    monkeypatch.setattr(device_choice, "samples_per_second", watch)
    run = train(Settings("snake", "dqn", steps=32, **small))
    assert run.result["device"] == run.result["settings"]["device"] == "cpu"
    assert "Device cpu: measured before compilation: cpu 300, cuda:0 200 samples/s." in capsys.readouterr().err
    assert len(watch.asked) == 2

    watch.speeds["cpu"] = 1.0
    cache_file().unlink()
    run = train(Settings("snake", "dqn", steps=64, **small))
    assert (run.result["device"], run.result["env_steps"]) == ("cpu", 64)
    assert "Device cpu: the run began there." in capsys.readouterr().err
    assert len(watch.asked) == 2


# ---- the measurement itself


def small_plan(env: str = "snake", algo: str = "dqn", **changes: Any) -> Plan:
    return resolve(Settings(**{"env": env, "algo": algo, "device": "cpu", "num_envs": 8} | changes))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "_SECONDS", 0.05)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("algo", algos.names())
def test_every_game_and_algorithm_can_be_measured(game_name: str, algo: str) -> None:
    speed = samples_per_second(small_plan(game_name, algo))
    assert 0 < speed < math.inf


@pytest.mark.usefixtures("quick")
def test_replay_elsewhere_leaves_no_file_behind() -> None:
    assert samples_per_second(small_plan(replay="memmap", replay_capacity=100_000, prioritized=True)) > 0
    assert not list(Path().rglob("replay*"))


def test_a_wider_network_is_slower() -> None:
    narrow, wide = ({"hidden": (width, width)} for width in (8, 1024))
    assert samples_per_second(small_plan(algo_options=narrow)) > 1.5 * samples_per_second(small_plan(algo_options=wide))


def test_samples_cost_learning_and_the_play_that_goes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step and of a sample that take a hundredth and a thousandth of a second."""
    seconds = {"play": 0.01, "learn": 0.001}
    sizes: dict[str, int] = {}

    def each(prepare: Any, size: int, plan: Plan) -> float:
        del plan
        sizes[prepare.__name__] = size
        return seconds[prepare.__name__]

    monkeypatch.setattr(device_choice, "_seconds_each", each)
    replay = samples_per_second(small_plan(num_envs=10, batch_size=40, algo_options={"updates": 2}))
    assert sizes == {"play": 10, "learn": 40}
    assert replay == pytest.approx(1 / (0.01 / 8 + 0.001))
    twice = samples_per_second(small_plan(num_envs=10, batch_size=40, accumulate=2, algo_options={"updates": 2}))
    assert twice == pytest.approx(1 / (0.01 / 16 + 0.001))
    ppo = samples_per_second(small_plan(algo="ppo", batch_size=16, algo_options={"epochs": 5}))
    assert sizes == {"play": 8, "learn": 16}
    assert ppo == pytest.approx(1 / (0.01 / 5 + 0.001))


@pytest.mark.parametrize(
    ("start", "each", "size", "expected"),
    [
        (0.0, 1e-6, 10_000, 1e-6),  # up to its size
        (0.001, 0.0, 1_000, 1e-6),
        (0.001, 0.0, 5, 2e-4),  # smaller than the first round
        (0.0, 1e-3, 10**9, 1e-3),  # what would take weeks is measured with few
        (0.0, 0.1, 10**9, 0.1),  # and ends if even these take long
    ],
)
def test_how_long_it_takes(
    start: float, each: float, size: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, sizes = 0.0, list[int]()

    def prepare(count: int) -> Callable[[], None]:
        sizes.append(count)

        def call() -> None:
            nonlocal now
            now += start + each * count

        return call

    monkeypatch.setattr(device_choice.time, "perf_counter", lambda: now)
    found = device_choice._seconds_each(prepare, size, small_plan())
    assert found == pytest.approx(expected)
    assert now < device_choice._SECONDS + (1 + device_choice._CALLS) * each * device_choice._FIRST
    assert sizes == sorted(set(sizes))  # none twice
    assert sizes[0] == min(size, device_choice._FIRST)
    if expected < 1e-3:
        assert sizes[-1] == size


def test_all_of_it_is_over_in_seconds() -> None:
    """However much is asked for: these sizes would take a CPU minutes."""
    huge = small_plan(num_envs=2**20, batch_size=2**20, replay_capacity=2**25, algo_options={"hidden": (512, 512)})
    started = time.perf_counter()
    samples_per_second(huge)
    assert time.perf_counter() - started < 6


def test_the_other_callers_of_auto_are_not_measured() -> None:
    """`resolve` alone, as of benchmarks, takes the GPU and says no more than that."""
    plan = resolve(SNAKE)
    assert str(plan.device) == str(hardware.pick_device("auto")) == "cuda:0"
    assert plan.reasons["device"] == "a CUDA device was found"
