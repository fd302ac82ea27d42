"""The command line: what each command prints and returns, and one sentence for whatever is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import redline
from redline import algos, cli, games, replay
from redline.cli import catalog
from redline.cli.command import COMMANDS, by_position, own_options
from redline.cli.commands.train import closing_lines
from redline.cli.parse import parse, split
from redline.core.errors import UserError
from redline.run import evaluate_tensor_games, resolve, session, settings
from redline.run import progress as progress_lines
from redline.run.agent import Agent

SOURCE = Path(__file__).parents[1] / "src"
TINY = (
    "--num-envs 16 --batch-size 16 --replay-capacity 2k --no-compile --device cpu --eval-episodes 4 --env.width 4 "
    "--env.height 4 --time-limit 20 --n-step 3 --backplay 0 --env.mirror --dqn.hidden 16,16 --dqn.learning-starts 64"
)


class Output(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one line on standard output."""
        (line,) = self.out.splitlines()
        record = json.loads(line)
        assert isinstance(record, dict)
        return record


class Stream(io.StringIO):
    """What a command writes to."""

    terminal = False

    def isatty(self) -> bool:
        return self.terminal


def call(line: str, *more: str) -> Output:
    """Run a command in this process: `line` is split at its spaces."""
    out, err = Stream(), Stream()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        cli.main([*line.split(), *more])
    assert isinstance(end.value.code, int)
    return Output(end.value.code, out.getvalue(), err.getvalue())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to work in, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Output]:
    """A trained run and what training it printed."""
    path = tmp_path_factory.mktemp("cli") / "a run"  # a path with a space
    return path, call(f"train snake {TINY} --steps 480 --json --run-dir", str(path))


@pytest.fixture
def run(trained: tuple[Path, Output]) -> str:
    return str(trained[0])


# ---- commands


def test_train_json(trained: tuple[Path, Output]) -> None:
    path, output = trained
    assert output.code == 0
    result = output.json
    expected = (
        "env algo device run env_steps updates samples_trained episodes seconds env_steps_per_second samples_per_second "
        "score_mean score_ci95 score_min score_max length_mean win_rate steps_per_win stopped_by settings"
    )
    assert result.keys() >= set(expected.split())
    assert (result["env"], result["algo"], result["device"], result["run"]) == ("snake", "dqn", "cpu", str(path))
    assert (result["env_steps"], result["stopped_by"]) == (480, "steps")
    assert (result["updates"], result["samples_trained"]) == (26, 26 * 16)
    assert result["settings"]["env_options"]["width"] == 4
    assert result["settings"]["algo_options"]["hidden"] == [16, 16]
    assert result["settings"]["replay_capacity"] == 2000
    assert json.loads((path / "result.json").read_text()) == result
    assert "Training snake with dqn" in output.err  # progress goes to standard error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--dqn.dueling snake", {"dqn.dueling": True}),
        ("snake --dqn.dueling --steps 20M", {"dqn.dueling": True, "steps": "20M"}),
        ("snake --no-dqn.double", {"dqn.double": False}),
        ("snake --dqn.double false --seed 1", {"dqn.double": "false", "seed": "1"}),
        ("snake --dqn.double=no", {"dqn.double": "no"}),
    ],
)
def test_flags_of_an_algorithm(words: str, expected: dict[str, Any]) -> None:
    request = split("train", COMMANDS.load("train"), words.split())
    assert (request.arguments, request.options) == (["snake"], expected)


def test_train_for_people(tmp_path: Path) -> None:
    line = f"train snake {TINY} --run-dir here --steps"
    output = call(line, "96")
    assert output.code == 0
    assert "96 steps in 0:0" in output.out
    assert "stopped by steps" in output.out
    assert re.search(r"Greedy score over 4 held-out games: [\d.]+ ± [\d.]+ \(best \d+, won [\d.]+ %\)", output.out)
    assert "Run folder: here\n" in output.out
    assert "redline eval here\n" in output.out
    assert "redline watch here\n" in output.out
    told = output.out.splitlines()[-1]
    assert told.strip().startswith("continue:")
    assert told.endswith("--run-dir here --steps 192")
    again = call(told.split("redline ", 1)[1])  # the command it tells of continues, whatever options the run was given
    assert "Continuing here from ckpt-000000000096 (96 steps)." in again.err
    assert "192 steps" in again.out
    assert os.listdir(tmp_path) == ["here"]


