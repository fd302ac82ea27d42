"""Make Gymnasium environments by id: import their module, check arguments, adapt old interfaces, explain failures."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import re
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator
from gymnasium.wrappers import Autoreset

from redline.core.errors import EnvFailure, UserError, nearest
from redline.core.registry import current_folder_importable
from redline.envs import atari, env_activity

PREFIX = "gym:"  # before an id on the command line
# Ids with this prefix are registered by a module that one of Redline's extras installs.
_EXTRAS = {atari.PREFIX: ("ale_py", "atari")}
# Ids with this prefix are registered by a package that must be named before the id.
_PACKAGES = {"MiniGrid-": "minigrid", "BabyAI-": "minigrid", "MiniWorld-": "miniworld", "highway-": "highway_env"}
_announced: set[tuple[str, str]] = set()  # warnings already printed: environment and text
STEP_VALUES = "observation, reward, terminated, truncated, info"


class EnvInfo(NamedTuple):
    """Properties of an environment, found by making it and stepping it once."""

    observation_space: spaces.Space[Any]
    kwargs: dict[str, Any]  # constructor arguments: the registered ones, updated with the given ones
    action_meanings: tuple[str, ...]  # names of the actions; empty if the environment does not provide them
    old_api: bool  # has the interface of Gym before 0.26


def probe(name: str, kwargs: Mapping[str, Any] | None = None) -> EnvInfo:
    """Return the properties of an environment, which is made and stepped once; cached."""
    return _probe(name, json.dumps(dict(kwargs or {}), sort_keys=True))


@functools.lru_cache(maxsize=64)
def _probe(name: str, kwargs_json: str) -> EnvInfo:
    with env_activity.calling(env_activity.MAKING):
        return _probe_once(name, json.loads(kwargs_json))


def _probe_once(name: str, kwargs: Mapping[str, Any]) -> EnvInfo:
    env = _make(name, kwargs)
    bare: Any = env.unwrapped
    doing = "reset"
    try:
        seeded = _takes_seed(bare)
        first = bare.reset(seed=0) if seeded else bare.reset()
        doing = "step"
        step = bare.step(bare.action_space.sample())
    except (Exception, SystemExit) as error:
        raise failure(f"{PREFIX}{name}", f"its first {doing}", error) from error
    finally:
        env.close()
    values = len(step) if isinstance(step, tuple) else 1
    if values not in (4, 5) or not isinstance(step[-1], dict):
        last = f", the last of them of type {type(step[-1]).__name__}" if values > 1 else ""
        raise EnvFailure(
            f"{PREFIX}{name} returned {values} value{'s' * (values > 1)} from step{last}; expected {STEP_VALUES}."
        )
    old_api = not (seeded and _is_pair(first)) or values == 4
    return EnvInfo(env.observation_space, env.spec.kwargs if env.spec else {}, atari.action_meanings(env), old_api)


def open_env(
    name: str, kwargs: Mapping[str, Any] | None = None, render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """Return the environment with its registered time limit; an old Gym interface is adapted."""
    env = _make(name, kwargs or {}, render_mode)
    if not probe(name, kwargs).old_api:
        return env
    if not isinstance(env, gymnasium.Wrapper):
        return _OldApi(env)
    innermost = env
    while isinstance(innermost.env, gymnasium.Wrapper):
        innermost = innermost.env
    innermost.env = _OldApi(innermost.env)  # below the wrappers, which unpack five values
    return env


def constructor_arguments(name: str) -> dict[str, inspect.Parameter]:
    """Return the constructor's parameters by name; `**kwargs` is listed as `**`."""
    _import_module(name)
    try:
        entry_point = gymnasium.spec(name.rpartition(":")[2]).entry_point
        creator: Any = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        parameters = inspect.signature(creator).parameters.values()
    except (gymnasium.error.Error, ImportError, AttributeError, ValueError, TypeError):
        return {"**": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}  # `_make` reports the error
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = [parameter for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD]
    return named | ({"**": open_ended[0]} if open_ended else {})


def check_kwargs(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that the constructor does not accept, or whose type differs from the default's."""
    arguments = constructor_arguments(name)
    open_ended = arguments.pop("**", None) is not None
    arguments.pop("render_mode", None)
    for argument, value in kwargs.items():
        if argument == "render_mode" or (argument not in arguments and not open_ended):
            known = f"Arguments: {', '.join(arguments)}." if arguments else "It takes none."
            hint = nearest(argument, arguments) or "."
            raise UserError(f"{PREFIX}{name} takes no argument '{argument}'{hint} {known}")
        default = arguments[argument].default if argument in arguments else None
        if isinstance(default, bool) and not isinstance(value, bool):
            raise UserError(f"env.kwargs.{argument} is {value!r}; expected true or false.")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(default, (int, float)) and not isinstance(default, bool) and not (is_number or value is None):
            raise UserError(f"env.kwargs.{argument} is {value!r}; expected a number.")


def failure(name: str, doing: str, error: BaseException) -> UserError:
    """Return an error that names the environment, the operation that failed and the line that raised."""
    if isinstance(error, UserError):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split()).rstrip(".")
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return EnvFailure(f"{name} failed in {doing}: {reason} ({Path(frame.filename).name}, line {frame.lineno}).")


