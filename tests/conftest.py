"""Shared fixtures: every game of the registry, and every way of playing it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from failures_at_once import FailuresAtOnce
from redline import games, testing
from redline.run import progress
from redline.testing import Variant

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, which tests of signals would inherit
torch.set_num_threads(1)  # the tensors here are too small for more
os.environ["OMP_NUM_THREADS"] = "1"  # nor do runs, also those in other processes, measure how many to use
progress._DOT_SECONDS = 600.0  # what is printed must not depend on how busy the machine is
settings.register_profile("redline", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("redline")


@pytest.fixture(scope="session", autouse=True)
def _signing_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the key that signs runs out of the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


def variants(name: str) -> list[Variant]:
    """Return the game as it comes, and with each alternative of its choices."""
    return testing.variants(name, games.load(name).Config)


def odd_rewards(name: str) -> Variant:
    """Return the game with rewards that are no binary fractions: their sums show every difference in rounding."""
    return testing.odd_rewards(name, games.load(name).Config)


def variant_id(variant: Variant) -> str:
    """Return the game's name and the choice, as `snake-centred`."""
    if variant.label == "odd rewards":
        return f"{variant.game}-rewards"
    return "-".join([variant.game, *map(str, variant.options.values())])


SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")  # written by `pytest --write-slow-tests`
_SLOW_SECONDS = 0.4
# What compiles, most of all Tetris. Begun last, such a test would keep one process busy long after all others have ended.
LONG_ON_A_GPU = re.compile(r"compiled|single_word|never_waits|masked|afterstates")


def pytest_configure(config: pytest.Config) -> None:
    """Name failures at once, in the process that reports."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out the tests listed in tests/slow_tests.txt")
    parser.addoption("--write-slow-tests", action="store_true", help="measure all tests and write that list anew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal out long GPU tests first. With --fast, drop the slow tests: a name without parameters stands for all of them."""
    items.sort(key=lambda item: not (item.get_closest_marker("gpu") and LONG_ON_A_GPU.search(item.nodeid)))
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
    """Run tests with a parameter `game_name`, `variant` or `any_variant` (odd rewards too) for all of them."""
    if "game_name" in metafunc.fixturenames:
        metafunc.parametrize("game_name", games.names())
    every = [variant for name in games.names() for variant in variants(name)]
    for fixture, chosen in (("variant", every), ("any_variant", [*every, *map(odd_rewards, games.names())])):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, chosen, ids=variant_id)


@pytest.fixture
def looks_uniform() -> Callable[[torch.Tensor], bool]:
    """Return a test that counts are uniform: chi-square within five standard deviations of its mean."""

    def plausible(counts: torch.Tensor) -> bool:
        expected, free = counts.double().mean(), counts.numel() - 1
        statistic = ((counts.double() - expected) ** 2 / expected).sum().item()
        return abs(statistic - free) < 5 * (2 * free) ** 0.5

    return plausible
