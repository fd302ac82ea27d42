"""What a run is told, and what follows from the hardware. `Settings` holds what was asked for, `Plan` what will be done."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from redline import algos, recipes, replay
from redline.algos.algorithm import Algorithm
from redline.core.errors import UserError, nearest
from redline.core.records import Hardware
from redline.engine import fast, hardware
from redline.envs import Rules, batch, load_game, make_rules
from redline.envs.gym_envs import WORTH_A_PROCESS
from redline.recipes.recipe import RUN_SETTINGS, Recipe
from redline.replay.contract import Location
from redline.run import options
from redline.run.curriculum import Curriculum, phases_of, read_phases
from redline.run.evaluate import MAX_SEED

DEFAULT_MINUTES = 3.0
DEFAULT_ALGO = "dqn"
_OF_REPLAY = ("n_step", "replay", "replay_capacity", "prioritized", "preset")  # only this algorithm has them


@dataclass(frozen=True)
class Settings:
    """Options of `redline train`. None: chosen from the hardware."""

    env: str  # the game
    algo: str = "auto"  # dqn, ppo, pqn; auto: what suits the game
    preset: str | None = None  # a combination of options: plain, rainbow, modern (dqn); options given besides win
    num_envs: int | None = None  # games played at once
    batch_size: int | None = None  # transitions a gradient step
    n_step: int | None = None  # steps a return looks ahead
    replay: str | None = None  # kind of replay memory; `redline list` shows them
    replay_capacity: int | str | None = None  # transitions remembered; auto: as many as fit into half of what is free
    prioritized: bool | None = None  # draw what was judged wrongly more often
    steps: int | None = None  # stop after this many environment steps in all
    episodes: int | None = None  # stop after this many finished games in all
    minutes: float | None = None  # stop after this much training time in all; 3 when no limit is given
    seed: int = 0  # of the games, the weights and every random choice
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    precision: str = "auto"  # auto, fp32, tf32, bf16, fp16
    compile: bool | None = None  # torch.compile
    graph: bool | None = None  # CUDA graphs over whole iterations
    accumulate: int = 1  # batches added up for one gradient step
    time_limit: int = 0  # steps until a game is truncated, 0: none
    run_dir: str | None = None  # runs/ENV-ALGO unless named
    resume: str = "auto"  # auto, must, never, or a checkpoint's path
    deterministic: bool = False  # refuse operations whose result depends on the order of threads
    checkpoint_minutes: float = 1.0  # between checkpoints
    save_replay: bool = True  # the replay memory goes into the checkpoints
    eval_episodes: int = 256  # greedy games played at the end, 0: none
    tensorboard: bool = False  # write TensorBoard files into the run folder
    actors: int | None = None  # processes that play CPU environments; 0: none, they are played in step
    inference: str = "auto"  # where actions are chosen: actors (in each of them) or central (for all at once)
    publish: int = 0  # updates between two publications of weights to actors; 0: automatic
    drop_oldest: bool = False  # what actors played and nobody read in time is overwritten; else they wait
    backplay: float | None = None  # share of games begun some moves before the last loss; cut short, and not counted
    backplay_steps: int = 32  # moves before it at least, twice as many at most; of an emulator up to that many
    curriculum: bool | None = None  # options of the game that change as training goes on; auto: where the game has some
    curriculum_file: str | None = None  # phases of your own: JSON, [{"name", "from", "to", "env": {option: value}}]
    env_options: dict[str, Any] = field(default_factory=dict)  # --env.*
    algo_options: dict[str, Any] = field(default_factory=dict)  # --dqn.* and so on


@dataclass(frozen=True)
class Plan:
    """A run, decided in every part."""

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
    minutes: float | None
    backplay: float
    actors: int
    inference: str
    run_dir: Path
    curriculum: Curriculum | None
    recipe: Recipe
    reasons: dict[str, str]  # setting -> why it was chosen

    def describe(self) -> dict[str, Any]:
        """As it is kept in config.json and shown in `settings`."""
        settings = {k: v for k, v in dataclasses.asdict(self.settings).items() if not k.endswith("_options")}
        decided = {"num_envs": self.num_envs, "device": str(self.device), "precision": self.precision}
        decided |= {"compile": self.compile, "graph": self.graph, "minutes": self.minutes}
        decided |= {"curriculum": self.curriculum is not None, "backplay": self.backplay}
        decided |= {"actors": self.actors, "inference": self.inference if self.actors else None}
        decided |= {k: v for k, v in dataclasses.asdict(self.algo_config).items() if k in settings}
        return (
            settings
            | decided
            | {
                "run_dir": str(self.run_dir),
                "rules_version": self.rules.game.VERSION,
                "env_options": dataclasses.asdict(self.rules.config),
                "phases": self.curriculum.describe() if self.curriculum else [],
                "algo_options": dataclasses.asdict(self.algo_config),
            }
        )

    def identity(self, record: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What a continued run must share, besides the algorithm's FIXED options; of another one's `describe`, if given."""
        record = record or self.describe()
        names = ("seed", "num_envs", "time_limit", "rules_version", "env_options")
        found = {name: record.get(name) for name in names}
        free = getattr(self.rules.game, "RESUME_FREE", ())
        usual = vars(self.rules.game.Config())  # an option that came later has its default in older runs
        told = {k: v for k, v in (found["env_options"] or {}).items() if k not in free and usual.get(k) != v}
        return found | {"env_options": told}

    @property
    def identity_hash(self) -> str:
        fixed = {name: getattr(self.algo_config, name) for name in self.algo.RESUME_FIXED}
        return digest([self.settings.env, self.settings.algo, self.identity(), fixed])


def digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()[:16]


def resolve(settings: Settings) -> Plan:
    """Decide everything `settings` leaves open; impossible wishes are errors that name the key.

    Device `auto` is the first GPU here; `devices.decide` measures whether it is the faster one.
    """
    game = load_game(settings.env)
    device = hardware.pick_device(settings.device)
    machine = hardware.detect(device)
    reasons = {"device": "asked for"}
    if settings.device == "auto":
        only = "there is only a CPU: no CUDA device was found"
        reasons["device"] = only if device.type == "cpu" else "a CUDA device was found"

    if game.ON_CPU:
        game.check_installed()  # type: ignore[attr-defined]
    recipe = recipes.find(settings.env)
    if settings.algo == "auto":
        algo_setting = recipes.choose_algo(game)
        algo_name, why_algo = algo_setting.value, str(algo_setting.reason)
        if asked := [name for name in _OF_REPLAY if getattr(settings, name) not in (None, False)]:
            suitable = algos.with_option("replay_capacity")
            if algo_name not in suitable:
                algo_name, why_algo = suitable[0], f"{asked[0]} needs a replay memory"
        settings, reasons["algo"] = dataclasses.replace(settings, algo=algo_name), why_algo
    algo = algos.load(settings.algo)
    requested_env = options.parse(game.Config, settings.env_options, "env.")
    request = recipes.Request(game, machine, settings.algo, requested_env, settings.algo_options)
    recommended = recipes.collect(request)
    for_run = {name: recommended.pop(name, None) for name in RUN_SETTINGS}
    backplay, reasons["backplay"] = 0.0, "every game begins anew"
    if for_run["backplay"] is not None:
        backplay, reasons["backplay"] = for_run["backplay"].value, str(for_run["backplay"].reason)
    if settings.backplay and game.ON_CPU and not game.CAN_RESTORE:  # type: ignore[attr-defined]
        raise UserError(f"retry is {settings.backplay}, but {settings.env} cannot go back; leave it away.")
    if settings.backplay is not None:
        backplay, reasons["backplay"] = settings.backplay, "asked for"
    for_env = {name.removeprefix("env."): row for name, row in recommended.items() if name.startswith("env.")}
    for_env = {name: row for name, row in for_env.items() if name not in requested_env}
    reasons |= {f"env.{name}": str(row.reason) for name, row in for_env.items()}
    defaults = {name: row.value for name, row in for_env.items()}
    env_options = dataclasses.asdict(options.build(game.Config, settings.env_options, "env.", defaults))
    rules = make_rules(settings.env, env_options, settings.time_limit)

    suggested = {name: (row.value, str(row.reason)) for name, row in recommended.items() if "." not in name}
    assert for_run["num_envs"] is not None
    num_envs, reasons["num_envs"] = for_run["num_envs"].value, str(for_run["num_envs"].reason)
    for name, (_, why) in suggested.items():
        reasons[name] = why
    wanted: dict[str, Any] = dict(settings.algo_options)
    run_dir = Path(settings.run_dir or f"runs/{re.sub('[:/]', '-', settings.env)}-{settings.algo}")
    for name in ("batch_size", "n_step", "replay", "replay_capacity", "prioritized"):
        if getattr(settings, name) is not None:
            if name not in algo.options:
                raise UserError(
                    f"{settings.algo} has no {name}; leave --{name.replace('_', '-')} away or take another --algo."
                )
            wanted[name] = getattr(settings, name)
    fits = wanted.get("replay_capacity") == "auto" and wanted.pop("replay_capacity") == "auto"
    if "gamma" in wanted:
        suggested.pop("gamma_end", None)  # who asks for a discount means that one
        reasons.pop("gamma_end", None)
    defaults = {name: value for name, (value, _) in suggested.items()}
    if settings.preset is not None:
        preset = _find_preset(algo, settings)
        defaults |= preset
        reasons |= dict.fromkeys(preset, f"of the preset {settings.preset}")
    for name in wanted:
        reasons.pop(name.replace("-", "_"), None)
    algo_config = options.build(algo.Config, wanted, f"{algo.group}.", defaults)

    if fits:
        algo_config, reasons["replay_capacity"] = _fit_replay(algo_config, rules, device, run_dir)
    if settings.num_envs is not None:
        num_envs, reasons["num_envs"] = settings.num_envs, "asked for"
    for name, least in (
        ("num_envs", 1),
        ("accumulate", 1),
        ("eval_episodes", 0),
        ("seed", 0),
        ("backplay_steps", 1),
        ("publish", 0),
    ):
        value = num_envs if name == "num_envs" else getattr(settings, name)
        if value < least:
            raise UserError(f"{name} is {value}; expected at least {least}.")
    requested = {name.replace("-", "_") for name in wanted}
    algo_config, follows = algo.fill_defaults(algo_config, num_envs, requested)
    reasons |= follows
    if settings.seed >= MAX_SEED:
        raise UserError(
            f"seed is {settings.seed}; expected 0 to {MAX_SEED - 1:,}: larger ones are kept for evaluation."
        )
    for name in ("steps", "episodes", "minutes"):
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise UserError(f"{name} is {value}; expected a number above 0.")
    if not 0 <= backplay < 1:
        raise UserError(f"retry is {backplay}; expected a number from 0 to below 1.")
    if settings.checkpoint_minutes <= 0:
        raise UserError(f"checkpoint_minutes is {settings.checkpoint_minutes}; expected a number above 0.")

    precision, reasons["precision"] = fast.pick_precision(settings.precision, machine)
    compiles, reasons["compile"] = _pick_compile(settings.compile, machine, game.ON_CPU)
    graphs, reasons["graph"] = _pick_graph(settings.graph, machine)
    actors, reasons["actors"] = _pick_actors(settings, rules, machine, num_envs)
    of_actors: dict[str, Any] = {
        "inference": settings.inference != "auto",
        "publish": settings.publish,
        "drop_oldest": settings.drop_oldest,
    }
    for name in (name for name, given in of_actors.items() if given and not actors):
        raise UserError(f"{name} is set, but no actors play ({reasons['actors']}); leave it away or give --actors.")
    inference, why_inference = _pick_inference(settings, machine, actors)
    if actors:
        reasons["inference"] = why_inference
    curriculum, reasons["curriculum"] = _pick_curriculum(settings, rules, recipe)
    unlimited = settings.steps is None and settings.episodes is None and settings.minutes is None
    return Plan(
        settings=settings,
        rules=rules,
        algo=algo,
        algo_config=algo_config,
        num_envs=num_envs,
        device=device,
        hardware=machine,
        precision=precision,
        compile=compiles,
        graph=graphs,
        minutes=DEFAULT_MINUTES if unlimited else settings.minutes,
        backplay=backplay,
        actors=actors,
        inference=inference,
        run_dir=run_dir,
        curriculum=curriculum,
        recipe=recipe,
        reasons=reasons,
    )


