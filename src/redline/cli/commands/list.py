"""`redline list`: games, algorithms, replay kinds and recipes."""

from __future__ import annotations

import importlib
from typing import Any

from redline.cli import catalog, schema
from redline.cli.command import Command, Request, show_progress


def run(request: Request) -> int:
    """Print every registered member with the first line of its module's docstring, or with the reason it fails to load."""
    sections = {title: _members(registry) for title, registry in catalog.registries().items()}
    environments = {kind.spelling: schema.summary(kind.module) for kind in catalog.cpu_kinds().values()}
    with show_progress("list", erase=True):
        failures = {title: _failures(registry.package) for title, registry in catalog.registries().items()}
    if request.json:
        record: dict[str, Any] = {title: list(members) for title, members in sections.items()}
        request.print_json(record | {"environments": list(environments), "failures": failures})
        return 0
    for title, members in sections.items():
        print(title.capitalize())
        for name, text in (members | (environments if title == "games" else {})).items():
            print(f"  {name:<12} {failures[title].get(name, text)}".rstrip())
    return 0


def _members(registry: Any) -> dict[str, str]:
    return {name: schema.summary(registry.locate(name) or "") for name in registry.names()}


def _failures(package: str) -> dict[str, str]:
    """Load every member of a package's registry and return the reasons of those that fail, by name."""
    if schema.locate(package) is None:
        return {}
    failures: dict[str, str] = getattr(importlib.import_module(package), "failures", dict)()
    return failures


COMMAND = Command("list games, algorithms, replay kinds and recipes", run, position=9)
