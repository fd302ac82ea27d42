"""Parse the words after a command into a Request, and check them without importing torch.

Words may come in any order. An option is `--name VALUE` or `--name=VALUE` with hyphens or underscores, a flag `--name`,
`--no-name` or `--name=false`. Every mistake raises UserError with one sentence and the most similar valid name.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from redline.cli import catalog
from redline.cli.command import Command, Request, own_options
from redline.cli.schema import Option
from redline.core.errors import UserError, nearest
from redline.run.options import parse_value
from redline.run.settings import ALGO_SHORTHANDS

_MAX_CONFIG = 1 << 20  # bytes of a --config file


def parse(name: str, command: Command, words: list[str]) -> Request:
    """Return the request from the `words` after the command `name`, checked as far as possible from source code."""
    request = split(name, command, words)
    check(command, request)
    return request


def split(name: str, command: Command, words: list[str]) -> Request:
    """Return words split into positional arguments and options by name, without checking values."""
    own = own_options(command)
    flags = {option.name for option in own.values() if option.is_flag}
    several, takes_groups = "..." in command.argument, command.target is not None
    arguments: list[str] = []
    options: dict[str, Any] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            if not command.argument or (arguments and not several):
                raise UserError(f"redline {name} does not know what to do with '{word}'; see redline {name} --help.")
            arguments.append(word)
            continue
        key, equals, value = word[2:].partition("=")
        plain = key.replace("-", "_")
        in_group = takes_groups and "." in plain
        negated = plain.removeprefix("no_") if plain.startswith("no_") else ""
        if plain in flags or (in_group and _is_group_flag(command, plain, arguments, options)):
            if in_group and not equals and arguments and queue and not queue[0].startswith("--"):
                options[plain] = queue.pop(0)  # --dqn.double false
            else:
                options[plain] = value if equals else True
        elif negated in flags or (negated and in_group and _is_group_flag(command, negated, arguments, options)):
            if equals:
                raise UserError(f"--{key} takes no value; see redline {name} --help.")
            options[negated] = False
        elif in_group or plain in own:
            if not equals:
                if not queue or (queue[0].startswith("--") and not queue[0][2:3].isdigit()):
                    raise UserError(f"--{key} needs a value; see redline {name} --help.")
                value = queue.pop(0)
            options[plain] = value
        else:
            hint = nearest(plain, own, "--").replace("_", "-") or "."
            raise UserError(f"redline {name} has no option --{key}{hint}")
    if command.argument and not arguments and not command.argument.startswith("["):
        raise UserError(f"redline {name} needs {command.argument}; see redline {name} --help.")
    as_json = parse_value(bool, str(options.pop("json", False)), "json")
    return Request(arguments, options, as_json)


def _is_group_flag(command: Command, key: str, arguments: list[str], options: Mapping[str, Any]) -> bool:
    """Return whether `env.NAME` or `ALGO.NAME` is a flag of the environment named so far, or of any registered one."""
    group, _, name = key.partition(".")
    if group == "env" and command.target:
        env, _ = command.target(Request(list(arguments), dict(options)))
        if env and catalog.is_outside(env):
            return any(option.name == name and option.is_flag for option in catalog.env_options(env))
    return key in catalog.group_flags()


def check(command: Command, request: Request) -> None:
    """Raise UserError for an unknown name or a value of the wrong type among a request's options."""
    own = own_options(command)
    grouped: dict[str, dict[str, Any]] = {}
    for key, word in request.options.items():
        group, dot, name = key.partition(".")
        if dot:
            grouped.setdefault(group, {})[name] = word
        else:
            _check_value(own[key], word, key)
    if command.target is None:
        return
    env, algo = command.target(request)
    schemas = {"env": catalog.env_options(env)} if env else {}
    if algo != "auto":
        schemas[catalog.group_of(algo)] = catalog.algorithm_options(algo)
    for group, words in grouped.items():
        if group not in schemas:
            if algo != "auto" or group not in catalog.ALGORITHMS.names():
                raise UserError(_unknown_group(group, algo))
            schemas[group] = catalog.algorithm_options(group)
        _check_group(group, schemas[group], words)


