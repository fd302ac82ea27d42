"""Read the records in run folders for a report: settings, log records and evaluations, skipping damaged ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redline.core.errors import UserError
from redline.run.run_folder import METRICS, read_config
from redline.tools.curves import Curve

_NOT_COMPARED = {  # fields of config.json that may differ between runs of the same settings
    *("seed", "run_dir", "resume", "provenance", "signature", "format_version", "micro_batches", "curriculum_file"),
    *("threads", "interop_threads", "checkpoint_minutes", "fallback_dir", "grace", "preemption_notice", "save_replay"),
    *("eval_episodes", "eval_every", "log_seconds", "tensorboard", "wandb", "rank_timeout"),
}
_EVALUATED = (
    *("score_mean", "score_ci95", "score_censored", "score_censored_low", "score_censored_high"),
    *("win_rate", "steps_per_win", "finished", "game_overs", "eval_steps", "env_steps"),
)


@dataclass(frozen=True)
class RunFolder:
    """The readable records of a run folder."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]  # records of the log points
    evaluation: dict[str, Any]  # _EVALUATED, episodes, and score with its kind; empty without one

    @property
    def winnable(self) -> bool:
        """Whether games can be won: according to the evaluation, or because one was won."""
        rates = (_number(record, "win_rate") for record in (*self.metrics, self.evaluation))
        return bool(self.evaluation.get("winnable")) or any(rates)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings used to compare runs, by option name: all runs of a group share them."""
        algo = self.config["algo"].rpartition(".")[2]
        flat = {k: v for k, v in self.config.items() if k not in _NOT_COMPARED | {"env_options", "algo_options"}}
        flat |= {f"env.{name}": value for name, value in self.config["env_options"].items()}
        return flat | {f"{algo}.{name}": value for name, value in self.config["algo_options"].items()}

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric; None if there is none."""
        return next((value for record in reversed(self.metrics) if (value := _number(record, name)) is not None), None)

    def median(self, name: str) -> float | None:
        """Return the median of a metric over the log points; None if there is none."""
        values = [value for record in self.metrics if (value := _number(record, name)) is not None]
        return float(np.median(values)) if values else None

    def curve(self, x: str, y: str) -> Curve:
        """Return y, with its interval if it has one, against x (env_steps or seconds), ascending, from all records with y.

        Evaluations have no time; it is interpolated between the log points around them.
        """
        rows = [
            (record["env_steps"], *(_number(record, name) for name in (y, f"{y}_low", f"{y}_high")))
            for record in self.metrics
        ]
        points = np.array([row for row in rows if row[1] is not None], dtype=float).reshape(-1, 4)
        points = points[points[:, 0].argsort(kind="stable")]
        if x == "seconds":
            clock = [(record["env_steps"], _number(record, "seconds")) for record in self.metrics]
            known = np.array(sorted(pair for pair in clock if pair[1] is not None), dtype=float).reshape(-1, 2)
            if not len(known):
                return Curve(*points[:0].T)
            points[:, 0] = np.interp(points[:, 0], known[:, 0], known[:, 1])
        return Curve(*points.T)

    def best(self) -> dict[str, Any] | None:
        """Return step, score and interval of the best evaluation during training, used by `--checkpoint best`."""
        steps, score, low, high = self.curve("env_steps", "eval_score")
        if not len(steps):
            return None
        row = len(score) - 1 - int(score[::-1].argmax())  # the newest if tied
        interval = {"score_low": float(low[row]), "score_high": float(high[row])} if np.isfinite(low[row]) else {}
        return {"env_steps": int(steps[row]), "score": float(score[row])} | interval

    def summary(self) -> dict[str, Any]:
        """Return the run's row of the table, with None for missing figures."""
        won = self.evaluation.get("win_rate", self.last("win_rate"))
        steps, seconds = self.last("env_steps"), self.last("seconds")
        overall = steps / seconds if steps is not None and seconds else None
        return {
            "run": str(self.path),
            "env": self.config["env"],
            "algo": self.config["algo"],
            "seed": self.config.get("seed"),
            "env_steps": int(steps) if steps is not None else None,
            "minutes": seconds / 60 if seconds is not None else None,
            "env_steps_per_second": self.median("env_steps_per_second") or overall,
            "gpu_percent": self.median("gpu_percent"),
            "training_score": self.last("score"),
            "training_win_rate": self.last("win_rate"),
            "evaluation": self.evaluation or None,
            "best_checkpoint": self.best(),
            "win_rate": won if self.winnable else None,
        }


def read_runs(paths: Sequence[Path]) -> tuple[list[RunFolder], list[str]]:
    """Return the unique runs in `paths`, and a note for each missing or damaged file; raise UserError if there is no run."""
    runs: list[RunFolder] = []
    notes: list[str] = []
    for path in {path.resolve(): path for path in paths}.values():
        if not path.is_dir():
            raise UserError(f"There is no run folder {path}; train one with redline train.")
        try:
            config = read_config(path)
        except UserError as error:  # one bad folder among many, as in runs/*
            if len(paths) == 1:
                raise
            notes.append(f"Left out: {error}")
            continue
        metrics = _read_metrics(path / METRICS, notes)
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
    """Return the stored evaluation (from `redline eval` or the end of training) of the agent with the most steps.

    Choosing the highest score would choose the luckiest one. An agent requested by `redline eval --checkpoint best` or by
    step takes precedence over the newest.
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
            # Stopped games make the mean depend on the limit; the score per game over does not.
            numbers |= {"kind": "per game over", "score": numbers["score_censored"]}
            if numbers["score"] is None:
                numbers |= {"kind": "at least", "score": numbers["score_censored_low"]}
        words = {"actions": str(record.get("actions", "greedy")), "checkpoint": str(record.get("checkpoint", "newest"))}
        evaluations.append(numbers | words | {"winnable": record.get("winnable") is True})
    return max(evaluations, key=_precedence, default={})


def _precedence(evaluation: Mapping[str, Any]) -> tuple[bool, float, float]:
    return evaluation["checkpoint"] != "newest", evaluation["env_steps"] or 0, evaluation["eval_steps"] or 0


def _record(text: str) -> dict[str, Any]:
    """Return a JSON object parsed from text; empty if the text is damaged."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with suppress(OverflowError):  # integers may have any number of digits
        return float(value) if math.isfinite(value) else None
    return None
