"""Any Gymnasium environment with discrete actions, as gym:CartPole-v1: its options, State and spec in the place of a game.

Only the CPU can step such an environment (`gym_envs.GymEnvs`). To learners it is a game whose State is its observation.
`gym:ID` names a registered environment; `gym:module:ID` imports the module first. Other kinds of CPU environments are
subclasses of GymGame.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from redline.core.errors import UserError
from redline.core.records import Spec
from redline.envs import atari, env_activity, random_play
from redline.envs.array_wrapper import ArrayWrapper
from redline.envs.frames import Frames
from redline.envs.gym_make import PREFIX, open_env, probe
from redline.envs.random_play import LARGE, RandomPlay, channel_bounds

WORTH_A_PROCESS = 500e-6  # seconds per step above which stepping in another process pays off
_announced: set[str] = set()  # environments whose dropped observation entries were already printed


@dataclass(frozen=True)
class GymConfig:
    """Options of a Gymnasium environment."""

    frame_skip: int = 1  # steps that each action is repeated for
    frame_max: bool = False  # observe the pixelwise maximum of the last two frames
    grey: bool = False  # convert images to greyscale
    size: int = 0  # resize images to this many rows and columns; 0: keep their size
    binary: int = 0  # brightness, 1 to 255, from which a pixel becomes 1, darker ones 0; 0: keep the brightness
    stack: int = 1  # frames in an observation
    obs_scale: tuple[float, ...] = ()  # factors of the numbers (images: channels) of an observation; empty: 1 / bound
    sticky: float = 0.0  # probability that the previous action is repeated instead
    show_action: bool = False  # draw the last action into the top of images, so that the agent sees what is pressed
    noops: int = 0  # most idle steps (of emulators: frames) before the agent plays; their number is random
    fire: bool = False  # Atari: press FIRE at the start of an episode and after the loss of a life
    life_loss: bool = False  # the learner sees the loss of a life as the end; the game and its score go on
    reward_clip: bool = False  # learn from the sign of the reward; the score counts the full reward
    nonfinite: str = "stop"  # on NaN, infinite or too large rewards and observations: stop, or mask them
    bound: float = 1e8  # largest magnitude of a reward or of a number in an observation
    timeout: float = 60.0  # seconds after which a step is taken to hang
    restarts: int = 20  # failures of environments or actors, each made anew, before the run stops
    kwargs: dict[str, Any] = field(default_factory=dict, hash=False)  # constructor arguments

    def __post_init__(self) -> None:
        for name, least in (("frame_skip", 1), ("size", 0), ("stack", 1), ("noops", 0), ("restarts", 0)):
            if getattr(self, name) < least:
                raise UserError(f"env.{name} is {getattr(self, name)}; expected at least {least}.")
        if not 0 <= self.binary <= 255:
            raise UserError(f"env.binary is {self.binary}; expected 1 to 255, or 0 for images as they are.")
        if not 0 <= self.sticky < 1:
            raise UserError(f"env.sticky is {self.sticky}; expected a number from 0 to below 1.")
        if self.nonfinite not in ("stop", "mask"):
            raise UserError(f"env.nonfinite is '{self.nonfinite}'; expected stop or mask.")
        if not 0 < self.bound < math.inf:
            raise UserError(f"env.bound is {self.bound}; expected a number above 0.")
        if not self.timeout > 0:
            raise UserError(f"env.timeout is {self.timeout}; expected seconds above 0.")
        object.__setattr__(self, "obs_scale", tuple(self.obs_scale))  # a list where it was read from JSON
        if not all(0 < factor < math.inf for factor in self.obs_scale):
            raise UserError(f"env.obs_scale is {self.obs_scale}; expected factors above 0.")
        if not isinstance(self.kwargs, Mapping) or not all(isinstance(name, str) for name in self.kwargs):
            raise UserError(f"env.kwargs is {self.kwargs!r}; expected constructor arguments by name.")
        try:
            json.dumps(self.kwargs)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"env.kwargs is {self.kwargs!r}; expected numbers, text, true, false, null, or lists and tables of them, "
                "since the run records them."
            ) from error


class GymState(NamedTuple):
    """The visible state of N environments: their observations."""

    obs: Tensor  # (N, …) the newest frame; (N, stack, …) where frames are stacked, the newest last


class GymGame:
    """A Gymnasium environment with the interface of a game, but without a `step` over tensors: only the CPU can step it.

    An environment with CAN_RESTORE takes snapshots during whole games if `reset` gets the option `snapshots`, the number
    of frames between snapshots. With the option `backplay` it starts from the last snapshot before a loss, if it has one,
    and sets `backplay` in the info. An environment with `levels` changes its level if `reset` gets the option `level`, an
    index of `levels`.
    """

    ON_CPU = True
    CAN_RESTORE = False
    cells = None  # the environment renders its own frames

    SPELLING = "gym:ID"  # form of an environment's name
    SCORE_NAME = "return"
    SCORE = ""  # key of the score so far in `info`; empty: the sum of rewards
    WON = ""  # key in `info` that tells whether the game was won; empty: not reported
    VERSION = 1
    PALETTE = ()
    HIDDEN = ()
    LIVE = ()
    # Options that a resumed run may change: they do not affect the games.
    RESUME_FREE = ("nonfinite", "bound", "timeout", "restarts")
    STACKED = ("obs",)
    # Names of the levels; empty if there is only one. Environment i starts with levels[i % len(levels)].
    levels: tuple[str, ...] = ()
    Config: type[GymConfig] = GymConfig
    State = GymState

    def __init__(self, name: str) -> None:
        """name: of the environment, in the form of SPELLING; `make` makes it."""
        self.name = name
        self._spec: tuple[GymConfig, Spec] | None = None

    @staticmethod
    def knows(name: str) -> bool:
        """Return whether Gymnasium has an environment registered under the id `name`."""
        return name in gymnasium.registry

    def open(self, config: Any, render_mode: str | None = None, env_index: int = 0) -> gymnasium.Env[Any, Any]:
        """Return one environment, number `env_index` of all, as registered, without preprocessing."""
        del env_index  # all are the same
        name = self.name.removeprefix(PREFIX)
        env = open_env(name, atari.constructor_arguments(name, config) | config.kwargs, render_mode)
        starts = config.noops or config.fire
        return atari.EpisodeStart(env, config.noops, config.fire, self.name) if starts else env

    def make(self, config: GymConfig, render_mode: str | None = None, env_index: int = 0) -> gymnasium.Env[Any, Any]:
        """Return one preprocessed environment with array observations, channels first, and actions numbered from 0.

        env_index: its index among all environments, which selects its level if there are several.
        """
        return self.prepare(self.open(config, render_mode, env_index), config)

    def level_index(self, env_index: int) -> int:
        """Return the index of the level that environment `env_index` plays, in training first; 0 if there is only one."""
        return env_index % max(len(self.levels), 1)

    def level_of(self, env_index: int) -> str:
        """Return the name of the level with that index; empty if there is only one."""
        return self.levels[self.level_index(env_index)] if self.levels else ""

    def prepare(self, env: gymnasium.Env[Any, Any], config: GymConfig) -> gymnasium.Env[Any, Any]:
        """Return `env` wrapped with the preprocessing of these options."""
        images = (config.frame_max, config.grey, config.size)
        frames = Frames(env, config.frame_skip, *images, config.sticky, config.show_action, self.name)
        return ArrayWrapper(frames, self.name)

    def spec(self, config: GymConfig) -> Spec:
        """Return the spec of the environment with these options; the environment is made once to read its spaces."""
        if self._spec is None or self._spec[0] is not config:  # no lookup by hash: compiled code calls this
            kind: Any = type(self)
            self._spec = (config, _make_spec(kind, self.name, config))
        return self._spec[1]

    def random_play(self, config: GymConfig) -> RandomPlay:
        """Return step duration and observation scale, measured in the first steps of random play; cached."""
        kind: Any = type(self)
        return _random_play(kind, self.name, config)

    def costs_are_constant(self, config: GymConfig) -> bool:
        """Return whether every step of random play has the same negative reward and none terminates; cached."""
        kind: Any = type(self)
        return _costs_are_constant(kind, self.name, config)

    def announced_scale(self, config: GymConfig) -> tuple[float, ...]:
        """Return the observation scale that follows from the spaces alone, without random play."""
        with env_activity.calling(env_activity.MAKING):
            env: Any = self.make(config)
        return random_play.announced_scale(env)

    def step_seconds(self, config: GymConfig) -> float:
        """Return the duration of a step in seconds, measured in random play."""
        return self.random_play(config).step_seconds

    def check_installed(self) -> None:
        """Raise UserError if the environment is unknown or needs a package that is not installed."""
        probe(self.name.removeprefix(PREFIX))

    def init(self, config: GymConfig, key: Tensor) -> GymState:
        """Return blank states (N, …) of the right shape and dtype, for buffers. key (N,) int32."""
        spec = self.spec(config)
        return GymState(torch.zeros(len(key), *frame_shape(spec), dtype=spec.obs_dtype, device=key.device))

    def observe(self, config: GymConfig, state: GymState) -> Tensor:
        """Return observations (N, …): the channels of all stacked frames, concatenated, or of a single frame."""
        single = state.obs.ndim == 1 + len(self.spec(config).obs_shape)
        channels = state.obs if single else state.obs.flatten(1, 2)
        return (channels >= config.binary).to(torch.uint8) if config.binary else channels

    def legal(self, config: GymConfig, state: GymState) -> Tensor:
        """Return an action mask (N, A) bool that is True everywhere: every action is legal."""
        return torch.ones(len(state.obs), self.spec(config).num_actions, dtype=torch.bool, device=state.obs.device)


def frame_shape(spec: Spec) -> tuple[int, ...]:
    """Return the shape of one frame of an observation."""
    return (spec.obs_shape[0] // spec.frames, *spec.obs_shape[1:])


def stacked(stack: Tensor, newest: Tensor, episode_start: Tensor | None = None) -> Tensor:
    """Return the stack (N, F, …) with the newest frame (N, …) appended; at an `episode_start` (N,) bool, filled with it."""
    later = torch.cat([stack[:, 1:], newest.unsqueeze(1)], 1)
    if episode_start is None:
        return later
    if later.device.type == "cpu" and not torch.compiler.is_compiling():
        started = episode_start.nonzero().flatten()  # few: `where` would select byte by byte, ten times slower
        later[started] = newest[started].unsqueeze(1)
        return later
    return torch.where(episode_start.view(-1, *(1,) * (stack.ndim - 1)), newest.unsqueeze(1), later)


@functools.lru_cache(maxsize=64)
def _make_spec(kind: Any, name: str, config: GymConfig) -> Spec:
    with env_activity.calling(env_activity.MAKING):
        env = kind(name).make(config)
    space, actions = env.observation_space, env.action_space
    limit = env.spec.max_episode_steps if env.spec else None
    if env.dropped and name not in _announced:
        _announced.add(name)
        print(f"{name}: dropped from the observation because they are not numeric: {env.dropped}.", file=sys.stderr)
    env.close()
    assert isinstance(space, spaces.Box)
    assert isinstance(actions, spaces.Discrete)
    is_bytes = space.dtype == np.uint8
    if config.binary:
        if not (is_bytes and len(space.shape) == 3):
            raise UserError(
                f"env.binary is set, but the observation of shape {space.shape} is no image; remove env.binary."
            )
        space = spaces.Box(0, 1, space.shape, np.uint8)
    bounds = channel_bounds(space)
    bounded = bool((bounds < LARGE).all())
    return Spec(
        obs_shape=(config.stack * space.shape[0], *space.shape[1:]),
        obs_dtype=torch.uint8 if is_bytes else torch.float32,
        obs_scale=_obs_scale(config, bounds) * config.stack,
        obs_high=float(space.high.max()) if bounded else math.inf,
        obs_low=float(space.low.min()) if bounded else -math.inf,
        num_actions=int(actions.n),
        score_name=kind.SCORE_NAME,
        winnable=bool(kind.WON),
        frames=config.stack,
        truncates=True,
        limit=math.ceil(limit / config.frame_skip) if limit else 0,
    )


def _obs_scale(config: GymConfig, bounds: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """Return the factor of every element of a vector, or channel of an image; a single given factor applies to all."""
    given = config.obs_scale * len(bounds) if len(config.obs_scale) == 1 else config.obs_scale
    if given and len(given) != len(bounds):
        raise UserError(f"env.obs_scale has {len(given)} factors; expected {len(bounds)}, or one for all.")
    return given or tuple(1.0 / x if 0 < x < LARGE else 1.0 for x in bounds.tolist())


@functools.lru_cache(maxsize=64)
def _random_play(kind: Any, name: str, config: GymConfig) -> RandomPlay:
    with env_activity.calling(env_activity.MAKING):
        return random_play.play(kind(name).make(config), name)


@functools.lru_cache(maxsize=64)
def _costs_are_constant(kind: Any, name: str, config: GymConfig) -> bool:
    with env_activity.calling(env_activity.MAKING):
        return random_play.costs_are_constant(kind(name).make(config))
