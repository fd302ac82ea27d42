"""notebooks/redline_t4.ipynb: its cells run from top to bottom, shell lines included, with a training of seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "notebooks" / "redline_t4.ipynb").read_text(encoding="utf-8"))


def shell(command: str) -> None:
    """Run a line that starts with `!` in the notebook; `redline` is that of this interpreter."""
    Path("bin").mkdir(exist_ok=True)
    Path("bin/redline").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m redline "$@"\n')
    Path("bin/redline").chmod(0o755)
    paths = {"PATH": f"{Path('bin').resolve()}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, shell=True, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def to_python(source: str) -> str:
    """Return a cell as Python: `!command {name}` as IPython reads it."""
    return re.sub(r"^(\s*)!(.+)$", lambda line: f"{line[1]}shell(f{line[2]!r})", source, flags=re.MULTILINE)


def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bytes] = []
    display: Any = ModuleType("IPython.display")
    display.Image = lambda file: shown.append(Path(file).read_bytes())
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setenv("REDLINE_NOTEBOOK_STEPS", "1000")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"shell": shell}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            exec(compile(to_python("".join(cell["source"])), cell["id"], "exec"), namespace)
    assert json.loads((tmp_path / "runs" / "snake" / "result.json").read_text())["env_steps"] >= 1000
    assert namespace["result"]["score_mean"] >= 0
    assert shown[0].startswith(b"GIF8")
    assert namespace["action"].shape == (4,)


def test_it_is_stored_without_outputs() -> None:
    assert NOTEBOOK["nbformat"] == 4
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in NOTEBOOK["cells"])


def test_shell_lines_become_calls() -> None:
    assert to_python("if x:\n    !pip install '{y}'\nz = 1") == "if x:\n    shell(f\"pip install '{y}'\")\nz = 1"
