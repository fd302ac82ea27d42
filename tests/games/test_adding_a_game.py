"""The guide to adding a game: its game keeps the contract and trains, its baselines run, its tables are complete."""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import redline
from redline import games, oracles
from redline.core.errors import UserError
from redline.core.records import Spec
from redline.games import _contract
from redline.testing import check_game
from redline.tools import bench

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "adding-a-game.md").read_text()


@pytest.fixture
def catch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The game of the guide as `catch.py` in the current folder."""
    (tmp_path / "catch.py").write_text(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0])
    monkeypatch.chdir(tmp_path)
    yield "catch"
    sys.modules.pop("catch", None)
    games.registry.refresh()


def test_the_first_game_is_short() -> None:
    code = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0].splitlines()
    assert sum(bool(line.strip()) for line in code) <= 65


def test_the_game_keeps_the_contract(catch: str) -> None:
    report = check_game(catch)
    assert report.ok, report
    assert oracles.find(catch) is None
    assert bench.plain_python(catch, 0.01) is None


def test_an_exception_is_reported_with_its_line(catch: str) -> None:
    text = Path("catch.py").read_text()
    Path("catch.py").write_text(f"{text}\n\ndef observe(config, state):\n    return missing\n")
    line = len(text.splitlines()) + 4
    with pytest.raises(UserError, match=rf"observe failed with NameError: .*'missing' .* \(catch\.py, line {line}\)"):
        games.load(catch)


def test_the_game_trains(catch: str, tmp_path: Path) -> None:
    run = redline.train(
        catch, steps=4096, num_envs=32, device="cpu", compile=False, run_dir=str(tmp_path / "run"), eval_episodes=4
    )
    assert redline.evaluate(run, episodes=4, max_steps=200)["env"] == catch


def test_the_baselines_run(catch: str) -> None:
    code = re.search(r"    import redline, torch\n.*?return sum[^\n]*\n", GUIDE, re.DOTALL)
    assert code is not None
    names: dict[str, object] = {}
    exec(textwrap.dedent(code[0]), names)
    still = names["baseline"](catch, [1, 0, 2], 16, 60)  # type: ignore[operator]
    assert 0 <= still < 3
    assert 0 <= names["baseline"](catch, None, 16, 60) < 3  # type: ignore[operator]


def test_the_tables_name_every_member_and_field() -> None:
    members = [field.name for field in dataclasses.fields(_contract.Game)]
    listed = re.findall(r"^\| `(\w+)", GUIDE, re.MULTILINE)
    internal = {"name", "module", "ON_CPU", "frames"}  # `frames` is of Gymnasium environments
    fields = [field.name for field in dataclasses.fields(Spec)]
    assert {*members, *fields} - internal == set(listed)
