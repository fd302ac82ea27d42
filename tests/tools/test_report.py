"""Reports of real runs and of damaged ones: the table, the curves as another program sees them, a sentence for the rest."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from redline import cli
from redline.core.errors import StorageError, UserError
from redline.run.settings import Settings
from redline.run.train import train
from redline.tools.curves import PIXELS, Curve, draw, line, mean_and_interval
from redline.tools.report import compose, markdown, write_report
from redline.tools.report_runs import read_runs

SETTINGS = Settings(
    env="snake",
    num_envs=16,
    batch_size=16,
    replay_capacity=2000,
    steps=960,
    device="cpu",
    compile=False,
    eval_episodes=8,
    time_limit=20,
    env_options={"width": 4, "height": 4},
    algo_options={"hidden": (16, 16), "learning_starts": 64},
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ only in their seed, and one that learns faster."""
    folder = tmp_path_factory.mktemp("report")
    for name, seed, rate in (("slow-0", 0, 1e-4), ("slow-1", 1, 1e-4), ("fast", 0, 1e-2)):
        options = SETTINGS.algo_options | {"learning_rate": rate}
        train(dataclasses.replace(SETTINGS, seed=seed, algo_options=options, run_dir=str(folder / name)))
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """Copies that a test may damage."""
    for path in trained.iterdir():
        shutil.copytree(path, tmp_path / path.name, ignore=shutil.ignore_patterns("checkpoints"))
    return tmp_path


