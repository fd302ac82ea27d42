"""An extension of griffe, which mkdocstrings uses to read the source.

A field's trailing comment becomes its description, and lines `name: meaning` of a function's docstring become a list.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


class Comments(griffe.Extension):
    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Use a class field's comment as its docstring if it has none."""
        if attr.docstring or attr.lineno is None or not attr.parent or not attr.parent.is_class:
            return
        assert isinstance(attr.filepath, Path)
        _, mark, comment = _lines(attr.filepath)[attr.lineno - 1].partition("  # ")
        if mark:
            attr.docstring = griffe.Docstring(comment.strip(), parent=attr)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring:
            func.docstring.value = re.sub(r"^(\w+): ", r"- `\1`: ", func.docstring.value, flags=re.MULTILINE)
