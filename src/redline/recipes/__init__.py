"""Recipes: the settings that train well, by environment, algorithm and class of hardware.

Every environment starts from the defaults for its kind: `tensor_games.py` for tensor games, `cpu_envs.py` for
environments that only a CPU can step. A recipe adds the settings that suit one environment. It is a module with

    settings(request: Request) -> dict[str, Setting]     required
    ALGO: Setting                                        the algorithm to train with, unless another is requested
    choose_algo(request: Request) -> Setting             the same, if it depends on environment or hardware
    curriculum(config) -> tuple[Phase, ...]              environment options that change as training progresses
    COMPILER: CompilerOptions                            how to compile the game

Names of settings: `num_envs`, `backplay`, `inference` and `minutes` are options of the run, `env.NAME` is an option of
the environment, and any other name is an option of the algorithm (`request.algo`).

Recipes are found in this order:

1. by the environment's name (`snake`), or the part before its colon (`mario:1-2`; `gym:ID` is `gymnasium`), among the
   modules of this folder and the entry points of `redline.recipes`;
2. for an external game, `my_package.twenty48`, in the file beside it: `my_package/twenty48_recipe.py`.

An environment without a recipe trains with the defaults for its kind; an algorithm not listed there trains with the
defaults of its Config.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from redline.core.errors import UserError
from redline.core.registry import Registry, defines
from redline.engine.fast import CompilerOptions
from redline.games import Game
from redline.recipes import cpu_envs, tensor_games
from redline.recipes.recipe import Phase, Recipe, Request, Setting, for_hardware

__all__ = ["Phase", "Recipe", "Request", "Setting", "choose_algo", "collect", "compiler_options", "find", "names"]

_NAMES = {"gym": "gymnasium"}  # by the part of an environment's name before the colon
# A recipe chooses these to suit its network; they are dropped if the user requests another network.
_WITH_NETWORK = ("net", "hidden", "channels", "stride", "num_envs", "batch_size", "learning_rate", "learning_rate_end")


def _build(name: str, module: Any) -> Recipe:
    """Make a recipe from a module."""
    kinds: dict[str, Any] = {"ALGO": Setting, "COMPILER": CompilerOptions}
    for member, kind in kinds.items():
        if hasattr(module, member) and not isinstance(getattr(module, member), kind):
            raise UserError(
                f"The recipe '{name}' has {member} = {getattr(module, member)!r}; expected a {kind.__name__}."
            )
    optional = {
        member.lower(): getattr(module, member)
        for member in ("ALGO", "COMPILER", "choose_algo", "curriculum")
        if hasattr(module, member)
    }
    if not callable(getattr(module, "settings", None)):
        raise UserError(f"The recipe '{name}' lacks settings(request), which returns the settings by name.")
    return Recipe(name, module.settings, **optional)


_registry = Registry("recipe", __name__, "redline.recipes", defines("settings"), _build)
names, failures, load, refresh = _registry.names, _registry.failures, _registry.load, _registry.refresh


def find(env: str) -> Recipe:
    """Return the recipe of the environment called `env`, or an empty recipe if there is none."""
    kind = env.partition(":")[0]
    for name in (env, _NAMES.get(kind, kind)):
        if name in names():
            return load(name)
    module = sys.modules.get(env)
    if module is not None and module.__file__ and _beside(module.__file__).exists():
        return load(f"{env}_recipe")
    return Recipe()


def _beside(path: str) -> Path:
    """Return the file that may hold the recipe of an external game."""
    return Path(path).with_name(f"{Path(path).stem}_recipe.py")


def choose_algo(request: Request) -> Setting:
    """Return the algorithm to train with unless another is requested."""
    recipe = find(request.game.name)
    algo = recipe.choose_algo(request) if recipe.choose_algo else recipe.algo
    if algo is not None:
        return dataclasses.replace(algo, source=f"recipe {recipe.name}")
    default = cpu_envs.ALGO if request.game.ON_CPU else tensor_games.ALGO
    return dataclasses.replace(default, source=_default(request.game))


def collect(request: Request) -> dict[str, Setting]:
    """Return all recommended settings by name: the defaults for the environment's kind, overridden by its recipe."""
    kind = cpu_envs if request.game.ON_CPU else tensor_games
    source = f"{_default(request.game)} on {request.hardware.tier}"
    settings = _from(kind.settings(request), request, source)
    recipe = find(request.game.name)
    own = _from(recipe.settings(request), request, f"recipe {recipe.name}")
    if "net" in own and request.algo_options.get("net", own["net"].value) != own["net"].value:
        own = {name: setting for name, setting in own.items() if name not in _WITH_NETWORK}
    return settings | own


def compiler_options(game: Game) -> CompilerOptions:
    """Return the options that `game` compiles with."""
    return find(game.name).compiler


def _from(table: dict[str, Setting], request: Request, source: str) -> dict[str, Setting]:
    chosen = for_hardware(table, request.hardware)
    return {name: dataclasses.replace(setting, source=source) for name, setting in chosen.items()}


def _default(game: Game) -> str:
    return f"default for {'CPU environments' if game.ON_CPU else 'tensor games'}"
