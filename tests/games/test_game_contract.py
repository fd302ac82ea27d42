# ruff: noqa: ARG005
"""Loading a game validates it: a broken member is named with the shape and dtype that was expected."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import toy_game

from redline import games
from redline.core.errors import UserError
from redline.core.records import Events, Spec
from redline.envs import make, make_rules
from redline.games import _contract


def broken(**members: Any) -> SimpleNamespace:
    """The toy game with members replaced, or left out where the value is None."""
    correct = {name: value for name, value in vars(toy_game).items() if not name.startswith("_")}
    return SimpleNamespace(**{name: value for name, value in {**correct, **members}.items() if value is not None})


def spec_with(**fields: Any) -> Callable[[Any], Spec]:
    return lambda config: Spec(**{**vars(toy_game.spec(config)), **fields})


def step_with(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda config, state, action: change(*toy_game.step(config, state, action))


class ListState(NamedTuple):
    place: list[int]


@dataclass
class Changeable:
    cells: int = 6


@dataclass(frozen=True)
class Demanding:
    cells: int


@dataclass(frozen=True)
class Listed:
    walls: list = field(default_factory=list)  # type: ignore[type-arg]


def flat_cells(config: Any, state: Any) -> torch.Tensor:
    return torch.zeros(len(state.place), 1, config.cells, dtype=torch.uint8)


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("no step", {"step": None}, "has no member 'step'; expected step(config, state, action) -> (State, reward"),
    ("no spec", {"spec": None}, "has no member 'spec'; expected spec(config) -> Spec"),
    ("no State", {"State": None}, "has no member 'State'; expected a NamedTuple of tensors"),
    ("State a dict", {"State": dict}, "State is the class <class 'dict'>; expected a NamedTuple of tensors"),
    ("Config a dict", {"Config": dict}, "Config is the class <class 'dict'>; expected a frozen dataclass"),
    ("Config not frozen", {"Config": Changeable}, "expected @dataclass(frozen=True)"),
    ("Config without default", {"Config": Demanding}, "Config failed with TypeError: "),
    (
        "Config with a list",
        {"Config": Listed},
        "Config.walls has the type list; expected int, float, bool, str or Literal",
    ),
    ("VERSION", {"VERSION": "1.0"}, "VERSION is '1.0'; expected a whole number"),
    ("HIDDEN", {"HIDDEN": ("keys",)}, "HIDDEN names 'keys'; expected fields of State: place, coins, key"),
    ("LIVE", {"LIVE": "reward"}, "LIVE is 'reward'; expected a tuple of names"),
    ("PALETTE", {"PALETTE": (("red", (256, 0, 0)),)}, "PALETTE is"),
    (
        "links",
        {"cells": flat_cells, "links": lambda config, state: flat_cells(config, state)[0]},
        "links is (1, 6) uint8 for 5 games; expected (5, 1, 6) uint8",
    ),
    (
        "action_names",
        {"cells": flat_cells, "action_names": lambda config: ("left",)},
        "action_names returned 1 names; expected 2",
    ),
    (
        "controls",
        {"cells": flat_cells, "controls": lambda config, level: {"a": 0}},
        "controls returned the value {'a': 0}; expected redline.games.Controls, or None",
    ),
    (
        "a key without an action",
        {"cells": flat_cells, "controls": lambda config, level: games.Controls({"a": 9})},
        "controls gives the key 'a' an action that does not exist",
    ),
    ("spec type", {"spec": lambda config: {"cells": config.cells}}, "spec returned the value"),
    ("obs_scale", {"spec": spec_with(obs_scale=(1.0,) * 6)}, "obs_scale has length 6; expected a tuple of 2 numbers"),
    ("obs_shape", {"spec": spec_with(obs_shape=[2, 6])}, "spec.obs_shape is [2, 6]; expected a tuple of sizes"),
    ("num_actions", {"spec": spec_with(num_actions=0)}, "spec.num_actions is 0; expected a whole number above 0"),
    ("score_name", {"spec": spec_with(score_name="")}, "spec.score_name is ''"),
    ("masked", {"spec": spec_with(masked=True)}, "legal is missing although spec.masked is True"),
    ("afterstates", {"spec": spec_with(afterstates=True)}, "spec.obs_dtype is torch.uint8; expected torch.float32"),
    (
        "a board without afterstates",
        {"spec": spec_with(afterstate_board=(1, 2))},
        "spec.afterstate_board is (1, 2); expected afterstates that hold its cells after the reward",
    ),
    (
        "obs dtype",
        {"spec": spec_with(obs_dtype=torch.float32)},
        "observe is (5, 2, 6) uint8 for 5 games; expected (5, 2, 6) float32",
    ),
    (
        "obs shape",
        {"spec": spec_with(obs_shape=(2, 7))},
        "observe is (5, 2, 6) uint8 for 5 games; expected (5, 2, 7) uint8",
    ),
    ("observe fails", {"observe": lambda config, state: state.board}, "observe failed with AttributeError: "),
    ("init type", {"init": lambda config, key: (key,)}, "init returned a tuple of 1; expected a State"),
    (
        "init batch",
        {"init": lambda config, key: toy_game.init(config, key[:1])},
        "State.place has shape (1,) after init of 5 games; expected (5, …)",
    ),
    (
        "state of lists",
        {"State": ListState, "init": lambda config, key: ListState([0] * len(key))},
        "State.place is the value [0, 0, 0, 0, 0] after init; expected a tensor",
    ),
    (
        "state dtype",
        {"step": step_with(lambda s, r, t, e: (s._replace(place=s.place.long()), r, t, e))},
        "State.place is (5,) int64 after step; expected (5,) int16, as init returned",
    ),
    (
        "reward dtype",
        {"step": step_with(lambda s, r, t, e: (s, r.double(), t, e))},
        "the reward of step is (5,) float64 for 5 games; expected (5,) float32",
    ),
    (
        "reward shape",
        {"step": step_with(lambda s, r, t, e: (s, r.sum(), t, e))},
        "the reward of step is () float32 for 5 games; expected (5,) float32",
    ),
    (
        "terminated",
        {"step": step_with(lambda s, r, t, e: (s, r, t.int(), e))},
        "terminated of step is (5,) int32 for 5 games; expected (5,) bool",
    ),
    (
        "events type",
        {"step": step_with(lambda s, r, t, e: (s, r, t, {}))},
        "step returned the value {} as its fourth value; expected redline.core.records.Events",
    ),
    (
        "events dtype",
        {"step": step_with(lambda s, r, t, e: (s, r, t, e._replace(score=r)))},
        "Events.score of step is (5,) float32 for 5 games; expected (5,) int32",
    ),
    (
        "step length",
        {"step": step_with(lambda s, r, t, e: (s, r, t, e.truncated, {}))},
        "step returned a tuple of 5; expected a tuple of State, reward, terminated and Events",
    ),
    (
        "legal shape",
        {"legal": lambda config, state: torch.ones(5, 3, dtype=torch.bool)},
        "legal is (5, 3) bool for 5 games; expected (5, 2) bool",
    ),
    (
        "no legal action",
        {"legal": lambda config, state: torch.zeros(5, 2, dtype=torch.bool), "spec": spec_with(masked=True)},
        "legal allows no action in a new game",
    ),
    (
        "unannounced mask",
        {"legal": lambda config, state: torch.tensor([[True, False]] * 5)},
        "legal forbids actions although spec.masked is False",
    ),
    (
        "no planes",
        {"plane_fields": lambda config: ("coins", "place", "place")},
        "plane_fields returned ('coins', 'place', 'place'); expected three fields of State that observations show as planes",
    ),
    (
        "cells shape",
        {"cells": lambda config, state: state.coins},
        "cells returned (5, 6) bool; expected (5, H, W) uint8",
    ),
    (
        "cells colour",
        {"cells": lambda config, state: torch.full((5, 1, 6), 40, dtype=torch.uint8)},
        "cells returned 40; expected indices below 32, the length of PALETTE",
    ),
]


@pytest.mark.parametrize(("members", "sentence"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_a_broken_member_is_named(members: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as failure:
        _contract.build("toy", broken(**members))
    message = str(failure.value)
    assert message.startswith("The game 'toy'")
    assert sentence in message


def test_six_members_are_enough() -> None:
    game = _contract.build("toy", toy_game)
    assert (game.name, game.VERSION, game.HIDDEN, game.LIVE, game.cells, game.ON_CPU) == ("toy", 1, (), (), None, False)
    state = game.init(game.Config(), torch.zeros(3, dtype=torch.int32))
    legal = game.legal(game.Config(), state)
    assert (legal.shape, legal.dtype) == ((3, 2), torch.bool)
    assert legal.all()
    with pytest.raises(UserError, match="toy cannot be drawn: the game does not define cells"):
        games.draw_cells(game, game.Config(), state)
    assert len({name for name, _ in game.PALETTE}) == len(game.PALETTE)


def test_options_are_validated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that shows only with an option other than the default is found when the rules are made."""

    def spec(config: Any) -> Spec:
        return Spec((2, config.cells), torch.uint8, (1.0,) * (2 if config.cells == 6 else 3), 1, 2, "coins")

    wrong = _contract.build("wrong", broken(spec=spec))
    monkeypatch.setattr(games, "load", lambda _: wrong)
    monkeypatch.setattr(games, "names", lambda: ["wrong"])
    assert make_rules("wrong").config.cells == 6
    with pytest.raises(UserError, match="obs_scale has length 3"):
        make_rules("wrong", {"cells": 7})


