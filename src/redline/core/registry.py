"""Registry: find and load games, algorithms, replay kinds and recipes, importing only those that are used.

Members come from three sources, in this order of precedence:

1. the modules of a package's folder (`redline/games/snake.py` is the game `snake`),
2. entry points of a group (`[project.entry-points."redline.games"]` in the metadata of an installed distribution),
3. for `load` only: any other module by its import name, found on the Python path or in the current folder.

A module that cannot be imported is reported by `failures` and when it is loaded. It never affects other members.
This module and `Registry.names` do not import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from redline.core.errors import UserError, instead_of_file, nearest

T = TypeVar("T")


class UnknownName(UserError):
    """No member has this name."""


class NoMember(UnknownName):
    """A module has this name, but does not define a member."""


class ImportFailed(UserError):
    """The module of a member cannot be imported."""


def defines(*names: str) -> Callable[[str], bool]:
    """Return a predicate that tests whether source text defines all `names` (function, class or assignment) at top level."""
    patterns = [re.compile(rf"^(?:def|class)\s+{name}\b|^{name}\s*[:=]", re.MULTILINE) for name in names]
    return lambda source: all(pattern.search(source) for pattern in patterns)


class Registry(Generic[T]):
    """Finds and loads the members of one kind, by name.

    kind: singular noun for messages, such as "game".
    package: dotted name of the package whose modules are members. Modules with a leading underscore are skipped.
    group: entry point group, such as "redline.games".
    is_member: decides from the source text of a module, without importing it, whether it is a member. See `defines`.
    build: makes the member from its name and the imported object (a module, or the target of an entry point), or
        raises UserError if the object is invalid. None: the object itself is the member.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        group: str,
        is_member: Callable[[str], bool] = lambda source: True,  # noqa: ARG005
        build: Callable[[str, Any], T] | None = None,
    ) -> None:
        self.kind, self.package, self.group = kind, package, group
        self._is_member, self._build = is_member, build
        self._sources: dict[str, str | metadata.EntryPoint] | None = None  # name -> module name or entry point
        self._members: dict[str, T] = {}

    def names(self) -> list[str]:
        """Return the names of all built-in and installed members, sorted, without importing any of them."""
        return sorted(self._find())

    def locate(self, name: str) -> str | None:
        """Return the import name of the module that provides a built-in or installed member; None for other names."""
        source = self._find().get(name)
        return source if source is None or isinstance(source, str) else source.module

    def load(self, name: str) -> T:
        """Return the member called `name`, imported and validated on first use; the same object on every call."""
        if name not in self._members:
            source = self._find().get(name)
            target = self._import_outside(name) if source is None else self._import(name, source)
            self._members[name] = cast(T, target) if self._build is None else self._build(name, target)
        return self._members[name]

    def failures(self) -> dict[str, str]:
        """Load all members and return the error messages of those that fail, by name."""
        messages = {}
        for name in self.names():
            try:
                self.load(name)
            except UserError as error:
                messages[name] = str(error)
        return messages

    def refresh(self) -> None:
        """Clear the cache: the next call scans the folder and the entry points again."""
        self._sources = None
        self._members.clear()

    def _find(self) -> dict[str, str | metadata.EntryPoint]:
        if self._sources is None:
            points = {point.name: point for point in metadata.entry_points(group=self.group)}
            self._sources = {**points, **self._scan()}
        return self._sources

    def _scan(self) -> dict[str, str]:
        spec = importlib.util.find_spec(self.package)
        modules = {}
        for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
            files = {path.stem: path for path in folder.glob("*.py")}
            files |= {path.parent.name: path for path in folder.glob("*/__init__.py")}
            for name, path in files.items():
                if not name.startswith("_") and self._accepts(path):
                    modules[name] = f"{self.package}.{name}"
        return modules

    def _accepts(self, path: Path) -> bool:
        return self._is_member(path.read_text(encoding="utf-8", errors="replace"))

    def _import(self, name: str, source: str | metadata.EntryPoint) -> Any:
        where = source if isinstance(source, str) else f"{source.value}, an entry point of {self.group}"
        try:
            return importlib.import_module(source) if isinstance(source, str) else source.load()
        except Exception as error:
            raise ImportFailed(f"The {self.kind} '{name}' ({where}) cannot be imported: {_describe(error)}") from error

    def _import_outside(self, name: str) -> ModuleType:
        """Import and return an unregistered module by its import name, from the Python path or the current folder."""
        if not all(part.isidentifier() for part in name.split(".")):
            raise UnknownName(self.unknown(name))
        with current_folder_importable(name):
            try:
                spec = importlib.util.find_spec(name)
            except ModuleNotFoundError as error:
                if error.name and f"{name}.".startswith(f"{error.name}."):
                    spec = None  # a parent package is missing
                else:
                    raise ImportFailed(self._broken(name, error)) from error
            except Exception as error:
                raise ImportFailed(self._broken(name, error)) from error
            if spec is None:
                raise UnknownName(self.unknown(name))
            if "." not in name and not (
                spec.origin and spec.origin.endswith(".py") and self._accepts(Path(spec.origin))
            ):
                # A mistyped name may be the name of any installed module: do not import modules that are not members.
                raise NoMember(f"{self.unknown(name)} The module '{name}' ({spec.origin}) does not define one.")
            try:
                return importlib.import_module(name)
            except Exception as error:
                raise ImportFailed(self._broken(name, error)) from error

    def unknown(self, name: str) -> str:
        """Return the error message for an unknown name, suggesting the nearest known one."""
        if place := instead_of_file(name):
            return f"There is no {self.kind} '{name}'{place}"
        known = self.names()
        hint = nearest(name, known) or "."
        return (
            f"There is no {self.kind} '{name}'{hint} {self.kind.capitalize()}s: {', '.join(known)}, "
            f"or the import name of a module in the current folder or on the Python path."
        )

    def _broken(self, name: str, error: Exception) -> str:
        return f"The {self.kind} '{name}' cannot be imported: {_describe(error)}"


@contextlib.contextmanager
def current_folder_importable(name: str) -> Iterator[None]:
    """Make the current folder importable during the `with` statement, unless the path already provides `name`'s package."""
    try:
        missing = importlib.util.find_spec(name.partition(".")[0]) is None
    except (ImportError, ValueError):
        missing = True
    if not missing:
        yield
        return
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # the current folder was deleted
        yield
        return
    importlib.invalidate_caches()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _describe(error: Exception) -> str:
    """Return an exception's type and message, to end a sentence with."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}." if text else f"{type(error).__name__}."
