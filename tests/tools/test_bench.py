"""Throughput tables: that what is counted is what was done."""

from __future__ import annotations

import dataclasses
import io
import subprocess
from typing import Any

import pytest
import torch

from redline import oracles
from redline.core import random, select
from redline.core.errors import UserError
from redline.core.records import leaves
from redline.engine import fast
from redline.envs import batch, make_rules
from redline.tools import bench
from redline.tools.bench_options import BenchRequest

CPU = torch.device("cpu")
QUICK = BenchRequest(games=(2,), seconds=0.01, device="cpu", compile=False)


def test_rate_is_calls_by_time_without_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], [0]

    def call() -> None:
        calls[0] += 1
        clock[0] += 100.0 if calls[0] <= 4 else 0.125  # the first calls are slow: compilation

    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    assert bench.rate(call, 3.0, CPU, warm_up=4) == 8.0
    measured = calls[0] - 4
    assert measured * 0.125 >= 3.0
    assert measured == 31  # 1, 2, 4, 8, 16: a clock is not asked after every call


def test_the_loop_plays_what_the_environments_play() -> None:
    rules = make_rules("snake", {"width": 4, "height": 4})
    loop = bench.EnvLoop(rules, 8, CPU, fast.Compiler(False, print), graph=False)
    envs = batch.reset(rules, batch.env_keys(0, torch.arange(8)))
    key, ended = random.seed_key(1), 0
    for time in range(40):
        action = random.below(random.bits(random.fold(key, time), torch.arange(8)), 4)
        seen = rules.game.observe(rules.config, envs.game)
        envs, step = batch.step(rules, envs, action)
        loop.call()
        assert all(torch.equal(x, y) for x, y in zip(leaves(loop.envs).values(), leaves(envs).values(), strict=True))
        assert torch.equal(loop.obs, seen)
        assert torch.equal(loop.reward, step.reward)
        assert torch.equal(loop.ended, step.terminated | step.truncated)
        ended += int(loop.ended.sum())
    assert ended > 8  # games ended and others began


def test_env_table() -> None:
    out = io.StringIO()
    found = bench.bench_env(dataclasses.replace(QUICK, games=(2, 64)), out)
    assert [row["games"] for row in found["rows"]] == [2, 64]
    assert all(row.keys() == {"games", "eager"} for row in found["rows"])
    for row in found["rows"]:
        assert 0 < row["eager"]["low"] <= row["eager"]["value"] <= row["eager"]["high"]
        assert row["eager"]["repeats"] == 3
    assert found["rows"][1]["eager"]["value"] > 2 * found["rows"][0]["eager"]["value"]  # steps of all games are counted
    assert found["plain_python"] > 0
    title, plain, header, *rows = out.getvalue().splitlines()
    assert title.startswith("snake: env-steps/s")
    assert plain.startswith("  one game in plain Python: ")
    assert header.split() == ["games", "eager"]
    assert [row.split()[0] for row in rows] == ["2", "64"]


