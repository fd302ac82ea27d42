"""Make docs/reliability.md: `python bench/make_reliability_page.py [--check]`.

The rows come from docs/fault_matrix.toml. Each row lists the tests marked with its id:

    @pytest.mark.fault("A3")             # on a function or a class, or as `marks` of a parameter
    def test_flipped_bits_are_found(): ...

Marks are read from the source; nothing is imported. After adding, renaming or removing a marked test, run `make docs`.
`--check` writes nothing and fails if the page is out of date.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "docs" / "fault_matrix.toml"
PAGE = ROOT / "docs" / "reliability.md"
INTRODUCTION = """\
<!-- Made by bench/make_reliability_page.py from docs/fault_matrix.toml and the marks of the tests: run `make docs`. -->
# Reliability

What happens when something goes wrong: a machine is preempted, a disk fills, an environment hangs, a file is damaged. Beside
each fault stand the tests that show it; all of them run on a CPU unless they lie in `tests/gpu`. To see one row's tests pass:

```bash
pytest -v tests/run/test_checkpoint.py::test_flipped_bits_are_found
```

Exit codes: 0 done, 2 a mistake in the command or the configuration, 70 environments or numbers that cannot go on, 74 storage,
75 stopped by a signal and resumable, 130 Ctrl-C.
"""


class Row(NamedTuple):
    fault: str
    behaviour: str
    untested: str = ""  # why there is no test


def rows() -> tuple[dict[str, str], dict[str, Row]]:
    """Return the titles of the sections by letter, and the rows by id."""
    content = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    return content.pop("sections"), {name: Row(**row) for name, row in content.items()}


def _marked(node: ast.AST) -> Iterator[str]:
    """Yield the row ids of the marks inside `node`."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.fault":
            for argument in call.args:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                    sys.exit(f"{ast.unparse(call)}: the rows of a mark are strings in the source")
                yield argument.value


def marks(folder: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Return the marked tests, as `run/test_x.py::test_y`, by row id."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        file = path.relative_to(folder).as_posix()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for decorator in node.decorator_list:
                    for row in _marked(decorator):
                        tests = found.setdefault(row, [])
                        if (test := f"{file}::{node.name}") not in tests:
                            tests.append(test)
    return found


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{name}](../tests/{file})"


def page() -> str:
    """Return the text of docs/reliability.md."""
    sections, matrix = rows()
    tests = marks()
    lines = [INTRODUCTION]
    for letter, title in sections.items():
        lines += [f"## {letter}. {title}\n", "| | fault | what Redline does | tests |", "|---|---|---|---|"]
        for name, row in matrix.items():
            if name.startswith(letter):
                shown = "<br>".join(map(_link, tests.get(name, []))) or row.untested
                lines.append(f"| {name} | {row.fault} | {row.behaviour} | {shown} |")
        lines.append("")
    marked = {test for row in tests.values() for test in row}
    lines.append(f"{len(tests)} of {len(matrix)} rows have a test; {len(marked)} tests are marked.")
    return "\n".join(lines) + "\n"


def main() -> None:
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date: run `make docs`.")


if __name__ == "__main__":
    main()
