"""The reliability page shows the fault matrix with the marked tests, and every row has one or a reason."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from bench_scripts import load_script

ROOT = Path(__file__).resolve().parents[1]
COUNTS = {"A": 17, "B": 8, "C": 15, "D": 10, "E": 5, "F": 10, "G": 9, "H": 7, "I": 6}  # 87 rows


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("make_reliability_page")


def test_the_matrix_is_complete(script: ModuleType) -> None:
    _, matrix = script.rows()
    assert list(matrix) == [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]
    for row in matrix.values():
        assert row.fault
        assert row.behaviour.endswith(".")
        assert "|" not in row.fault + row.behaviour


def test_every_row_has_a_test_or_a_reason(script: ModuleType) -> None:
    _, matrix = script.rows()
    marked = script.marks()
    assert set(marked) <= set(matrix), "a mark names a row that docs/fault_matrix.toml does not have"
    assert {name for name, row in matrix.items() if name not in marked and not row.untested} == set()
    assert not {name for name, row in matrix.items() if name in marked and row.untested}, (
        "tested, with a reason not to be"
    )


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run `make docs`"


def test_marks_are_read_wherever_they_stand(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "@pytest.mark.fault('A1', 'A2')\ndef test_function(): ...\n"
        "@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.fault('A2'))])\ndef test_case(n): ...\n"
        "@pytest.mark.fault('B1')\nclass TestClass: ...\n"
        "def test_unmarked(): ...\n"
    )
    assert script.marks(tmp_path) == {
        "A1": ["test_x.py::test_function"],
        "A2": ["test_x.py::test_function", "test_x.py::test_case"],
        "B1": ["test_x.py::TestClass"],
    }
    (tmp_path / "test_y.py").write_text("@pytest.mark.fault(ROW)\ndef test_function(): ...\n")
    with pytest.raises(SystemExit, match="strings"):
        script.marks(tmp_path)


def test_the_mark_is_registered() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert any(marker.startswith("fault(") for marker in options["markers"])
