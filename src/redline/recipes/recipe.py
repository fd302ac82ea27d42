"""The types of recipes: a setting with its reason, tables by class of hardware, phases of a curriculum, a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from redline.core.records import Hardware
from redline.engine.fast import DEFAULT_OPTIONS, CompilerOptions
from redline.games import Game

# Settings of the run; `env.*` belong to the environment, all others to the algorithm. `minutes` applies without a budget.
RUN_SETTINGS = ("num_envs", "backplay", "backplay_steps", "inference", "minutes")


class ByClass(NamedTuple):
    """One value for each class of hardware; UNSET does not set the option."""

    cpu_few: Any
    cpu_many: Any
    gpu_small: Any
    gpu_mid: Any
    gpu_large: Any


UNSET = object()


def by_device(cpu: Any = UNSET, gpu: Any = UNSET) -> ByClass:
    """Return a table with one value for CPUs and one for GPUs."""
    return ByClass(cpu, cpu, gpu, gpu, gpu)


def per_core(at_least: int) -> Callable[[Hardware], int]:
    """Return a function of Hardware: the number of cores, or `at_least` if that is larger."""
    return lambda hardware: max(at_least, hardware.cores)


@dataclass(frozen=True)
class Setting:
    """The value of one option, the reason for it in one phrase, and where it came from.

    In a recipe's table, value and reason may be `ByClass`, and the value may be a function of Hardware; `for_hardware`
    resolves them.
    """

    value: Any
    reason: str | ByClass = ""
    source: str = ""  # filled in by `recipes.collect`

    def describe(self) -> dict[str, Any]:
        """Return value, source and reason, as stored in config.json."""
        return {"value": self.value, "source": self.source, "reason": self.reason}


Table = dict[str, Setting]  # by name: one of RUN_SETTINGS, `env.NAME`, or NAME, an option of the algorithm


def for_hardware(table: Table, hardware: Hardware) -> dict[str, Setting]:
    """Return the rows of `table` that apply to this hardware, each with a single value and reason."""

    def pick(entry: Any) -> Any:
        if isinstance(entry, ByClass):
            entry = getattr(entry, hardware.tier.replace("-", "_"))
        return entry(hardware) if callable(entry) else entry

    rows = {name: Setting(pick(row.value), pick(row.reason), row.source) for name, row in table.items()}
    return {name: row for name, row in rows.items() if row.value is not UNSET}


@dataclass(frozen=True)
class Phase:
    """A part of the training and the environment options it uses."""

    name: str
    start: float  # training progress, 0 to 1, included
    end: float  # not included
    options: Mapping[str, Any]

    def describe(self) -> dict[str, Any]:
        """Return the phase in the format of a curriculum file."""
        return {"name": self.name, "from": self.start, "to": self.end, "env": dict(self.options)}


@dataclass(frozen=True)
class Request:
    """The inputs from which a recipe chooses settings."""

    game: Game  # a tensor game or a CPU environment (`game.ON_CPU`)
    hardware: Hardware
    algo: str = ""  # empty while it is being chosen
    env_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # requested values, by option name
    algo_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    may_play: bool = True  # a CPU environment may be stepped in this process and is not known to crash or hang it

    @property
    def on_gpu(self) -> bool:
        """Whether the run trains on a CUDA device."""
        return self.hardware.kind == "cuda"

    def env_option(self, name: str) -> Any:
        """Return the requested value of an environment option, or its default."""
        return self.env_options.get(name, getattr(self.game.Config, name))


def _no_phases(config: Any) -> tuple[Phase, ...]:
    del config
    return ()


def _no_settings(request: Request) -> dict[str, Setting]:
    del request
    return {}


@dataclass(frozen=True)
class Recipe:
    """The settings, curriculum and compiler options for one environment."""

    name: str = ""  # empty: there is no recipe for this environment
    settings: Callable[[Request], dict[str, Setting]] = _no_settings  # override the defaults for the environment's kind
    curriculum: Callable[[Any], tuple[Phase, ...]] = _no_phases  # from the environment's Config
    algo: Setting | None = None  # the algorithm to train with, unless another is requested
    choose_algo: Callable[[Request], Setting] | None = None  # the same, from environment and hardware
    compiler: CompilerOptions = DEFAULT_OPTIONS