def test_the_run_folder_has_a_default(tmp_path: Path) -> None:
    output = call(f"train snake {TINY} --steps 16 --eval-episodes 0")
    assert (tmp_path / "runs" / "snake-dqn" / "config.json").exists()
    assert "Run folder: runs/snake-dqn\n" in output.out
    assert "--run-dir" not in output.out
    assert "Greedy" not in output.out


def test_words_in_every_form(tmp_path: Path) -> None:
    """`--key=value`, underscores, flags with a word, a flag the second time."""
    words = (
        "--steps=16 --eval_episodes 0 --compile=no --save-replay=off --env.reward-food 2 --graph --no-graph --seed=3"
    )
    record = call(f"train snake {TINY} {words} --json").json
    settings = record["settings"]
    assert (settings["compile"], settings["save_replay"], settings["graph"], settings["seed"]) == (
        False,
        False,
        False,
        3,
    )
    assert settings["env_options"]["reward_food"] == 2.0
    assert not list((tmp_path / "runs").rglob("replay.safetensors"))


def test_eval(run: str) -> None:
    output = call("eval", run, "--episodes", "6", "--seed", "2", "--json")
    assert output.code == 0
    result = output.json
    expected = (
        "env algo device run env_steps episodes seconds score_mean score_ci95 score_min score_max length_mean win_rate "
        "steps_per_win settings"
    )
    assert result.keys() >= set(expected.split())
    assert (result["env"], result["algo"], result["run"], result["env_steps"]) == ("snake", "dqn", run, 480)
    assert result["episodes"] == 6
    assert 1 <= result["length_mean"] <= 20
    assert json.loads((Path(run) / "eval.json").read_text()) == result
    same = redline.evaluate(run, episodes=6, device="cpu", seed=2)
    assert {**same, "seconds": 0} == {**result, "seconds": 0}

    for_people = call("eval", run, "--episodes", "6", "--seed", "2").out
    assert for_people.startswith("6 games of snake, greedy, after 480 training steps\n")
    assert f"{result['score_mean']:.2f} ± {result['score_ci95']:.2f} (95 %)" in for_people


def test_eval_with_a_budget_of_steps(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = call("eval", run, "--episodes", "6", "--max-steps", "0.3k", "--json")
    result = output.json
    assert (result["stopped_by"], result["eval_steps"]) == ("max_steps", 300)
    assert result["episodes"] > result["finished"] >= 6
    assert result["score_censored_low"] <= result["total_score"]
    assert json.loads((Path(run) / "eval.json").read_text()) == result
    monkeypatch.setattr(Stream, "terminal", True)
    output = call("eval", run, "--episodes", "6", "--max-steps", "300")
    assert "300 of 300 steps" in output.err
    assert f"{result['game_overs']} game over" in output.out
    going_on = result["episodes"] - result["finished"]
    assert f"; {going_on} still going on count as they stood\n" in output.out
    same = redline.evaluate(run, episodes=6, device="cpu", max_steps=300)
    assert {**same, "seconds": 0} == {**result, "seconds": 0}


def test_an_interrupted_run_is_continued_by_the_same_command(trained: tuple[Path, Output]) -> None:
    options = {"steps": "20M", "run_dir": "my runs", "resume": "never"}
    stopped = closing_lines(trained[1].json | {"stopped_by": "SIGINT"}, options)
    assert stopped.endswith("train snake --steps 20M --run-dir 'my runs'")
    ended = closing_lines(trained[1].json, options)
    assert ended.endswith("train snake --run-dir 'my runs' --steps 960")


def test_the_time_of_preparation_is_shown_apart(trained: tuple[Path, Output]) -> None:
    lines = closing_lines(trained[1].json | {"seconds": 118.0, "preparation_seconds": 76.0}, {})
    assert lines.startswith("480 steps in 0:42 of training after 1:16 of preparation (")


def test_closing_lines_mention_games_that_were_stopped(trained: tuple[Path, Output]) -> None:
    result = trained[1].json
    assert result["finished"] == result["eval_episodes"] == 4
    assert "stopped after" not in closing_lines(result, {})
    lines = closing_lines(result | {"finished": 1, "game_overs": 0, "score_censored_low": 15.5}, {})
    note = "\n3 of them were stopped after 40,000 steps and count as they stood; score per game over: more than 15.5"
    assert note in lines


def test_closing_lines_say_that_nothing_was_learned(trained: tuple[Path, Output], tmp_path: Path) -> None:
    result = trained[1].json | {"run": str(tmp_path), "algo": "ppo", "score_min": -200.0, "score_max": -200.0}
    assert "nothing was learned" not in closing_lines(result, {}), "there is no log"
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"episodes": 0}\n{"score": -200.0}\n{"score": -150.0}\n')
    advice = "Every game scored -200, as at the start of training: nothing was learned."
    assert advice in closing_lines(result, {})
    assert "try --algo ppo.\n" in closing_lines(result | {"algo": "dqn"}, {})
    assert "try --algo dqn and another --run-dir.\n" in closing_lines(result, {"run_dir": "mine"})
    for changed in ({"score_max": -180.0}, {"score_min": -90.0, "score_max": -90.0}, {"win_rate": 1.0}):
        assert advice not in closing_lines(result | changed, {})
    log.write_text("damaged")
    assert advice not in closing_lines(result, {})