def _find_preset(algo: Algorithm, settings: Settings) -> dict[str, Any]:
    """The options of the preset asked for."""
    known = algo.PRESETS
    if settings.preset is not None and settings.preset in known:
        return dict(known[settings.preset])
    if known:
        hint = nearest(str(settings.preset), known) or "."
        raise UserError(f"{settings.algo} has no preset '{settings.preset}'{hint} Presets: {', '.join(known)}.")
    broken = algos.failures()
    others = [name for name in algos.names() if name not in broken and algos.load(name).PRESETS]
    raise UserError(
        f"{settings.algo} has no presets; leave --preset away or take another --algo that has: {', '.join(others)}."
    )


def state_bytes(rules: Rules) -> int:
    """Of the fields of one State that observations read."""
    state = batch.reset(rules, batch.env_keys(0, torch.arange(1))).game
    return sum(x.nbytes for name, x in state._asdict().items() if name not in rules.game.HIDDEN)


def _fit_replay(config: Any, rules: Rules, device: torch.device, run_dir: Path) -> tuple[Any, str]:
    """The settings with a replay capacity for half of the memory, or disk, that is free where it is kept.

    A run that is continued keeps what it began with.
    """
    with suppress(OSError, ValueError, KeyError):
        began = int(json.loads((run_dir / "config.json").read_text())["algo_options"]["replay_capacity"])
        return dataclasses.replace(config, replay_capacity=began), "as the run began"
    kind = replay.load(config.replay)
    if kind.location == Location.DISK:
        there = next(folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists())
        free, what = shutil.disk_usage(there).free, "disk"
    else:
        place = device if kind.location == Location.DEVICE else torch.device("cpu")
        free, what = hardware.free_bytes(place), f"memory of {place}"
    capacity = kind.largest_capacity(free, state_bytes(rules))
    return dataclasses.replace(config, replay_capacity=capacity), f"from the {free / 1e9:,.0f} GB {what} that are free"


