"""Option schemas of `Config` dataclasses, read from source code without importing it.

Games and algorithms import torch, which takes seconds. Help, completion and usage errors need only the names, types,
defaults and comments of their options, so this module parses the source instead of executing it. It resolves base classes,
type aliases and constants across modules.
"""

from __future__ import annotations

import ast
import collections.abc
import functools
import importlib.util
import io
import os
import sys
import tokenize
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

# Syntax that is evaluated: enough for annotations and constants, but no function calls.
_PLAIN = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.Dict, ast.Subscript, ast.BinOp, ast.UnaryOp),
    *(ast.operator, ast.unaryop, ast.expr_context),
)


@dataclass(frozen=True)
class Option:
    """One option: a field of a dataclass."""

    name: str
    kind: Any  # the annotation as a type, such as int, `float | None` or Literal["a", "b"]; Any if unknown
    default: Any  # MISSING for a required option
    help: str  # the comment beside or above the field; empty without one

    @property
    def is_flag(self) -> bool:
        return self.kind is bool or bool in typing.get_args(self.kind)

    @property
    def is_mapping(self) -> bool:
        """Whether the option is a mapping, set by --OPTION.NAME VALUE."""
        return (typing.get_origin(self.kind) or self.kind) in (dict, collections.abc.Mapping)


def locate(module: str) -> Path | None:
    """Return the source file of a module without importing it or its packages; None if there is none.

    Searches the import path, then the current folder.
    """
    first, *rest = module.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        return None
    try:
        spec: ModuleSpec | None = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        spec = None
    spec = spec or PathFinder.find_spec(first, [os.getcwd()])
    name = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def read_options(module: str, class_name: str = "Config") -> tuple[Option, ...]:
    """Return the options of a dataclass in a module, inherited ones first.

    Empty if the class is not in the source, for example because it is generated: loading the module reports the reason.
    """
    source = read_module(module)
    return tuple(source.options(class_name).values()) if source else ()


def summary(module: str) -> str:
    """Return the first line of a module's docstring; empty without one."""
    source = read_module(module)
    text = (ast.get_docstring(source.tree) or "") if source else ""
    return text.partition("\n")[0].strip()


def read_module(module: str) -> Source | None:
    """Return a module's parsed source; None if there is none or it is not valid Python."""
    path = locate(module)
    if path is None:
        return None
    try:
        return _parse(module, path, path.stat().st_mtime_ns)
    except (OSError, SyntaxError, ValueError):
        return None


@functools.lru_cache(maxsize=128)
def _parse(module: str, path: Path, changed: int) -> Source:
    del changed  # part of the cache key: an edited file is parsed again
    return Source(module, path.name == "__init__.py", path.read_text(encoding="utf-8"))