def _make(name: str, kwargs: Mapping[str, Any], render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    if not name:
        raise UserError("gym: names no environment; give its id, as in gym:CartPole-v1.")
    _import_module(name)
    if kwargs:
        check_kwargs(name, kwargs)
    arguments = dict(kwargs) | ({"render_mode": render_mode} if render_mode else {})
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            env: gymnasium.Env[Any, Any] = gymnasium.make(name, **arguments)
    except gymnasium.error.UnregisteredEnv as error:
        raise UserError(f"{PREFIX}{name} cannot be made: {_sentence(error)}{_package_hint(name)}") from error
    except TypeError as error:
        raise UserError(
            f"{PREFIX}{name} cannot be made: {_sentence(error)} Redline takes single environments of Gymnasium, "
            "neither vector environments nor those of old Gym."
        ) from error
    except (gymnasium.error.Error, ImportError, ValueError) as error:  # their messages name the cause
        raise UserError(f"{PREFIX}{name} cannot be made: {_sentence(error)}") from error
    except (Exception, SystemExit) as error:
        raise failure(f"{PREFIX}{name}", "its constructor", error) from error
    _announce(name, [str(warning.message) for warning in caught])
    layer = env
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, Autoreset):
            env.close()
            raise UserError(
                f"{PREFIX}{name} starts its next episode by itself (the wrapper Autoreset), so that the final observation "
                "of an episode would be lost; register it without that wrapper."
            )
        layer = layer.env
    return env


def _announce(name: str, messages: list[str]) -> None:
    """Print Gymnasium's warnings about an environment, each only once and on one line."""
    for message in messages:
        text = re.sub(r"\x1b\[\d*m", "", message)
        if text.startswith("WARN: ") and (name, text) not in _announced:
            _announced.add((name, text))
            print(f"{PREFIX}{name}: {' '.join(text.removeprefix('WARN: ').split())}", file=sys.stderr)


def _import_module(name: str) -> None:
    """Import the module that registers the id: the one named before the colon, or an extra's."""
    for beginning, (module, extra) in _EXTRAS.items():
        if name.startswith(beginning):
            try:
                package = importlib.import_module(module)
            except ImportError as error:
                raise UserError(
                    f"{PREFIX}{name} needs a package that is not installed; install it: pip install 'redline[{extra}]'."
                ) from error
            package.ALEInterface.setLoggerMode(package.LoggerMode.Error)  # no greeting from every process
    module, colon, _ = name.rpartition(":")
    if not colon:
        return
    with current_folder_importable(module):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise UserError(f"{PREFIX}{name} cannot be made: {_sentence(error)}") from error
            raise UserError(
                f"{PREFIX}{name} cannot be made: there is no module '{module}' in the current folder or on the Python "
                "path; install it, or change to its folder."
            ) from error
        except Exception as error:
            raise failure(f"{PREFIX}{name}", f"importing {module}", error) from error


def _package_hint(name: str) -> str:
    """Return a hint such as ` Did you mean gym:PACKAGE:ID?` for an id that a package registers on import; else empty."""
    if ":" in name:
        return ""
    packages = [package for beginning, package in _PACKAGES.items() if name.startswith(beginning)]
    for package in (*packages, name.split("/")[0].split("-")[0].lower()):
        installed = package.isidentifier() and importlib.util.find_spec(package) is not None
        if installed:
            return f" Did you mean {PREFIX}{package}:{name}?"
        if package in packages:
            return f" Install its package (pip install {package}) and name it {PREFIX}{package}:{name}."
    return ""


class _OldApi(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adapts an environment written for Gym before 0.26: `seed()`, no `info` from `reset`, a single `done` flag."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        del options
        env: Any = self.env
        if _takes_seed(env):
            first = env.reset(seed=seed)
        else:
            if seed is not None and hasattr(env, "seed"):
                env.seed(seed)
            first = env.reset()
        return first if _is_pair(first) else (first, {})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        values: Any = self.env.step(action)
        obs, reward, *endings, info = values
        if len(endings) == 2:
            return obs, reward, *endings, info
        truncated = bool(endings[0] and info.get("TimeLimit.truncated", False))
        return obs, reward, bool(endings[0]) and not truncated, truncated, info


def _takes_seed(env: Any) -> bool:
    parameters = inspect.signature(env.reset).parameters.values()
    return any(parameter.name == "seed" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _is_pair(first: Any) -> bool:
    """Return whether `reset` returned (observation, info)."""
    return isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], dict)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()).strip("`'\"")
    return text if text.endswith((".", "?", "!")) else f"{text}."