def test_eval_without_a_game_over(run: str) -> None:
    """One step: nobody is dead yet, so only a lower bound is known."""
    output = call("eval", run, "--episodes", "3", "--max-steps", "1")
    assert re.search(r"per game over more than 0\.\d\d \(95 %\), since no game ended by itself in 3 steps", output.out)


def test_eval_as_at_the_end_of_training(trained: tuple[Path, Output], run: str) -> None:
    result = call("eval", run, "--episodes", "4", "--json").json
    for name in ("score_mean", "score_ci95", "length_mean", "win_rate"):
        assert result[name] == trained[1].json[name]


def test_eval_shows_progress(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar on a terminal; in a pipe a line every ten seconds, none for a short evaluation."""
    assert call("eval", run, "--episodes", "6", "--json").err == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(Stream, "terminal", True)
    monkeypatch.setattr(evaluate_tensor_games, "_LOOK_EVERY", 4)
    output = call("eval", run, "--episodes", "6", "--json").err
    assert "Evaluating" in output
    assert "6 of 6 games" in output


def test_eval_shows_progress_in_a_pipe(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: Agent, episodes: int, seed: int, progress: Callable[[int], None], *budget: Any) -> dict[str, Any]:
        del self, seed, budget
        progress(2)
        time.sleep(1.5)
        raise UserError(f"{episodes} games take too long.")

    monkeypatch.setattr(Agent, "evaluate", slow)
    monkeypatch.setattr(progress_lines, "_PLAIN_SECONDS", 0.5)
    assert "Evaluating: 0:01 so far, 2 of 6 games." in call("eval", run, "--episodes", "6").err


def test_watch_in_the_terminal(run: str) -> None:
    output = call("watch", run, "--terminal", "--games", "2")
    assert output.code == 0
    assert [line.split("   ")[0] for line in output.out.splitlines()[-2:]] == ["game 1", "game 2"]
    drawn = call("watch", run, "--terminal", "--games", "2", "--json")
    assert drawn.err == output.out  # the game goes to standard error, standard output is for the program that reads it
    record = drawn.json
    assert (record["run"], record["env"], len(record["games"])) == (run, "snake", 2)
    assert [f"   {game['length']} steps " in output.out for game in record["games"]] == [True, True]


def test_watch_as_a_gif(run: str, tmp_path: Path) -> None:
    output = call("watch", run, "--gif", "game.gif", "--max-steps", "5", "--seed", "1", "--json")
    assert output.code == 0
    (game,) = output.json["games"]
    with Image.open(tmp_path / "game.gif") as picture:
        assert picture.n_frames >= 2
    assert f"game.gif: {game['length']} steps, score {game['score']}" in output.err
    assert game["length"] <= 5
    assert call("watch", run, "--gif", "again.gif", "--max-steps", "5", "--seed", "1").out == ""


def test_watch_as_a_video_and_a_page(run: str, tmp_path: Path) -> None:
    words = ("--mp4", "game.mp4", "--html", "game.html", "--games", "2", "--max-steps", "5")
    output = call("watch", run, *words, "--json")
    assert output.code == 0
    assert b"ftyp" in (tmp_path / "game.mp4").read_bytes()[:16]
    assert "<!doctype html>" in (tmp_path / "game.html").read_text()
    assert len(output.json["games"]) == 2
    assert "game.html: 2 games, score " in output.err
    assert sorted(os.listdir(tmp_path)) == ["game.html", "game.mp4"]


def test_bench_env(tmp_path: Path) -> None:
    line = "bench env --games 2,8 --seconds 0.01 --no-compile --device cpu"
    output = call(f"{line} --out figures.json --json")
    assert output.code == 0
    record = output.json
    assert [row["games"] for row in record["env"]["rows"]] == [2, 8]
    assert all(row["eager"]["value"] > 0 for row in record["env"]["rows"])
    assert record["torch"] == torch.__version__
    assert "train" not in record
    assert json.loads((tmp_path / "figures.json").read_text()) == record
    assert "env-steps/s" in output.err
    assert "env-steps/s" in call(line).out


def test_bench_train() -> None:
    record = call("bench train --games 4 --seconds 0.01 --no-compile --device cpu --json").json
    assert [row["games"] for row in record["train"]["rows"]] == [4]
    assert record["train"]["rows"][0]["eager"]["value"] > 0


def test_bench_takes_the_options_of_games_and_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.tools import bench

    monkeypatch.setattr(bench, "bench_train", lambda wanted, _: vars(wanted))
    line = "bench train --algo ppo --env.width 6 --ppo.hidden 64,64 --ppo.batch-size 8 --games 4 --json"
    found = call(line).json["train"]
    assert (found["algo"], found["env_options"]) == ("ppo", {"width": "6"})
    assert {name.replace("-", "_"): word for name, word in found["algo_options"].items()} == {
        "hidden": "64,64",
        "batch_size": "8",
    }


def test_bench_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.tools import bench, bench_collect, bench_replay

    settings = bench_collect._settings
    monkeypatch.setattr(bench_collect, "_settings", lambda request: (settings(request)[0], 1))  # as on one core
    monkeypatch.setattr(bench_replay, "bench_replay", lambda wanted, _: [wanted.capacity, wanted.batch])
    monkeypatch.setattr(bench, "bench_env", lambda wanted, _: wanted.games)
    monkeypatch.setattr(bench, "bench_train", lambda wanted, _: wanted.seconds)
    learner = "--algo ppo --ppo.hidden 16 --ppo.rollout-steps 8 --ppo.batch-size 16"
    line = f"bench --games 2 --seconds 0.125 --capacity 2k --batch 3,4 --actors 1 --no-compile --json {learner}"
    record = call(line).json
    assert (record["env"], record["train"], record["replay"]) == ([2], 0.125, [2000, [3, 4]])
    collected = record["collect"]
    assert collected["env"] == "gym:CartPole-v1"
    ways = ("bare", "in_step", "gymnasium", *(f"{where}_{collected['actors']}" for where in ("central", "actors")))
    assert all(collected[way]["frames"]["value"] > 0 for way in ways)
    assert min(collected["transport"].values()) > 0


def test_bench_compares_with_an_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.tools import bench
    from redline.tools.bench_figures import summarize

    speed = [100.0]
    monkeypatch.setattr(
        bench, "bench_env", lambda _, __: {"rows": [{"games": 2, "eager": summarize([speed[0], speed[0] + 1])}]}
    )
    assert call("bench env --device cpu --out old.json").code == 0
    assert "1 figures compared" in call("bench env --device cpu --compare old.json").out
    speed[0] = 80.0
    output = call("bench env --device cpu --compare old.json")
    assert output.code == 1
    assert "SLOWER 20%" in output.out
    assert "env, games 2, eager" in output.out
    assert call("bench env --device cpu --compare old.json --tolerance 30").code == 0
    assert call("bench env --device cpu --compare old.json --json").json["slower"] == 1
    old = json.loads((tmp_path / "old.json").read_text())
    (tmp_path / "old.json").write_text(json.dumps(old | {"hardware": "another"}))
    refused = call("bench env --device cpu --compare old.json")
    assert refused.code == 2
    assert "are of another, this machine is" in refused.err
    assert call("bench env --device cpu --compare none.json").code == 2


def test_bench_defaults_fit_the_occasion(monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.tools import bench, bench_collect, bench_replay

    for module, name in ((bench, "env"), (bench, "train"), (bench_replay, "replay"), (bench_collect, "collect")):
        monkeypatch.setattr(module, f"bench_{name}", lambda wanted, _: [wanted.games, wanted.capacity, wanted.compile])
    one, every, quick = (call(f"bench {line} --device cpu --json").json for line in ("env", "", "--quick"))
    assert one["env"] == [[1, 16, 64, 256, 4096, 65536], 1_000_000, None]
    assert (every["env"], every["train"]) == ([[4096], 1_000_000, None], [[1024], 1_000_000, None])
    assert every["replay"][1:] == [100_000, False]
    assert len(every["collect"][0]) > 1  # else it would be the number of environments
    assert (quick["env"][0], quick["train"][2], quick["replay"][1]) == ([256], False, 20_000)
    assert call("bench --quick --games 8 --device cpu --json").json["env"][0] == [8]


def test_doctor() -> None:
    output = call("doctor", "--json")
    assert output.code == 0
    record = output.json
    assert (record["env"], record["algo"]) == ("snake", "ppo")
    assert record["hardware"]["device"] == "cpu"
    assert all(choice["source"] for choice in record["settings"].values())
    text = call("doctor").out
    assert "Device: cpu" in text
    assert all(choice["reason"] in text for choice in record["settings"].values())


def test_list() -> None:
    record = call("list", "--json").json
    assert record["games"] == games.names()
    assert record["algorithms"] == algos.names()
    assert record["environments"] == ["gym:ID", "mario:W-S"]
    assert not any(record["failures"].values())
    assert record["replay kinds"] == replay.names()
    output = call("list")
    assert output.code == 0
    for name in games.names() + algos.names() + replay.names():
        lines = [line for line in output.out.splitlines() if line.startswith(f"  {name} ")]  # a game may have a recipe
        assert lines
        assert all(len(line.split()) > 3 for line in lines), "no sentence about it"


BROKEN_GAME = '"""A game that is not finished."""\nimport missing_module\n\ndef step(): ...\n'


def test_list_tells_why_a_game_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text(BROKEN_GAME)
    monkeypatch.setattr(games, "__path__", [*games.__path__, str(tmp_path)])
    monkeypatch.setattr(games.__spec__, "submodule_search_locations", games.__path__)
    games.registry.refresh()
    try:
        reason = "cannot be imported: ModuleNotFoundError: No module named 'missing_module'."
        assert call("list", "--json").json["failures"]["games"]["broken"].endswith(reason)
        output = call("list").out
        assert reason in output
        assert "  snake " in output
    finally:
        games.registry.refresh()


def test_check(tmp_path: Path) -> None:
    (tmp_path / "no_game.py").write_text("def step(): ...\n")
    output = call("check", "no_game")
    assert output.code == 1
    assert "FAILED members: The game 'no_game' has no member" in output.out
    assert call("check", "no_game", "--json").json["ok"] is False


def test_check_of_a_game_or_oracle_that_cannot_be_loaded_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "unfinished.py").write_text("def step(:\n")
    code, out, err = call("check unfinished")
    assert (code, out) == (2, "")
    assert err.startswith("redline: The game 'unfinished' cannot be imported: SyntaxError: ")
    code, out, err = call("check snake --oracle nope")
    assert (code, out) == (2, "")
    assert err.startswith("redline: There is no oracle 'nope'")


def test_version() -> None:
    assert call("--version") == (0, f"redline {redline.__version__}\n", "")


@pytest.mark.parametrize("word", ["", "--help", "-h", "help"])
def test_overview(word: str) -> None:
    output = call(word)
    assert (output.code, output.err) == (0, "")
    text = " ".join(output.out.split())
    for name, command in by_position().items():
        assert f"  {name} {command.argument}".rstrip() in output.out
        assert command.summary in text


@pytest.mark.parametrize("name", COMMANDS.names())
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(name: str, flag: str) -> None:
    output = call(name, flag)
    assert (output.code, output.err) == (0, "")
    assert output.out.startswith(f"usage: redline {name}")
    for option in own_options(COMMANDS.load(name)).values():
        pattern = rf"^  --(\[no-\]|no-)?{option.name.replace('_', '-')}( |$)"
        (line,) = re.findall(pattern, output.out, re.MULTILINE)[:1] or [None]
        assert line is not None, option.name
        assert option.help, option.name
    assert "--env.width" not in output.out


# ---- what is wrong


WRONG = {
    # unknown names, with the nearest
    "trian snake": "There is no command 'trian'; did you mean 'train'?",
    "zzzz": "There is no command 'zzzz'. Commands: train, eval,",
    "train snak": "There is no game 'snak'; did you mean 'snake'?",
    "train zzzz": "There is no game 'zzzz'. Games: snake",
    "train snake --algo dqm": "There is no algorithm 'dqm'; did you mean 'dqn'?",
    "train snake --stpes 5": "redline train has no option --stpes; did you mean '--steps'?",
    "train snake --num-env 5": "redline train has no option --num-env; did you mean '--num-envs'?",
    "train snake --qqqq 5": "redline train has no option --qqqq.",
    "train snake --env snake": "redline train has no option --env",
    "train snake --env.widht 5": "There is no option env.widht; did you mean 'width'?",
    "train snake --env.qqqq 5": "There is no option env.qqqq.",
    "train snake --dqn.learning-rat 1": "There is no option dqn.learning_rat; did you mean 'learning_rate'?",
    "train snake --envv.width 5": "There is no option group envv.*; there are env.* and those of the "
    "algorithms: dqn.*, ppo.*, pqn.*.",
    "train snake --algo dqn --ppo.gamma 0.9": "There is no option group ppo.*; with --algo dqn there are env.* and dqn.*.",
    "train snake --env-options 5": "redline train has no option --env-options",
    "train snake --no-steps": "redline train has no option --no-steps",
    "train snake --compile=perhaps": "compile is 'perhaps'; expected true or false.",
    "train snake --no-compile=no": "--no-compile takes no value",
    "train snake --json=perhaps": "json is 'perhaps'; expected true or false.",
    "doctor --env snak": "There is no game 'snak'; did you mean 'snake'?",
    "doctor --algo zzzz": "There is no algorithm 'zzzz'",
    "doctor --env.width 5": "redline doctor has no option --env.width; did you mean '--env'?",
    "bench envv": "There is no benchmark 'envv'; did you mean 'env'?",
    "bench zzzz": "There is no benchmark 'zzzz'. Benchmarks: env, train, replay, collect, switches.",
    "bench train --ppo.epochs 3": "There is no option group ppo.*; with --algo dqn there are env.* and dqn.*.",
    "bench env --game 5": "redline bench has no option --game; did you mean '--games'?",
    "bench env --env snak": "There is no game 'snak'; did you mean 'snake'?",
    "list --game": "redline list has no option --game",
    "eval RUN --episode 5": "redline eval has no option --episode; did you mean '--episodes'?",
    # wrong types
    "train snake --num-envs many": "num_envs is 'many'; expected a number, such as 3, 1.5k or 20M.",
    "train snake --num-envs 1.5": "num_envs is '1.5'; expected a whole number.",
    "train snake --steps nan": "steps is 'nan'; expected a number",
    "train snake --minutes inf": "minutes is 'inf'; expected a number",
    "train snake --env.width wide": "env.width is 'wide'; expected a number",
    "train snake --dqn.net cn": "dqn.net is 'cn'; did you mean 'cnn'? Expected auto, mlp, cnn, resnet, pixels, columns.",
    "train snake --dqn.double maybe": "dqn.double is 'maybe'; expected true or false.",
    "train snake --dqn.hidden 8,x": "dqn.hidden is '8,x'; expected whole numbers separated by commas",
    "eval RUN --episodes few": "episodes is 'few'; expected a number",
    "watch RUN --terminal --fps fast": "fps is 'fast'; expected a number",
    "bench env --games some": "games is 'some'; expected whole numbers separated by commas",
    # missing words, words too many
    "train": "redline train needs ENV; see redline train --help.",
    "train --steps 5": "redline train needs ENV",
    "train snake --steps": "--steps needs a value; see redline train --help.",
    "train snake --steps --json": "--steps needs a value",
    "train snake --env.width": "--env.width needs a value",
    "train snake tetris": "redline train does not know what to do with 'tetris'",
    "eval": "redline eval needs RUN",
    "watch --terminal": "redline watch needs RUN",
    "watch RUN --port 99999": "port is 99999; expected 0 (any free one) to 65535.",
    "watch RUN RUN --terminal": "--terminal and files show one run; name one",
    "play": "redline play needs GAME",
    "play gym:CartPole-v1": "gym:CartPole-v1 cannot be played by keys",
    "play tetris --against RUN": "The agent in ",
    "doctor snake": "redline doctor does not know what to do with 'snake'",
    # impossible values
    "train snake --env.width 4 --env.height 4 --env.start-length 6": "env.start_length is 6; a snake on a 4x4 board",
    "train snake --env.width 3": "env.width is 3; a Snake board has 4 to 40",
    "train snake --num-envs 0": "num_envs is 0; expected at least 1.",
    "train snake --num-envs -3": "num_envs is -3; expected at least 1.",
    "train snake --steps 0": "steps is 0; expected a number above 0.",
    "train snake --minutes -1": "minutes is -1.0; expected a number above 0.",
    "train snake --batch-size -1": "ppo.batch_size is -1; expected 0 or more.",
    "train snake --seed -1": "seed is -1; expected at least 0.",
    "train snake --dqn.gamma 2": "dqn.gamma is 2.0; expected a number from 0 to 1.",
    "train snake --device cuda": "device is 'cuda', but torch",
    "train snake --device cuda:7": "device is 'cuda:7', but torch",
    "train snake --device gpu": "device is 'gpu'",
    "train snake --precision fp8": "precision is 'fp8'; expected auto, fp32, tf32, bf16, fp16.",
    "train snake --precision tf32": "precision tf32 needs a CUDA device",
    "train snake --graph": "graph needs a CUDA device",
    "eval RUN --episodes 0": "episodes is 0; expected at least 1.",
    "eval RUN --max-steps -1": "max_steps is -1; expected at least 0.",
    "train snake --curriculum": "snake has no curriculum of its own; give one with --curriculum-file.",
    "train snake --curriculum-file none.json": "curriculum_file none.json could not be read: No such file or directory.",
    "eval RUN --device cuda": "device is 'cuda', but torch",
    "eval nowhere": "There is no run folder nowhere; train one with redline train.",
    "eval .": ". is not a run folder: there is no config.json in it.",
    "watch nowhere --terminal": "There is no run folder nowhere",
    "watch RUN --terminal --fps 0": "fps is 0; expected more than 0",
    "watch RUN --terminal --games 0": "games is 0; expected at least 1.",
    "watch RUN --gif a.gif --max-steps 0": "max_steps is 0; expected at least 1.",
    "watch RUN --gif missing/x.gif": "gif is 'missing/x.gif', but there is no folder missing; create it first.",
    "train snake.py": "There is no game 'snake.py'; give the import name instead of a file: snake.",
    "train ./snake.py": "There is no game './snake.py'; give the import name instead of a file: snake.",
    "train snake --algo my/a2c.py": "There is no algorithm 'my/a2c.py'; give the import name instead of a file, from the",
    "watch RUN --gif out.mp4": "gif is 'out.mp4'; give a name that ends in .gif.",
    "watch RUN --html out.gif": "html is 'out.gif'; give a name that ends in .html.",
    "watch RUN --mp4 missing/x.mp4": "mp4 is 'missing/x.mp4', but there is no folder missing; create it first.",
    "check snak": "There is no game 'snak'; did you mean 'snake'?",
    "bench train --games 0": "games is (0,); expected one or more numbers of games",
    "bench env --device cuda": "device is 'cuda', but torch",
    "doctor --device cuda": "device is 'cuda', but torch",
}


@pytest.mark.fault("G1", "H1")
@pytest.mark.parametrize("line", WRONG)
def test_wrong_input(line: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("it trains")

    monkeypatch.setattr(session.Session, "iterate", never)
    output = call("", *(run if word == "RUN" else word for word in line.split()))
    assert output.code == 2
    assert output.out == "" or line.startswith("bench")
    (sentence,) = output.err.splitlines()
    assert sentence.startswith(f"redline: {WRONG[line]}")
    assert sentence[-1] in ".?"
    assert list(tmp_path.iterdir()) == []  # found before anything was made


@pytest.mark.fault("H2")
def test_settings_that_do_not_fit_together() -> None:
    output = call(f"train snake {TINY} --replay-capacity 10")
    assert output.code == 2
    *_, sentence = output.err.splitlines()
    assert sentence.startswith("redline: replay_capacity is 10; 16 environments with 3-step returns need at least 80")


def test_the_run_folder_of_another_environment(tmp_path: Path) -> None:
    other = {"format_version": 2, "env": "chess", "algo": "dqn", "env_options": {}, "algo_options": {}}
    (tmp_path / "config.json").write_text(json.dumps(other))
    output = call(f"train snake {TINY} --steps 16 --json --run-dir", str(tmp_path))
    assert (output.code, output.out) == (2, "")
    *_, sentence = output.err.splitlines()
    assert sentence == (
        f"redline: {tmp_path} holds a run of chess with dqn, not of snake with dqn; name another folder with --run-dir."
    )
    assert json.loads((tmp_path / "config.json").read_text()) == other


@pytest.mark.fault("A8")
def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = call(f"train snake {TINY} --run-dir file/run")
    assert (output.code, output.out) == (74, "")
    assert output.err == (
        "redline: The run folder file/run cannot be written: file is a file, not a folder; choose another with --run-dir.\n"
    )


def test_figures_that_cannot_be_written() -> None:
    output = call("bench env --games 2 --seconds 0.01 --no-compile --device cpu --out missing/figures.json")
    assert output.code == 74
    assert "missing/figures.json could not be written" in output.err


def test_an_interrupted_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> dict[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog, "registries", interrupt)
    assert call("list") == (130, "", "redline: Interrupted.\n")


known = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(settings.Settings)]
word = st.one_of(
    st.sampled_from(
        [*known, "--json", "--no-compile", "--env.width", "--dqn.gamma", "--dqn.hidden", "--", "-1", "=", "auto"]
    ),
    st.sampled_from(["1", "0", "5k", "none", "snake", "cpu", "mlp", "1e9", "x" * 20, "--a.b.c", "--=", "--x=y=z"]),
    st.text(max_size=6),
    st.tuples(st.sampled_from(known), st.text(max_size=4)).map("=".join),
)


@pytest.mark.fault("H1")
@given(st.lists(word, max_size=6))
def test_any_words_are_a_plan_or_one_sentence(words: list[str]) -> None:
    """Whatever is typed, deciding what to do ends in a plan or in a sentence; nothing is trained here."""
    refused, plan = "", None
    try:
        request = parse("train", COMMANDS.load("train"), ["snake", *words])
        plan = resolve.resolve(settings.from_words("snake", request.options))
    except UserError as error:
        refused = str(error)
    assert refused if plan is None else plan.num_envs >= 1


# ---- as a program


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, tuple[int, bytes, bytes]]]:
    """A few commands as programs of their own, side by side: code, standard output, standard error."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    plain |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    reading, closed = os.pipe()
    os.close(reading)
    started = {
        "list": (["list", "--json"], {}, subprocess.PIPE),
        "closed": (["list"], {}, closed),
        "ascii": (["--help"], {"PYTHONIOENCODING": "ascii"}, subprocess.PIPE),
    }
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "redline", *words], env=plain | extra, stdout=out, stderr=subprocess.PIPE
        )
        for name, (words, extra, out) in started.items()
    }
    os.close(closed)
    try:
        finished = {}
        for name, process in running.items():
            out, err = process.communicate(timeout=120)
            finished[name] = (process.returncode, out or b"", err)
        yield finished
    finally:
        for process in running.values():
            process.kill()


