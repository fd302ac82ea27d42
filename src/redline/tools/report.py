"""Reports of runs, from their folders alone: a table in Markdown, learning curves as PNG."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redline.core.errors import StorageError, UserError
from redline.run.progress import quantity
from redline.run.run_folder import explain_os_error, read_config
from redline.run.statistics import iqm
from redline.tools.curves import Curve, draw

_OF_ONE_RUN = ("seed", "run_dir", "resume")  # settings that may differ within a group
_FIGURES = (("score", "training score", 1), ("win_rate", "training games won in %", 100))  # metric, label, factor
_EVALUATED = (
    *("score_mean", "score_ci95", "score_censored", "score_censored_low", "score_censored_high"),
    *("win_rate", "steps_per_win", "finished", "game_overs", "eval_steps", "env_steps"),
)
_AXES = (("env_steps", "env-steps"), ("seconds", "seconds"))


@dataclass(frozen=True)
class RunFolder:
    """The records in a run folder, as far as they could be read."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]  # records of the log points
    evaluation: dict[str, Any]  # _EVALUATED, episodes, and score with its kind; empty without one

    @property
    def winnable(self) -> bool:
        """Whether games can be won: the evaluation says so, or one was."""
        rates = (_number(record, "win_rate") for record in (*self.metrics, self.evaluation))
        return bool(self.evaluation.get("winnable")) or any(rates)

    @property
    def group(self) -> str:
        """A key that runs share if they differ only in their seed."""
        return json.dumps({k: v for k, v in self.config.items() if k not in _OF_ONE_RUN}, sort_keys=True)

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric; None without one."""
        return next((value for record in reversed(self.metrics) if (value := _number(record, name)) is not None), None)

    def curve(self, x: str, y: str) -> Curve:
        """Return two metrics from every record that holds both, x ascending."""
        pairs = [(_number(record, x), _number(record, y)) for record in self.metrics]
        points = np.array(sorted((a, b) for a, b in pairs if a is not None and b is not None)).reshape(-1, 2)
        return points[:, 0], points[:, 1]

    def summary(self) -> dict[str, Any]:
        """Return the run's row of the table; None where a figure is missing."""
        won = self.evaluation.get("win_rate", self.last("win_rate"))
        steps, seconds = self.last("env_steps"), self.last("seconds")
        return {
            "run": str(self.path),
            "env": self.config["env"],
            "algo": self.config["algo"],
            "seed": self.config.get("seed"),
            "env_steps": int(steps) if steps is not None else None,
            "minutes": seconds / 60 if seconds is not None else None,
            "env_steps_per_second": steps / seconds if steps is not None and seconds else None,
            "training_score": self.last("score"),
            "training_win_rate": self.last("win_rate"),
            "evaluation": self.evaluation or None,
            "win_rate": won if self.winnable else None,
        }


def write_report(paths: Sequence[Path], out: Path) -> dict[str, Any]:
    """Write `report.md` and its pictures into the folder `out`; return the fields of `redline report --json`.

    `notes` lists files that could not be read, `missing` tells why there are no pictures without matplotlib.
    """
    runs, notes = read_runs(paths)
    report, missing = out / "report.md", ""
    pictures: dict[str, tuple[str, bytes]] = {}
    try:
        pictures = _pictures(runs)
    except ImportError:
        missing = f"{report} has no curves, because matplotlib is not installed; install it with pip install 'redline[report]'."
    text = markdown(runs, {name: caption for name, (caption, _) in pictures.items()}, notes)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, (_, data) in pictures.items():
            _write(out / name, data)
        _write(report, text.encode(errors="surrogateescape"))
    except OSError as error:
        raise StorageError(
            f"Cannot write {report}: {explain_os_error(report, error)}. Choose another folder with --out."
        ) from error
    return {
        "report": str(report),
        "pictures": [str(out / name) for name in pictures],
        "runs": [run.summary() for run in runs],
        "notes": notes,
        "missing": missing,
    }


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        with suppress(OSError):  # gone after success
            part.unlink()


# ---- reading


