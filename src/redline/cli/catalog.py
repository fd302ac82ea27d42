"""Names of environments, algorithms, replay kinds and recipes, and their option schemas, without importing torch."""

from __future__ import annotations

import ast
import functools
from typing import Any, NamedTuple

from redline import algos, games, replay
from redline.cli import schema
from redline.cli.schema import Option
from redline.core.errors import UserError, instead_of_file, nearest
from redline.core.registry import Registry, defines

# The packages' own registries validate what they load. These only list and locate members.
GAMES: Registry[Any] = games.registry
ALGORITHMS: Registry[Any] = algos.registry
REPLAY: Registry[Any] = replay.registry
RECIPES: Registry[Any] = Registry("recipe", "redline.recipes", "redline.recipes", defines("settings"))
group_of = algos.group_of


def registries() -> dict[str, Registry[Any]]:
    """Return all registries, keyed by the title of their section in `redline list`."""
    return {"games": GAMES, "algorithms": ALGORITHMS, "replay kinds": REPLAY, "recipes": RECIPES}


class CpuKind(NamedTuple):
    """A kind of CPU environment, such as gym:ID."""

    prefix: str
    spelling: str
    module: str
    config: tuple[str, str]  # module and class of its options


@functools.cache
def cpu_kinds() -> dict[str, CpuKind]:
    """Return the kinds of CPU environments by prefix: classes in redline.envs that declare their spelling."""
    package = schema.locate("redline.envs")
    kinds = {}
    for path in sorted(package.parent.glob("*.py")) if package else ():
        if "SPELLING = " not in path.read_text(encoding="utf-8"):
            continue
        source = schema.read_module(f"redline.envs.{path.stem}")
        for name in source.classes if source else ():
            assert source is not None
            values = source.class_values(name)
            spelling, config = values.get("SPELLING"), values.get("Config")
            if isinstance(spelling, ast.Constant) and config and (owner := source.find_class(config)):
                text = str(spelling.value)
                prefix = text.partition(":")[0]
                kinds[prefix] = CpuKind(prefix, text, source.module, owner)
    return kinds


def environments() -> list[str]:
    """Return every valid value of ENV, as users write it."""
    return [*GAMES.names(), *(kind.spelling for kind in cpu_kinds().values())]


def env_options(name: str) -> tuple[Option, ...]:
    """Return the options (--env.*) of an environment; raise UserError if it does not exist."""
    kind = cpu_kinds().get(name.partition(":")[0])
    if kind:
        if kind.spelling.endswith(":ID") and not name.removeprefix(f"{kind.prefix}:").removeprefix(kind.prefix):
            raise UserError(f"'{name}' names no environment; give its id, as in {kind.prefix}:CartPole-v1.")
        return schema.read_options(*kind.config)
    module = GAMES.locate(name)
    if module is None:
        if not all(part.isidentifier() for part in name.split(".")) or schema.locate(name) is None:
            raise UserError(unknown_environment(name))
        module = name
    return schema.read_options(module)


def is_outside(name: str) -> bool:
    """Return whether an environment is a module outside the package: neither registered nor a CPU environment."""
    known = name.partition(":")[0] in cpu_kinds() or GAMES.locate(name) is not None
    return not known and schema.locate(name) is not None


def default_algorithm(env: str) -> str:
    """Return the algorithm that `redline train ENV` chooses: ALGO of its recipe, or "auto" if the source does not define it.

    A recipe that chooses by environment or hardware (`choose_algo`) may choose a different one.
    """
    prefix = env.partition(":")[0]
    on_cpu = prefix in cpu_kinds()
    names = [RECIPES.locate(name) for name in (env, prefix, f"{prefix}nasium") if RECIPES.locate(name)]
    outside = [f"{env}_recipe"] if is_outside(env) else []
    for module in (*names, *outside, f"redline.recipes.{'cpu_envs' if on_cpu else 'tensor_games'}"):
        source = schema.read_module(str(module))
        node = source.assigned("ALGO") if source else None
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            return str(node.args[0].value)
    return "auto"


def unknown_environment(name: str) -> str:
    """Return the error message for an environment that does not exist, with the most similar existing name."""
    if hint := instead_of_file(name):
        return f"There is no game '{name}'{hint}"
    import gymnasium

    if name in gymnasium.registry:
        return f"There is no game '{name}'; did you mean 'gym:{name}'? gym:ID names a Gymnasium environment."
    hint = nearest(name.partition(":")[0], [*GAMES.names(), *cpu_kinds()]) or "."
    return (
        f"There is no game '{name}'{hint} Games: {', '.join(environments())}, "
        "or the import name of a module in the current folder or on the Python path."
    )


def algorithm_options(name: str) -> tuple[Option, ...]:
    """Return the options (--ALGO.*) of an algorithm; raise UserError if it does not exist."""
    module = ALGORITHMS.locate(name)
    if module is None:
        if not all(part.isidentifier() for part in name.split(".")) or schema.locate(name) is None:
            raise UserError(ALGORITHMS.unknown(name))
        module = name
    return schema.read_options(module)


def all_env_options() -> tuple[Option, ...]:
    """Return the options of all registered environments; shared names appear more than once."""
    games = [option for name in GAMES.names() for option in env_options(name)]
    return (*games, *(option for kind in cpu_kinds().values() for option in schema.read_options(*kind.config)))


@functools.cache
def group_flags() -> frozenset[str]:
    """Return the boolean options of all registered environments and algorithms, as env.NAME or ALGO.NAME."""
    flags = {f"env.{option.name}" for option in all_env_options() if option.is_flag}
    for name in ALGORITHMS.names():
        flags |= {f"{name}.{option.name}" for option in algorithm_options(name) if option.is_flag}
    return frozenset(flags)
