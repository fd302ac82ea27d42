"""Check a game against the contract of `redline.games`: `check_game("my_package.twenty48")`, or `redline check`.

Every check runs with the default options and with each alternative of options that are choices (`Literal`, `bool`).
A failure names the step, the environment and the action of the first difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch

from redline import games, oracles
from redline.core.errors import UserError, code_place
from redline.core.registry import ImportFailed, UnknownName
from redline.envs.batch import Rules
from redline.games import _contract
from redline.testing.against_oracle import check_oracle
from redline.testing.checks import CHECKS, check_compiled, check_gpu
from redline.testing.play import NUM_ENVS, STEPS, Broken

__all__ = ["CHECKS", "Broken", "Check", "Report", "Variant", "check_game", "odd_rewards", "variants"]


class Variant(NamedTuple):
    """A way to play a game: options that differ from the defaults."""

    game: str
    options: dict[str, Any]
    label: str


class Check(NamedTuple):
    """The outcome of one check with one set of options."""

    name: str
    variant: str  # empty for the default options
    failure: str  # empty: passed


@dataclass(frozen=True)
class Report:
    """The outcome of all checks of a game; printed, one line per check."""

    game: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()  # checks that were skipped, and why

    @property
    def ok(self) -> bool:
        return not any(check.failure for check in self.checks)

    @property
    def failures(self) -> list[str]:
        return [
            f"{check.name}{check.variant and f' ({check.variant})'}: {check.failure}"
            for check in self.checks
            if check.failure
        ]

    def lines(self) -> list[str]:
        """Return a line for each check that passed with all options, a line for each failure, and the closing lines."""
        lines = []
        for _, group in itertools.groupby(self.checks, key=lambda check: check.name):
            lines += _lines(list(group))
        return [*lines, *self.closing_lines()]

    def closing_lines(self) -> list[str]:
        """Return the lines that follow the checks: notes and the verdict."""
        verdict = f"{self.game} {'keeps the contract' if self.ok else 'breaks the contract'}."
        return [*(f"note   {note}" for note in self.notes), verdict]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _lines(checks: list[Check]) -> list[str]:
    """Return the lines of one check with all options."""
    failed = [check for check in checks if check.failure]
    if not failed:
        return [f"ok     {checks[0].name}"]
    return [f"FAILED {check.name}{check.variant and f' ({check.variant})'}: {check.failure}" for check in failed]


def variants(name: str, config: type[Any]) -> list[Variant]:
    """Return the default options, and each alternative of options that are choices, except invalid combinations."""
    chosen, defaults = [Variant(name, {}, "")], config()
    for option, kind in get_type_hints(config).items():
        choices = get_args(kind) if get_origin(kind) is Literal else (False, True) if kind is bool else ()
        for choice in choices:
            if choice != getattr(defaults, option) and _possible(config, {option: choice}):
                chosen.append(Variant(name, {option: choice}, f"{option}={choice}"))
    return chosen


def odd_rewards(name: str, config: type[Any]) -> Variant:
    """Return options with rewards that are not binary fractions, so that sums reveal any difference in rounding."""
    defaults = vars(config())
    rewards = {
        name: value + 0.1 for name, value in defaults.items() if name.startswith("reward_") and type(value) is float
    }
    return Variant(name, rewards, "odd rewards")


def check_game(
    game: str | ModuleType | Any,
    oracle: str | ModuleType | type[oracles.Oracle] | None = None,
    compiled: bool = False,
    num_envs: int = NUM_ENVS,
    steps: int = STEPS,
    show: Callable[[str], None] | None = None,
) -> Report:
    """Check a game, given by name or as a module, against the contract and, if there is one, its oracle.

    oracle: an Oracle class, a module that defines one, or its import name. By default the game's own: a
        built-in game's oracle, or for a module `catch` the module `catch_oracle` next to it.
    compiled: also compare the compiled step with the eager one; needs a C++ compiler and about a minute.
    show: called with the lines of each check as soon as it has run with all options.

    Raise UserError if there is no such game or oracle, or if its module cannot be imported.
    """
    name = game if isinstance(game, str) else getattr(game, "__name__", type(game).__name__)
    notes: list[str] = []
    try:
        loaded = games.load(game) if isinstance(game, str) else _contract.build(name, game)
    except (UnknownName, ImportFailed):
        raise
    except UserError as error:
        failed = Check("members", "", str(error))
        _show(show, [failed])
        return Report(name, (failed,))
    reference = _find_oracle(name, oracle)
    checks: dict[str, Callable[[Rules], None]] = dict(CHECKS)
    if reference is None:
        notes.append("There is no oracle: the rules themselves were not compared with anything.")
    else:
        checks["oracle"] = lambda rules: check_oracle(rules, reference, num_envs, steps)
    if torch.cuda.is_available():
        checks["GPU equals CPU"] = lambda rules: check_gpu(rules, num_envs, steps)
    else:
        notes.append("There is no GPU: the game was checked on the CPU only.")
    if compiled:
        checks["compiled equals eager"] = lambda rules: check_compiled(rules, num_envs, steps)
    outcomes: list[Check] = []
    chosen = variants(name, loaded.Config)
    if odd := odd_rewards(name, loaded.Config).options:
        chosen.append(Variant(name, odd, "odd rewards"))
    rules = {variant.label: Rules(loaded, loaded.Config(**variant.options), 0) for variant in chosen}
    for title, check in checks.items():
        of_check = [Check(title, label, _run(check, variant_rules)) for label, variant_rules in rules.items()]
        _show(show, of_check)
        outcomes += of_check
    return Report(name, tuple(outcomes), tuple(notes))


def _show(show: Callable[[str], None] | None, checks: list[Check]) -> None:
    if show:
        for line in _lines(checks):
            show(line)


def _run(check: Callable[[Rules], None], rules: Rules) -> str:
    """Return the failure message of a check, or an empty string if it passes."""
    try:
        with torch.no_grad():
            check(rules)
    except (Broken, UserError) as error:
        return str(error)
    except Exception as error:
        place = code_place(error, getattr(rules.game.module, "__file__", None))
        return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
    return ""


def _find_oracle(name: str, oracle: Any) -> type[oracles.Oracle] | None:
    if oracle is None:
        return oracles.find(name)
    if isinstance(oracle, str):
        return oracles.load(oracle)
    reference: type[oracles.Oracle] = getattr(oracle, "Oracle", oracle)
    return reference


def _possible(config: type[Any], options: dict[str, Any]) -> bool:
    try:
        config(**options)
    except UserError:
        return False
    return True
