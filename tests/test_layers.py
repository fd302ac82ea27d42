"""The house keeps its order: a file imports only from its own folder and those above it, and only rules name a game.

`python tests/test_layers.py` (or `pytest -s tests/test_layers.py`) prints the picture.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from redline import algos, replay

PACKAGE = "redline"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE

# As the data flows. A single file in the package's own folder (cli.py) is a layer of its own.
LAYERS = (
    *("core", "games", "oracles", "envs", "engine", "replay", "algos"),
    *("recipes", "collect", "run", "testing", "tools", "web", "cli"),
)
FREE = ("__init__", "__main__")  # the package's front door may import anything; only the last layer may import it

NAMELESS = ("core", "envs", "replay", "algos", "engine", "collect", "run", "web")  # these know no game by its name
MAY_NAME_A_GAME: frozenset[str] = frozenset()  # files excepted, as "run/config.py"; each needs a reason beside it
KNOWN_GAMES = frozenset({"snake", "tetris"})  # besides those found in games/


def layer_of(path: Path) -> str:
    """The first part of a path within the package, without its suffix: a folder, or a file of the package itself."""
    return path.parts[0].removesuffix(".py")


def files(source: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Every Python file, by its path within the package, parsed."""
    for path in sorted(source.rglob("*.py")):
        yield path.relative_to(source), ast.parse(path.read_text(encoding="utf-8"), str(path))


