"""Environments of Gymnasium by their ids: what is missing is said, what cannot be stepped is refused, what is old made new."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, NamedTuple

import gymnasium
from gymnasium import spaces
from gymnasium.wrappers import Autoreset

from redline.core.errors import UserError

_PREFIX = "gym:"  # as people name them
# Ids that begin so are registered by a module, which an extra of Redline brings.
_EXTRAS = {"ALE/": ("ale_py", "atari")}


class Known(NamedTuple):
    """What an environment tells of itself."""

    seen: spaces.Space[Any]
    options: dict[str, Any]  # that it is registered with
    old: bool  # written for Gym before 0.26


@functools.lru_cache(maxsize=64)
def ask(name: str) -> Known:
    """The environment is made once and played for one step: only what comes back shows which interface it has."""
    env = _make(name)
    bare: Any = env.unwrapped
    seeded = _takes_seed(bare)
    begun = bare.reset(seed=0) if seeded else bare.reset()
    old = not (seeded and _is_pair(begun)) or len(bare.step(bare.action_space.sample())) == 4
    known = Known(env.observation_space, env.spec.kwargs if env.spec else {}, old)
    env.close()
    return known


def open_env(name: str, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """The environment of that name, with the time limit it is registered with."""
    env = _make(name, render_mode)
    if not ask(name).old:
        return env
    if not isinstance(env, gymnasium.Wrapper):
        return _OldApi(env)
    last = env
    while isinstance(last.env, gymnasium.Wrapper):
        last = last.env
    last.env = _OldApi(last.env)  # below the wrappers: they unpack what comes back
    return env


def _make(name: str, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    if not name:
        raise UserError("gym: names no environment; give its id, as in gym:CartPole-v1.")
    for beginning, (module, extra) in _EXTRAS.items():
        if name.startswith(beginning):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise UserError(
                    f"{_PREFIX}{name} needs a package that is missing here; install it: pip install 'redline[{extra}]'."
                ) from error
    try:
        options: dict[str, Any] = {"render_mode": render_mode} if render_mode else {}  # not every constructor takes one
        env: gymnasium.Env[Any, Any] = gymnasium.make(name, **options)
    except (gymnasium.error.Error, ImportError, ValueError) as error:  # unknown, or something is missing: it says so
        raise UserError(f"{_PREFIX}{name} cannot be made: {_sentence(error)}") from error
    except TypeError as error:
        raise UserError(
            f"{_PREFIX}{name} cannot be made: {_sentence(error)} Redline takes single environments of Gymnasium, "
            "neither vectors of them nor those of old Gym."
        ) from error
    layer = env
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, Autoreset):
            env.close()
            raise UserError(
                f"{_PREFIX}{name} begins its next episode by itself (the wrapper Autoreset), so that the last sight of "
                "an episode would be taken for the next one's; register it without that wrapper."
            )
        layer = layer.env
    return env


class _OldApi(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment written for Gym before 0.26: a seed apart, no `info` from `reset`, one `done` for both kinds of end."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        del options
        env: Any = self.env
        if _takes_seed(env):
            begun = env.reset(seed=seed)
        else:
            if seed is not None and hasattr(env, "seed"):
                env.seed(seed)
            begun = env.reset()
        return begun if _is_pair(begun) else (begun, {})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        came: Any = self.env.step(action)
        obs, reward, *ends, info = came
        if len(ends) == 2:
            return obs, reward, *ends, info
        cut = bool(ends[0] and info.get("TimeLimit.truncated", False))
        return obs, reward, bool(ends[0]) and not cut, cut, info


def _takes_seed(env: Any) -> bool:
    parameters = inspect.signature(env.reset).parameters.values()
    return any(parameter.name == "seed" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _is_pair(begun: Any) -> bool:
    """An observation and `info`."""
    return isinstance(begun, tuple) and len(begun) == 2 and isinstance(begun[1], dict)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()).strip("`'\"")
    return text if text.endswith((".", "?", "!")) else f"{text}."
