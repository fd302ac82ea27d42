"""Random play: measures a CPU environment in its first steps, for recipes to choose settings from."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from redline.envs.array_wrapper import ArrayWrapper
from redline.envs.gym_make import failure

_STEPS = 256
_LEAST_STEPS = 64  # failures after this many steps are left for the run to report
_SECONDS = 1.0  # time limit: a slow environment is stepped less often
_LONG_STEPS = 20_000  # of `costs_are_constant`; Acrobot needs 15,000 for the first success
_LONG_SECONDS = 5.0
_TIMED_STEPS = 16  # steps timed as a group; the fastest group counts, since other processes may slow some down
LARGE = 1e6  # bounds beyond this are not informative about usual values
_BEYOND_BOUND = 4.0  # largest scaled value at the bound of a bounded number: usual values are often well below it
_HIGHEST_FACTOR = 16.0  # of a number without informative bounds: later values may exceed those of random play
_MOST_FACTORS = 1024  # larger observations are scaled by their bounds

Array = np.ndarray[Any, Any]


class RandomPlay(NamedTuple):
    """Measurements of random play in one environment."""

    step_seconds: float  # duration of a step
    obs_scale: tuple[float, ...]  # factors that bring observations to about 1, see `_obs_scale`


def play(env: ArrayWrapper, name: str) -> RandomPlay:
    """Return measurements of random play, always from the same seed, and close the environment."""
    try:
        obs, _ = env.reset(seed=0)
        env.action_space.seed(0)
        squares, durations = np.zeros(len(obs)), []
        started = time.perf_counter()
        for step in range(1, _STEPS + 1):
            step_started = time.perf_counter()
            try:
                obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
            except Exception:
                if step <= _LEAST_STEPS:
                    raise
                break
            if terminated or truncated:
                env.reset()
            durations.append(time.perf_counter() - step_started)
            squares += np.square(obs, dtype=np.float64).reshape(len(obs), -1).mean(1)
            if time.perf_counter() - started > _SECONDS:
                break
        rms = np.nan_to_num(np.sqrt(squares / step), nan=0.0, posinf=0.0)  # GymEnvs reports non-finite observations
        groups = (
            durations[first : first + _TIMED_STEPS]
            for first in range(0, max(len(durations) - _TIMED_STEPS, 0) + 1, _TIMED_STEPS)
        )
        return RandomPlay(min(map(statistics.fmean, groups)), _obs_scale(env, rms))
    except (Exception, SystemExit) as error:
        raise failure(name, "the first steps", error) from error
    finally:
        env.close()


def costs_are_constant(env: ArrayWrapper) -> bool:
    """Return whether every step of random play has the same negative reward and none terminates; close the environment.

    An example is MountainCar: random play never reaches the flag, and all its episodes have the same return. Returns False
    if the environment fails, which the run will report, or is too slow to find out.
    """
    try:
        env.reset(seed=0)
        env.action_space.seed(0)
        started, cost = time.perf_counter(), None
        for _ in range(_LONG_STEPS):
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            cost = reward if cost is None else cost
            if terminated or reward >= 0 or reward != cost or time.perf_counter() - started > _LONG_SECONDS:
                return False
            if truncated:
                env.reset()
        return True
    except (Exception, SystemExit):
        return False
    finally:
        env.close()


def announced_scale(env: ArrayWrapper) -> tuple[float, ...]:
    """Return the observation scale that follows from the spaces alone, and close the environment."""
    assert env.observation_space.shape is not None
    env.close()
    return _obs_scale(env, np.zeros(env.observation_space.shape[0]))


def channel_bounds(space: spaces.Box) -> Array:
    """Return the largest magnitude (C,) that each element of a vector, or channel of an image, can have."""
    high: Array = np.maximum(np.abs(space.low.astype(np.float64)), np.abs(space.high.astype(np.float64)))
    bounds: Array = high.reshape(len(high), -1).max(1)
    return bounds


def _obs_scale(env: ArrayWrapper, rms: Array) -> tuple[float, ...]:
    """Return factors (C,) that bring the elements of a vector, or the channels of an image, to a magnitude of about 1.

    rms (C,): their root mean square in random play, 0 where unknown. A bounded real number is scaled to at most
    _BEYOND_BOUND at its bound. A single factor applies to all elements; no factors mean 1 / bound.

    A Discrete entry with n values is a one-hot vector of length n. Networks are initialised for inputs of about 1 in every
    element; the factor sqrt(n) gives the one-hot vector the same norm.
    """
    assert isinstance(env.observation_space, spaces.Box)
    bounds = channel_bounds(env.observation_space)
    if env.flat_space is None:
        real, one_of = np.full(len(rms), env.observation_space.dtype.kind == "f"), np.ones(len(rms))
    else:
        real, one_of = (np.concatenate(columns) for columns in zip(*_places(env.flat_space), strict=True))
    known = (bounds > 0) & (bounds < LARGE)
    least = np.where(known, 1 / np.where(known, bounds, 1.0), 0.0)
    most = np.where(known & real, _BEYOND_BOUND * least, _HIGHEST_FACTOR)
    factor = 2.0 ** np.round(-np.log2(np.maximum(rms, 1e-9)))  # rounded so that it is the same on every machine
    factor = np.where(rms > 0, np.clip(factor, least, np.maximum(least, most)), np.where(known, least, 1.0))
    factors = np.where(one_of > 1, np.sqrt(one_of), factor).tolist()
    if len(set(factors)) == 1:
        return (factors[0],)
    return tuple(factors) if len(factors) <= _MOST_FACTORS else ()


def _places(space: spaces.Space[Any]) -> list[tuple[Array, Array]]:
    """Return (is_real, n) for each part of the flattened space; n is the size of an element's one-hot vector, else 1."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return [place for part in parts for place in _places(part)]
    one_of = np.ones(spaces.flatdim(space))
    if isinstance(space, spaces.Discrete):
        one_of[:] = space.n
    elif isinstance(space, spaces.MultiDiscrete):
        one_of = np.repeat(space.nvec.flatten(), space.nvec.flatten())
    return [(np.full(len(one_of), isinstance(space, spaces.Box) and space.dtype.kind == "f"), one_of)]
