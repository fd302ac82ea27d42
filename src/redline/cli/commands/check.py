"""`redline check MODULE`: run the game contract on a game, such as one of your own."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from redline.cli import catalog
from redline.cli.command import Command, Request, options_of, show_progress
from redline.core.errors import UserError


@dataclass(frozen=True)
class CheckOptions:
    """Options of `redline check`."""

    oracle: str | None = None  # module with the same rules in plain Python [MODULE_oracle, where there is one]
    compiled: bool = False  # also compare the compiled game with the eager one, which takes about a minute


def run(request: Request) -> int:
    """Print the outcome of each check as soon as it has run; return 1 if the game breaks the contract."""
    options, name = request.build(CheckOptions), request.arguments[0]
    catalog.env_options(name)  # a missing module is a UserError
    if name.partition(":")[0] in catalog.cpu_kinds():
        raise UserError(
            f"redline check runs the contract of tensor games, and {name} is a CPU environment; Gymnasium's own "
            "gymnasium.utils.env_checker.check_env checks one."
        )
    with show_progress(f"check {name}", erase=True):
        from redline.testing import check_game

    show = None if request.json else functools.partial(print, flush=True)
    report = check_game(name, options.oracle, options.compiled, show=show)
    if request.json:
        checks = [check._asdict() for check in report.checks]
        request.print_json({"game": report.game, "ok": report.ok, "checks": checks, "notes": list(report.notes)})
    else:
        print("\n".join(report.closing_lines()))
    return 0 if report.ok else 1


COMMAND = Command("run the game contract on a game of your own", run, "MODULE", options_of(CheckOptions), position=8)
