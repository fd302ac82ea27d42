"""Several runs together: the same games for each, figures over the runs by hand, and runs that cannot be compared."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import redline
from redline import cli, envs
from redline.core.errors import UserError
from redline.run.agent import Agent, load_agent
from redline.run.compare import check_comparable, evaluate_runs, over_runs
from redline.run.evaluate import Evaluation
from redline.run.progress import Progress
from redline.run.settings import Settings
from redline.run.statistics import bootstrap_runs, wilson_interval
from redline.run.train import train

SETTINGS = Settings(
    env="snake",
    num_envs=16,
    batch_size=16,
    replay_capacity=2000,
    steps=320,
    device="cpu",
    compile=False,
    eval_episodes=0,
    time_limit=30,
    env_options={"width": 5, "height": 4},
    algo_options={"hidden": (16, 16), "learning_starts": 64},
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs that differ only in their seed."""
    folder = tmp_path_factory.mktemp("compare")
    return [train(dataclasses.replace(SETTINGS, seed=n, run_dir=str(folder / f"run {n}"))).path for n in range(3)]


@pytest.fixture(scope="module")
def agents(paths: list[Path]) -> list[Agent]:
    return [load_agent(path, "cpu") for path in paths]


class Stream(io.StringIO):
    """What a command writes to."""

    terminal = False

    def isatty(self) -> bool:
        return self.terminal


