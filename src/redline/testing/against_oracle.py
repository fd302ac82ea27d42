"""Compare a tensor game with its oracle in every environment, step by step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from redline import oracles
from redline.core.records import leaves
from redline.envs import batch
from redline.envs.batch import Rules
from redline.testing.play import NUM_ENVS, SEED, STEPS, Broken, Record, any_actions, describe_place, legal_actions, play


def check_oracle(
    rules: Rules, oracle: Any, num_envs: int = NUM_ENVS, steps: int = STEPS, tolerance: float = 1e-5
) -> None:
    """Check that State, observation, legal actions, reward, endings and score match the oracle's after every step.

    Integers are compared exactly, floats within `tolerance`, relative above 1. An oracle may omit `state`, `observe` and
    `legal`, which are then not compared. If the spec masks actions, only legal ones are played.
    """
    choose = legal_actions if rules.game.spec(rules.config).masked else any_actions
    records = play(rules, SEED, torch.arange(num_envs), steps, choose)
    shown = [
        (_arrays(rules, record.envs.game), record.step and _arrays(rules, record.step.final_state))
        for record in records
    ]
    for env_index in range(num_envs):
        _compare_environment(rules, oracle, records, shown, env_index, tolerance)


class _Arrays(NamedTuple):
    """The compared parts of a State of N environments, as arrays (N, …)."""

    state: dict[str, Any]
    obs: Any
    legal: Any  # None where every action is legal


def _arrays(rules: Rules, state: Any) -> _Arrays:
    legal = batch.legal(rules, state)
    fields = {name: x.numpy() for name, x in leaves(state).items()}
    if "key" in fields:
        fields["key"] = fields["key"].astype(np.int64) % 2**32  # oracles count the same 32 bits from 0
    return _Arrays(fields, rules.game.observe(rules.config, state).numpy(), None if legal is None else legal.numpy())


def _compare_environment(
    rules: Rules, oracle: Any, records: list[Record], shown: list[Any], env_index: int, tolerance: float
) -> None:
    played, score_before = 0, 0
    player = oracle(rules.config, oracles.episode_key(SEED, env_index, 0))
    afterstates = rules.game.spec(rules.config).afterstates
    for t, (record, (current, final)) in enumerate(zip(records, shown, strict=True)):
        place, ended = describe_place(t, env_index, record.action), True
        if record.step is not None:
            step = record.step
            expected = player.step(int(record.action[env_index]))
            score = int(step.episode.score[env_index])
            endings = [x[env_index].item() for x in (step.reward, step.terminated, step.truncated)]
            outcome = (*endings, score - score_before, step.won[env_index].item())
            names = ("reward", "terminated", "truncated", "score", "won")
            for name, ours, theirs in zip(names, outcome, expected, strict=True):
                _expect_same(f"the {name}", np.asarray(ours), theirs, tolerance, place)
            _compare_shown(final, env_index, player, afterstates, tolerance, place)
            ended = bool(expected[1] or expected[2])
            score_before = 0 if ended else score
            if ended:
                played += 1
                player = oracle(rules.config, oracles.episode_key(SEED, env_index, played))
        if ended:
            _compare_shown(current, env_index, player, afterstates, tolerance, place)


def _compare_shown(ours: _Arrays, env_index: int, player: Any, afterstates: bool, tolerance: float, place: str) -> None:
    """Compare State, observation and legal actions of one environment."""
    if hasattr(player, "state"):
        expected = player.state()
        for name, x in ours.state.items():
            if name not in expected:
                raise Broken(f"The oracle's state() has no field '{name}'; expected all fields of State.")
            theirs = expected[name] % 2**32 if name == "key" else expected[name]
            _expect_same(f"State.{name}", x[env_index], theirs, tolerance, place)
    if hasattr(player, "observe"):
        seen, obs = player.observe(), ours.obs[env_index]
        if afterstates:  # rows of illegal actions are arbitrary
            rows = [row for row, values in enumerate(seen) if len(values)]
            seen, obs = [seen[row] for row in rows], obs[rows]
        _expect_same("the observation", obs, seen, tolerance, place)
    if ours.legal is not None and hasattr(player, "legal"):
        _expect_same("legal", ours.legal[env_index], player.legal(), tolerance, place)


def _expect_same(name: str, ours: Any, theirs: Any, tolerance: float, place: str) -> None:
    expected = np.asarray(theirs)
    if ours.size == expected.size:
        expected = expected.reshape(ours.shape)
        floats = ours.dtype.kind == "f" or expected.dtype.kind == "f"
        equal = np.isclose(ours, expected, rtol=tolerance, atol=tolerance) if floats else ours == expected
        if equal.all():
            return
        where = tuple(int(i) for i in np.argwhere(~equal)[0]) if ours.ndim else ()
        index = f" at index {where}" if where else ""
        raise Broken(f"{name} differs from the oracle's {place}{index}: {ours[where]} here, {expected[where]} there.")
    raise Broken(f"{name} has shape {ours.shape}, the oracle's {expected.shape} {place}.")
