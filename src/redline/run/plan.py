"""Plan: a run with every setting resolved, and the source of each setting."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redline import replay
from redline.algos.algorithm import Algorithm
from redline.core.errors import UserError
from redline.core.records import Hardware
from redline.engine.distributed import SINGLE, Ranks
from redline.envs import Rules
from redline.recipes import Recipe, Setting
from redline.replay.contract import Location, UsesReplay
from redline.run.curriculum import Curriculum
from redline.run.settings import Settings

# Sources of settings.
REQUESTED, HARDWARE, MEASURED = "requested", "derived from the hardware", "derived from a measurement"
_CORES_TO_SHARE = 8  # with at least this many CPU cores, two processes compile faster than one
DEFAULT_SOURCES = ("algorithm default", "environment default")


@dataclass(frozen=True)
class Plan:
    """A run with every setting resolved. Numbers are totals over all ranks; `share_of` returns one rank's share."""

    settings: Settings
    rules: Rules
    algo: Algorithm
    algo_config: Any
    num_envs: int
    device: torch.device
    hardware: Hardware
    precision: str
    compile: bool
    graph: bool
    threads: int  # of torch on the CPU; 0: as torch chooses
    minutes: float | None
    backplay: float
    backplay_steps: int
    actors: int
    inference: str
    run_dir: Path
    curriculum: Curriculum | None
    recipe: Recipe
    # Keyed by setting (`env.NAME` for the environment's, NAME for the run's and the algorithm's): value, source
    # (`requested`, `recipe NAME`, `default for …`, `preset NAME`, `derived from …`, `algorithm default`) and reason.
    provenance: dict[str, Setting]
    ranks: Ranks = SINGLE  # the processes that train together

    @property
    def own_folder(self) -> Path:
        """The folder for this process's own files, such as a replay file: the run folder, or a subfolder per rank."""
        ranks = self.ranks
        return self.run_dir / f"rank-{ranks.rank}-of-{ranks.size}" if ranks.size > 1 else self.run_dir

    @property
    def starts_uncompiled(self) -> bool:
        """Whether training begins uncompiled: on a CPU while another process compiles, on a GPU for one update.

        Never for runs that must repeat exactly: compiled and eager results differ by rounding, and the switch between them
        depends on the clock.
        """
        repeats = self.settings.steps is not None or self.settings.deterministic
        return not repeats and (self.shares_compilation or (self.device.type == "cpu" and self._compiles_anywhere))

    @property
    def shares_compilation(self) -> bool:
        """Whether another process may compile the learning functions while this one compiles the step of the games.

        Not with compile modes that time kernels, whose timings it would disturb.
        """
        undisturbed = self.hardware.cores >= _CORES_TO_SHARE and self.settings.compile_mode == "default"
        # The other process does not set torch's deterministic mode, which is part of the compiler's cache keys.
        same = not self.settings.deterministic
        return self.device.type == "cuda" and undisturbed and same and self._compiles_anywhere

    @property
    def _compiles_anywhere(self) -> bool:
        """Whether another process can build the same session: not with several ranks or a replay memory in files."""
        config = self.algo_config
        files = isinstance(config, UsesReplay) and replay.load(config.replay).location != Location.DEVICE
        return self.compile and self.ranks.size == 1 and not self.rules.game.ON_CPU and not files

    @property
    def reasons(self) -> dict[str, str]:
        """Return the reason for each setting that was chosen for the user."""
        return {name: str(setting.reason) for name, setting in self.provenance.items() if setting.reason}

    def chosen(self) -> dict[str, Setting]:
        """Return the settings that are not plain defaults of the algorithm or the environment."""
        return {name: s for name, s in self.provenance.items() if s.source not in DEFAULT_SOURCES}

    def name_sources(self) -> str:
        """Return a sentence that lists the settings taken from the recipe, the hardware's defaults and the preset."""
        by_source: dict[str, list[str]] = {}
        for name, setting in sorted(self.provenance.items()):
            if setting.source.startswith(("recipe", "default for", "preset")):
                by_source.setdefault(setting.source, []).append(name)
        parts = [f"{', '.join(names)} ({source})" for source, names in sorted(by_source.items(), reverse=True)]
        return f"Settings chosen for you: {'; '.join(parts)}. config.json gives the reasons." if parts else ""

    def describe(self) -> dict[str, Any]:
        """Return every setting's value, as stored in config.json and shown in `settings`."""
        settings = {k: v for k, v in dataclasses.asdict(self.settings).items() if not k.endswith("_options")}
        decided = {"num_envs": self.num_envs, "device": str(self.device), "precision": self.precision}
        decided |= {"compile": self.compile, "graph": self.graph, "threads": self.threads, "minutes": self.minutes}
        decided |= {"curriculum": self.curriculum is not None}
        decided |= {"backplay": self.backplay, "backplay_steps": self.backplay_steps}
        decided |= {"actors": self.actors, "inference": self.inference if self.actors else None}
        decided |= {k: v for k, v in dataclasses.asdict(self.algo_config).items() if k in settings}
        if self.ranks.size > 1:
            decided["ranks"] = self.ranks.size
        return (
            settings
            | decided
            | {
                "run_dir": str(self.run_dir),
                "rules_version": self.rules.game.VERSION,
                "env_options": dataclasses.asdict(self.rules.config),
                "phases": self.curriculum.describe() if self.curriculum else [],
                "algo_options": dataclasses.asdict(self.algo_config),
                "provenance": {name: setting.describe() for name, setting in sorted(self.provenance.items())},
            }
        )

    def identity(self, record: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the settings that a resumed run must share, besides the algorithm's RESUME_FIXED options.

        record: the `describe()` of another plan, to return its settings instead.
        """
        record = record or self.describe()
        names = ("seed", "num_envs", "time_limit", "rules_version", "env_options")
        values = {name: record.get(name) for name in names}
        free = getattr(self.rules.game, "RESUME_FREE", ())
        defaults = vars(self.rules.game.Config())  # an option added later had its default in older runs
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in (values["env_options"] or {}).items()}  # JSON
        options = {k: v for k, v in options.items() if k not in free and defaults.get(k) != v}
        return values | {"env_options": options}

    @property
    def identity_hash(self) -> str:
        """Return a digest of `identity` and the algorithm's RESUME_FIXED options that differ from their defaults.

        Defaults are left out so that an option added in a later version does not change the digests of earlier runs.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self.algo_config)}
        values = {name: getattr(self.algo_config, name) for name in self.algo.RESUME_FIXED}
        fixed = {name: value for name, value in values.items() if defaults[name] != value}
        return digest([self.settings.env, self.settings.algo, self.identity(), fixed])


def share_of(plan: Plan) -> Plan:
    """Return one rank's share of the plan: of environments, batch, replay memory and actors. All shares are equal."""
    size = plan.ranks.size
    if size == 1:
        return plan
    algo, config = plan.settings.algo, plan.algo_config
    parts = {"num_envs": plan.num_envs, f"{algo}.batch_size": config.batch_size}
    if plan.settings.actors:
        parts["actors"] = plan.settings.actors
    for name, count in parts.items():
        if count % size:
            near = max(count // size, 1) * size
            raise UserError(
                f"{name} is {count:,}; expected a multiple of {size}, the number of ranks, such as {near:,}."
            )
    own = {"batch_size": config.batch_size // size}
    if isinstance(config, UsesReplay):
        own["replay_capacity"] = config.replay_capacity // size
    actors = plan.settings.actors // size if plan.settings.actors else plan.actors // plan.ranks.local_size
    return dataclasses.replace(
        plan,
        num_envs=plan.num_envs // size,
        algo_config=dataclasses.replace(config, **own),
        actors=max(actors, 1) if plan.actors else 0,
    )


def digest(record: Any) -> str:
    """Return a hash of a record: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()[:16]