def call(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    out, err = Stream(), Stream()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        cli.main(list(words))
    assert isinstance(end.value.code, int)
    return end.value.code, out.getvalue(), err.getvalue()


def test_each_run_plays_the_same_games_as_alone(agents: list[Agent]) -> None:
    told: list[tuple[int, int]] = []
    result = evaluate_runs(agents, 40, 3, lambda run, done: told.append((run, done)))
    for agent, record in zip(agents, result["runs"], strict=True):
        assert {**record, "seconds": 0} == {**agent.evaluate(40, 3), "seconds": 0}
    assert len({record["eval_steps"] for record in result["runs"]}) > 1  # not one agent three times
    assert {run for run, _ in told} == {0, 1, 2}
    assert [done for run, done in told if run == 1][-1] == 40
    means = [record["score_mean"] for record in result["runs"]]
    assert result["score_mean"] == pytest.approx(sum(means) / 3)
    assert result["best"] == result["runs"][int(np.argmax(means))]["run"]
    assert result["worst"] == result["runs"][int(np.argmin(means))]["run"]
    assert result["episodes"] == 120


def outcome(scores: list[float], won: int = 0, going_on: int = 0) -> Evaluation:
    """Games of 10 steps; the first `won` are won, the last `going_on` have not ended."""
    place = torch.arange(len(scores))
    ended = place < len(scores) - going_on
    return Evaluation(
        torch.tensor(scores, dtype=torch.float64), torch.full((len(scores),), 10.0).double(), place < won, ended, ended
    )


def test_figures_over_runs_by_hand() -> None:
    """Run means 1, 2, 3 and 10: their IQM is 2.5, whatever single games scored; each run counts as one."""
    found = over_runs([outcome([0, 2]), outcome([2, 2, 2]), outcome([3] * 20), outcome([0, 20], won=1)])
    assert (found["score_mean"], found["score_iqm"], found["score_median"]) == (4.0, 2.5, 2.5)
    assert (found["score_min"], found["score_max"], found["total_score"]) == (0.0, 20.0, 88.0)
    assert (found["episodes"], found["eval_steps"], found["game_overs"]) == (27, 270, 27)
    assert (found["win_rate"], found["steps_per_win"]) == (0.125, 10.0)
    assert found["win_rate_interval"] == "Wilson"
    assert (found["win_rate_low"], found["win_rate_high"]) == wilson_interval(1, 27)
    assert found["score_low"] < 2.5 < found["score_high"]
    assert found["score_ci95"] == (found["score_high"] - found["score_low"]) / 2


def test_intervals_over_runs_are_of_runs_and_games() -> None:
    scores = [[float(10 * run + game % 7) for game in range(40)] for run in range(4)]
    found = over_runs([outcome(values, won=10 * run) for run, values in enumerate(scores)])
    mean, middle = bootstrap_runs([np.array(values) for values in scores])
    assert (found["score_low"], found["score_high"]) == mean
    assert (found["score_iqm_low"], found["score_iqm_high"]) == middle
    assert found["win_rate_interval"] == "bootstrap"
    # Of runs that won 0, 25, 50, 75 %: not the 30 to 46 % that 160 games of one agent would give.
    assert found["win_rate"] == 0.375
    assert found["win_rate_low"] < 0.2
    assert found["win_rate_high"] > 0.55


def test_unfinished_games_of_several_runs() -> None:
    found = over_runs([outcome([5, 5, 6], going_on=1), outcome([1, 1, 9, 9], going_on=2)])
    assert (found["episodes"], found["finished"], found["game_overs"]) == (7, 4, 4)
    assert found["score_censored"] == 36 / 4


def test_runs_are_ranked_by_the_score_per_game_over_where_games_were_cut_off(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run whose agent hardly ever dies has the longer games, so with a budget it begins fewer of them."""
    outcomes = iter([outcome([6, 6, 6]), outcome([1, 1, 3], going_on=2), outcome([0, 0, 3], going_on=3)])
    monkeypatch.setattr("redline.run.compare.evaluate_net", lambda *_: next(outcomes))
    result = evaluate_runs(agents, 3)
    assert result["best"] == str(agents[0].path)  # 6, then 5 for each game over, then at least 3 / 3.69
    assert result["worst"] == str(agents[2].path)


def test_a_snake_that_starves_is_not_the_better_for_it(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no game over, so that its score per game over has no end: runs are ranked by their means then."""
    starved = outcome([1, 1, 3], going_on=1)
    starved = dataclasses.replace(starved, game_over=torch.zeros_like(starved.game_over))
    outcomes = iter([starved, outcome([2, 3, 4]), outcome([6, 6, 6], going_on=1)])
    monkeypatch.setattr("redline.run.compare.evaluate_net", lambda *_: next(outcomes))
    result = evaluate_runs(agents, 3)
    assert result["worst"] == str(agents[0].path)
    assert result["best"] == str(agents[2].path)


# ---- what cannot be compared


def changed(agent: Agent, path: str = "other", **options: Any) -> Agent:
    """The same agent in another folder, by other rules."""
    time_limit = options.pop("time_limit", agent.rules.time_limit)
    env = options.pop("env", "snake")
    config = dataclasses.asdict(agent.rules.config) | options if env == "snake" else options
    rules = envs.make_rules(env, config, time_limit)
    return dataclasses.replace(agent, path=Path(path), rules=rules, config=agent.config | {"env": env})


def test_runs_of_different_games(agents: list[Agent]) -> None:
    with pytest.raises(UserError, match=r"run 0 is a run of snake, other of tetris; .* Evaluate runs of one game"):
        check_comparable([agents[0], changed(agents[0], env="tetris")])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"width": 6}, "env.width is 5 there, 6 here"),
        ({"start": "random"}, "env.start is centre there, random here"),
        ({"time_limit": 0}, "time_limit is 30 there, 0 here"),
        ({"starvation": 7, "height": 7}, "env.height is 4 there, 7 here; env.starvation is 0 there, 7 here"),
    ],
)
def test_runs_of_different_rules(agents: list[Agent], options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        check_comparable([*agents, changed(agents[0], **options)])
    assert str(error.value) == (
        f"other plays by other rules than {agents[0].path}: {told}. Evaluate runs of the same rules together."
    )


def test_rewards_and_views_may_differ(agents: list[Agent]) -> None:
    check_comparable(
        [*agents, changed(agents[0], reward_food=3.0, reward_step=-0.1, view="centred", sight=3, mirror=False)]
    )


def test_a_run_named_twice(agents: list[Agent], paths: list[Path]) -> None:
    twice = dataclasses.replace(agents[0], path=paths[0].parent / "x" / ".." / "run 0")
    with pytest.raises(UserError, match=r"run 0 is named twice; name every run once"):
        check_comparable([agents[0], agents[1], twice])


# ---- the command


def test_eval_of_several_runs(paths: list[Path]) -> None:
    words = [*map(str, paths), "--episodes", "20", "--device", "cpu"]
    code, out, err = call("eval", *words, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert [record["run"] for record in result["runs"]] == [str(path) for path in paths]
    for path, record in zip(paths, result["runs"], strict=True):
        assert json.loads((path / "eval.json").read_text()) == record
    assert result.keys() >= {"env", "score_mean", "score_iqm", "score_iqm_low", "score_iqm_high", "best", "worst"}

    code, out, err = call("eval", *words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "3 runs of snake, greedy, on the same held-out games"
    assert lines[1].split()[:4] == ["run", "algo", "games", "foods"]
    for line, record in zip(lines[2:5], result["runs"], strict=True):
        assert line.startswith(f"  {record['run']} ")
        assert f" {record['score_mean']:.2f}  {record['score_low']:.2f} to {record['score_high']:.2f} " in line
    told = {line[2:15].strip(): line[16:] for line in lines[6:]}
    assert told["mean"] == f"{result['score_mean']:.2f} (95 %: {result['score_low']:.2f} to {result['score_high']:.2f})"
    assert told["IQM"] == (
        f"{result['score_iqm']:.2f} (95 %: {result['score_iqm_low']:.2f} to {result['score_iqm_high']:.2f})"
    )
    assert told["won"].startswith("0.0 % (95 %: 0.0 to 6.0, Wilson)")
    assert (told["best run"], told["worst run"]) == (result["best"], result["worst"])


def test_eval_with_drawn_actions(paths: list[Path], tmp_path: Path) -> None:
    code, out, err = call("eval", str(paths[0]), "--sample")
    assert (code, out) == (2, "")
    assert err == "redline: sample is set, but dqn learns values and has no policy to sample from; drop --sample.\n"

    options: dict[str, Any] = {
        "algo": "ppo",
        "replay_capacity": None,
        "algo_options": {"hidden": (8,), "rollout_steps": 4},
    }
    own = [dataclasses.replace(SETTINGS, **options, seed=n, run_dir=str(tmp_path / f"{n}")) for n in range(2)]
    words = ["eval", *(str(train(settings).path) for settings in own), "--episodes", "20", "--device", "cpu"]
    code, out, _ = call(*words, "--sample")
    assert (code, out.splitlines()[0]) == (0, "2 runs of snake, sampled actions, on the same held-out games")
    first = ["eval", words[1], *words[3:]]
    (greedy, drawn, again) = (call(*first, *more)[1] for more in ([], ["--sample"], ["--sample"]))
    assert drawn == again
    assert greedy.partition("\n")[2] != drawn.partition("\n")[2]
    assert (", greedy, after " in greedy, ", sampled actions, after " in drawn) == (True, True)
    same = redline.evaluate(words[1], episodes=20, device="cpu", sample=True)
    assert f" {same['score_mean']:.2f} " in drawn
    assert redline.evaluate(words[1], episodes=20, device="cpu")["actions"] == "greedy"

    played = mock.Mock(side_effect=AssertionError)
    with mock.patch("redline.run.compare.evaluate_net", played):
        code, _, err = call("eval", words[1], str(paths[0]), "--sample")
    assert (code, "dqn learns values" in err) == (2, True)


def test_eval_of_several_runs_with_a_budget(paths: list[Path]) -> None:
    code, out, _ = call("eval", *map(str, paths[:2]), "--episodes", "4", "--max-steps", "40", "--device", "cpu")
    assert code == 0
    assert out.splitlines()[1].endswith("per game over")
    assert re.search(r"; [1-8] still going on count as they stood", out)


def test_progress_names_the_run(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, int, str]] = []
    monkeypatch.setattr(Progress, "count", lambda _, *figures: shown.append(figures))
    call("eval", *map(str, paths), "--episodes", "4", "--device", "cpu", "--json")
    assert {(4, 4, f"games, run {n} of 3") for n in (1, 2, 3)} <= set(shown)


def test_eval_refuses_what_cannot_be_compared_before_anything_is_played(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = dataclasses.replace(
        SETTINGS, steps=16, run_dir=str(tmp_path / "wide"), env_options={"width": 6, "height": 4}
    )
    train(wide)
    monkeypatch.setattr("redline.run.compare.evaluate_net", lambda *_: pytest.fail("it plays"))
    code, out, err = call("eval", str(paths[0]), str(tmp_path / "wide"))
    assert (code, out) == (2, "")
    assert err.startswith(f"redline: {tmp_path / 'wide'} plays by other rules than {paths[0]}: env.width is 5 there, 6")
    assert len(err.splitlines()) == 1
    code, out, err = call("eval", str(paths[0]), "nowhere")
    assert (code, out) == (2, "")
    assert err == "redline: There is no run folder nowhere; train one with redline train.\n"
