"""Commands of the command line: Command, their registry, and Request, the words of one invocation.

A command is a module in `redline/cli/commands` that defines `COMMAND`, named by its file. Command modules import torch
and everything that needs it inside their `run` function, so that help and usage errors appear immediately.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from redline.cli import schema, streams
from redline.cli.schema import Option
from redline.core.errors import UserError
from redline.core.registry import Registry, defines
from redline.run.options import build

if TYPE_CHECKING:
    from redline.run.progress import Progress

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """The words given to a command, not yet parsed by type."""

    arguments: list[str] = field(default_factory=list)  # positional, in order
    options: dict[str, Any] = field(default_factory=dict)  # by name; group options as env.NAME and ALGO.NAME
    json: bool = False  # --json

    def build(self, kind: type[T]) -> T:
        """Return the options as a dataclass of type `kind`."""
        return build(kind, self.options, "")

    def print_json(self, record: dict[str, Any]) -> None:
        """Print the JSON object of `--json` as the last line of standard output."""
        streams.write(json.dumps(record, default=str) + "\n")


@dataclass(frozen=True)
class Command:
    """One command: its arguments, its options and the function that runs it."""

    summary: str  # one line for the overview
    run: Callable[[Request], int]  # returns the exit code
    argument: str = ""  # positional argument in the usage line; in brackets: optional; with "...": several
    options: Callable[[], tuple[Option, ...]] = tuple
    # Environment and algorithm whose options (--env.*, --ALGO.*) the command takes as well; either may be empty.
    target: Callable[[Request], tuple[str, str]] | None = None
    position: int = 100  # place in the overview


def options_of(kind: type) -> Callable[[], tuple[Option, ...]]:
    """Return a function that reads the options of a dataclass from its source."""
    return lambda: schema.read_options(kind.__module__, kind.__qualname__)


def check_least(options: Any, **minima: float) -> None:
    """Raise UserError for an option below its minimum."""
    for name, least in minima.items():
        if (value := getattr(options, name)) < least:
            raise UserError(f"{name} is {value:g}; expected at least {least:g}.")


def show_progress(title: str, erase: bool = False, quiet: bool = False) -> Progress:
    """Return a command's progress display, which first shows that torch is loading. Enter it before importing torch.

    erase: remove the panel from a terminal at the end. quiet: show nothing.
    """
    from redline.run.progress import Progress

    progress = Progress(title, erase=erase, quiet=quiet)
    progress.start_activity("Loading PyTorch", announce="torch" not in sys.modules)
    return progress


def _build(name: str, module: Any) -> Command:
    command = getattr(module, "COMMAND", module)
    if not isinstance(command, Command):
        raise UserError(f"The command '{name}' is not a redline.cli.command.Command.")
    return command


COMMANDS: Registry[Command] = Registry(
    "command", "redline.cli.commands", "redline.commands", defines("COMMAND"), _build
)


def by_position() -> dict[str, Command]:
    """Return all commands that can be imported, in the order of the overview."""
    failures = COMMANDS.failures()
    commands = {name: COMMANDS.load(name) for name in COMMANDS.names() if name not in failures}
    return dict(sorted(commands.items(), key=lambda item: (item[1].position, item[0])))


def own_options(command: Command) -> dict[str, Option]:
    """Return a command's own options by name, `--json` last."""
    json_option = Option("json", bool, False, "print one JSON object as the last line of standard output")
    return {option.name: option for option in (*command.options(), json_option)}
