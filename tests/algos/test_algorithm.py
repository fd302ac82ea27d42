"""Algorithm: names, defaults of optional members, and a sentence for each member that is missing or wrong."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from redline import algos
from redline.algos import ppo
from redline.algos.algorithm import from_module
from redline.algos.learner import Learner
from redline.core.errors import UserError


def test_names_are_those_of_modules_with_a_learner() -> None:
    assert {"dqn", "ppo", "pqn"} <= set(algos.names())
    assert not {"learner", "networks", "optimizer", "on_policy", "algorithm"} & set(algos.names())
    assert algos.failures() == {}


def test_an_unknown_name() -> None:
    with pytest.raises(UserError, match=r"There is no algorithm 'dqm'; did you mean 'dqn'\? Algorithms: .*dqn"):
        algos.load("dqm")
    with pytest.raises(UserError, match=r"There is no algorithm 'xyzzy'\. Algorithms: "):
        algos.load("xyzzy")


def test_algorithms_with_a_replay_memory_are_known_by_their_options() -> None:
    found = algos.with_option("replay_capacity")
    assert found
    assert all("replay_capacity" in algos.load(name).options for name in found)
    assert set(found) < set(algos.names())


@pytest.fixture
def members() -> dict[str, Any]:
    """Everything a module must define."""
    names = ("Config", "Learner", "select_actions", "acting_network", "policy_network")
    return {name: getattr(ppo, name) for name in names}


def module(members: dict[str, Any]) -> types.ModuleType:
    made = types.ModuleType("mine")
    vars(made).update(members)
    return made


def test_optional_members_have_defaults(members: dict[str, Any]) -> None:
    algorithm = from_module("my_package.mine", module(members))
    assert (algorithm.name, algorithm.group) == ("my_package.mine", "mine")
    assert (algorithm.POLICY_OUTPUTS, algorithm.RESUME_FIXED, algorithm.PRESETS) == ((), (), {})
    assert algorithm.STOCHASTIC is False
    config = algorithm.Config()
    assert algorithm.fill_defaults(config, 8, ()) == (config, {})
    assert algorithm.memory_bytes(config, None, 1, 8) == {}  # type: ignore[arg-type]
    assert algorithm.samples_per_step(config, 8, 1) == 1.0


@pytest.mark.parametrize("name", ["Config", "Learner", "select_actions", "acting_network", "policy_network"])
def test_a_missing_member_is_named(name: str, members: dict[str, Any]) -> None:
    del members[name]
    with pytest.raises(UserError, match=rf"^The algorithm 'mine' has no {name}; expected a "):
        from_module("mine", module(members))


class NoDataclass:
    batch_size = 1


@dataclass(frozen=True)
class NoDefault:
    batch_size: int


@dataclass
class NotFrozen:
    batch_size: int = 1


@dataclass(frozen=True)
class NoBatchSize:
    learning_rate: float = 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Config", NoDataclass),
        ("Learner", NoDataclass),
        ("Learner", 3),
        ("select_actions", "greedy"),
        ("POLICY_OUTPUTS", ["value"]),
        ("RESUME_FIXED", "gamma"),
        ("STOCHASTIC", "yes"),
        ("PRESETS", {"fast": 3}),
        ("memory_bytes", 12),
    ],
)
def test_a_wrong_member_is_named(name: str, value: Any, members: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"^{name} of the algorithm 'mine' is .*; expected "):
        from_module("mine", module(members | {name: value}))


@pytest.mark.parametrize(
    ("config", "problem"),
    [(NoDefault, "has no default for batch_size"), (NotFrozen, "is not frozen"), (NoBatchSize, "has no batch_size")],
)
def test_the_fault_of_a_config_is_named(config: type, problem: str, members: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"^Config of the algorithm 'mine' {problem}; expected a frozen dataclass"):
        from_module("mine", module(members | {"Config": config}))


def test_a_learner_with_methods_missing_is_refused(members: dict[str, Any]) -> None:
    class Half(Learner):
        def update(self) -> None:
            """Learn nothing."""

    with pytest.raises(
        UserError, match=r"^The Learner of the algorithm 'mine' does not define acting_network, ingest, "
    ):
        from_module("mine", module(members | {"Learner": Half}))


@pytest.mark.parametrize(("name", "value"), [("RESUME_FIXED", ("gama",)), ("PRESETS", {"fast": {"gama": 0.5}})])
def test_an_option_that_does_not_exist_is_named(name: str, value: Any, members: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"of the algorithm 'mine' names gama, which is no option"):
        from_module("mine", module(members | {name: value}))


@pytest.fixture
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; modules imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    algos.registry.refresh()


def test_a_module_of_the_current_folder_is_an_algorithm(current_folder: Path) -> None:
    (current_folder / "ours").mkdir()
    text = (
        "from redline.algos import ppo\nfrom redline.algos.ppo import *\nConfig = ppo.Config\nLearner = ppo.Learner\n"
    )
    text += (
        "select_actions, acting_network = ppo.select_actions, ppo.acting_network\npolicy_network = ppo.policy_network\n"
    )
    (current_folder / "ours" / "other.py").write_text(text)
    (current_folder / "outside_ppo.py").write_text(text)
    assert algos.load("outside_ppo").group == "outside_ppo"
    assert (algos.load("ours.other").name, algos.load("ours.other").group) == ("ours.other", "other")
    assert "outside_ppo" not in algos.names()
