"""The tables of a report as rows of text: runs, groups of seeds, and settings that differ."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from redline.run.progress import quantity
from redline.run.statistics import bootstrap, iqm
from redline.tools.report_runs import RunFolder
from redline.tools.wording import checkpoint_name

Row = dict[str, str]  # cells by heading
Group = list[RunFolder]  # runs that differ only in their seed

_OPTIONAL = ("GPU use", "best checkpoint", "win rate")  # headings that are left out if no run has them


def group_runs(runs: Sequence[RunFolder]) -> list[Group]:
    """Return runs in groups that differ only in their seed."""
    groups: dict[str, Group] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
    return list(groups.values())


def label(group: Group, runs: Sequence[RunFolder]) -> str:
    """Return the names of a group's folders; full paths if two of the `runs` have the same name."""
    short = len({run.path.resolve().name for run in runs}) == len(runs)
    names = [run.path.resolve().name if short else str(run.path) for run in group]
    names = [os.fsencode(name).decode(errors="replace") for name in names]  # whatever the encoding of file names
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def table_of_runs(runs: Sequence[RunFolder]) -> list[Row]:
    """Return a row for each run."""
    rows = [_row(run) for run in runs]
    empty = {name for name in _OPTIONAL if all(row[name] == "-" for row in rows)}
    return [{name: cell for name, cell in row.items() if name not in empty} for row in rows]


def _row(run: RunFolder) -> Row:
    summary = run.summary()
    speed, gpu, won = summary["env_steps_per_second"], summary["gpu_percent"], summary["win_rate"]
    in_training = "" if run.evaluation else " (training)"
    return {
        "run": summary["run"],
        "game": summary["env"],
        "algorithm": summary["algo"],
        "seed": text(summary["seed"]),
        "env-steps": text(summary["env_steps"], ","),
        "minutes": text(summary["minutes"], ".1f"),
        "env-steps/s": "-" if speed is None else quantity(speed),
        "GPU use": "-" if gpu is None else f"{gpu:.0f} %",
        "last training score": text(summary["training_score"], ".2f"),
        "evaluation": _evaluation(run.evaluation),
        "checkpoint": "-" if run.evaluation.get("env_steps") is None else checkpoint_name(run.evaluation),
        "best checkpoint": _best(summary["best_checkpoint"]),
        "win rate": "-" if won is None else f"{100 * won:.1f} %{in_training}",
    }


def text(value: Any, form: str = "") -> str:
    """Return a value as text; "-" for None."""
    return "-" if value is None else f"{value:{form}}" if form else str(value)


def _evaluation(evaluation: Mapping[str, Any]) -> str:
    actions = evaluation.get("actions", "greedy")
    return _score(evaluation) + (f", {actions}" if actions != "greedy" else "")


def _score(evaluation: Mapping[str, Any]) -> str:
    if not evaluation:
        return "-"
    if evaluation["kind"] == "at least":
        return f"more than {evaluation['score']:.2f} per game over"
    if evaluation["kind"] == "per game over":
        low, high = (text(evaluation[f"score_censored_{end}"], ".2f") for end in ("low", "high"))
        return f"{evaluation['score']:.2f} per game over ({low} to {high})"
    reach = f" ± {evaluation['score_ci95']:.2f}" if evaluation["score_ci95"] is not None else ""
    games = f" ({evaluation['episodes']:,.0f} games)" if evaluation["episodes"] is not None else ""
    return f"{evaluation['score']:.2f}{reach}{games}"


def _best(best: Mapping[str, Any] | None) -> str:
    if best is None:
        return "-"
    interval = f" ({best['score_low']:.2f} to {best['score_high']:.2f})" if "score_low" in best else ""
    return f"step {best['env_steps']:,}: {best['score']:.2f}{interval}"


def table_of_groups(groups: Sequence[Group], runs: Sequence[RunFolder]) -> list[Row]:
    """Return a row for each group, from the evaluations of its runs."""
    rows = []
    for group in groups:
        figures = {name: text(value, ".2f") for name, value in group_summary(group).items()}
        interval = f"{figures['score_low']} to {figures['score_high']}" if figures["score_low"] != "-" else "-"
        rows.append(
            {
                "runs": label(group, runs),
                "evaluated": f"{sum(bool(run.evaluation) for run in group)} of {len(group)}",
                "mean": figures["score_mean"],
                "95 % interval": interval,
                "IQM": figures["score_iqm"],
                "worst run": figures["score_min"],
                "best run": figures["score_max"],
            }
        )
    return rows


def group_summary(group: Group) -> dict[str, float | None]:
    """Return the scores of a group; None unless all its evaluations compute scores and choose actions in the same way."""
    evaluations = [run.evaluation for run in group if run.evaluation]
    kinds = {(evaluation["kind"], evaluation["actions"]) for evaluation in evaluations}
    names = ("score_mean", "score_low", "score_high", "score_iqm", "score_min", "score_max")
    if len(kinds) != 1 or "at least" in next(iter(kinds)):
        return dict.fromkeys(names)
    scores = np.array([evaluation["score"] for evaluation in evaluations])
    low, high = bootstrap(scores)[0] if len(scores) > 1 else (None, None)
    figures = (float(scores.mean()), low, high, float(iqm(scores)), float(scores.min()), float(scores.max()))
    return dict(zip(names, figures, strict=True))


def tables_of_settings(groups: Sequence[Group], runs: Sequence[RunFolder]) -> list[list[Row]]:
    """Return for each game a table of the shared settings in which its groups differ, with a column for each group."""
    tables = []
    for env in dict.fromkeys(run.config["env"] for run in runs):
        settings = {label(group, runs): group[0].settings for group in groups if group[0].config["env"] == env}
        rows: list[Row] = []
        for name in set.intersection(*(set(values) for values in settings.values())):
            values = [json.dumps(known[name], sort_keys=True) for known in settings.values()]
            if len(set(values)) > 1:
                rows.append({"game": env, "setting": name} | dict(zip(settings, values, strict=True)))
        tables.append(sorted(rows, key=lambda row: row["setting"]))
    return [rows for rows in tables if rows]
