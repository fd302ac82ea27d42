"""What the tests share: every game, and every way of playing it, taken from the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import settings

from redline import games

torch.set_num_threads(1)  # the tensors here are too small to share out
settings.register_profile("redline", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("redline")


class Variant(NamedTuple):
    """A game and the settings that differ from its own."""

    game: str
    options: dict[str, Any]
    label: str


def variants(name: str) -> list[Variant]:
    """The game as it comes, and with each alternative of its choices."""
    config = games.load(name).Config
    found = [Variant(name, {}, "")]
    for option, kind in get_type_hints(config).items():
        if get_origin(kind) is Literal:
            default = getattr(config(), option)
            found += [Variant(name, {option: other}, f"-{other}") for other in get_args(kind) if other != default]
    return found


def odd_rewards(name: str) -> Variant:
    """The game with rewards that no binary fraction can hold: their sums show every difference in rounding."""
    fields = [field for field in dataclasses.fields(games.load(name).Config) if field.name.startswith("reward_")]
    return Variant(name, {field.name: field.default + 0.1 for field in fields}, "-rewards")


SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")  # written by `pytest --write-slow-tests`
_SLOW_SECONDS = 0.4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out the tests listed in tests/slow_tests.txt")
    parser.addoption("--write-slow-tests", action="store_true", help="measure all tests and write that list anew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --fast, drop the slow tests. A listed name without parameters stands for all its parameters."""
    if not config.getoption("--fast"):
        return
    slow = set(SLOW_TESTS.read_text(encoding="utf-8").split("\n"))
    dropped = [item for item in items if item.nodeid.partition("[")[0] in slow]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item.nodeid.partition("[")[0] not in slow]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """With --write-slow-tests, list every test function of which one case took longer than _SLOW_SECONDS."""
    if not config.getoption("--write-slow-tests"):
        return
    seconds: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    names = {name.partition("[")[0] for name, spent in seconds.items() if spent > _SLOW_SECONDS}
    SLOW_TESTS.write_text("\n".join(sorted(names)) + "\n", encoding="utf-8")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `game_name`, `variant` or `any_variant` (odd rewards too) runs for all there are."""
    if "game_name" in metafunc.fixturenames:
        metafunc.parametrize("game_name", games.names())
    every = [variant for name in games.names() for variant in variants(name)]
    for fixture, chosen in (("variant", every), ("any_variant", [*every, *map(odd_rewards, games.names())])):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, chosen, ids=lambda variant: variant.game + variant.label)


@pytest.fixture
def looks_uniform() -> Callable[[torch.Tensor], bool]:
    """Chi-square of counts that should be equal: no farther from what chance gives than five standard deviations."""

    def plausible(counts: torch.Tensor) -> bool:
        expected, free = counts.double().mean(), counts.numel() - 1
        statistic = ((counts.double() - expected) ** 2 / expected).sum().item()
        return abs(statistic - free) < 5 * (2 * free) ** 0.5

    return plausible
