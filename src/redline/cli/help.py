"""Help texts: the overview of all commands, and each command's options with type, default and description."""

from __future__ import annotations

import itertools
import shutil
import textwrap
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING
from typing import Any

from redline.cli import catalog
from redline.cli.command import Command, Request, by_position, own_options
from redline.cli.schema import Option
from redline.core.errors import UserError

_COLUMN = 32  # where the descriptions begin


def overview() -> str:
    """Return the text of `redline --help`."""
    lines = ["usage: redline COMMAND [OPTIONS]", ""]
    lines += [_entry(f"{name} {command.argument}", command.summary) for name, command in by_position().items()]
    lines += ["", "redline COMMAND --help shows a command's options; redline completion SHELL prints completions."]
    return "\n".join(lines)


def command_help(name: str, command: Command, words: list[str]) -> str:
    """Return the text of `redline NAME --help`; an environment in `words` adds its options and its algorithm's."""
    env, algo = _target(command, words)
    lines = [f"usage: {' '.join(filter(None, ('redline', name, env or command.argument, '[OPTIONS]')))}", ""]
    lines += [_wrap(f"{command.summary}.", ""), ""]
    if env:
        lines += [f"options of {env}:", *_entries(catalog.env_options(env), "env.")]
        if algo != "auto":
            lines += [
                "",
                f"options of {algo}:",
                *_entries(catalog.algorithm_options(algo), f"{catalog.group_of(algo)}."),
            ]
        lines += [
            "",
            f"Recipe and hardware may change these: redline doctor --env {env} shows the values for this machine.",
        ]
        lines += ["", f"General options, such as --steps, --num-envs and --device: redline {name} --help."]
        return "\n".join(lines)
    lines += ["options:", *_entries(own_options(command).values(), "")]
    if command.target:
        example = catalog.GAMES.names()[0]
        algorithms = ", ".join(f"--{algo}.*" for algo in catalog.ALGORITHMS.names())
        lines += ["", f"Options of the environment are --env.*, of the algorithm {algorithms}:"]
        lines += [f"redline train {example} --help shows those of {example}; add --algo NAME for another algorithm."]
    return "\n".join(lines)


def _target(command: Command, words: list[str]) -> tuple[str, str]:
    """Return the environment and algorithm for which help is requested; empty and auto if none is named."""
    if command.target is None or command.argument != "ENV":
        return "", "auto"
    pairs = list(itertools.pairwise(["", *words]))
    arguments = [word for before, word in pairs if not word.startswith("-") and before != "--algo"]
    named = [word for before, word in pairs if before == "--algo" and not word.startswith("-")]
    named += [word.partition("=")[2] for word in words if word.startswith("--algo=")]
    groups = [word[2:].partition(".")[0] for word in words if word.startswith("--") and "." in word]
    known = catalog.ALGORITHMS.names()
    chosen = [*named, *(group for group in groups if group in known)]
    for word in arguments:
        try:
            catalog.env_options(word)
        except UserError:
            continue
        algo = next((name for name in chosen if name != "auto"), "auto")
        request = Request([word], {"algo": algo})
        return word, command.target(request)[1] if algo != "auto" else catalog.default_algorithm(word)
    if arguments and not any(word.startswith("--") and word not in ("--help",) for word in words):
        catalog.env_options(arguments[0])  # raises UserError if the environment does not exist
    return "", "auto"


def _entries(options: Iterable[Option], prefix: str) -> list[str]:
    return [_entry(*describe(option, prefix)) for option in options]


def describe(option: Option, prefix: str = "") -> tuple[str, str]:
    """Return an option's flag with a placeholder for its value, and its description with the default."""
    flag = f"{prefix}{option.name.replace('_', '-')}"
    shown = f"--{flag}.NAME" if option.is_mapping else _spelling(option, flag)
    return f"{shown} {type_name(option.kind)}".rstrip(), f"{option.help} {_default(option)}".strip()


def _spelling(option: Option, flag: str) -> str:
    """Return an option's flag; a boolean option that is not off by default has two forms."""
    if not option.is_flag or option.default is False:
        return f"--{flag}"
    return f"--{flag} / --no-{flag}" if option.default is True else f"--[no-]{flag}"


def _default(option: Option) -> str:
    if option.is_mapping or option.default is MISSING or option.default is ...:
        return ""
    if option.default is None and type_name(option.kind) == "TEXT":
        return ""
    return f"[{default_text(option.default)}]"


def default_text(value: Any) -> str:
    """Return a default as a user would type it."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or "none"
    return f"{value:,}".replace(",", "_") if isinstance(value, int) and value >= 10_000 else str(value) or "none"


def type_name(kind: Any) -> str:
    """Return the placeholder for a value of a type: N, X, TEXT, a|b; empty for a flag."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        names = dict.fromkeys(type_name(part) for part in arguments if part not in (type(None), str))
        return "|".join(names) if names else "TEXT"
    if origin is typing.Literal:
        return "|".join(map(str, arguments))
    if origin is tuple:
        one = type_name(arguments[0])
        return f"{one},{one},…"
    return {bool: "", int: "N", float: "X"}.get(kind, "VALUE" if origin is dict or kind is dict else "TEXT")


def _entry(left: str, text: str) -> str:
    """Return an indented entry: `left`, then `text` wrapped in its column, starting on the next line if `left` is long."""
    body = _wrap(text, " " * _COLUMN)
    if len(left) + 4 > _COLUMN:
        return f"  {left}\n{body}" if text else f"  {left}"
    return f"  {left:<{_COLUMN - 3}} {body.lstrip()}".rstrip()


def _wrap(text: str, indent: str) -> str:
    width = min(max(shutil.get_terminal_size((110, 24)).columns, 60), 120)
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
