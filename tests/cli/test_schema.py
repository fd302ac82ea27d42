"""Option schemas read from source equal the dataclasses they describe, for everything registered and from outside."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from redline import algos, games
from redline.cli import catalog, schema
from redline.cli.command import COMMANDS
from redline.core.errors import UserError
from redline.envs import CPU_ENVS, load_game
from redline.run.settings import Settings


def assert_same(options: tuple[schema.Option, ...], kind: type[Any]) -> None:
    """Compare names, order, types and defaults."""
    fields = dataclasses.fields(kind)
    assert [option.name for option in options] == [field.name for field in fields]
    hints = typing.get_type_hints(kind)
    for option, field in zip(options, fields, strict=True):
        assert option.kind == hints[field.name], option.name
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        assert option.default == default, option.name
        assert type(option.default) is type(default)


@pytest.mark.parametrize("name", games.names())
def test_every_game(name: str) -> None:
    assert_same(catalog.env_options(name), games.load(name).Config)


@pytest.mark.parametrize("name", algos.names())
def test_every_algorithm(name: str) -> None:
    assert_same(catalog.algorithm_options(name), algos.load(name).Config)


def test_every_kind_of_cpu_environment() -> None:
    assert [*catalog.cpu_kinds()] == [*CPU_ENVS]
    for prefix, kind in catalog.cpu_kinds().items():
        assert kind.spelling == CPU_ENVS[prefix].SPELLING
        assert_same(catalog.env_options(f"{prefix}:x"), CPU_ENVS[prefix].Config)


def test_settings_of_train() -> None:
    assert_same(schema.read_options(Settings.__module__, "Settings"), Settings)


@pytest.mark.parametrize("name", [*games.names(), *(f"{prefix}:x" for prefix in catalog.cpu_kinds())])
def test_every_option_of_an_environment_has_a_sentence(name: str) -> None:
    assert [option.name for option in catalog.env_options(name) if not option.help] == []


@pytest.mark.parametrize("name", algos.names())
def test_every_option_of_an_algorithm_has_a_sentence(name: str) -> None:
    assert [option.name for option in catalog.algorithm_options(name) if not option.help] == []


def test_every_option_of_a_command_has_a_sentence() -> None:
    for name in COMMANDS.names():
        assert [option.name for option in COMMANDS.load(name).options() if not option.help] == []


OUTSIDE = '''
"""Twenty48: slide tiles.

More about it.
"""
from __future__ import annotations
from dataclasses import dataclass, field
from typing import ClassVar, Literal
from my_package import shared
from .shared import Base, LARGEST

raise RuntimeError("imported")

View = Literal["planes", "flat"]

@dataclass(frozen=True)
class Config(Base):
    table: ClassVar[int] = 3
    view: View = "planes"  # how the board is shown
    # Numbers of tiles
    # at the start.
    tiles: tuple[int, ...] = (2, 4)
    largest: int = LARGEST
    smallest: int = shared.SMALLEST
    scale: float = 2.0**10  # scaled by this
    extra: dict[str, int] = field(default_factory=dict)  # more
    computed: int = max(1, 2)  # known when it runs

    def __post_init__(self) -> None: ...

def step(): ...
'''
SHARED = '''
from dataclasses import dataclass
LARGEST = 2_048
SMALLEST = 2

@dataclass(frozen=True)
class Base:
    """Options of all."""
    size: int = 4  # rows and columns
    fast: bool | None = None  # hurry
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in the current folder whose modules cannot be imported."""
    folder = tmp_path / "my_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "twenty48.py").write_text(textwrap.dedent(OUTSIDE).lstrip())
    (folder / "shared.py").write_text(SHARED)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("outside")
def test_a_module_from_outside_is_read_and_not_executed() -> None:
    options = {option.name: option for option in catalog.env_options("my_package.twenty48")}
    assert list(options) == ["size", "fast", "view", "tiles", "largest", "smallest", "scale", "extra", "computed"]
    assert options["size"] == schema.Option("size", int, 4, "rows and columns")
    assert options["fast"].is_flag
    assert options["view"].kind == typing.Literal["planes", "flat"]
    assert (options["tiles"].default, options["tiles"].help) == ((2, 4), "Numbers of tiles at the start.")
    assert (options["largest"].default, options["scale"].default, options["computed"].default) == (2048, 1024.0, ...)
    assert options["smallest"].default == 2
    assert options["extra"].is_mapping
    assert schema.summary("my_package.twenty48") == "Twenty48: slide tiles."
    assert "my_package" not in sys.modules


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("name", ["my_package.nothing", "nothing.at.all", "../my_package", "", "my-package"])
def test_a_module_that_is_not_there(name: str) -> None:
    assert schema.locate(name) is None
    with pytest.raises(UserError, match="There is no game"):
        catalog.env_options(name)


def test_damaged_source_is_no_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.py").write_text("class Config(:")
    assert schema.read_options("damaged") == ()
    assert schema.summary("damaged") == ""


def test_the_default_algorithm_is_that_of_the_recipe() -> None:
    from redline import recipes
    from redline.engine import hardware

    machine = hardware.detect(torch.device("cpu"))
    for name in (*games.names(), "gym:CartPole-v1"):
        chosen = recipes.choose_algo(recipes.Request(load_game(name), machine))
        assert catalog.default_algorithm(name) == chosen.value
