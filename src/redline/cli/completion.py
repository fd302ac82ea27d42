"""Shell completion: an argparse parser with every command and option, from which shtab generates the script."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable

import shtab

from redline.cli import catalog
from redline.cli.command import Command, by_position, own_options
from redline.cli.schema import Option

_FILES = {"config": shtab.FILE, "gif": shtab.FILE, "curriculum_file": shtab.FILE, "out": shtab.FILE}
_FOLDERS = {"run_dir": shtab.DIRECTORY, "folder": shtab.DIRECTORY}


def script(shell: str) -> str:
    """Return the completion script of `redline` for a shell."""
    text: str = shtab.complete(parser(), shell=shell)
    return text


def parser() -> argparse.ArgumentParser:
    """Return an argparse parser with all commands and options, only for generating completions."""
    root = argparse.ArgumentParser("redline", add_help=True)
    commands = root.add_subparsers()
    for name, command in by_position().items():
        sub = commands.add_parser(name, help=command.summary)
        _add_argument(sub, command)
        _add_options(sub, own_options(command).values(), "")
        if command.target:
            _add_options(sub, _union(catalog.all_env_options()), "env.")
            for algo in catalog.ALGORITHMS.names():
                _add_options(sub, catalog.algorithm_options(algo), f"{algo}.")
    return root


def _add_argument(sub: argparse.ArgumentParser, command: Command) -> None:
    argument = command.argument.partition("]")[0].strip("[")
    if argument == "ENV":
        sub.add_argument("env", choices=[*catalog.GAMES.names(), *(f"{kind}:" for kind in catalog.cpu_kinds())])
    elif argument == "SHELL":
        from redline.cli.commands.completion import SHELLS

        sub.add_argument("shell", choices=SHELLS)
    elif "|" in argument:
        sub.add_argument("kind", choices=argument.split("|"))
    elif argument.startswith("RUN"):
        sub.add_argument("run", nargs="+" if "..." in argument else None).complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif argument:
        sub.add_argument("argument")


def _add_options(sub: argparse.ArgumentParser, options: Iterable[Option], prefix: str) -> None:
    for option in options:
        flag = f"--{prefix}{option.name.replace('_', '-')}"
        text = option.help.replace("%", "%%")
        if option.is_flag:
            negated = f"--no-{prefix}{option.name.replace('_', '-')}"
            sub.add_argument(flag, negated, action="store_true", help=text)
            continue
        choices = _choices(option)
        action = sub.add_argument(flag, help=text, choices=choices)
        files = _FILES | _FOLDERS
        if not prefix and option.name in files:
            action.complete = files[option.name]  # type: ignore[attr-defined]


def _choices(option: Option) -> list[str] | None:
    if typing.get_origin(option.kind) is typing.Literal:
        return [str(choice) for choice in typing.get_args(option.kind)]
    if option.name == "algo":
        return ["auto", *catalog.ALGORITHMS.names()]
    return None


def _union(options: Iterable[Option]) -> list[Option]:
    """Return the options, with duplicate names removed."""
    return list({option.name: option for option in options}.values())
