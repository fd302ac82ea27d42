"""The algorithms, found by scanning this folder: a module here that defines `Learner` is one, named by its file."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from redline.core.errors import UserError, nearest


def names() -> list[str]:
    """All algorithms, alphabetically."""
    here = Path(__path__[0])
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in modules if "\nclass Learner" in (here / f"{name}.py").read_text())


def load(name: str) -> ModuleType:
    """The algorithm called `name`: a module with Config, Learner, suggest, complete, memory_bytes and policy_net."""
    if name not in names():
        hint = nearest(name, names()) or "."
        raise UserError(f"There is no algorithm '{name}'{hint} Algorithms: {', '.join(names())}.")
    return importlib.import_module(f"{__name__}.{name}")