def _check_group(group: str, options: tuple[Option, ...], words: Mapping[str, Any]) -> None:
    known = {option.name: option for option in options}
    for name, word in words.items():
        first, dot, _ = name.partition(".")
        if dot and first in known and known[first].is_mapping:
            continue  # --env.kwargs.NAME: only the environment knows which names are valid
        if name in known and known[name].is_mapping and isinstance(word, str):
            raise UserError(f"{group}.{name} needs a name: give --{group}.{name}.NAME VALUE for each.")
        if name in known:
            _check_value(known[name], word, f"{group}.{name}")
        elif known:  # else the options cannot be read from source: importing the module checks them
            raise UserError(f"There is no option {group}.{name}{nearest(name, known) or '.'}")


def _check_value(option: Option, word: Any, key: str) -> None:
    if isinstance(word, str) and not option.is_mapping:
        parse_value(option.kind, word, key)


def _unknown_group(group: str, algo: str) -> str:
    if algo != "auto":
        return f"There is no option group {group}.*; with --algo {algo} there are env.* and {catalog.group_of(algo)}.*."
    groups = ", ".join(f"{name}.*" for name in catalog.ALGORITHMS.names())
    return f"There is no option group {group}.*; there are env.* and those of the algorithms: {groups}."


def read_config(path: str) -> dict[str, Any]:
    """Return the options in a TOML file, by name: top-level keys, and the tables `[env]` and `[ALGO]`."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MAX_CONFIG + 1)
        if len(text) > _MAX_CONFIG:
            raise UserError(f"config {path} has more than {_MAX_CONFIG:,} bytes; expected a short TOML file.")
        return dict(_flatten(tomllib.loads(text.decode()), ""))
    except OSError as error:
        raise UserError(f"config {path} could not be read: {error.strerror}.") from error
    except RecursionError as error:
        raise UserError(f"config {path} is nested too deeply.") from error
    except ValueError as error:  # invalid TOML or UTF-8, a number with thousands of digits, or a null byte in the path
        raise UserError(f"config {path} is not valid TOML: {error}.") from error


def fold(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with all `env.kwargs.NAME` collected into one mapping, `env.kwargs`, and their words parsed."""
    folded: dict[str, Any] = {}
    for key, word in options.items():
        group, _, rest = key.partition(".")
        option, dot, name = rest.partition(".")
        if dot:
            folded.setdefault(f"{group}.{option}", {})[name] = _value(word) if isinstance(word, str) else word
        else:
            folded[key] = word
    return folded


def _value(word: str) -> Any:
    """Return the value of a word: a number, true, false, null, a list, or else the text itself."""
    if word in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[word]
    try:
        return json.loads(word)
    except ValueError:
        return word


def _flatten(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = prefix + key.replace("-", "_")
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        elif name.count(".") > 1:
            yield prefix + key, value  # a value of --env.kwargs: any type, under a name that the environment defines
        elif isinstance(value, bool):
            yield name, value
        elif isinstance(value, list):
            yield name, ",".join(map(str, value))
        else:
            yield name, str(value)


def _overrides(given: Mapping[str, Any], key: str) -> bool:
    """Return whether the command line sets an option of the file, possibly under its other spelling, like --dqn.n-step."""

    def meaning(option: str) -> str:
        group, _, name = option.rpartition(".")
        name = "train_every" if name == "rollout_steps" else name
        return name if name in ALGO_SHORTHANDS and group != "env" else option

    return meaning(key) in map(meaning, given)


def merge_config(name: str, command: Command, request: Request) -> Request:
    """Return the request with the options of its `--config` file added; the command line takes precedence."""
    path = request.options.get("config")
    if path is None:
        return request
    own = own_options(command)
    known = own.keys() - {"config", "print_config", "json"}
    words = read_config(str(path))
    for key in words:
        if "." not in key and key not in known:
            raise UserError(f"config {path}: redline {name} has no option {key}{nearest(key, known) or '.'}")
    given = {key: word for key, word in request.options.items() if key != "config"}
    options = {key: word for key, word in words.items() if not _overrides(given, key)} | given
    merged = Request(request.arguments, options, request.json)
    try:
        check(command, merged)
    except UserError as error:
        raise UserError(f"config {path}: {error}") from error
    return merged
