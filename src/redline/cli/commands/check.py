"""`redline check MODULE`: run the game contract on a game, such as one of your own."""

from __future__ import annotations

from dataclasses import dataclass

from redline.cli import catalog
from redline.cli.command import Command, Request, options_of


@dataclass(frozen=True)
class CheckOptions:
    """Options of `redline check`."""

    oracle: str | None = None  # module with the same rules in plain Python, compared step by step
    compiled: bool = False  # also compare the compiled game with the eager one, which takes about a minute


def run(request: Request) -> int:
    """Print the outcome of every check; exit code 1 where the game breaks the contract."""
    options, name = request.build(CheckOptions), request.arguments[0]
    catalog.env_options(name)  # a missing module is an error of its own
    from redline.testing import check_game

    report = check_game(name, options.oracle, options.compiled)
    if request.json:
        checks = [check._asdict() for check in report.checks]
        request.print_json({"game": report.game, "ok": report.ok, "checks": checks, "notes": list(report.notes)})
    else:
        print(report)
    return 0 if report.ok else 1


COMMAND = Command("run the game contract on a game of your own", run, "MODULE", options_of(CheckOptions), position=8)