def by_hand(folder: Path, seed: int = 0, points: int = 3, **config: Any) -> Path:
    """A run folder written by hand: a record every 100 steps and 10 seconds, its score 1, 2, … plus the seed."""
    folder.mkdir(parents=True)
    record = {
        "format_version": 2,
        "env": "snake",
        "algo": "dqn",
        "env_options": {},
        "algo_options": {},
        "seed": seed,
        "run_dir": str(folder),
    }
    (folder / "config.json").write_text(json.dumps(record | config))
    lines = [
        {"env_steps": 100 * n, "seconds": 10.0 * n, "score": float(n + seed), "win_rate": n / 10}
        for n in range(1, points + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def call(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        cli.main(list(words))
    assert isinstance(end.value.code, int)
    return end.value.code, out.getvalue(), err.getvalue()


def told_of(*paths: Path) -> str:
    """The report without its pictures."""
    runs, notes = read_runs(paths)
    return markdown(compose(runs, notes))


def tables(text: str) -> list[list[dict[str, str]]]:
    """The rows of each Markdown table, by the names of its columns."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("|"):
            head, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
            assert set(rule) == {"---"}
            found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.array(picture.convert("RGB"))


def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


# ---- real runs


def test_report_of_real_runs(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ("slow-0", "slow-1", "fast")
    code, out, err = call("report", *(str(runs / name) for name in names), "--out", str(runs / "new" / "out"), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["notes"], found["missing"]) == ([], "")
    text = (runs / "new" / "out" / "report.md").read_text()
    rows, seeds, settings = tables(text)
    assert [row["run"] for row in rows] == [str(runs / name) for name in names]
    for row, name in zip(rows, names, strict=True):
        result = json.loads((runs / name / "result.json").read_text())
        last = json.loads((runs / name / "metrics.jsonl").read_text().splitlines()[-1])
        assert (row["game"], row["algorithm"], row["env-steps"]) == ("snake", "dqn", "960")
        assert row["seed"] == str(result["settings"]["seed"])
        assert row["minutes"] == f"{last['seconds'] / 60:.1f}"
        assert row["last training score"] == f"{last['score']:.2f}"
        assert row["evaluation"] == f"{result['score_mean']:.2f} ± {result['score_ci95']:.2f} (8 games)"
        assert row["win rate"] == f"{100 * result['win_rate']:.1f} %"
        assert row["checkpoint"] == "step 960 (newest)"
    assert [(row["runs"], row["evaluated"]) for row in seeds] == [("slow-0, slow-1", "2 of 2")]
    (group,) = found["groups"]
    assert group["runs"] == [str(runs / "slow-0"), str(runs / "slow-1")]
    assert group["score_min"] == group["score_low"] <= group["score_mean"] <= group["score_high"] == group["score_max"]
    differing = {"game": "snake", "setting": "dqn.learning_rate", "slow-0, slow-1": "0.0001", "fast": "0.01"}
    assert settings == [differing]
    drawn = [f"snake-{name}" for name in ("score-env-steps", "score-seconds", "win-rate-env-steps", "win-rate-seconds")]
    drawn += ["snake-env-steps-per-second-seconds"]
    assert [Path(name).stem for name in found["pictures"]] == drawn
    for name in found["pictures"]:
        assert f"]({Path(name).name})" in text
        image = pixels(Path(name))
        assert image.shape == (PIXELS[1], PIXELS[0], 3)
        assert len(np.unique(image.reshape(-1, 3), axis=0)) > 10  # something is drawn
    assert sorted(path.name for path in (runs / "new" / "out").iterdir()) == sorted(
        [*(f"{n}.png" for n in drawn), "report.md", "report.html"]
    )


def test_a_report_goes_where_it_is_expected(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    no_matplotlib(monkeypatch)
    call("report", "fast")
    assert (runs / "fast" / "report.md").exists()
    call("report", "slow-0", "slow-1")
    assert (runs / "report" / "report.md").exists()


def test_the_same_report_twice(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    first = {p.name: p.read_bytes() for p in map(Path, _files(write_report([runs / "fast"], runs / "a")))}
    again = {p.name: p.read_bytes() for p in map(Path, _files(write_report([runs / "fast"], runs / "a")))}
    assert first == again
    assert len(first) == 7


def _files(found: dict[str, Any]) -> list[str]:
    return [found["report"], found["html"], *found["pictures"]]


def test_without_matplotlib_there_is_a_table_and_a_sentence(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_matplotlib(monkeypatch)
    code, out, err = call("report", str(runs / "fast"), "--out", str(runs / "out"))
    report = runs / "out" / "report.md"
    assert code == 2
    assert out.splitlines()[-3:] == ["", str(report.with_suffix(".html")), str(report)]
    assert err == (
        f"redline: {report} has no curves, because matplotlib is not installed; install it with "
        "pip install 'redline[report]'.\n"
    )
    assert {path.name for path in (runs / "out").iterdir()} == {"report.md", "report.html"}
    assert len(tables(report.read_text())[0]) == 1
    assert "![" not in report.read_text()


# ---- the table


def test_a_row_by_hand(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "run", seed=4)
    (run,), notes = read_runs([path])
    assert notes == []
    assert run.summary() == {
        "run": str(path),
        "env": "snake",
        "algo": "dqn",
        "seed": 4,
        "env_steps": 300,
        "minutes": 0.5,
        "env_steps_per_second": 10.0,
        "gpu_percent": None,
        "training_score": 7.0,
        "training_win_rate": 0.3,
        "evaluation": None,
        "best_checkpoint": None,
        "win_rate": 0.3,
    }
    ((row,),) = tables(told_of(path))
    assert (row["evaluation"], row["win rate"], row["env-steps/s"]) == ("-", "30.0 % (training)", "10")


def evaluated(steps: int, mean: float, **more: Any) -> dict[str, Any]:
    record = {"env_steps": steps, "score_mean": mean, "score_ci95": 0.5, "win_rate": 0.25, "eval_steps": 900}
    return record | {"episodes": 16, "eval_episodes": 16, "finished": 16, "score_censored": mean} | more


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        ({"eval": evaluated(300, 3)}, "3.00 ± 0.50 (16 games)"),
        ({"result": evaluated(300, 3)}, "3.00 ± 0.50 (16 games)"),
        ({"eval": evaluated(200, 9), "result": evaluated(300, 3)}, "3.00 ± 0.50 (16 games)"),  # of the newest agent
        ({"eval": evaluated(300, 3), "result": evaluated(300, 9, eval_steps=90)}, "3.00 ± 0.50 (16 games)"),  # not luck
        ({"eval": evaluated(300, 3, actions="actions drawn")}, "3.00 ± 0.50 (16 games), actions drawn"),
        ({"eval": {"env_steps": 300}}, "-"),  # training without an evaluation
        (
            {"eval": evaluated(300, 3, finished=4, score_censored=12, score_censored_low=8, score_censored_high=20)},
            "12.00 per game over (8.00 to 20.00)",
        ),
        (
            {"eval": evaluated(300, 3, finished=0, score_censored=None, score_censored_low=13)},
            "more than 13.00 per game over",
        ),
    ],
)
def test_which_evaluation_is_told(tmp_path: Path, stored: dict[str, Any], told: str) -> None:
    path = by_hand(tmp_path / "run")
    for name, record in stored.items():
        (path / f"{name}.json").write_text(json.dumps(record))
    ((row,),) = tables(told_of(path))
    assert row["evaluation"] == told


def test_runs_that_differ_only_in_their_seed_are_told_together(tmp_path: Path) -> None:
    paths = [by_hand(tmp_path / f"s{seed}", seed) for seed in range(4)]
    paths += [by_hand(tmp_path / "other", 0, algo_options={"gamma": 0.9}), by_hand(tmp_path / "s9", 9, algo="ppo")]
    for path, mean in zip(paths[:4], (1.0, 2.0, 3.0, 10.0), strict=True):
        (path / "eval.json").write_text(json.dumps(evaluated(300, mean)))
    rows, (seeds,), _ = tables(told_of(*paths))
    assert len(rows) == 6
    assert seeds == {
        "runs": "s0 and 3 more",
        "evaluated": "4 of 4",
        "mean": "4.00",
        "95 % interval": "1.50 to 8.00",
        "IQM": "2.50",
        "worst run": "1.00",
        "best run": "10.00",
    }
    # A mean and a score per game over are not averaged.
    (paths[0] / "eval.json").write_text(json.dumps(evaluated(300, 3, finished=4, score_censored_low=8)))
    assert tables(told_of(*paths))[1][0]["mean"] == "-"
    # Nor what was greedy with what was not.
    (paths[0] / "eval.json").write_text(json.dumps(evaluated(300, 1, actions="actions drawn")))
    assert tables(told_of(*paths))[1][0]["mean"] == "-"


def test_names_that_markdown_would_misread(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "_a|b $x$ *c*", env="gym:A/B\n-v0")
    found = write_report([path], tmp_path / "out")
    ((row,),) = tables((tmp_path / "out" / "report.md").read_text())
    assert row["run"].endswith("_a&#124;b $x$ *c*")
    assert row["game"] == "gym:A/B -v0"
    assert all(Path(name).name.startswith("gym-A-B-v0-") for name in found["pictures"])


def test_win_rates_appear_only_where_games_can_be_won(tmp_path: Path) -> None:
    """CartPole cannot be won: no column of zeros, no chart of zeros. A Snake that never won shows 0 %."""
    for name, winnable in (("cartpole", False), ("snake", True)):
        path = by_hand(tmp_path / name, env=name)
        records = [json.loads(line) | {"win_rate": 0.0} for line in (path / "metrics.jsonl").read_text().splitlines()]
        (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (path / "eval.json").write_text(json.dumps(evaluated(300, 3, win_rate=0.0, winnable=winnable)))
    found = write_report([tmp_path / "cartpole", tmp_path / "snake"], tmp_path / "out")
    (rows,) = tables((tmp_path / "out" / "report.md").read_text())
    assert [row["win rate"] for row in rows] == ["-", "0.0 %"]
    drawn = [Path(name).name for name in found["pictures"]]
    assert "snake-win-rate-seconds.png" in drawn
    assert "cartpole-score-seconds.png" in drawn
    assert not any(name.startswith("cartpole-win-rate") for name in drawn)


# ---- curves


def test_mean_and_interval_by_hand() -> None:
    """Two lines, 0 to 10 and 2 to 12 on the x axis: where both are, their mean; with two runs the interval is the range."""
    one = line(np.array([0.0, 10.0]), np.array([0.0, 10.0]))
    other = line(np.array([2.0, 6.0, 12.0]), np.array([4.0, 4.0, 4.0]))
    found = mean_and_interval([one, other])
    assert found is not None
    x, mean, low, high = found
    assert (x[0], x[-1]) == (2.0, 10.0)
    assert np.allclose(mean, (x + 4) / 2)
    assert np.allclose(low, np.minimum(x, 4))
    assert np.allclose(high, np.maximum(x, 4))


def test_the_interval_of_many_seeds_is_that_of_their_mean() -> None:
    """Twenty runs: about 1.96 standard errors around the mean, far less than their range."""
    x = np.array([0.0, 1.0])
    values = np.random.default_rng(0).normal(10, 2, size=20)
    found = mean_and_interval([line(x, np.full(2, value)) for value in values])
    assert found is not None
    reach = 1.96 * values.std() / np.sqrt(20)
    assert found.low[0] == pytest.approx(values.mean() - reach, abs=0.15)
    assert found.high[0] == pytest.approx(values.mean() + reach, abs=0.15)


def test_curves_without_a_common_part() -> None:
    one, other = (np.array([start, start + 1.0]) for start in (0.0, 5.0))
    assert mean_and_interval([line(one, one), line(other, other)]) is None
    assert mean_and_interval([line(one, one), line(one[:1], one[:1])]) is None


def evaluations(path: Path, scores: dict[int, float]) -> Path:
    """Add evaluations in training, by step, each with an interval of 1 below and 2 above."""
    with open(path / "metrics.jsonl", "a") as file:
        for step, score in scores.items():
            record = {"env_steps": step, "eval_score": score, "eval_score_low": score - 1, "eval_score_high": score + 2}
            file.write(json.dumps(record) + "\n")
    return path


def test_evaluations_in_training_have_their_own_interval(tmp_path: Path) -> None:
    """Their time is read off the log points, every 10 seconds and 100 steps; the newest of the best is named."""
    path = evaluations(by_hand(tmp_path / "run"), {150: 9.0, 250: 9.0, 300: 7.0})
    (run,), notes = read_runs([path])
    assert notes == []
    curve = run.curve("seconds", "eval_score")
    assert [values.tolist() for values in curve] == [[15, 25, 30], [9, 9, 7], [8, 8, 6], [11, 11, 9]]
    assert run.best() == {"env_steps": 250, "score": 9.0, "score_low": 8.0, "score_high": 11.0}
    ((row,),) = tables(told_of(path))
    assert row["best checkpoint"] == "step 250: 9.00 (8.00 to 11.00)"
    pytest.importorskip("matplotlib")
    names = [Path(name).name for name in write_report([path], tmp_path / "out")["pictures"]]
    assert names[:2] == ["snake-eval-score-env-steps.png", "snake-eval-score-seconds.png"]


def test_old_evaluations_without_an_interval(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "run")
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"env_steps": 300, "eval_score": 4.5}\n')
    (run,), _ = read_runs([path])
    assert run.best() == {"env_steps": 300, "score": 4.5}


def test_an_evaluation_of_the_best_checkpoint_is_named(tmp_path: Path) -> None:
    """It was asked for, so that it comes before that of the newest agent."""
    path = by_hand(tmp_path / "run")
    (path / "result.json").write_text(json.dumps(evaluated(300, 3)))
    (path / "eval.json").write_text(json.dumps(evaluated(200, 9, checkpoint="best")))
    ((row,),) = tables(told_of(path))
    assert (row["evaluation"], row["checkpoint"]) == ("9.00 ± 0.50 (16 games)", "step 200 (best)")


def test_seeds_are_grouped_whatever_does_not_change_the_agent(tmp_path: Path) -> None:
    one = by_hand(tmp_path / "a", 0, threads=1, provenance={"seed": "default"}, checkpoint_minutes=1.0)
    other = by_hand(tmp_path / "b", 1, threads=2, provenance={"seed": "given"}, checkpoint_minutes=5.0)
    rows, seeds = tables(told_of(one, other))
    assert (len(rows), seeds[0]["runs"]) == (2, "a, b")


def test_throughput_and_gpu_use(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "run")
    records = [json.loads(text) for text in (path / "metrics.jsonl").read_text().splitlines()]
    figures = ((1_000, 10), (90_000, 80), (100_000, 90))  # the first interval compiles
    lines = [
        json.dumps(record | {"env_steps_per_second": speed, "gpu_percent": use}) + "\n"
        for record, (speed, use) in zip(records, figures, strict=True)
    ]
    (path / "metrics.jsonl").write_text("".join(lines))
    ((row,),) = tables(told_of(path))
    assert (row["env-steps/s"], row["GPU use"]) == ("90 k", "80 %")
    pytest.importorskip("matplotlib")
    names = [Path(name).name for name in write_report([path], tmp_path / "out")["pictures"]]
    assert names[-2:] == ["snake-env-steps-per-second-seconds.png", "snake-gpu-percent-seconds.png"]


def test_the_terminal_shows_the_table(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "run", env="gym:\x1b[31mred")
    code, out, _ = call("report", str(path), "--out", str(tmp_path / "out"))
    assert code == 0
    head, row, *files = out.splitlines()
    assert head.split()[:4] == ["run", "game", "algorithm", "seed"]
    assert "\x1b" not in out
    assert row.split()[0] == str(path)
    assert files[1:3] == [str(tmp_path / "out" / name) for name in ("report.html", "report.md")]


def coloured(data: bytes, colour: tuple[int, int, int]) -> np.ndarray:
    """Places (n, 2) of pixels of a colour, row and column, outside of the corner where the legend may be."""
    with Image.open(io.BytesIO(data)) as picture:
        return np.argwhere((np.array(picture.convert("RGB")) == colour).all(2))


BLUE, ORANGE = (31, 119, 180), (255, 127, 14)


def test_a_line_for_each_group() -> None:
    pytest.importorskip("matplotlib")
    x = np.linspace(0, 1e6, 50)
    data = draw({"up": [line(x, x)], "down": [line(x, x[::-1].copy())]}, "title", "x", "y")
    blue, orange = coloured(data, BLUE), coloured(data, ORANGE)
    left, right = blue[blue[:, 1] < 200], blue[blue[:, 1] > 850]
    assert left[:, 0].mean() > right[:, 0].mean() + 200  # upwards is towards row 0
    left, right = orange[orange[:, 1] < 200], orange[orange[:, 1] > 850]
    assert left[:, 0].mean() + 200 < right[:, 0].mean()


def test_a_group_is_a_mean_in_a_band() -> None:
    pytest.importorskip("matplotlib")
    x = np.linspace(0, 100, 50)
    flat = np.ones(50)
    data = draw({"three": [line(x, flat), line(x, 2 * flat), line(x, 6 * flat)]}, "title", "x", "y")
    alone = draw({"three": [line(x, 3 * flat), line(x, 3 * flat)]}, "title", "x", "y")
    with Image.open(io.BytesIO(data)) as picture:
        column = np.array(picture.convert("RGB")).astype(int)[:, 300]
    middle = np.flatnonzero((column == BLUE).all(1))
    band = np.flatnonzero((np.abs(column - (210, 228, 240)) < 6).all(1))  # a fifth of the colour on white
    assert len(middle) <= 3
    assert len(band) > 100
    above, below = middle.mean() - band.min(), band.max() - middle.mean()
    assert above / below == pytest.approx((6 - 3) / (3 - 1), rel=0.1)
    assert len(coloured(alone, (210, 228, 240))) == 0


def test_odd_curves_can_be_drawn() -> None:
    pytest.importorskip("matplotlib")
    one, two = np.array([5.0]), np.array([1.0, 2.0])
    lone = Curve(two, two, two - 1, two + 1)
    curves = [line(one, one)], [line(two, -two)], [line(one, one), lone], [line(two, 0 * two)], [line(two, two * 1e300)]
    for label, group in zip(("$", "_hidden", "$x_{$", "", "plain"), curves, strict=True):
        data = draw({label: group}, label, "x", "y")
        with Image.open(io.BytesIO(data)) as picture:
            assert picture.size == PIXELS


def test_games_have_their_own_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [by_hand(tmp_path / f"{n}", env=env) for n, env in enumerate(("snake", "a:b", "a/b"))]
    found = write_report(paths, tmp_path / "out")
    assert len(set(found["pictures"])) == 12  # score and win rate, each by steps and by time
    assert all(Path(name).is_file() for name in found["pictures"])


# ---- damaged runs


def test_a_torn_last_line(runs: Path) -> None:
    path = runs / "fast" / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-9])
    found = write_report([runs / "fast"], runs / "out")
    count = len(whole.splitlines())
    assert count > 1
    assert found["notes"] == [f"{path}: 1 of {count} lines are damaged and were skipped."]
    assert found["runs"][0]["env_steps"] == json.loads(whole.splitlines()[-2])["env_steps"]
    assert f"- {found['notes'][0]}\n" in (runs / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00garbled",
        b"[1, 2]",
        b"null",
        b'{"env_steps": "many"}',
        b'{"env_steps": NaN}',
        b'{"env_steps": 1' + b"0" * 400 + b"}",
        b"[" * 100_000,
        b"{}",
    ],
    ids=["bytes", "list", "null", "text", "nan", "huge", "deep", "empty"],
)
def test_a_garbled_line_is_left_out(tmp_path: Path, line: bytes) -> None:
    path = by_hand(tmp_path / "run") / "metrics.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    (run,), notes = read_runs([path.parent])
    assert notes == [f"{path}: 1 of 4 lines are damaged and were skipped."]
    assert (len(run.metrics), run.last("score")) == (3, 3.0)


def test_figures_that_are_no_numbers(tmp_path: Path) -> None:
    """A record may lack a score, as long as no game has ended, or hold one that is none."""
    path = by_hand(tmp_path / "run") / "metrics.jsonl"
    more = ['{"env_steps": 400, "seconds": 40}', '{"env_steps": 500, "seconds": true, "score": NaN, "win_rate": "all"}']
    path.write_text(path.read_text() + "\n".join(more) + "\n")
    (run,), notes = read_runs([path.parent])
    assert notes == []
    assert (run.last("env_steps"), run.last("seconds"), run.last("score")) == (500.0, 40.0, 3.0)
    x, y, low, _ = run.curve("env_steps", "score")
    assert np.isnan(low).all()
    assert (x.tolist(), y.tolist()) == ([100, 200, 300], [1, 2, 3])


@pytest.mark.parametrize("damage", ["missing", "empty", "folder"])
def test_a_run_without_metrics(tmp_path: Path, damage: str) -> None:
    path = by_hand(tmp_path / "run") / "metrics.jsonl"
    path.unlink()
    if damage == "empty":
        path.write_text("")
    elif damage == "folder":
        path.mkdir()
    code, out, err = call("report", str(path.parent), "--out", str(tmp_path / "out"))
    assert code == 0  # with nothing to draw matplotlib is not missed
    assert out.splitlines()[-2:] == [str(tmp_path / "out" / name) for name in ("report.html", "report.md")]
    (sentence,) = err.splitlines()
    assert sentence.startswith(f"{path} ")
    assert sentence.endswith(": this run has no curves.")
    ((row,),) = tables((tmp_path / "out" / "report.md").read_text())
    assert (row["env-steps"], row["minutes"], row["last training score"]) == ("-", "-", "-")


def test_damaged_evaluations(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "run")
    (path / "eval.json").write_text('{"score_mean": 3, "epi')
    (path / "result.json").mkdir()
    (run,), notes = read_runs([path])
    assert notes == [
        f"{path / 'eval.json'} is damaged and was skipped.",
        f"{path / 'result.json'} cannot be read (Is a directory) and was skipped.",
    ]
    assert run.summary()["evaluation"] is None


def test_folders_that_are_no_runs_among_others(runs: Path) -> None:
    (runs / "empty").mkdir()
    (runs / "torn").mkdir()
    (runs / "torn" / "config.json").write_text('{"env": ')
    found, (first, second) = read_runs([runs / "empty", runs / "fast", runs / "torn", runs / "fast" / "."])
    assert [run.path for run in found] == [runs / "fast"]
    assert first.startswith(f"Left out: {runs / 'empty'} is not a run folder: there is no config.json in it.")
    assert second.startswith(f"Left out: {runs / 'torn' / 'config.json'} could not be read")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["nowhere"], 2, "There is no run folder nowhere; train one with redline train."),
        (["run", "nowhere"], 2, "There is no run folder nowhere"),
        (["empty"], 2, "empty is not a run folder: there is no config.json in it."),
        (["empty", "void"], 2, "None of these 2 folders is a run: empty is not a run folder"),
        (["file"], 2, "There is no run folder file"),
        (["torn"], 74, "torn/config.json could not be read"),
        ([], 2, "redline report needs RUN [RUN ...]; see redline report --help."),
        (
            ["run", "--out", "file"],
            74,
            "Cannot write file/report.md: file is a file, not a folder. Choose another folder with --out.",
        ),
        (["run", "--to", "x"], 2, "redline report has no option --to"),
    ],
)
def test_what_cannot_be_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    by_hand(tmp_path / "run")
    for name in ("empty", "void", "torn"):
        (tmp_path / name).mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    (tmp_path / "file").write_text("")
    found, out, err = call("report", *words)
    assert (found, out) == (code, "")
    (sentence,) = err.splitlines()
    assert sentence.startswith(f"redline: {told}")


def test_errors_from_python(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no run folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "out")
    path = by_hand(tmp_path / "run")
    (tmp_path / "out").write_text("")
    with pytest.raises(StorageError, match="Cannot write"):
        write_report([path], tmp_path / "out")


# ---- the page


class Page(HTMLParser):
    """What a browser would find in a page: tags with their attributes, and the cells of its tables."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self._open = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self._open in ("td", "th"):
            self.cells.append(data)


def test_the_page_holds_everything_itself(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    found = write_report([runs / "fast", runs / "slow-0"], runs / "out")
    page = Page(Path(found["html"]))
    assert {"run", "evaluation", str(runs / "fast"), str(runs / "slow-0")} <= set(page.cells)
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == len(found["pictures"])
    for attributes, path in zip(images, found["pictures"], strict=True):
        kind, _, data = (attributes["src"] or "").partition(",")
        assert (kind, base64.b64decode(data)) == ("data:image/png;base64", Path(path).read_bytes())
        assert attributes["alt"]
    dark = [attributes["srcset"] or "" for tag, attributes in page.tags if tag == "source"]
    assert all(address.startswith("data:") for address in dark)
    with Image.open(io.BytesIO(base64.b64decode(dark[0].partition(",")[2]))) as picture:
        assert max(picture.convert("RGB").getpixel((2, 2))) < 64
    addresses = [v for _, attributes in page.tags for k, v in attributes.items() if k in ("src", "href", "srcset")]
    assert all((address or "").startswith("data:") for address in addresses)
    assert "url(" not in Path(found["html"]).read_text()
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object"})


EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'>"


def test_a_strangers_run_cannot_put_script_into_a_report(tmp_path: Path) -> None:
    """Markup in the name of the folder, the game, an algorithm, a setting and an evaluation is shown as text."""
    name = EVIL.replace("/", "\u2215")
    other = by_hand(tmp_path / "other", env=EVIL, algo=EVIL, env_options={EVIL: EVIL, "![a](javascript:b)": 1})
    path = by_hand(tmp_path / name, env=EVIL, algo=EVIL, env_options={EVIL: 1, "![a](javascript:b)": 2})
    (path / "eval.json").write_text(json.dumps(evaluated(300, 3, actions=EVIL, checkpoint=EVIL)))
    with open(path / "metrics.jsonl", "a") as file:
        file.write("<script>\n")
    found = write_report([path, other], tmp_path / "out")
    assert EVIL.partition("<img")[0] in found["runs"][0]["env"]
    page = Page(Path(found["html"]))
    assert EVIL in page.cells  # shown, not dropped
    allowed = {"charset", "http-equiv", "content", "name", "lang", "class", "tabindex", "scope", "media", "srcset"}
    for tag, attributes in page.tags:
        assert tag != "script"
        assert set(attributes) <= allowed | {"src", "alt", "width", "height"}, tag
    policy = next(attributes["content"] or "" for tag, attributes in page.tags if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")
    text = Path(found["report"]).read_text()
    assert "<" not in text
    assert "](javascript:" not in text


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """Chromium runs none of a stranger's markup and shows the page at the width of a phone without scrolling sideways."""
    pytest.importorskip("matplotlib")
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs chromium")
    script = "<img src=x onerror=\"document.title='bad'\"><script>document.title='bad'</script>"
    path = by_hand(tmp_path / "run", env=script)
    found = write_report([path], tmp_path / "out")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=400,900", "--virtual-time-budget=2000"]
    words += [f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
    page = subprocess.run(
        [browser, *words, Path(found["html"]).as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "<title>Redline report</title>" in page
    assert "&lt;script&gt;document.title" in page