def test_as_a_program(programs: dict[str, tuple[int, bytes, bytes]]) -> None:
    code, out, err = programs["list"]
    assert (code, err.decode().splitlines()[0]) == (0, "Loading PyTorch…")  # then dots where it takes long
    assert b"Traceback" not in err
    assert json.loads(out)["games"] == games.names()


@pytest.mark.fault("H5")
def test_a_reader_that_goes_away(programs: dict[str, tuple[int, bytes, bytes]]) -> None:
    """`redline list | head -1`: no traceback, neither at once nor at the exit of the interpreter."""
    code, out, err = programs["closed"]
    assert (code, out, err.decode().splitlines()[0]) == (0, b"", "Loading PyTorch…")
    assert b"Traceback" not in err


@pytest.mark.fault("H5")
def test_a_terminal_that_knows_ascii_only(programs: dict[str, tuple[int, bytes, bytes]]) -> None:
    code, out, err = programs["ascii"]
    assert (code, err) == (0, b"")
    assert b"usage: redline COMMAND" in out


@pytest.mark.fault("H5")
def test_streams_that_are_closed_full_or_ascii(tmp_path: Path, run: str) -> None:
    """As programs of their own, side by side: no traceback, and the exit code of the command."""
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LC_", "LANG"))}
    plain |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    odd = tmp_path / "läuft"
    shutil.copytree(run, odd)
    report = f"report {shlex.quote(str(odd))} --out {shlex.quote(str(tmp_path))}"
    cases = {
        f"eval {shlex.quote(run)} --episodes 2 --device cpu 2>&-": 0,
        f"eval {shlex.quote(run)} --episodes 2 --device cpu >&- 2>&-": 0,
        f"eval {shlex.quote(str(odd))} --episodes 2 --device cpu": 0,
        report: 0,
        "list >/dev/full": 74,
        "--help >/dev/full": 74,
        "train --help": 0,
    }
    started = [
        subprocess.Popen(
            ["bash", "-c", f"exec {sys.executable} -m redline {line}"],
            env=plain | ascii_only,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for line in cases
    ]
    for process, (line, code) in zip(started, cases.items(), strict=True):
        _, err = process.communicate(timeout=200)
        assert (process.returncode, b"Traceback" in err) == (code, False), (line, err.decode(errors="replace"))
