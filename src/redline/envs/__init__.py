"""Environments for people: `make` gives N games on a device, tensors in, tensors out."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast, get_type_hints

import torch
from torch import Tensor

from redline import games
from redline.core.errors import UserError, nearest
from redline.core.records import Episode, Spec
from redline.core.registry import UnknownName
from redline.envs import batch
from redline.envs.batch import EnvState, Rules
from redline.envs.gym_envs import PREFIX, GymGame
from redline.envs.mario import MarioGame

__all__ = [
    "HOSTS",
    "Env",
    "EnvStep",
    "Lanes",
    "Rules",
    "change_rules",
    "live_rules",
    "load_game",
    "make",
    "make_rules",
    "set_live",
    "with_live",
]

HOSTS: dict[str, type[GymGame]] = {"gym": GymGame, "mario": MarioGame}  # by what stands before the colon of a name
_LIVE_DTYPES = {int: torch.int32, float: torch.float32}


class EnvStep(NamedTuple):
    """What `Env.step` returns, the same structure and shapes every step. Each (N, …)."""

    obs: Tensor  # after the action, and after the reset where the episode ended
    reward: Tensor  # float32
    terminated: Tensor  # bool: the game ended
    truncated: Tensor  # bool: cut short; bootstrap from final_obs
    won: Tensor  # bool
    final_obs: Tensor  # before any reset; equals obs where nothing ended
    episode: Episode  # length, score and reward so far, this step included; the result where the episode ended


class Env:
    """N games of one kind on one device."""

    def __init__(self, rules: Rules, num_envs: int, device: torch.device | str = "cpu", seed: int = 0) -> None:
        if num_envs < 1:
            raise UserError(f"num_envs is {num_envs}; expected at least 1 environment.")
        self.rules, self.num_envs, self.device, self.seed = rules, num_envs, torch.device(device), seed
        self.state: EnvState | None = None

    @property
    def spec(self) -> Spec:
        return self.rules.game.spec(self.rules.config)

    @torch.no_grad()
    def reset(self, seed: int | None = None) -> Tensor:
        """Start every environment's first episode and return the observations (N, …)."""
        self.seed = self.seed if seed is None else seed
        env_index = torch.arange(self.num_envs, device=self.device)
        self.state = batch.reset(self.rules, batch.env_keys(self.seed, env_index))
        return self.observe()

    @torch.no_grad()
    def step(self, action: Tensor) -> EnvStep:
        """Play action (N,) integer in every environment; a environment whose episode ends starts the next one in the same step."""
        if self.state is None:
            raise UserError("step was called before reset; call reset first.")
        if action.shape != (self.num_envs,):
            raise UserError(f"step expects actions of shape ({self.num_envs},), got {tuple(action.shape)}.")
        self.state, step = batch.step(self.rules, self.state, action.to(self.device))
        final_obs = self.rules.game.observe(self.rules.config, step.final_state)
        return EnvStep(self.observe(), step.reward, step.terminated, step.truncated, step.won, final_obs, step.episode)

    @torch.no_grad()
    def observe(self) -> Tensor:
        """The present observations (N, …)."""
        if self.state is None:
            raise UserError("observe was called before reset; call reset first.")
        return self.rules.game.observe(self.rules.config, self.state.game)

    def legal(self) -> Tensor:
        """(N, A) bool: the actions that may be taken now."""
        if self.state is None:
            raise UserError("legal was called before reset; call reset first.")
        return self.rules.game.legal(self.rules.config, self.state.game)


def load_game(name: str) -> games.Game:
    """The game called `name`, or one that the host must step, as `gym:ID`."""
    kind = name.partition(":")[0]
    if kind in HOSTS:
        return cast(games.Game, HOSTS[kind](name))
    try:
        return games.load(name)
    except UnknownName as error:
        hint = nearest(kind, [*games.names(), *HOSTS]) or "."
        known = [*games.names(), *(host.SPELLING for host in HOSTS.values())]
        raise UserError(
            f"There is no game '{name}'{hint} Games: {', '.join(known)}, or the import name of a module in the current "
            "folder or on the Python path."
        ) from error


