"""Small environments of Gymnasium, whose every number is known."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Count(gymnasium.Env[Any, Any]):
    """Sees (episode, step, reset's random number); ends after `length` steps, cut short in every second episode.

    A step earns its number, times ten if the action was 2 (actions are 2 and 3).
    """

    def __init__(self, length: int = 3) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Discrete(2, start=2)
        self.length, self.episode = length, -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        del options
        super().reset(seed=seed)
        self.episode, self.time, self.luck = self.episode + 1, 0, float(self.np_random.integers(1000))
        return self._seen(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in (2, 3)
        self.time += 1
        over = self.time >= self.length
        cut = over and self.episode % 2 == 1
        return self._seen(), self.time * (10.0 if action == 2 else 1.0), over and not cut, cut, {}

    def _seen(self) -> Any:
        return np.array([self.episode, self.time, self.luck])


class Match(gymnasium.Env[Any, Any]):
    """Earns 1 where the action is the number seen, else 0; eight steps an episode."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Discrete(3), spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        del options
        super().reset(seed=seed)
        self.time, self.shown = 0, int(self.np_random.integers(3))
        return self.shown, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.shown)
        self.time, self.shown = self.time + 1, int(self.np_random.integers(3))
        return self.shown, reward, self.time >= 8, False, {}


class Seen(gymnasium.Env[Any, Any]):
    """An environment that is seen as any space, and takes actions of any."""

    def __init__(self, seen: spaces.Space[Any], actions: spaces.Space[Any] | None = None) -> None:
        self.observation_space = seen
        self.action_space = actions or spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        del options
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        del action
        return self.observation_space.sample(), 0.0, False, False, {}


SPACES = {
    "Image": spaces.Box(0, 255, (6, 5, 3), np.uint8),
    "Planes": spaces.Box(0, 255, (4, 6, 5), np.uint8),
    "Bounded": spaces.Box(np.array([-2.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32)),
    "Both": spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,), np.float32)}),
    "Bits": spaces.MultiBinary(4),
    "Any": spaces.Sequence(spaces.Discrete(2)),
}
for _name, _space in SPACES.items():
    gymnasium.register(f"Toy{_name}-v0", lambda space=_space: Seen(space))
gymnasium.register("ToyContinuous-v0", lambda: Seen(SPACES["Bits"], spaces.Box(-1, 1, (2,))))
gymnasium.register("ToyCount-v0", Count)
gymnasium.register("ToyMatch-v0", Match)
gymnasium.register("ToyLimited-v0", lambda: Count(100), max_episode_steps=5)


class Film(gymnasium.Env[Any, Any]):
    """Images (8, 6, 3) whose every cell is 10 times the step, brighter by 100 in odd ones; ends after `length` steps.

    Two lives: one is lost at step 4. A step earns 1.5. The first action of an episode is remembered and told in `info`.
    """

    def __init__(self, length: int = 7) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 255, (8, 6, 3), np.uint8), spaces.Discrete(3)
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        del options
        super().reset(seed=seed)
        self.time = 0
        return self._seen(), {"lives": 2}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        told = {"lives": 2 if self.time < 4 else 1, "action": action}
        return self._seen(), 1.5, self.time >= self.length, False, told

    def _seen(self) -> Any:
        return np.full((8, 6, 3), (10 * self.time + 100 * (self.time % 2)) % 256, np.uint8)


class Button(gymnasium.Env[Any, Any]):
    """A press of the button (action 1) earns 1 if it was released before; the grey image never changes."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 255, (10, 10, 1), np.uint8), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        del options
        super().reset(seed=seed)
        self.time, self.pressed = 0, 0
        return np.full((10, 10, 1), 100, np.uint8), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        earned = float(action and not self.pressed)
        self.time, self.pressed = self.time + 1, action
        return np.full((10, 10, 1), 100, np.uint8), earned, False, self.time == 20, {}


class Screen(Seen):
    """Images as large as a screen's."""

    def __init__(self) -> None:
        super().__init__(spaces.Box(0, 255, (120, 160, 3), np.uint8), spaces.Discrete(4))


gymnasium.register("ToyFilm-v0", Film)
gymnasium.register("ToyButton-v0", Button)
gymnasium.register("ToyScreen-v0", Screen)


def _screen(frameskip: int = 1, channels: int = 3) -> Seen:
    del frameskip
    return Seen(spaces.Box(0, 255, (90, 90, channels), np.uint8), spaces.Discrete(4))


gymnasium.register("ToyStacked-v0", lambda: _screen(channels=4))
gymnasium.register("ToySkipping-v0", _screen, kwargs={"frameskip": 4})
gymnasium.register("ToyNotSkipping-v0", _screen, kwargs={"frameskip": 1})
gymnasium.register("ToyEndless-v0", lambda: Count(10**9))