def test_a_game_is_copied_and_pickled_by_name(game_name: str) -> None:
    game = games.load(game_name)
    assert copy.deepcopy(game) is game
    assert pickle.loads(pickle.dumps(game)) is game


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registered games before and after the test are the real ones."""
    games.registry.refresh()
    yield
    monkeypatch.undo()
    games.registry.refresh()


@pytest.mark.usefixtures("fresh_registry")
def test_a_game_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(toy_game.__file__).read_text()
    (tmp_path / "coin_walk.py").write_text(text)
    (tmp_path / "my_games").mkdir()
    (tmp_path / "my_games" / "walk.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("coin_walk", "my_games.walk"):
        assert games.load(name).name == name
        env = make(name, num_envs=4)
        assert env.reset().shape == (4, 2, 6)
        assert env.step(torch.ones(4, dtype=torch.int64)).reward.shape == (4,)
    for name in ("coin_walk", "my_games.walk", "my_games"):
        monkeypatch.delitem(sys.modules, name)
    games.registry.refresh()
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(UserError, match=r"There is no game 'coin_walk'.* in the current folder or on the Python path"):
        make("coin_walk")


@pytest.mark.usefixtures("fresh_registry")
def test_a_game_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        metadata.EntryPoint("coins", "toy_game", "redline.games"),
        metadata.EntryPoint("lost", "no_such_module", "redline.games"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == "redline.games" else [])
    games.registry.refresh()
    assert {"coins", "snake", "tetris", "lost"} <= set(games.names())
    assert make("coins", cells=9).reset().shape == (1, 2, 9)
    assert list(games.failures()) == ["lost"]
    assert games.load("snake").name == "snake"


def test_events_record() -> None:
    """The names validation checks are those of the record."""
    assert Events._fields == ("score", "won", "truncated")