def modules_imported(source: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import from the package, at the top of the file, in a function or for types."""
    package = (PACKAGE, *path.parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (start, node.module)))
            # `from redline import games` imports redline.games, `from redline import make` redline itself.
            found = [
                f"{module}.{alias.name}" if module == PACKAGE and exists(source, alias.name) else module
                for alias in node.names
            ]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found = [str(node.args[0].value)] if called in ("import_module", "__import__") else []
        else:
            continue
        for name in found:
            if name.split(".")[0] == PACKAGE:
                yield node.lineno, name


def exists(source: Path, name: str) -> bool:
    return (source / name).is_dir() or (source / f"{name}.py").is_file()


def layers_imported(source: Path) -> Iterator[tuple[str, str, str]]:
    """(place, layer, layer it imports) for every import within the package. The package itself counts as `__init__`."""
    for path, tree in files(source):
        for line, name in modules_imported(source, path, tree):
            yield f"{path}:{line}", layer_of(path), [*name.split("."), "__init__"][1]


def order_broken(source: Path) -> list[str]:
    """A sentence for each import that goes the wrong way, and for each folder that has no place in the order."""
    strangers = sorted({layer_of(path) for path, _ in files(source)} - {*LAYERS, *FREE})
    broken = [f"{name} has no place in LAYERS" for name in strangers]
    rank = {name: place for place, name in enumerate(LAYERS)} | dict.fromkeys(FREE, len(LAYERS) - 1)
    for place, layer, imported in layers_imported(source):
        if imported not in rank:
            broken.append(f"{place}: there is no {PACKAGE}.{imported}")
        elif layer not in strangers and rank[imported] > rank[layer]:
            broken.append(f"{place}: {layer} must not import {imported}, which comes after it")
    return broken


def words(text: str) -> set[str]:
    """The words of an identifier or a sentence, in lower case: 'SnakeNet', 'snake_net', 'Snakes' all hold 'snake'."""
    parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", text)}
    return parts | {part.removesuffix("s") for part in parts}


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every identifier and string, but for strings that stand alone: docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) in docstrings:
            continue
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    yield getattr(node, "lineno", 0), text


def games_named(source: Path, allowed: frozenset[str] = MAY_NAME_A_GAME) -> list[str]:
    """A sentence for each place in NAMELESS that names a game: code, a file's name, what the browser loads."""
    games = KNOWN_GAMES | {path.stem for path in source.glob("games/*.py") if not path.stem.startswith("_")}
    found = []
    for path in sorted(path for folder in NAMELESS for path in source.glob(f"{folder}/**/*")):
        name = path.relative_to(source).as_posix()
        where = [(0, name)]
        if path.suffix == ".py":
            where += texts(ast.parse(path.read_text(encoding="utf-8")))
        elif path.suffix in (".js", ".html", ".css"):
            code = re.sub(
                r"/\*.*?\*/|<!--.*?-->|^\s*//[^\n]*", blank, path.read_text(encoding="utf-8"), flags=re.S | re.M
            )
            where += enumerate(code.splitlines(), 1)
        if name not in allowed:
            found += [f"{name}:{line} names {game}" for line, text in where for game in sorted(games & words(text))]
    return found


def blank(comment: re.Match[str]) -> str:
    """As many lines, with nothing in them."""
    return "\n" * comment[0].count("\n")


def picture(source: Path) -> str:
    """Each layer with those it imports, from the ground up."""
    imported: dict[str, set[str]] = {layer_of(path): set() for path, _ in files(source)}
    for _, layer, other in layers_imported(source):
        imported[layer] |= {other} - {layer}
    lines = [
        f"{layer:>10} -> {', '.join(name for name in (*LAYERS, *FREE) if name in imported[layer]) or '-'}"
        for layer in (*LAYERS, *FREE)
        if layer in imported
    ]
    return "\n".join(lines)


def test_order() -> None:
    print("\n" + picture(SOURCE))
    assert any(imported == "core" for _, _, imported in layers_imported(SOURCE)), "no import was found at all"
    assert order_broken(SOURCE) == []


def test_only_rules_name_a_game() -> None:
    assert games_named(SOURCE) == []
    assert all((SOURCE / name).is_file() for name in MAY_NAME_A_GAME), "an exception for a file that is gone"


def test_the_loop_names_no_algorithm_and_no_replay_kind() -> None:
    """Registries know them; `device` is a word of its own as well."""
    members = {*algos.names(), *replay.names()} - {"device"}
    assert {"ppo", "memmap"} <= members
    named = [
        f"{path.relative_to(SOURCE)}:{line} names {member}"
        for folder in ("core", "envs", "engine", "collect", "run")
        for path in sorted((SOURCE / folder).glob("*.py"))
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        for member in sorted(members & words(text))
        if not (member == "pinned" and folder == "collect")  # page-locked staging memory, not a replay kind
    ]
    assert named == []


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small package in good order."""
    write(tmp_path, "__init__.py", "from redline.run import train")
    write(tmp_path, "core/__init__.py", "")
    write(tmp_path, "core/records.py", "import torch\nimport redlines.web")
    write(tmp_path, "games/chess.py", "from redline.core import records\nname = 'chess'")
    write(tmp_path, "oracles/chess.py", "from redline.games import chess")
    write(tmp_path, "envs/batch.py", "from redline import games\nfrom . import other\nfrom ..core import records")
    write(tmp_path, "run/train.py", '"""Not chess."""\nimport redline.envs  # unlike chess\ndef chessboard(): "Chess."')
    write(tmp_path, "cli.py", "import redline\nfrom redline import __version__, run")
    return tmp_path


def write(source: Path, name: str, text: str) -> None:
    (source / name).parent.mkdir(parents=True, exist_ok=True)
    (source / name).write_text(text, encoding="utf-8")


def test_a_house_in_order_passes(house: Path) -> None:
    assert order_broken(house) == []
    assert games_named(house) == []
    assert picture(house).splitlines() == [
        "      core -> -",
        "     games -> core",
        "   oracles -> games",
        "      envs -> core, games",
        "       run -> envs",
        "       cli -> run, __init__",
        "  __init__ -> run",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import redline.run.train",
        "import torch, redline.run as r",
        "from redline.run import train",
        "from redline import run",
        "from redline import games, run",
        "from ..run import train",
        "from .. import run",
        "def later():\n    from redline.run import train",
        "if TYPE_CHECKING:\n    import redline.run",
        "importlib.import_module('redline.run.train')",
        "import redline",  # the front door leads everywhere
        "from redline import train",
        "import redline.nowhere",
    ],
)
def test_an_import_the_wrong_way_is_found(house: Path, text: str) -> None:
    write(house, "envs/wrong.py", text)
    (sentence,) = order_broken(house)
    assert re.match(r"envs/wrong\.py:[12]: ", sentence)


def test_a_folder_without_a_place_is_found(house: Path) -> None:
    write(house, "extras/helper.py", "import redline.run")
    write(house, "stray.py", "")
    assert order_broken(house) == ["extras has no place in LAYERS", "stray has no place in LAYERS"]


@pytest.mark.parametrize(
    "text",
    [
        "default = 'chess'",
        "default = f'{x}-chess-v0'",
        "class ChessNet: pass",
        "def play_chess(): pass",
        "def play(chess): pass",
        "play(chess=1)",
        "games.chess.step()",
        "import chess",
        "from games import chess as game",
        "from games.chess import step",
        "global chess",
        "x = {'Chess': 3}",
        "SNAKE_SIZE = 3",  # named though this house has no such game
        "many = 'snakes'",
    ],
)
def test_a_game_named_in_code_is_found(house: Path, text: str) -> None:
    write(house, "run/wrong.py", text)
    assert games_named(house)
    assert games_named(house, allowed=frozenset({"run/wrong.py"})) == []
    (house / "run/wrong.py").rename(house / "cli.py")
    assert games_named(house) == []  # the command line may


def test_a_game_named_by_a_file_or_a_page_is_found(house: Path) -> None:
    write(house, "replay/chess.py", "")
    write(house, "web/page.js", "// chess\n/* chess\n */ draw('chess')")
    write(house, "web/page.html", "<!-- chess -->\n<p>board</p>")
    assert games_named(house) == ["replay/chess.py:0 names chess", "web/page.js:3 names chess"]


if __name__ == "__main__":
    print(picture(SOURCE))
