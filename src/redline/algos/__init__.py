"""Algorithms, by name: modules of this folder, entry points of the group `redline.algos`, and modules from outside.

A module is an algorithm if it defines `Config` and `Learner`; `redline.algos.algorithm` lists all members. Importing this
package and listing names does not import torch.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from redline.core.registry import Registry, defines

if TYPE_CHECKING:
    from redline.algos.algorithm import Algorithm


def _build(name: str, module: ModuleType) -> Algorithm:
    from redline.algos.algorithm import from_module

    return from_module(name, module)


registry: Registry[Algorithm] = Registry("algorithm", __name__, "redline.algos", defines("Config", "Learner"), _build)


def names() -> list[str]:
    """Return the names of all built-in and installed algorithms, sorted, without importing any of them."""
    return registry.names()


def load(name: str) -> Algorithm:
    """Return the algorithm called `name`: one of `names()`, or a module on the path or in the current folder."""
    return registry.load(name)


def failures() -> dict[str, str]:
    """Return an error message for each registered algorithm that cannot be loaded, by name."""
    return registry.failures()


def group_of(name: str) -> str:
    """Return the options group of the algorithm called `name`: the last part of its name."""
    return name.rpartition(".")[2]


def with_option(option: str) -> list[str]:
    """Return the names of the registered algorithms whose Config has the field `option`; broken ones are skipped."""
    broken = failures()
    return [name for name in names() if name not in broken and option in load(name).options]
