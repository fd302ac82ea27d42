"""Let an agent play a given environment: a batch from `redline.make`, or a single Gymnasium environment."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from redline.core.errors import UserError
from redline.envs.env import Env

if TYPE_CHECKING:
    from redline.run.agent import Agent


def play(agent: Agent, env: Any, episodes: int, seed: int = 0, sample: bool = False) -> dict[str, Any]:
    """Return the returns and lengths of the first `episodes` episodes to end, and their means."""
    if episodes < 1:
        raise UserError(f"episodes is {episodes}; expected at least 1.")
    if isinstance(env, Env):
        played = _play_batch(agent, env, episodes, seed, sample)
    elif isinstance(env, gymnasium.Env):
        played = [_play_episode(agent, env, seed + i, sample) for i in range(episodes)]
    else:
        raise UserError(f"play expects an environment of redline.make or of gymnasium.make, got {type(env).__name__}.")
    returns, lengths = zip(*played, strict=True)
    return {
        "episodes": episodes,
        "return_mean": float(np.mean(returns)),
        "length_mean": float(np.mean(lengths)),
        "returns": list(returns),
        "lengths": list(lengths),
    }


def _play_batch(agent: Agent, env: Env, episodes: int, seed: int, sample: bool) -> list[tuple[float, int]]:
    obs, played = env.reset(seed), list[tuple[float, int]]()
    while len(played) < episodes:
        step = env.step(agent.act(obs, env.legal() if env.spec.masked else None, sample=sample).to(env.device))
        obs, ended = step.obs, step.terminated | step.truncated
        results = zip(step.episode.episode_return[ended].tolist(), step.episode.length[ended].tolist(), strict=True)
        played += [(float(total), int(length)) for total, length in results]
    return played[:episodes]


def _play_episode(agent: Agent, env: gymnasium.Env[Any, Any], seed: int, sample: bool) -> tuple[float, int]:
    game: Any = agent.rules.game
    config = agent.rules.config
    prepared = game.prepare(env, config) if game.ON_CPU else env
    frames: deque[Any] = deque(maxlen=game.spec(config).frames)
    total, length, over = 0.0, 0, False
    frame, info = prepared.reset(seed=seed)
    while not over:
        frames.extend([frame] * (1 if frames else frames.maxlen or 1))
        obs = np.concatenate(frames) if len(frames) > 1 else np.asarray(frames[0])
        frame, reward, terminated, truncated, info = prepared.step(
            agent.act(obs, info.get("action_mask"), sample=sample)
        )
        total, length, over = total + float(reward), length + 1, bool(terminated or truncated)
    return total, length
