"""Validate a game's members: types, shapes and dtypes of everything it returns, on a batch of a few games on the CPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_origin, get_type_hints
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from redline.core import random
from redline.core.errors import UserError, code_place
from redline.core.records import Events, Spec
from redline.games._contract import REQUIRED, Controls, Game

_GAMES = 5  # a batch size unlikely to equal a board's side, so that a wrong axis is detected
_VALID: WeakKeyDictionary[Game, list[Any]] = WeakKeyDictionary()  # configs already validated
_Signature = dict[str, tuple[tuple[int, ...], torch.dtype]]  # field -> shape and dtype


class _Fault(UserError):
    """A member violates the contract."""


def validate(game: Game, config: Any = None) -> None:
    """Raise UserError with the invalid member and its expected form if `game` violates the contract with these options.

    Without `config`, the default options are validated. Plays one step of five games; cached by game and config.
    """
    _validate_constants(game)
    if config is None:
        config = _call(game, "Config", game.Config)
    known = _VALID.setdefault(game, [])
    if config not in known:
        _validate_functions(game, config)
        known.append(config)


def _validate_functions(game: Game, config: Any) -> None:
    spec = _call(game, "spec", game.spec, config)
    _validate_spec(game, spec)
    with torch.no_grad(), torch.device("cpu"):
        key = random.fold(random.seed_key(0), torch.arange(_GAMES))
        state = _call(game, "init", game.init, config, key)
        _validate_state(game, state, "init", _signature(game, state, "init"))
        action = _validate_shown(game, config, spec, state)
        _validate_step(game, config, state, action)


def fault(game: Game, member: str, problem: str, expected: str) -> UserError:
    """Return the error for a member that violates the contract."""
    return _Fault(f"The game '{game.name}': {member} {problem}; expected {expected}.")


def _call(game: Game, member: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        place = code_place(error, getattr(game.module, "__file__", None))
        raise _Fault(f"The game '{game.name}': {member} failed with {type(error).__name__}: {reason}{place}") from error


def _validate_constants(game: Game) -> None:
    if not (isinstance(game.Config, type) and dataclasses.is_dataclass(game.Config)):
        raise fault(game, "Config", f"is {_kind(game.Config)}", REQUIRED["Config"])
    if not game.Config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise fault(game, "Config", "is a dataclass that can be changed", "@dataclass(frozen=True)")
    for name, kind in _call(game, "Config", get_type_hints, game.Config).items():
        if kind not in (int, float, bool, str) and get_origin(kind) not in (Literal, ClassVar):
            shown = kind.__name__ if isinstance(kind, type) else kind
            raise fault(game, f"Config.{name}", f"has the type {shown}", "int, float, bool, str or Literal[…]")
    if not (isinstance(game.State, type) and issubclass(game.State, tuple) and hasattr(game.State, "_fields")):
        raise fault(game, "State", f"is {_kind(game.State)}", REQUIRED["State"])
    if type(game.VERSION) is not int:
        raise fault(game, "VERSION", f"is {game.VERSION!r}", "a whole number")
    for member in ("spec", "init", "step", "observe", "legal"):
        if not callable(getattr(game, member)):
            raise fault(game, member, f"is {_kind(getattr(game, member))}", REQUIRED.get(member, "a function"))
    fields = {"HIDDEN": game.State._fields, "LIVE": [field.name for field in dataclasses.fields(game.Config)]}
    for member, names in fields.items():
        value = getattr(game, member)
        if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
            raise fault(game, member, f"is {value!r}", "a tuple of names")
        for name in value:
            if name not in names:
                owner = "State" if member == "HIDDEN" else "Config"
                raise fault(game, member, f"names '{name}'", f"fields of {owner}: {', '.join(names)}")
    _validate_palette(game)


def _validate_palette(game: Game) -> None:
    try:
        valid = all(
            isinstance(name, str) and len(colour) == 3 and all(0 <= channel <= 255 for channel in colour)
            for name, colour in game.PALETTE
        )
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise fault(game, "PALETTE", f"is {game.PALETTE!r}", "pairs of a name and (red, green, blue), each 0 to 255")


def _validate_spec(game: Game, spec: Any) -> None:
    if not isinstance(spec, Spec):
        raise fault(game, "spec", f"returned {_kind(spec)}", "a redline.core.records.Spec")
    if not (isinstance(spec.obs_shape, tuple) and spec.obs_shape and all(_whole(side) for side in spec.obs_shape)):
        raise fault(game, "spec.obs_shape", f"is {spec.obs_shape!r}", "a tuple of sizes above 0, channels first")
    if not isinstance(spec.obs_dtype, torch.dtype):
        raise fault(game, "spec.obs_dtype", f"is {spec.obs_dtype!r}", "a torch.dtype")
    if not _whole(spec.num_actions):
        raise fault(game, "spec.num_actions", f"is {spec.num_actions!r}", "a whole number above 0")
    if not (isinstance(spec.score_name, str) and spec.score_name):
        raise fault(game, "spec.score_name", f"is {spec.score_name!r}", "the noun the score counts, as 'foods'")
    if spec.afterstates and (len(spec.obs_shape) != 2 or spec.obs_shape[0] != spec.num_actions):
        raise fault(game, "spec.obs_shape", f"is {spec.obs_shape}", f"({spec.num_actions}, F), a row for each action")
    if spec.afterstates and spec.obs_dtype != torch.float32:
        raise fault(game, "spec.obs_dtype", f"is {spec.obs_dtype}", "torch.float32 for afterstates")
    board = spec.afterstate_board
    if board is not None and not (spec.afterstates and 1 + math.prod(board) <= spec.obs_shape[1]):
        raise fault(game, "spec.afterstate_board", f"is {board}", "afterstates that hold its cells after the reward")
    channels = spec.obs_shape[-1 if spec.afterstates else 0]
    if not isinstance(spec.obs_scale, tuple) or len(spec.obs_scale) != channels:
        unit = "feature" if spec.afterstates else "channel"
        length = f"has length {len(spec.obs_scale)}" if isinstance(spec.obs_scale, tuple) else f"is {spec.obs_scale!r}"
        expected = f"a tuple of {channels} numbers, one for each {unit} of obs_shape {spec.obs_shape}"
        raise fault(game, "spec.obs_scale", length, expected)
    if not spec.obs_low < spec.obs_high:
        raise fault(game, "spec.obs_low", f"is {spec.obs_low}", f"less than obs_high, {spec.obs_high}")
    if spec.masked and getattr(game.legal, "__name__", "") == "all_actions_legal":
        raise fault(game, "legal", "is missing although spec.masked is True", "legal(config, state) -> (N, A) bool")


def _signature(game: Game, state: Any, member: str) -> _Signature:
    if not isinstance(state, game.State):
        raise fault(game, member, f"returned {_kind(state)}", f"a {game.State.__name__}")
    for name, value in zip(state._fields, state, strict=True):
        if not isinstance(value, Tensor):
            raise fault(game, f"State.{name}", f"is {_kind(value)} after {member}", "a tensor with the games on axis 0")
    return {name: (tuple(x.shape), x.dtype) for name, x in zip(state._fields, state, strict=True)}


def _validate_state(game: Game, state: Any, member: str, expected: _Signature) -> None:
    for name, (shape, dtype) in _signature(game, state, member).items():
        if not shape or shape[0] != _GAMES:
            raise fault(game, f"State.{name}", f"has shape {shape} after {member} of {_GAMES} games", f"({_GAMES}, …)")
        if (shape, dtype) != expected[name]:
            got, usual = _describe(shape, dtype), _describe(*expected[name])
            raise fault(game, f"State.{name}", f"is {got} after {member}", f"{usual}, as init returned")


def _validate_shown(game: Game, config: Any, spec: Spec, state: Any) -> Tensor:
    """Validate `observe`, `legal`, `observe_afterstate` and `cells`; return a legal action (N,) int64 for each game."""
    obs = _call(game, "observe", game.observe, config, state)
    _expect(game, "observe", obs, (_GAMES, *spec.obs_shape), spec.obs_dtype)
    legal = _call(game, "legal", game.legal, config, state)
    _expect(game, "legal", legal, (_GAMES, spec.num_actions), torch.bool)
    if not legal.any(1).all():
        raise fault(game, "legal", "allows no action in a new game", "at least one legal action")
    if not (spec.masked or legal.all()):
        raise fault(game, "legal", "forbids actions although spec.masked is False", "spec.masked True")
    if game.cells is not None:
        drawn = _call(game, "cells", game.cells, config, state)
        if not (isinstance(drawn, Tensor) and drawn.dim() == 3 and len(drawn) == _GAMES and drawn.dtype == torch.uint8):
            raise fault(game, "cells", f"returned {_kind(drawn)}", f"({_GAMES}, H, W) uint8")
        if drawn.max() >= len(game.PALETTE):
            colours = len(game.PALETTE)
            raise fault(
                game, "cells", f"returned {int(drawn.max())}", f"indices below {colours}, the length of PALETTE"
            )
        _validate_drawing(game, config, spec, state, drawn)
    first: Tensor = legal.to(torch.int64).argmax(1)
    if spec.afterstates and game.observe_afterstate is not None:
        row = _call(game, "observe_afterstate", game.observe_afterstate, config, state, first)
        _expect(game, "observe_afterstate", row, (_GAMES, spec.obs_shape[1]), spec.obs_dtype)
        if not torch.equal(row, obs[torch.arange(_GAMES), first]):
            raise fault(game, "observe_afterstate", "differs from observe", "its row of that action")
    if game.plane_fields is not None:
        _validate_planes(game, _call(game, "plane_fields", game.plane_fields, config), state, obs)
    return first


def _validate_planes(game: Game, names: tuple[str, ...], state: Any, obs: Tensor) -> None:
    """Validate that observations show exactly the State fields `names`, if there are any."""
    if not names:
        return
    if len(names) != 3 or not set(names) <= set(state._fields) - set(game.HIDDEN) or obs.shape[1] != 3:
        raise fault(game, "plane_fields", f"returned {names}", "three fields of State that observations show as planes")
    board, *cells = (getattr(state, name) for name in names)
    number = torch.arange(obs[0, 0].numel())
    marked = [obs[:, plane].flatten(1) == (cell.unsqueeze(1) == number) for plane, cell in enumerate(cells, 1)]
    shown = obs[:, 0].contiguous()
    same = board.nbytes != shown.nbytes or torch.equal(
        board.flatten().view(torch.uint8), shown.flatten().view(torch.uint8)
    )
    if not (same and all(part.all() for part in marked)):
        raise fault(
            game, "plane_fields", f"returned {names}", "what observe shows: a board, and a one at each of two cells"
        )


def _validate_drawing(game: Game, config: Any, spec: Spec, state: Any, drawn: Tensor) -> None:
    """Validate the optional members for rendering and human play; `drawn` are the cells of `state`."""
    if game.links is not None:
        _expect(game, "links", _call(game, "links", game.links, config, state), tuple(drawn.shape), torch.uint8)
    if game.paint is not None:
        painted = _call(game, "paint", game.paint, config, drawn, state, state)
        _expect(game, "paint", painted, tuple(drawn.shape), torch.uint8)
    if game.side_boards is not None:
        for title, board in _call(game, "side_boards", game.side_boards, config, state).items():
            if not (isinstance(board, Tensor) and board.dim() == 3 and board.dtype == torch.uint8):
                raise fault(game, "side_boards", f"returned {_kind(board)} for '{title}'", f"({_GAMES}, h, w) uint8")
    if game.action_names is not None:
        names = _call(game, "action_names", game.action_names, config)
        if len(names) != spec.num_actions:
            raise fault(
                game, "action_names", f"returned {len(names)} names", f"{spec.num_actions}, one for each action"
            )
    if game.controls is not None and (controls := _call(game, "controls", game.controls, config, 1)) is not None:
        if not isinstance(controls, Controls):
            raise fault(game, "controls", f"returned {_kind(controls)}", "redline.games.Controls, or None")
        if wrong := [key for key, action in controls.keys.items() if not 0 <= action < spec.num_actions]:
            raise fault(
                game, "controls", f"gives the key '{wrong[0]}' an action that does not exist", "actions of the spec"
            )


def _validate_step(game: Game, config: Any, state: Any, action: Tensor) -> None:
    result = _call(game, "step", game.step, config, state, action)
    if not (isinstance(result, tuple) and len(result) == 4):
        raise fault(game, "step", f"returned {_kind(result)}", "a tuple of State, reward, terminated and Events")
    after, reward, terminated, events = result
    _validate_state(game, after, "step", _signature(game, state, "init"))
    _expect(game, "the reward of step", reward, (_GAMES,), torch.float32)
    _expect(game, "terminated of step", terminated, (_GAMES,), torch.bool)
    if not isinstance(events, Events):
        raise fault(game, "step", f"returned {_kind(events)} as its fourth value", "redline.core.records.Events")
    for name, dtype in (("score", torch.int32), ("won", torch.bool), ("truncated", torch.bool)):
        _expect(game, f"Events.{name} of step", getattr(events, name), (_GAMES,), dtype)


def _expect(game: Game, member: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor) or (tuple(value.shape), value.dtype) != (shape, dtype):
        raise fault(game, member, f"is {_kind(value)} for {_GAMES} games", _describe(shape, dtype))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return _describe(tuple(value.shape), value.dtype)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"a tuple of {len(value)}"
    return f"the {'class' if isinstance(value, type) else 'value'} {value!r:.60}"


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"


def _whole(value: Any) -> bool:
    return type(value) is int and value > 0
