"""Make Rules, a game with its options, by name; change options, also while training runs (live options)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor

from redline import games
from redline.core.errors import UserError, instead_of_file, nearest
from redline.core.registry import NoMember, UnknownName
from redline.envs.batch import Rules
from redline.envs.gym_game import GymGame
from redline.envs.mario import MarioGame

# Kinds of CPU environment by the part of a name before its colon, as in gym:CartPole-v1.
CPU_ENVS: dict[str, type[GymGame]] = {"gym": GymGame, "mario": MarioGame}
_LIVE_DTYPES = {int: torch.int32, float: torch.float32}


def load_game(name: str | ModuleType) -> games.Game:
    """Return the game called `name`: a tensor game by name or module, or a CPU environment such as `gym:CartPole-v1`."""
    if isinstance(name, ModuleType):
        own_name = name.__name__.removeprefix(f"{games.__name__}.")
        return games.load(own_name) if own_name in games.names() else games.build(own_name, name)
    kind = name.partition(":")[0]
    if kind in CPU_ENVS:
        return cast(games.Game, CPU_ENVS[kind](name))
    try:
        return games.load(name)
    except UnknownName as error:
        if GymGame.knows(name):
            message = f"There is no game '{name}'; did you mean 'gym:{name}'? gym:ID names a Gymnasium environment."
            raise UserError(message) from error
        if place := instead_of_file(name):
            raise UserError(f"There is no game '{name}'{place}") from error
        hint = nearest(kind, [*games.names(), *CPU_ENVS]) or "."
        known = [*games.names(), *(cpu_env.SPELLING for cpu_env in CPU_ENVS.values())]
        raise UnknownName(
            f"There is no game '{name}'{hint} Games: {', '.join(known)}, or the import name of a module in the current "
            f"folder or on the Python path.{_module_hint(name, error)}"
        ) from error


def _module_hint(name: str, error: UnknownName) -> str:
    """Return a hint for a module that defines no game, which may register Gymnasium environments; else empty."""
    if not isinstance(error, NoMember):
        return ""
    return f" The module '{name}' defines none; an environment that it registers with Gymnasium is gym:{name}:ID."


def make_rules(name: str | ModuleType, options: Mapping[str, Any] | None = None, time_limit: int = 0) -> Rules:
    """Return the game called `name` with `options` set; raise UserError for an unknown option, suggesting the nearest."""
    if time_limit < 0:
        raise UserError(f"time_limit is {time_limit}; expected 0 (none) or a number of steps.")
    game = load_game(name)
    rules = change_rules(Rules(game, game.Config(), time_limit), options or {}, getattr(name, "__name__", name))
    if not game.ON_CPU:
        games.validate(game, rules.config)
    return rules


def change_rules(rules: Rules, options: Mapping[str, Any], name: Any = "The game") -> Rules:
    """Return `rules` with some options changed; raise UserError for an unknown option or an invalid value."""
    known = {field.name for field in dataclasses.fields(rules.config)}
    types = get_type_hints(type(rules.config))
    for option, value in options.items():
        if option not in known:
            hint = nearest(option, known) or "."
            raise UserError(f"{name} has no option '{option}'{hint} Options: {', '.join(sorted(known))}.")
        # A number passed as text, or a board 7.5 cells wide, would fail much later, far from the cause.
        accepted = {int: (int,), float: (int, float)}.get(types[option])
        if accepted and (not isinstance(value, accepted) or isinstance(value, bool)):
            expected = "a whole number" if types[option] is int else "a number"
            raise UserError(f"env.{option} is {value!r}; expected {expected}.")
        if types[option] is bool and not isinstance(value, bool):
            raise UserError(f"env.{option} is {value!r}; expected true or false.")
    return rules._replace(config=dataclasses.replace(rules.config, **options))


def live_rules(rules: Rules, names: Iterable[str], device: torch.device | str) -> Rules:
    """Return the same rules with the options `names` as 0-dim tensors on `device`: int32 for integers, else float32.

    Compiled or captured code that uses them reads the values that `set_live` writes. `LIVE` of a game lists the options
    that may be tensors. Results are bitwise identical to those of plain options.
    """
    config, types = copy.copy(rules.config), get_type_hints(type(rules.config))
    for name in names:
        if name not in rules.game.LIVE or types[name] not in _LIVE_DTYPES:
            raise ValueError(f"option {name} cannot be live; LIVE has {rules.game.LIVE}")
        value = torch.tensor(getattr(rules.config, name), dtype=_LIVE_DTYPES[types[name]], device=device)
        object.__setattr__(config, name, value)  # bypasses the frozen dataclass and its checks, which expect numbers
    return rules._replace(config=config)


def with_live(plain: Rules, live: Rules) -> Rules:
    """Return `plain` with the live options of `live`, sharing their tensors, so that `set_live` changes both."""
    config = copy.copy(plain.config)
    for field in dataclasses.fields(live.config):
        if isinstance(value := getattr(live.config, field.name), Tensor):
            object.__setattr__(config, field.name, value)
    return plain._replace(config=config)


def set_live(live: Rules, plain: Rules) -> None:
    """Copy the values of `plain` into the live options of `live`, in place, without synchronizing with the device."""
    for field in dataclasses.fields(live.config):
        value = getattr(live.config, field.name)
        if isinstance(value, Tensor):
            value.fill_(getattr(plain.config, field.name))
