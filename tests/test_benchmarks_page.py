"""The benchmarks page is what the script makes of the result files, and the script knows every file."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_benchmarks_page", ROOT / "bench" / "make_benchmarks_page.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == script.page()


def test_every_result_file_has_rows_with_commit_and_date(script: ModuleType) -> None:
    files = {path.stem for path in (ROOT / "bench" / "results").glob("*.json")}
    assert files == set(script.EXTRACTORS)
    rows = [line for line in script.page().splitlines() if line.endswith(".json) |")]
    assert {re.search(r"\[([\w-]+)\]", row)[1] for row in rows} == files  # type: ignore[index]
    for row in rows:
        _, what, result, hardware, commit, date, _, _ = (cell.strip() for cell in row.split("|"))
        assert what
        assert re.search(r"\d", result)
        assert hardware in ("H200", "2 CPU cores (Neoverse-N1)")
        assert re.search(r"[0-9a-f]{7}|not recorded", commit)
        assert re.fullmatch(r"2026-\d\d-\d\d", date)


def test_a_changed_figure_changes_the_page(script: ModuleType, tmp_path: Path) -> None:
    for path in (ROOT / "bench" / "results").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    changed = json.loads((tmp_path / "gpu-train.json").read_text())
    changed["train"]["rows"][0]["graphed"] = 12_345_678
    (tmp_path / "gpu-train.json").write_text(json.dumps(changed))
    assert "| 12.3 M env-steps/s |" in script.page(tmp_path)
    (tmp_path / "unknown.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"unknown\.json has no extractor"):
        script.page(tmp_path)
