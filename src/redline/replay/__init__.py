"""Replay memories: past transitions, stored for learning. One module of this folder per kind of storage.

A module is a kind if it defines `LOCATION`, `make` and `bytes_per_transition`; see `contract` for their signatures.
External kinds are found through the entry point group `redline.replay`, or by the import name of their module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redline.core.registry import Registry, defines

if TYPE_CHECKING:
    from redline.replay.contract import ReplayKind

DEFAULT = "device"  # the kind used unless the settings specify another


def _build(name: str, module: Any) -> ReplayKind:
    from redline.replay.contract import build_kind

    return build_kind(name, module)


registry: Registry[ReplayKind] = Registry(
    "replay kind", __name__, "redline.replay", defines("LOCATION", "make", "bytes_per_transition"), _build
)
names, load, failures = registry.names, registry.load, registry.failures


def check(name: str) -> None:
    """Raise UserError, suggesting the nearest name, if no replay kind is called `name`."""
    if name not in names():
        load(name)


def alternatives(name: str) -> list[str]:
    """Return the kinds to try if `name` does not fit: those stored farther from the device, nearest first."""
    location = load(name).location
    broken = failures()
    farther = [kind for kind in map(load, (n for n in names() if n not in broken)) if kind.location > location]
    return [kind.name for kind in sorted(farther, key=lambda kind: kind.location)]


def run_files() -> list[str]:
    """Return the names of all files that replay kinds store in a run folder."""
    broken = failures()
    return [file for name in names() if name not in broken for file in load(name).files]