def make_rules(name: str, options: Mapping[str, Any] | None = None, time_limit: int = 0) -> Rules:
    """The game called `name` with its options set; an unknown option names the nearest."""
    if time_limit < 0:
        raise UserError(f"time_limit is {time_limit}; expected 0 (none) or a number of steps.")
    game = load_game(name)
    rules = change_rules(Rules(game, game.Config(), time_limit), options or {}, name)
    if not game.ON_CPU:
        games.validate(game, rules.config)
    return rules


def change_rules(rules: Rules, options: Mapping[str, Any], name: str = "The game") -> Rules:
    """`rules` with some options set anew; unknown ones and impossible values are errors."""
    known = {field.name for field in dataclasses.fields(rules.config)}
    types = get_type_hints(type(rules.config))
    for option, value in options.items():
        if option not in known:
            hint = nearest(option, known) or "."
            raise UserError(f"{name} has no option '{option}'{hint} Options: {', '.join(sorted(known))}.")
        # A number written as text or a board 7.5 cells wide would fail much later, and far from here.
        wanted = {int: (int,), float: (int, float)}.get(types[option])
        if wanted and (not isinstance(value, wanted) or isinstance(value, bool)):
            expected = "a whole number" if types[option] is int else "a number"
            raise UserError(f"env.{option} is {value!r}; expected {expected}.")
        if types[option] is bool and not isinstance(value, bool):
            raise UserError(f"env.{option} is {value!r}; expected true or false.")
    return rules._replace(config=dataclasses.replace(rules.config, **options))


def live_rules(rules: Rules, names: Iterable[str], device: torch.device | str) -> Rules:
    """The same rules with the options `names` as 0-dim tensors on `device`: int32 for whole numbers, float32 for others.

    What was compiled or captured with them sees every value that `set_live` gives them. A game lists in `LIVE` the options
    it uses so that they may be tensors. The numbers that come of it are those of plain options, bit for bit.
    """
    config, types = copy.copy(rules.config), get_type_hints(type(rules.config))
    for name in names:
        if name not in rules.game.LIVE or types[name] not in _LIVE_DTYPES:
            raise ValueError(f"option {name} cannot be live; LIVE has {rules.game.LIVE}")
        value = torch.tensor(getattr(rules.config, name), dtype=_LIVE_DTYPES[types[name]], device=device)
        object.__setattr__(config, name, value)  # past the frozen dataclass, and past its checks, which read numbers
    return rules._replace(config=config)


def with_live(plain: Rules, live: Rules) -> Rules:
    """`plain` with the live options of `live`: the same tensors, so that `set_live` reaches both."""
    config = copy.copy(plain.config)
    for field in dataclasses.fields(live.config):
        if isinstance(value := getattr(live.config, field.name), Tensor):
            object.__setattr__(config, field.name, value)
    return plain._replace(config=config)


def set_live(live: Rules, plain: Rules) -> None:
    """Give the live options the values they have in `plain`, in place. Does not wait for the device."""
    for field in dataclasses.fields(live.config):
        value = getattr(live.config, field.name)
        if isinstance(value, Tensor):
            value.fill_(getattr(plain.config, field.name))


def make(
    name: str,
    num_envs: int = 1,
    device: torch.device | str = "cpu",
    seed: int = 0,
    time_limit: int = 0,
    **options: Any,
) -> Env:
    """N games on a device: `make("snake", num_envs=4096, device="cuda", seed=0, width=7)`."""
    if name.partition(":")[0] in HOSTS:
        own = f"gymnasium.make({name.removeprefix(PREFIX)!r})"
        other = f"redline.envs.load_game({name!r}).make(options)"
        raise UserError(f"{name} is no tensor game; make it with {own if name.startswith(PREFIX) else other}.")
    return Env(make_rules(name, options, time_limit), num_envs, device, seed)