def read_runs(paths: Sequence[Path]) -> tuple[list[RunFolder], list[str]]:
    """Return the runs in `paths`, each once, and a note for each missing or damaged file; UserError without any run."""
    runs: list[RunFolder] = []
    notes: list[str] = []
    for path in {path.resolve(): path for path in paths}.values():
        if not path.is_dir():
            raise UserError(f"There is no run folder {path}; train one with redline train.")
        try:
            config = read_config(path)
        except UserError as error:  # one folder among many, as in runs/*
            if len(paths) == 1:
                raise
            notes.append(f"Left out: {error}")
            continue
        metrics = _read_metrics(path / "metrics.jsonl", notes)
        runs.append(RunFolder(path, config, metrics, _evaluation(path, notes)))
    if not runs:
        raise UserError(f"None of these {len(paths)} folders is a run: {notes[0].removeprefix('Left out: ')}")
    return runs, notes


def _read_metrics(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl without its damaged lines."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        notes.append(f"{path} cannot be read ({error.strerror}): this run has no curves.")
        return []
    records = [record for line in lines if (record := _record(line)) and _number(record, "env_steps") is not None]
    if not records:
        notes.append(f"{path} holds no records yet: this run has no curves.")
    elif len(records) < len(lines):
        damaged = len(lines) - len(records)
        notes.append(f"{path}: {damaged} of {len(lines)} lines are damaged and were skipped.")
    return records


def _evaluation(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the stored evaluation (by `redline eval` or at the end of training) of the newest agent with the most steps.

    Not the one with the highest score, which would be the luckiest.
    """
    evaluations: list[dict[str, Any]] = []
    for name, count in (("eval.json", "episodes"), ("result.json", "eval_episodes")):
        try:
            record = _record((path / name).read_text(errors="replace"))
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"{path / name} cannot be read ({error.strerror}) and was skipped.")
            continue
        if not record:
            notes.append(f"{path / name} is damaged and was skipped.")
            continue
        if _number(record, "score_mean") is None:  # training without a final evaluation
            continue
        numbers: dict[str, Any] = {key: _number(record, key) for key in _EVALUATED}
        numbers |= {"episodes": _number(record, count), "kind": "mean", "score": numbers["score_mean"]}
        only_game_overs = numbers["game_overs"] in (None, numbers["finished"])
        if numbers["finished"] != numbers["episodes"] and numbers["score_censored_low"] is not None and only_game_overs:
            # Games were stopped, so that their mean depends on when; the score per game over does not.
            numbers |= {"kind": "per game over", "score": numbers["score_censored"]}
            if numbers["score"] is None:
                numbers |= {"kind": "at least", "score": numbers["score_censored_low"]}
        more = {"actions": str(record.get("actions", "greedy")), "winnable": record.get("winnable") is True}
        evaluations.append(numbers | more)
    return max(evaluations, key=lambda record: (record["env_steps"] or 0, record["eval_steps"] or 0), default={})


def _record(text: str) -> dict[str, Any]:
    """Return a JSON object; an empty one where the text is damaged."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with suppress(OverflowError):  # a whole number may have any number of digits
        return float(value) if math.isfinite(value) else None
    return None


# ---- writing


def markdown(runs: Sequence[RunFolder], pictures: Mapping[str, str], notes: Sequence[str]) -> str:
    """Return the text of the report; `pictures` are captions by file name."""
    lines = ["# Report", "", *_table([_row(run) for run in runs])]
    seeds = [group for group in _groups(runs) if len(group) > 1]
    if seeds:
        lines += ["", "Runs that differ only in their seed, by their evaluations:", ""]
        lines += _table([_row_of_group(group, runs) for group in seeds])
    for name, caption in pictures.items():
        lines += ["", f"![{caption}]({name})"]
    if seeds and pictures:
        lines += ["", "Runs that differ only in their seed are one line, their mean, in a band from lowest to highest;"]
        lines += ["it ends where the shortest of them ends."]
    if notes:
        lines += ["", "Notes:", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return [f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in line)} |" for line in lines]


def _row(run: RunFolder) -> dict[str, str]:
    summary = run.summary()
    speed, won = summary["env_steps_per_second"], summary["win_rate"]
    in_training = "" if run.evaluation else " (training)"
    return {
        "run": summary["run"],
        "game": summary["env"],
        "algorithm": summary["algo"],
        "seed": _text(summary["seed"], ""),
        "env-steps": _text(summary["env_steps"], ","),
        "minutes": _text(summary["minutes"], ".1f"),
        "env-steps/s": "-" if speed is None else quantity(speed),
        "last training score": _text(summary["training_score"], ".2f"),
        "evaluation": _evaluation_text(run.evaluation),
        "win rate": "-" if won is None else f"{100 * won:.1f} %{in_training}",
    }


def _text(value: Any, form: str) -> str:
    return "-" if value is None else f"{value:{form}}" if form else str(value)


def _evaluation_text(evaluation: Mapping[str, Any]) -> str:
    actions = evaluation.get("actions", "greedy")
    return _score_text(evaluation) + (f", {actions}" if actions != "greedy" else "")


def _score_text(evaluation: Mapping[str, Any]) -> str:
    if not evaluation:
        return "-"
    if evaluation["kind"] == "at least":
        return f"more than {evaluation['score']:.2f} per game over"
    if evaluation["kind"] == "per game over":
        low, high = (_text(evaluation[f"score_censored_{end}"], ".2f") for end in ("low", "high"))
        return f"{evaluation['score']:.2f} per game over ({low} to {high})"
    reach = f" ± {evaluation['score_ci95']:.2f}" if evaluation["score_ci95"] is not None else ""
    games = f" ({evaluation['episodes']:,.0f} games)" if evaluation["episodes"] is not None else ""
    return f"{evaluation['score']:.2f}{reach}{games}"


def _row_of_group(group: Sequence[RunFolder], runs: Sequence[RunFolder]) -> dict[str, str]:
    evaluations = [run.evaluation for run in group if run.evaluation]
    kinds = {(evaluation["kind"], evaluation["actions"]) for evaluation in evaluations}
    row = {"runs": _label(group, runs), "evaluated": f"{len(evaluations)} of {len(group)}"}
    figures: tuple[Any, ...] = (None,) * 4
    if len(kinds) == 1 and "at least" not in next(iter(kinds)):
        scores = [evaluation["score"] for evaluation in evaluations]
        figures = float(np.mean(scores)), float(iqm(scores)), min(scores), max(scores)
    names = ("mean", "IQM", "worst run", "best run")
    return row | {name: _text(figure, ".2f") for name, figure in zip(names, figures, strict=True)}


def _groups(runs: Sequence[RunFolder]) -> list[list[RunFolder]]:
    """Return runs in groups that differ only in their seed."""
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return list(groups.values())


def _label(group: Sequence[RunFolder], runs: Sequence[RunFolder]) -> str:
    """Return the names of a group's folders; full paths where two runs have the same name."""
    short = len({run.path.resolve().name for run in runs}) == len(runs)
    names = [run.path.resolve().name if short else str(run.path) for run in group]
    names = [os.fsencode(name).decode(errors="replace") for name in names]  # whatever the locale makes of a file name
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def _pictures(runs: Sequence[RunFolder]) -> dict[str, tuple[str, bytes]]:
    """Return captions and PNG files by file name: score and win rate of every game, by env-steps and by seconds."""
    pictures: dict[str, tuple[str, bytes]] = {}
    for number, env in enumerate(dict.fromkeys(run.config["env"] for run in runs)):
        groups = _groups([run for run in runs if run.config["env"] == env])
        prefix = re.sub(r"[^A-Za-z0-9]+", "-", env[:40]).strip("-") or "game"
        if any(name.startswith(f"{prefix}-") for name in pictures):
            prefix = f"{prefix}-{number}"
        for figure, figure_label, scale in _FIGURES:
            if figure == "win_rate" and not any(run.winnable for group in groups for run in group):
                continue
            for axis, axis_label in _AXES:
                curves = {_label(group, runs): [run.curve(axis, figure) for run in group] for group in groups}
                curves = {label: [(x, scale * y) for x, y in group if len(x)] for label, group in curves.items()}
                curves = {label: group for label, group in curves.items() if group}
                if curves:
                    name = f"{prefix}-{figure}-{axis}.png".replace("_", "-")
                    caption = f"{' '.join(env.split())}: {figure_label} against {axis_label}"
                    pictures[name] = caption, draw(curves, env, axis_label, figure_label)
    return pictures