def _pick_curriculum(settings: Settings, rules: Rules, recipe: Recipe) -> tuple[Curriculum | None, str]:
    if settings.curriculum_file is not None:
        if rules.game.ON_CPU:
            raise UserError(
                f"curriculum_file is given, but options of {settings.env} cannot change while it is played."
            )
        if settings.curriculum is False:
            raise UserError("curriculum_file is given, and no-curriculum as well; leave one of them away.")
        return Curriculum(read_phases(settings.curriculum_file), rules), "asked for"
    if settings.curriculum is False:
        return None, "asked for"
    phases = phases_of(recipe.curriculum(rules.config), without=settings.env_options)
    if not phases:
        if settings.curriculum:
            raise UserError(f"{settings.env} has no curriculum of its own; give one with --curriculum-file.")
        return None, f"{settings.env} has none of its own"
    try:
        return Curriculum(phases, rules), "the game's own"
    except UserError as error:
        if settings.curriculum:
            raise
        return None, f"the game's own does not fit these options: {error}"


def _pick_actors(settings: Settings, rules: Rules, machine: Hardware, num_envs: int) -> tuple[int, str]:
    """Processes that play. Where a step costs less than handing it over, there are none."""
    wanted = settings.actors
    if not rules.game.ON_CPU:
        if wanted:
            raise UserError(f"actors is {wanted}, but {settings.env} is played on the device; leave it away.")
        return 0, "the game is played on the device"
    if wanted is not None:
        if wanted and settings.deterministic:
            raise UserError("deterministic is on, but what actors play cannot be repeated exactly; take --actors 0.")
        if not 0 <= wanted <= num_envs:
            raise UserError(f"actors is {wanted}; expected 0 to {num_envs}, the number of environments.")
        return wanted, "asked for"
    if settings.deterministic:
        return 0, "what actors play cannot be repeated exactly"
    cost = rules.game.step_seconds(rules.config)  # type: ignore[attr-defined]
    if cost < WORTH_A_PROCESS:
        return 0, f"a step takes {1e6 * cost:,.0f} µs: less than it costs to hand it over"
    why = f"a step takes {1e3 * cost:,.1f} ms"
    if machine.tier == "cpu-few":
        return min(machine.cores, num_envs), f"{why}: every core plays while the learner waits"
    return min(max(1, machine.cores - 1), num_envs), f"{why}: each core but one plays"


