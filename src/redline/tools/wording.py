"""What evaluations found, in words and tables for people. `redline eval --json` has the same figures for programs."""

from __future__ import annotations

from typing import Any


def evaluation(result: dict[str, Any], name: str) -> str:
    """What `redline eval` found of one run; `name` is what the game counts."""
    around, around_iqm = " (one game has no interval)", ""
    if result["score_low"] is not None:
        around = f" ± {result['score_ci95']:.2f} (95 %), {_range(result, 'score')} by bootstrap"
        around_iqm = f" (95 %: {_range(result, 'score_iqm')})"
    lines = {
        name: f"{result['score_mean']:.2f}{around}, worst {result['score_min']:.0f}, best {result['score_max']:.0f}"
        + _unfinished(result),
        "IQM": f"{result['score_iqm']:.2f}{around_iqm}, median {result['score_median']:.1f}",
        "per game over": per_game_over(result),
        "length": f"{result['length_mean']:.1f} steps",
        "won": _won(result),
    }
    title = f"{result['episodes']} games of {result['env']}, {result['actions']}, after {result['env_steps']:,} training steps"
    return "\n".join([title, *(f"  {what:<13} {text}" for what, text in lines.items())])


def comparison(result: dict[str, Any], name: str) -> str:
    """What `redline eval` found of several runs: a row each, then over all of them."""
    rows: list[tuple[str, ...]] = [("run", "algo", "games", name, "95 %", "IQM", "won", "steps a win", "per game over")]
    for record in result["runs"]:
        over, at_least = record["score_censored"], record["score_censored_low"]
        rows.append(
            (
                record["run"],
                record["algo"],
                f"{record['episodes']:,}",
                f"{record['score_mean']:.2f}",
                "-" if record["score_low"] is None else _range(record, "score"),
                f"{record['score_iqm']:.2f}",
                f"{100 * record['win_rate']:.1f} %",
                f"{record['steps_per_win']:.0f}" if record["steps_per_win"] else "-",
                f"more than {at_least:.2f}" if over is None else f"{over:.2f}",
            )
        )
    if result["finished"] == result["episodes"]:  # no game was cut off: the mean says it all
        rows = [row[:-1] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{len(rows) - 1} runs of {result['env']}, {result['actions']}, on the same held-out games"]
    for first, *others in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        lines.append(f"  {first:<{widths[0]}}  {'  '.join(cells)}")
    figures = {
        "mean": f"{result['score_mean']:.2f} (95 %: {_range(result, 'score')}){_unfinished(result)}",
        "IQM": f"{result['score_iqm']:.2f} (95 %: {_range(result, 'score_iqm')})",
        "per game over": per_game_over(result),
        "won": _won(result),
        "best run": result["best"],
        "worst run": result["worst"],
    }
    lines.append("over the runs (intervals by bootstrap over runs and the games of each)")
    return "\n".join([*lines, *(f"  {what:<13} {text}" for what, text in figures.items())])


def _range(result: dict[str, Any], name: str, scale: float = 1.0, digits: int = 2) -> str:
    """The interval of a figure."""
    return f"{scale * result[name + '_low']:.{digits}f} to {scale * result[name + '_high']:.{digits}f}"


def _won(result: dict[str, Any]) -> str:
    """The share of games won, its interval and how that was found, the steps a won game took."""
    between = f"(95 %: {_range(result, 'win_rate', 100, 1)}, {result['win_rate_interval']})"
    steps = f", {result['steps_per_win']:.0f} steps a win" if result["steps_per_win"] else ""
    return f"{100 * result['win_rate']:.1f} % {between}{steps}"


def _unfinished(result: dict[str, Any]) -> str:
    """A note where games were cut off: their scores are lower than they would have become."""
    going_on = result["episodes"] - result["finished"]
    return f"; {going_on} still going on count as they stood" if going_on else ""


def per_game_over(result: dict[str, Any]) -> str:
    """The score per game over, which does not depend on where the budget of steps ended."""
    low, high, count = (result[name] for name in ("score_censored_low", "score_censored_high", "game_overs"))
    played = f"{count:,} game over{'s' if count != 1 else ''} in {result['eval_steps']:,} steps"
    if not count:
        return f"more than {low:.2f} (95 %): {played}"
    return f"{result['score_censored']:.2f} (95 %: {low:.2f} to {high:.2f}): {played}"
