"""Evaluation results as text: for one run, for several runs side by side, and for the last lines of training.

`redline eval --json` prints the same figures for programs. A figure that cannot be estimated is None there, and left out or
shown as "-" here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redline.core.records import Spec


def evaluation(result: dict[str, Any], spec: Spec) -> str:
    """Return the figures of one run, one per line."""
    interval, iqm_interval = " (one game has no interval)", ""
    if result["score_low"] is not None:
        interval = f" ± {result['score_ci95']:.2f} (95 %), {_interval(result, 'score')} by bootstrap"
        iqm_interval = f" (95 %: {_interval(result, 'score_iqm')})"
    extremes = f", worst {_short(result['score_min'])}, best {_short(result['score_max'])}"
    figures = {
        spec.score_name: f"{result['score_mean']:.2f}{interval}{extremes}{_unfinished(result)}",
        "IQM": f"{result['score_iqm']:.2f}{iqm_interval}, median {result['score_median']:.1f}",
        "length": f"{result['length_mean']:.1f} steps",
    }
    if result["finished"] != result["episodes"]:  # the mean is too low or too high
        figures["per game over"] = per_game_over(result)
    if spec.winnable:
        figures["won"] = _wins(result)
    figures |= levels(result)
    title = f"{result['episodes']} games of {result['env']}, {result['actions']}, after {result['env_steps']:,} training steps"
    return "\n".join([title, *_lines(figures)])


def levels(result: dict[str, Any]) -> dict[str, str]:
    """Return a line for each level, by name; empty unless there are several levels."""
    return {
        f"level {level}": f"{figures['score_mean']:.2f}, won {100 * figures['win_rate']:.1f} % of {figures['episodes']}"
        for level, figures in result.get("levels", {}).items()
    }


def checkpoint_name(record: Mapping[str, Any]) -> str:
    """Return the step of a record's agent, and how it was chosen unless by step: step 5,000 (best)."""
    chosen = record.get("checkpoint", "newest")
    return f"step {record['env_steps']:,.0f}" + (f" ({chosen})" if chosen in ("newest", "best") else "")


def comparison(result: dict[str, Any], spec: Spec) -> str:
    """Return the figures of several runs: a table with a row for each, then the figures over all runs."""
    columns = _columns(result, spec)
    rows = [list(columns), *([column(run) for column in columns.values()] for run in result["runs"])]
    lines = [f"{len(rows) - 1} runs of {result['env']}, {result['actions']}, on the same held-out games", *table(rows)]
    figures = {
        "mean": f"{_figure(result['score_mean'])}{_in_brackets(result, 'score')}{_unfinished(result)}",
        "IQM": f"{_figure(result['score_iqm'])}{_in_brackets(result, 'score_iqm')}",
    }
    if result["finished"] != result["episodes"]:
        figures["per game over"] = per_game_over(result)
    if spec.winnable:
        figures["won"] = _wins(result)
    figures |= levels(result)
    figures |= {"best run": result["best"], "worst run": result["worst"]}
    lines.append("over the runs (intervals by bootstrap over runs and the games of each)")
    return "\n".join([*lines, *_lines(figures)])


def _columns(result: dict[str, Any], spec: Spec) -> dict[str, Callable[[dict[str, Any]], str]]:
    """Return the columns of the comparison: heading -> function that returns a run's cell. Uninformative ones are left out."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "run": lambda run: str(run["run"]),
        "algo": lambda run: str(run["algo"]),
        "games": lambda run: f"{run['episodes']:,}",
        spec.score_name: lambda run: f"{run['score_mean']:.2f}",
        "95 %": lambda run: _interval(run, "score"),
        "IQM": lambda run: f"{run['score_iqm']:.2f}",
    }
    if spec.winnable:
        columns["won"] = lambda run: f"{100 * run['win_rate']:.1f} %"
        columns["steps a win"] = lambda run: f"{run['steps_per_win']:.0f}" if run["steps_per_win"] else "-"
    if result["finished"] != result["episodes"]:  # some games were stopped early, so the mean is too low
        columns["per game over"] = _censored
    return columns


def table(rows: list[list[str]]) -> list[str]:
    """Return rows of cells as aligned lines: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        lines.append(f"  {first:<{widths[0]}}  {'  '.join(cells)}".rstrip())
    return lines


def final_score(result: dict[str, Any], spec: Spec) -> list[str]:
    """Return the score at the end of training, and a note if games were stopped early."""
    won = f", won {100 * result['win_rate']:.1f} %" if spec.winnable else ""
    lines = [
        f"Greedy score over {result['eval_episodes']} held-out games: {result['score_mean']:.2f} ± "
        f"{result['score_ci95']:.2f} (best {_short(result['score_max'])}{won})"
    ]
    if unfinished := result["eval_episodes"] - result["finished"]:
        known = result["game_overs"] or result["score_censored_low"] is not None
        ended = f"score per game over: {per_game_over(result)}" if known else "no game ended by itself"
        lines.append(
            f"{unfinished} of them were stopped after {result['eval_max_steps']:,} steps and count as they stood; {ended}."
        )
    return [*lines, *_lines(levels(result))]


def per_game_over(result: dict[str, Any]) -> str:
    """Return the score per game over, which does not depend on the step limit."""
    count, steps = result["game_overs"], f"{result['eval_steps']:,} steps"
    if not count:
        low = result["score_censored_low"]
        return (
            f"{'unknown' if low is None else f'more than {low:.2f} (95 %)'}, since no game ended by itself in {steps}"
        )
    played = f"{count:,} game over{'s' if count != 1 else ''} in {steps}"
    return f"{result['score_censored']:.2f}{_in_brackets(result, 'score_censored')}: {played}"


def _censored(run: dict[str, Any]) -> str:
    if run["score_censored"] is not None:
        return f"{run['score_censored']:.2f}"
    low = run["score_censored_low"]
    return "-" if low is None else f"more than {low:.2f}"


def _lines(figures: dict[str, str]) -> list[str]:
    return [f"  {name:<13} {text}" for name, text in figures.items()]


def _short(value: float) -> str:
    """Return a score with two decimals, or without any if it is whole."""
    return f"{value:.0f}" if value == round(value) else f"{value:.2f}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _interval(result: dict[str, Any], name: str, scale: float = 1.0, digits: int = 2) -> str:
    """Return a figure's interval as text; "-" if there is none."""
    low, high = result[f"{name}_low"], result[f"{name}_high"]
    if low is None or high is None:
        return "-"
    return f"{scale * low:.{digits}f} to {scale * high:.{digits}f}"


def _in_brackets(result: dict[str, Any], name: str) -> str:
    interval = _interval(result, name)
    return "" if interval == "-" else f" (95 %: {interval})"


def _wins(result: dict[str, Any]) -> str:
    """Return the win rate, its interval with the method, and the steps per won game."""
    interval = f"(95 %: {_interval(result, 'win_rate', 100, 1)}, {result['win_rate_interval']})"
    steps = f", {result['steps_per_win']:.0f} steps a win" if result["steps_per_win"] else ""
    return f"{100 * result['win_rate']:.1f} % {interval}{steps}"


def _unfinished(result: dict[str, Any]) -> str:
    """Return a note if games were stopped early: their scores could have become higher."""
    unfinished = result["episodes"] - result["finished"]
    return f"; {unfinished} still going on count as they stood" if unfinished else ""