def _pick_inference(settings: Settings, machine: Hardware, actors: int) -> tuple[str, str]:
    if settings.inference not in ("auto", "actors", "central"):
        raise UserError(f"inference is '{settings.inference}'; expected auto, actors or central.")
    if settings.inference != "auto":
        return settings.inference, "asked for"
    if machine.kind == "cpu" and actors >= machine.cores:
        return "actors", "actors and learner share the cores: nobody waits to be answered"
    return "central", "the cores of the actors are left to the environments"


def _pick_compile(wanted: bool | None, machine: Hardware, host: bool) -> tuple[bool, str]:
    if wanted is not None:
        return wanted, "asked for"
    if host and machine.kind == "cpu":
        return False, "the environments take the time here, and small networks are soon trained"
    if machine.kind == "mps":
        return False, "torch.compile does not pay on this device"
    if (0, 0) < machine.capability < (7, 0):
        return False, "torch.compile needs a GPU of compute capability 7.0 or more"
    if machine.kind == "cpu" and not machine.compiler:
        return False, "no C++ compiler (g++ or clang++) was found; install one to train faster"
    return True, "fuses each stage into a few kernels"


def _pick_graph(wanted: bool | None, machine: Hardware) -> tuple[bool, str]:
    if machine.kind != "cuda":
        if wanted:
            raise UserError(f"graph needs a CUDA device; {machine.device} has no CUDA graphs. Leave --graph away.")
        return False, "CUDA graphs need a CUDA device"
    return (
        (True, "replays a whole iteration without launches from the host") if wanted is None else (wanted, "asked for")
    )


def from_words(env: str, words: dict[str, Any]) -> Settings:
    """Settings from option names and words, `env.*` and the algorithm's options among them."""
    algo = words.get("algo", Settings.algo)
    algo = _algo_of(words) if algo == "auto" else algo
    if algo != "auto":
        algos.load(algo)  # or say that there is none
    found, groups = split_groups(words, algo)
    plain = {"env": env} | found | ({} if algo == "auto" else {"algo": algo})
    known = {f.name for f in dataclasses.fields(Settings)} - {"env", "env_options", "algo_options"}
    hidden = set(plain) - known - {"env"}
    for name in hidden & {"env_options", "algo_options"}:
        raise UserError(f"There is no option {name}; use --env.NAME or --ALGO.NAME.")
    return options.build(
        Settings, plain, "", {"env_options": groups["env"], "algo_options": groups[algos.group_of(algo)]}
    )


def _algo_of(words: Mapping[str, Any]) -> str:
    """The algorithm whose options are given, where none is named."""
    given = [name for name in algos.names() if any(word.startswith(f"{name}.") for word in words)]
    if len(given) > 1:
        raise UserError(f"Options of {' and '.join(given)} are given; name the one to train with: --algo {given[0]}.")
    return given[0] if given else "auto"


def split_groups(words: Mapping[str, Any], algo: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Options without a group, and those of the groups `env.` and of the algorithm, by their names in it."""
    plain: dict[str, Any] = {}
    own = algos.group_of(algo)
    groups: dict[str, dict[str, Any]] = {"env": {}, own: {}}
    for name, word in words.items():
        group, dot, rest = name.partition(".")
        if not dot:
            plain[name] = word
        elif group in groups:
            groups[group][rest] = word
        else:
            known = f"with --algo {algo} there are env.* and {own}.*."
            if algo == "auto":
                known = (
                    f"there are env.* and those of the algorithms: {', '.join(f'{name}.*' for name in algos.names())}."
                )
            raise UserError(f"There is no option group {group}.*; {known}")
    return plain, groups
