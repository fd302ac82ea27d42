"""Evaluate several runs on the same held-out games: a record per run and statistics over all runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from redline.core.errors import UserError
from redline.run.agent import Agent
from redline.run.evaluate import Evaluation, evaluate_net
from redline.run.statistics import bootstrap_runs, iqm

_GAMES = ("scores", "lengths", "wins", "game_over", "finished")  # fields of an Evaluation
_VIEW = ("view", "mirror", "sight", "show_hunger", "show_action")  # options that change the observation, not the rules


def evaluate_runs(
    agents: Sequence[Agent],
    episodes: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda run, done: None,  # noqa: ARG005
    max_steps: int = 0,
    sample: bool = False,
) -> dict[str, Any]:
    """Let all agents play the same games; return statistics over the runs, and in `runs` the record of each.

    progress: called with the index of the run and the progress value from `evaluate`.
    """
    check_comparable(agents)
    for agent in agents:
        agent.check(sample)
    started = time.monotonic()
    outcomes, records = [], []
    for number, agent in enumerate(agents):
        began, tell = time.monotonic(), partial(progress, number)
        outcome = evaluate_net(agent.net, agent.rules, agent.device, episodes, seed, tell, max_steps, sample)
        outcomes.append(outcome)
        records.append(agent.record(outcome, began, sample))
    score = _ranking(records)
    return {
        "env": agents[0].config["env"],
        "device": str(agents[0].device),
        "actions": records[0]["actions"],
        **over_runs(outcomes),
        "best": max(records, key=score)["run"],
        "worst": min(records, key=score)["run"],
        "runs": records,
        "seconds": time.monotonic() - started,
    }


def _ranking(records: Sequence[dict[str, Any]]) -> Callable[[dict[str, Any]], float]:
    """Return the sort key of runs: the mean score, or the score per game over if the step budget stopped some games.

    The latter only if every finished game ended in a game over: truncated games must not improve the rank.
    """
    stopped = any(record["finished"] != record["episodes"] for record in records)
    if not stopped or any(record["finished"] != record["game_overs"] for record in records):
        return lambda record: float(record["score_mean"])
    bounds = {record["run"]: _first(record["score_censored"], record["score_censored_low"]) for record in records}
    if None in bounds.values():  # no game over, and returns below 0: there is not even a lower bound
        return lambda record: float(record["score_mean"])
    return lambda record: float(bounds[record["run"]] or 0.0)


def _first(*values: float | None) -> float | None:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def over_runs(outcomes: Sequence[Evaluation]) -> dict[str, Any]:
    """Return the statistics of several runs, with the same names as those of one run.

    Counts, extremes and the score per game over cover all games together. All others are taken over the runs, each counting
    once, with its mean score and its win rate.
    """
    games: dict[str, Any] = {name: torch.cat([getattr(outcome, name) for outcome in outcomes]) for name in _GAMES}
    levels = tuple(level for outcome in outcomes for level in outcome.levels)
    together = Evaluation(**games, stopped_by=outcomes[0].stopped_by, levels=levels).summary()
    scores = [outcome.scores.numpy() for outcome in outcomes]
    wins = [outcome.wins.double().numpy() for outcome in outcomes]
    means = np.array([values.mean() for values in scores])
    mean, middle = bootstrap_runs(scores)
    over = {
        "score_mean": float(means.mean()),
        "score_ci95": (mean.high - mean.low) / 2,
        "score_low": mean.low,
        "score_high": mean.high,
        "score_iqm": float(iqm(means)),
        "score_iqm_low": middle.low,
        "score_iqm_high": middle.high,
        "score_median": float(np.median(means)),
        "win_rate": float(np.mean([values.mean() for values in wins])),
    }
    if together["win_rate_interval"] == "bootstrap":  # else nearly all games were won or lost, in every run
        won, _ = bootstrap_runs(wins)
        over |= {"win_rate_low": won.low, "win_rate_high": won.high}
    return together | over


def check_comparable(agents: Sequence[Agent]) -> None:
    """Raise UserError for runs whose scores are not comparable, or a run that is named twice."""
    first, *others = agents
    rules = _rules_of(first)
    seen = {first.path.resolve()}
    for other in others:
        if other.path.resolve() in seen:
            raise UserError(f"{other.path} is named twice; name every run once.")
        seen.add(other.path.resolve())
        if other.config["env"] != first.config["env"]:
            raise UserError(
                f"{first.path} is a run of {first.config['env']}, {other.path} of {other.config['env']}; their scores "
                "cannot be compared. Evaluate runs of one game together."
            )
        here = _rules_of(other)
        differs = [f"{name} is {rules[name]} there, {here[name]} here" for name in rules if rules[name] != here[name]]
        if differs:
            raise UserError(
                f"{other.path} plays by other rules than {first.path}: {'; '.join(differs)}. Evaluate runs of the same "
                "rules together."
            )


def _rules_of(agent: Agent) -> dict[str, Any]:
    """Return the options that affect scores: all except those of rewards and observations."""
    options = dataclasses.asdict(agent.rules.config)
    kept = {f"env.{k}": v for k, v in options.items() if not k.startswith("reward_") and k not in _VIEW}
    return kept | {"time_limit": agent.rules.time_limit}
