"""`redline check MODULE`: run the game contract on a game, such as one of your own."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from redline.cli.command import Command, Request, options_of


@dataclass(frozen=True)
class CheckOptions:
    """Options of `redline check`."""

    oracle: str | None = None  # module with a plain-Python version of the rules to compare with


def run(request: Request) -> int:
    """Run the contract; the first rule that is broken is the error message."""
    options = request.build(CheckOptions)
    testing: Any = importlib.import_module("redline.testing")
    name = request.arguments[0]
    checked = testing.check_game(name, oracle=options.oracle)
    if request.json:
        request.print_json({"game": name, "checks": list(checked or ())})
    else:
        print(f"{name} keeps the game contract.")
    return 0


COMMAND = Command("run the game contract on a game of your own", run, "MODULE", options_of(CheckOptions), position=8)