def test_train_table(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = []

    class Noted(bench.Session):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            sessions.append(self)

    monkeypatch.setattr(bench, "Session", Noted)
    out = io.StringIO()
    found = bench.bench_train(dataclasses.replace(QUICK, games=(8,), algo_options={"hidden": "16"}), out)
    assert [row["games"] for row in found["rows"]] == [8]
    figure = found["rows"][0]["eager"]
    assert figure["value"] > 0
    assert figure["peak_bytes"] > 10**7  # beside every training figure: memory and use of the device
    assert figure["cpu_percent"] >= 0
    assert found["algo_options"] == {"n_step": 1, "net": "mlp", "hidden": "16", "learning_starts": 0}
    (session,) = sessions
    # one gradient sample an environment step, from before the clock started
    assert session.updates >= session.iterations - 2
    assert session.samples_trained == session.updates * 8
    assert "one gradient sample per step" in out.getvalue()


def test_train_table_of_an_algorithm_without_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is a whole rollout: all its steps are counted. Options reach game and learner."""
    sessions, calls = [], []

    class Noted(bench.Session):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            sessions.append(self)

    def rates(call: Any, *_: Any, **__: Any) -> list[float]:
        calls.append(call)
        return [3.0, 2.0, 5.0]

    monkeypatch.setattr(bench, "Session", Noted)
    monkeypatch.setattr(bench, "rates", rates)
    words = {"env_options": {"width": "5"}, "algo_options": {"hidden": "16,8", "rollout_steps": "4", "batch-size": "8"}}
    found = bench.bench_train(dataclasses.replace(QUICK, games=(8,), algo="ppo", **words), io.StringIO())
    (session,) = sessions
    calls[0]()
    assert session.env_steps == 4 * 8
    figure = found["rows"][0]["eager"]
    assert (figure["value"], figure["low"], figure["high"]) == (3.0 * 4 * 8, 2.0 * 4 * 8, 5.0 * 4 * 8)
    assert (session.plan.algo_config.hidden, session.plan.algo_config.batch_size) == ((16, 8), 8)
    assert (session.plan.rules.config.width, session.plan.rules.config.view) == (5, "planes")
    assert (found["algo"], found["env_options"]) == ("ppo", {"width": "5"})


def test_random_actions_are_legal() -> None:
    """A game that ends by an illegal action: nobody who draws legal ones ever ends so."""
    rules = make_rules("tetris", {"width": 4, "height": 6})
    loop = bench.EnvLoop(rules, 64, CPU, fast.Compiler(False, print), graph=False)
    for _ in range(30):
        legal = rules.game.legal(rules.config, loop.envs.game)
        draw = random.bits(random.fold(loop.key, loop.time), torch.arange(64))
        action = select.draw(legal, draw)
        assert legal.gather(1, action.unsqueeze(1)).all()
        expected, _ = batch.step(rules, loop.envs, action)
        loop.call()
        assert all(
            torch.equal(x, y) for x, y in zip(leaves(loop.envs).values(), leaves(expected).values(), strict=True)
        )


def test_options_of_the_game_reach_the_env_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Noted(bench.EnvLoop):
        def __init__(self, rules: Any, *arguments: Any) -> None:
            super().__init__(rules, *arguments)
            seen.append(rules.config.width)

    monkeypatch.setattr(bench, "EnvLoop", Noted)
    bench.bench_env(dataclasses.replace(QUICK, env_options={"width": "6"}), io.StringIO())
    assert seen == [6]
    with pytest.raises(UserError, match=r"There is no option env\.widht"):
        bench.bench_env(dataclasses.replace(QUICK, env_options={"widht": "6"}), io.StringIO())


@pytest.mark.parametrize("games", [(), (0,), (4, -1)])
def test_wrong_numbers_of_games(games: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"games is .*; expected one or more numbers of games"):
        bench.bench_train(dataclasses.replace(QUICK, games=games), io.StringIO())


def test_columns() -> None:
    assert bench._ways(CPU, False) == {"eager": (False, False)}
    assert bench._ways(CPU, None) == {"eager": (False, False), "compiled": (True, False)}
    gpu = torch.device("cuda:0")
    assert bench._ways(gpu, None)["graphed"] == (True, True)
    assert bench._ways(gpu, False) == {"eager": (False, False), "graphed": (False, True)}


@pytest.mark.parametrize("missing", ["observe", "legal"])
def test_an_oracle_without_observations_has_no_plain_figure(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that an oracle may leave out; a game whose actions are all legal needs no `legal`."""
    oracle = oracles.find("tetris")
    members = {name: getattr(oracle, name) for name in ("__init__", "step", "observe", "legal") if name != missing}
    monkeypatch.setattr(oracles, "find", lambda _: type("Oracle", (), members))
    assert bench.plain_python("tetris", 0.01) is None


def test_rates_are_of_parts_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def call() -> None:
        clock[0] += 0.5

    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    assert bench.rates(call, 12.0, CPU, repeats=4, warm_up=1) == [2.0] * 4
    assert clock[0] >= 12.5


def test_a_game_without_an_oracle_has_no_plain_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (bench.plain_python("snake", 0.01) or 0) > 0
    monkeypatch.setattr(oracles, "find", lambda game: None)  # noqa: ARG005
    out = io.StringIO()
    assert bench.bench_env(QUICK, out)["plain_python"] is None
    assert "plain Python" not in out.getvalue()


def test_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench.describe_machine("cpu")
    assert found.keys() == {"date", "commit", "hardware", "torch", "python"}
    assert "CPU cores" in found["hardware"]

    def no_git(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    assert bench.describe_machine("cpu")["commit"] is None


def test_cpu_environments_have_a_table_too() -> None:
    out = io.StringIO()
    request = dataclasses.replace(QUICK, env="gym:CartPole-v1", games=(1, 4), compile=None)
    record = bench.bench_env(request, out)
    assert [row.keys() for row in record["rows"]] == [{"games", "eager"}] * 2
    assert all(row["eager"]["value"] > 0 for row in record["rows"])
    assert out.getvalue().startswith("gym:CartPole-v1: env-steps/s")
    defaults = dataclasses.replace(request, games=BenchRequest.games)
    assert bench._games(defaults, bench._rules(request)) == (1, 16, 64)  # 65,536 would take a day


def test_the_title_shows_options_as_words_and_not_as_a_dictionary() -> None:
    out = io.StringIO()
    request = dataclasses.replace(QUICK, env_options={"width": "6"}, algo_options={"hidden": "16,8"})
    bench.bench_train(request, out)
    title = out.getvalue().splitlines()[0]
    assert title == (
        "snake, width 6: env-steps/s with dqn, one gradient sample per step, n_step 1, net mlp, hidden 16,8, "
        "learning_starts 0 (cpu)"
    )