class Source:
    """A module parsed from source: its top-level classes, assignments and imports."""

    def __init__(self, module: str, is_package: bool, text: str) -> None:
        self.module, self.tree = module, ast.parse(text)
        self._package = module if is_package else module.rpartition(".")[0]
        self._comments = _comments(text)
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self._values = dict(_assignments(self.tree.body))
        self._imports = dict(self._imported())

    def options(self, class_name: str) -> dict[str, Option]:
        """Return the options of a dataclass by name, inherited ones first."""
        node = self.classes.get(class_name)
        if node is None:
            owner, name = self._follow(class_name)
            return owner.options(name) if owner else {}
        options: dict[str, Option] = {}
        for base in reversed(node.bases):
            owner, name = self._resolve(base)
            options |= owner.options(name) if owner else {}
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                option = self._option(statement)
                if option is not None:
                    inherited = options.get(option.name)
                    text = option.help or (inherited.help if inherited else "")
                    options[option.name] = replace(option, help=text)
        return options

    def assigned(self, name: str) -> ast.expr | None:
        """Return the expression assigned to a name at the top level, following aliases and imports."""
        node = self._values.get(name)
        if node is None and name in self._imports:
            module, attribute = self._imports[name]
            source = read_module(module)
            return source.assigned(attribute) if source and attribute else None
        if isinstance(node, ast.Name):
            return self.assigned(node.id)
        if isinstance(node, ast.Attribute):
            owner, attribute = self._resolve(node)
            return owner.assigned(attribute) if owner else None
        return node

    def class_values(self, class_name: str) -> dict[str, ast.expr]:
        """Return the assignments in a class body by name."""
        return dict(_assignments(self.classes[class_name].body))

    def find_class(self, node: ast.expr) -> tuple[str, str] | None:
        """Return module and name of the class that an expression refers to; None if it is not found in source."""
        owner, name = self._resolve(node)
        return (owner.module, name) if owner else None

    def _option(self, node: ast.AnnAssign) -> Option | None:
        """Return the option that an annotated assignment declares; None for a ClassVar."""
        assert isinstance(node.target, ast.Name)
        if "ClassVar" in ast.unparse(node.annotation):
            return None
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        beside = [self._comments[line] for line in lines if line in self._comments]
        above: list[str] = []
        line = node.lineno - 1
        while not beside and (line, "alone") in self._comments:
            above.insert(0, self._comments[line, "alone"])
            line -= 1
        return Option(
            node.target.id,
            self._evaluate(node.annotation, Any),
            self._default(node.value),
            " ".join(beside or above),
        )

    def _default(self, node: ast.expr | None) -> Any:
        if node is None:
            return MISSING
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("field", "dataclasses.field"):
            for keyword in node.keywords:
                if keyword.arg == "default":
                    return self._default(keyword.value)
                if keyword.arg == "default_factory":
                    factory = self._evaluate(keyword.value, None)
                    return factory() if factory in (dict, list, tuple, set) else ...
            return MISSING
        return self._evaluate(node, ...)

    def _evaluate(self, node: ast.expr, unknown: Any) -> Any:
        """Return the value of an annotation or constant; `unknown` if that needs more than names and operators."""
        if not all(isinstance(part, _PLAIN) for part in ast.walk(node)):
            return unknown
        try:
            return eval(compile(ast.Expression(node), self.module, "eval"), {"__builtins__": {}}, _Names(self))
        except Exception:  # a name that is only computed when the module runs
            return unknown

    def lookup(self, name: str) -> Any:
        """Return the value of a name used in this module; raise KeyError if the source does not define it."""
        if name in self._values:
            value = self._evaluate(self._values[name], KeyError)
            if value is KeyError:
                raise KeyError(name)
            return value
        module, attribute = self._imports[name]
        if module.partition(".")[0] in sys.stdlib_module_names:
            imported = importlib.import_module(module)
            return getattr(imported, attribute) if attribute else imported
        imported_module = read_module(f"{module}.{attribute}" if attribute else module)
        if imported_module is not None:
            return _Attributes(imported_module)
        source = read_module(module)
        if source is None or attribute is None:
            raise KeyError(name)
        return source.lookup(attribute)

    def _resolve(self, node: ast.expr) -> tuple[Source | None, str]:
        """Return the module and name of the class that an expression such as `networks.NetworkConfig` refers to."""
        if isinstance(node, ast.Name):
            return (self, node.id) if node.id in self.classes else self._follow(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self._imports:
            module, attribute = self._imports[node.value.id]
            return read_module(f"{module}.{attribute}" if attribute else module), node.attr
        return None, ""

    def _follow(self, name: str) -> tuple[Source | None, str]:
        """Return the module and name of the class behind an alias (`Config = GymConfig`) or an import."""
        if name in self._values:
            return self._resolve(self._values[name])
        module, attribute = self._imports.get(name, ("", None))
        source = read_module(module) if module and attribute else None
        if source is None or attribute is None:
            return None, ""
        return (source, attribute) if attribute in source.classes else source._follow(attribute)

    def _imported(self) -> Iterator[tuple[str, tuple[str, str | None]]]:
        """Yield local name, module and attribute (None for a module) of every import at the top level."""
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.asname or alias.name.partition(".")[0], (alias.name, None)
            elif isinstance(node, ast.ImportFrom):
                parents = self._package.split(".")
                start = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
                module = ".".join(filter(None, (start, node.module)))
                for alias in node.names:
                    yield alias.asname or alias.name, (module, alias.name)


class _Names(dict[str, Any]):
    """Names available to an annotation or default: builtin types, then the module's names."""

    def __init__(self, source: Source) -> None:
        super().__init__({kind.__name__: kind for kind in (int, float, str, bool, tuple, list, dict, set, object)})
        self.source = source

    def __missing__(self, name: str) -> Any:
        return self.source.lookup(name)


class _Attributes:
    """A module in an expression such as `replay.DEFAULT`."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return self._source.lookup(name)


def _assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _comments(text: str) -> dict[Any, str]:
    """Return comments: those beside code by line number, those on a separate line by (line number, "alone")."""
    comments: dict[Any, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            alone = not token.line[: token.start[1]].strip()
            comments[(line, "alone") if alone else line] = token.string.lstrip("#").strip()
    return comments
