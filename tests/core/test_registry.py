"""Registry: names without imports, loading from folder, entry points and outside, failures that stay with their name."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from redline.core.errors import UserError
from redline.core.registry import Registry, defines

MEMBER = "VALUE = {value}\ndef step(): ...\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package on the path with the members `good` and `large` (a folder), and files that are no members."""
    folder = tmp_path / f"pack_{tmp_path.name}"
    files = {
        "__init__.py": "",
        "good.py": MEMBER.format(value=1),
        "large/__init__.py": MEMBER.format(value=2),
        "_helper.py": MEMBER.format(value=3),
        "tools.py": "class Tool:\n    def step(self): ...\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder.name


def registry(package: str, **options: Any) -> Registry[Any]:
    return Registry("game", package, "redline.test_games", defines("step"), **options)


def add(package: str, name: str, text: str) -> None:
    (Path(sys.path[0]) / package / f"{name}.py").write_text(text)


def test_names_come_from_the_folder_and_import_nothing(package: str) -> None:
    add(package, "explosive", MEMBER.format(value="1 / 0"))
    assert registry(package).names() == ["explosive", "good", "large"]
    assert not [name for name in sys.modules if name.startswith(f"{package}.")]


def test_load_imports_once(package: str) -> None:
    members = registry(package, build=lambda name, module: (name, module.VALUE))
    assert members.load("good") == ("good", 1)
    assert members.load("good") is members.load("good")
    assert members.load("large") == ("large", 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (MEMBER.format(value="1 / 0"), "cannot be imported: ZeroDivisionError: division by zero."),
        (
            "import no_such_library\n" + MEMBER.format(value=1),
            "ModuleNotFoundError: No module named 'no_such_library'.",
        ),
        ("def step(:\n", "cannot be imported: SyntaxError: "),
    ],
)
def test_a_broken_module_is_reported_and_breaks_no_other(package: str, text: str, sentence: str) -> None:
    add(package, "broken", text)
    members = registry(package)
    assert members.load("good").VALUE == 1
    with pytest.raises(UserError, match="The game 'broken'") as failure:
        members.load("broken")
    assert sentence in str(failure.value)
    assert members.failures() == {"broken": str(failure.value)}
    assert members.names() == ["broken", "good", "large"]


def test_an_invalid_member_is_a_failure_too(package: str) -> None:
    def build(name: str, module: Any) -> int:
        if module.VALUE > 1:
            raise UserError(f"{name}.VALUE is {module.VALUE}; expected at most 1.")
        return int(module.VALUE)

    assert registry(package, build=build).failures() == {"large": "large.VALUE is 2; expected at most 1."}


def test_entry_points(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        metadata.EntryPoint("outside", f"{package}._helper", "redline.test_games"),
        metadata.EntryPoint("good", f"{package}._helper", "redline.test_games"),
        metadata.EntryPoint("lost", "no_such_package.game", "redline.test_games"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point for point in points if point.group == group])
    members = registry(package)
    assert members.names() == ["good", "large", "lost", "outside"]
    assert members.load("outside").VALUE == 3
    assert members.load("good").VALUE == 1, "a built-in member must win over an entry point of the same name"
    assert list(members.failures()) == ["lost"]
    assert "no_such_package.game" in members.failures()["lost"]
    assert "No module named 'no_such_package'" in members.failures()["lost"]


def test_refresh_sees_new_members(package: str) -> None:
    members = registry(package)
    assert "late" not in members.names()
    add(package, "late", MEMBER.format(value=4))
    members.refresh()
    assert members.load("late").VALUE == 4


def test_an_unknown_name_gets_the_nearest(package: str) -> None:
    with pytest.raises(UserError, match=r"There is no game 'goood'; did you mean 'good'\? Games: good, large, or "):
        registry(package).load("goood")


@pytest.mark.parametrize("name", ["", ".", "../good", "good.", "a b", ".good"])
def test_a_name_that_is_no_module_name(package: str, name: str) -> None:
    with pytest.raises(UserError, match="There is no game"):
        registry(package).load(name)


def test_a_module_of_the_current_folder(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "elsewhere"
    (folder / "their_package").mkdir(parents=True)
    (folder / "their_game.py").write_text(MEMBER.format(value=5))
    (folder / "their_script.py").write_text("raise SystemExit('ran')\n")
    (folder / "their_package" / "rules.py").write_text("from their_package import size\n" + MEMBER.format(value=6))
    (folder / "their_package" / "size.py").write_text("")
    (folder / "their_package" / "bad.py").write_text("import no_such_library\n")
    members = registry(package)
    with pytest.raises(UserError, match="There is no game 'their_game'"):
        members.load("their_game")
    monkeypatch.chdir(folder)
    assert members.load("their_game").VALUE == 5
    assert members.load("their_package.rules").VALUE == 6
    assert str(folder) not in sys.path
    assert members.names() == ["good", "large"]
    with pytest.raises(UserError, match=r"'their_script' \(.*their_script.py\) does not define one"):
        members.load("their_script")
    with pytest.raises(UserError, match=r"There is no game 'their_package\.none'"):
        members.load("their_package.none")
    with pytest.raises(UserError, match=r"There is no game 'missing_package\.rules'"):
        members.load("missing_package.rules")
    with pytest.raises(UserError, match=r"'their_package\.bad' cannot be imported: .*'no_such_library'"):
        members.load("their_package.bad")


def test_registry_does_not_import_torch() -> None:
    """`redline --help` lists names: the module and `names` must stay light. (`redline` itself is stubbed out.)"""
    program = """
        import sys, types, pathlib
        redline = types.ModuleType("redline")
        redline.__path__ = [str(pathlib.Path("src/redline").resolve())]
        sys.modules["redline"] = redline
        from redline.core.registry import Registry, defines
        print(Registry("game", "redline.games", "redline.games", defines("step")).names(), "torch" in sys.modules)
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['snake', 'tetris'] False"
