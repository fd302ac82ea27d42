"""Every registered game keeps the contract, in every way of playing it."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
import torch

from redline import games, oracles
from redline.core.errors import UserError
from redline.core.records import leaves
from redline.envs import make_rules
from redline.testing import CHECKS, check_game
from redline.testing.against_oracle import check_oracle


@pytest.mark.fault("G9")
@pytest.mark.parametrize("check", CHECKS)
def test_the_contract(check: str, any_variant: Any) -> None:
    CHECKS[check](make_rules(any_variant.game, any_variant.options))


@pytest.mark.fault("G9")
def test_the_oracle(any_variant: Any) -> None:
    """Bit for bit, rewards included."""
    if any_variant.game not in oracles.names():
        pytest.skip(f"{any_variant.game} has no oracle")
    rules = make_rules(any_variant.game, any_variant.options)
    check_oracle(rules, oracles.load(any_variant.game), num_envs=16, tolerance=0.0)


def test_state_is_small(game_name: str) -> None:
    """Replay stores the fields that observations read: 120 bytes a game at most with the default options."""
    game = games.load(game_name)
    state = game.init(game.Config(), torch.zeros(1, dtype=torch.int32))
    sizes = {name: x.numel() * x.element_size() for name, x in leaves(state).items()}
    assert sum(size for name, size in sizes.items() if name not in game.HIDDEN) <= 120
    assert sum(sizes.values()) <= 160


def test_a_game_with_the_required_members_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered by an entry point, without legal, cells, PALETTE, HIDDEN, LIVE or VERSION."""
    point = metadata.EntryPoint("coins", "toy_game", "redline.games")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == "redline.games" else [])
    games.registry.refresh()
    try:
        assert "coins" in games.names()
        report = check_game("coins")
        assert report.ok, report
    finally:
        monkeypatch.undo()
        games.registry.refresh()


@pytest.mark.parametrize("wrong", ["", "snak", "tetris2", "../snake"])
def test_unknown_game(wrong: str) -> None:
    with pytest.raises(UserError, match=r"There is no game '.*'.* Games: .*snake.*\.$"):
        games.load(wrong)
