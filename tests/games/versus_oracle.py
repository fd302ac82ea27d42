"""Plays a tensor game and its plain-Python oracle side by side and compares everything, every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from redline import oracles
from redline.core.records import leaves
from redline.envs import batch, make_rules

Policy = Callable[[int, Any, random.Random], int]  # environment, its oracle, random numbers -> action


class EpisodeStats(NamedTuple):
    """How much was compared; a test checks it to know that it tested something."""

    episodes: int
    wins: int
    truncations: int
    longest: int  # steps of an episode
    score: int  # of all episodes together


def arrays(state: Any) -> dict[str, np.ndarray]:
    """A State's fields as (N, …) int64."""
    return {
        name: x.flatten(1).numpy().astype(np.int64) if x.dim() > 1 else x.numpy() for name, x in leaves(state).items()
    }


def state_of(game: Any, players: list[Any]) -> Any:
    """The State of N oracles, for a game set up by hand."""
    like = game.init(players[0].config, torch.zeros(len(players), dtype=torch.int32))
    rows = [player.state() for player in players]
    fields = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return type(like)(**{name: fields[name].view_as(x).to(x.dtype) for name, x in leaves(like).items()})


def same_state(state: Any, games: list[Any]) -> None:
    """Every field of a State equals the oracles'; a random key is the same 32 bits, signed here and unsigned there."""
    rows = [game.state() for game in games]
    assert set(rows[0]) == set(state._fields)
    for name, values in arrays(state).items():
        expected = np.array([row[name] for row in rows], dtype=np.int64)
        wrong = (values.astype(np.int64) - expected) % 2**32 != 0
        assert not wrong.any(), f"{name} differs in environments {np.unique(np.nonzero(wrong)[0])[:5]}"


def same_observation(obs: torch.Tensor, games: list[Any]) -> None:
    expected = np.array([game.observe() for game in games])
    assert obs.shape == expected.shape
    wrong = (obs.numpy().astype(np.int64) != expected).reshape(len(games), -1).any(1)
    assert not wrong.any(), f"observations differ in environments {np.flatnonzero(wrong)[:5]}"


def same_legal(rules: batch.Rules, state: Any, games: list[Any]) -> None:
    """Of a game in which some actions may be illegal."""
    if rules.game.spec(rules.config).masked:
        found = rules.game.legal(rules.config, state).numpy()
        np.testing.assert_array_equal(found, np.array([game.legal() for game in games]))


def play(name: str, options: dict[str, Any], policy: Policy, envs: int, steps: int, seed: int) -> EpisodeStats:
    """Lanes 0 to `environments` of `seed` for `steps` steps, each episode to its end and on to the next one."""
    rules = make_rules(name, options)
    observe = lambda state: rules.game.observe(rules.config, state)  # noqa: E731
    oracle, rng = oracles.load(name), random.Random(seed)
    played = [0] * envs
    games = [oracle(rules.config, oracles.episode_key(seed, env_index, 0)) for env_index in range(envs)]
    tensors = batch.reset(rules, batch.env_keys(seed, torch.arange(envs)))
    same_state(tensors.game, games)
    same_observation(observe(tensors.game), games)
    same_legal(rules, tensors.game, games)

    wins = truncations = longest = total = 0
    scores, lengths = np.zeros(envs, np.int64), np.zeros(envs, np.int64)
    rewards = np.zeros(envs, np.float32)
    for _ in range(steps):
        actions = [policy(env_index, games[env_index], rng) for env_index in range(envs)]
        tensors, step = batch.step(rules, tensors, torch.tensor(actions))
        results = [game.step(action) for game, action in zip(games, actions, strict=True)]
        reward, terminated, truncated, score, won = (np.array(column) for column in zip(*results, strict=True))
        np.testing.assert_array_equal(step.reward.numpy(), reward.astype(np.float32))
        np.testing.assert_array_equal(step.terminated.numpy(), terminated)
        np.testing.assert_array_equal(step.truncated.numpy(), truncated)
        np.testing.assert_array_equal(step.won.numpy(), won)
        same_state(step.final_state, games)
        same_observation(observe(step.final_state), games)
        same_legal(rules, step.final_state, games)

        lengths, scores, rewards = lengths + 1, scores + score, rewards + reward.astype(np.float32)
        np.testing.assert_array_equal(step.episode.length.numpy(), lengths)
        np.testing.assert_array_equal(step.episode.score.numpy(), scores)
        np.testing.assert_array_equal(step.episode.episode_return.numpy(), rewards)
        total += score.sum()
        ended = terminated | truncated
        if ended.any():
            wins, truncations = wins + won.sum(), truncations + truncated.sum()
            longest = max(longest, lengths[ended].max())
            lengths[ended], scores[ended], rewards[ended] = 0, 0, 0
            for env_index in np.flatnonzero(ended).tolist():
                played[env_index] += 1
                games[env_index] = oracle(rules.config, oracles.episode_key(seed, env_index, played[env_index]))
        # Ended environments hold the next episode; the others hold what was compared above.
        chosen = torch.from_numpy(ended)
        if ended.any():
            fresh = type(tensors.game)(*(x[chosen] for x in tensors.game))
            new_games = [games[env_index] for env_index in np.flatnonzero(ended)]
            same_state(fresh, new_games)
            same_observation(observe(fresh), new_games)
            same_legal(rules, fresh, new_games)
        for after, before in zip(tensors.game, step.final_state, strict=True):
            assert torch.equal(after[~chosen], before[~chosen])
    return EpisodeStats(sum(played), int(wins), int(truncations), int(longest), int(total))
