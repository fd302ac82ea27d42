"""Resolve requested settings into a plan, in several passes. Each returns its values with source and reason."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from redline import algos, recipes
from redline.algos.algorithm import Algorithm
from redline.core.errors import UserError, nearest
from redline.core.records import Hardware
from redline.engine import hardware
from redline.envs import Rules, load_game, make_rules
from redline.games import Game
from redline.recipes import Setting
from redline.recipes.recipe import RUN_SETTINGS, Recipe
from redline.run import execution, options
from redline.run.curriculum import Curriculum, phases_of, read_phases
from redline.run.memory import fit_replay
from redline.run.network_size import check_network
from redline.run.plan import HARDWARE, REQUESTED, Plan
from redline.run.run_folder import CONFIG
from redline.run.settings import ALGO_SHORTHANDS, DEFAULT_MINUTES, Settings

_BACKPLAY_STEPS = Setting(32, "long enough for most losses to be avoidable", "default")


def resolve(settings: Settings) -> Plan:
    """Return the plan for `settings`, with all open settings chosen; impossible values raise UserError with the option's name.

    Device `auto` means the first GPU here; `device_choice.decide` measures whether the CPU is faster.
    """
    settings.check()
    game = load_game(settings.env)
    if game.ON_CPU:
        game.check_installed()  # type: ignore[attr-defined]
    device, chosen_device = execution.choose_device(settings)
    machine = hardware.detect(device)
    recipe = recipes.find(game.name)
    algo, chosen_algo = _choose_algo(settings, game, machine)
    settings = dataclasses.replace(settings, algo=algo.name)
    requested = _requested_algo_options(settings, algo)
    run_dir = Path(settings.run_dir or f"runs/{re.sub('[:/,]', '-', settings.env)}-{settings.algo}")
    recommended = _collect_recommended(settings, game, machine, requested, run_dir)
    recommended |= _measured_before(settings, recommended, run_dir)
    rules, from_env = _build_rules(settings, game, recommended)
    num_envs = _requested_or(settings.num_envs, recommended["num_envs"])
    if game.ON_CPU and num_envs.value < len(levels := game.levels):  # type: ignore[attr-defined]
        raise UserError(f"num_envs is {num_envs.value}; expected at least one for each of the {len(levels)} levels.")
    backplay = _choose_backplay(settings, game, recommended)
    algo_config, from_algo = _build_algo_config(
        settings, algo, requested, recommended, num_envs.value, rules, device, run_dir
    )

    chosen = {
        "device": chosen_device,
        "algo": chosen_algo,
        "num_envs": num_envs,
        "backplay": backplay,
        "backplay_steps": _requested_or(settings.backplay_steps, recommended.get("backplay_steps", _BACKPLAY_STEPS)),
        "precision": execution.choose_precision(settings.precision, machine),
        "compile": execution.choose_compile(settings.compile, machine, game.ON_CPU),
        "graph": execution.choose_graph(settings.graph, machine),
        "threads": execution.choose_threads(settings.threads, machine, rules),
        "actors": execution.choose_actors(settings, rules, machine, num_envs.value, run_dir),
    }
    chosen["inference"] = execution.choose_inference(settings, machine, chosen["actors"], recommended)
    curriculum, chosen["curriculum"] = _choose_curriculum(settings, rules, recipe)
    minutes = settings.minutes
    if settings.steps is None and settings.episodes is None and minutes is None:
        minutes = DEFAULT_MINUTES
        if "minutes" in recommended:
            chosen["minutes"] = recommended["minutes"]
            minutes = chosen["minutes"].value
    plan = Plan(
        settings=settings,
        rules=rules,
        algo=algo,
        algo_config=algo_config,
        hardware=machine,
        minutes=minutes,
        run_dir=run_dir,
        curriculum=curriculum,
        recipe=recipe,
        provenance=from_env
        | from_algo
        | {k: v for k, v in chosen.items() if k != "inference" or chosen["actors"].value},
        **{k: v.value for k, v in chosen.items() if k not in ("device", "algo", "curriculum", "minutes")},
        device=device,
    )
    check_network(plan)
    return plan


def _requested_or(value: Any, recommended: Setting) -> Setting:
    """Return the requested value as a setting, or the recommended setting if nothing was requested."""
    return recommended if value is None else Setting(value, "", REQUESTED)


# ---- algorithm and options


def _choose_algo(settings: Settings, game: Game, machine: Hardware) -> tuple[Algorithm, Setting]:
    """Return the requested algorithm, else the recommended one or the first that has all requested options."""
    if settings.algo != "auto":
        return algos.load(settings.algo), Setting(settings.algo, "", REQUESTED)
    if before := _algo_before(settings):
        return algos.load(before), Setting(before, "the run began with it", HARDWARE)
    env_options = options.parse(game.Config, settings.env_options, "env.")
    recommended = recipes.choose_algo(
        recipes.Request(game, machine, env_options=env_options, may_play=settings.actors is None)
    )
    names = [n for n in (*ALGO_SHORTHANDS, "preset") if getattr(settings, n) not in (None, False)]
    lacking = [name for name in names if not _has(algos.load(recommended.value), name)]
    if not lacking:
        return algos.load(recommended.value), recommended
    broken = algos.failures()
    for name in algos.names():
        if name not in broken and all(_has(algos.load(name), option) for option in names):
            reason = f"{lacking[0]} is requested, which {recommended.value} does not have"
            return algos.load(name), Setting(name, reason, f"derived from {lacking[0]}")
    return algos.load(recommended.value), recommended


def _algo_before(settings: Settings) -> str | None:
    """Return the algorithm of the run to resume in the given folder: other hardware might recommend a different one."""
    if settings.run_dir and settings.resume != "never":
        with suppress(OSError, ValueError, KeyError, TypeError):
            before = json.loads((Path(settings.run_dir) / CONFIG).read_text(encoding="utf-8"))
            if before["env"] == settings.env:
                return str(before["algo"])
    return None


def _has(algo: Algorithm, option: str) -> bool:
    return bool(algo.PRESETS) if option == "preset" else bool(_find_option(algo, option))


def _find_option(algo: Algorithm, shorthand: str) -> str:
    """Return the algorithm's option that a shorthand stands for, or an empty string.

    On-policy learners call the steps between updates `rollout_steps`.
    """
    names = (shorthand, "rollout_steps") if shorthand == "train_every" else (shorthand,)
    return next((name for name in names if name in algo.options), "")


def _requested_algo_options(settings: Settings, algo: Algorithm) -> dict[str, Any]:
    """Return the requested options of the algorithm by name, including shorthands without its prefix."""
    requested = {name.replace("-", "_"): value for name, value in settings.algo_options.items()}
    for name in ALGO_SHORTHANDS:
        if (value := getattr(settings, name)) is not None:
            if not (option := _find_option(algo, name)):
                flag = name.replace("_", "-")
                raise UserError(f"{settings.algo} has no {name}; drop --{flag} or choose another --algo.")
            requested[option] = value
    return requested


def _collect_recommended(
    settings: Settings, game: Game, machine: Hardware, requested: Mapping[str, Any], run_dir: Path
) -> dict[str, Setting]:
    """Return the settings recommended for this environment, algorithm and hardware, except those the user requested."""
    env_options = options.parse(game.Config, settings.env_options, "env.")
    # If actors are requested, only they play: the environment may crash its process. A resumed run keeps its measurements.
    may_play = settings.actors is None and (settings.resume == "never" or not (run_dir / CONFIG).exists())
    recommended = recipes.collect(
        recipes.Request(game, machine, settings.algo, env_options, settings.algo_options, may_play)
    )
    if "gamma" in requested:
        recommended.pop("gamma_end", None)  # a requested discount applies to all of training
    return recommended


def _measured_before(settings: Settings, recommended: Mapping[str, Setting], run_dir: Path) -> dict[str, Setting]:
    """Return the observation scale of the run to resume: measured again, it might differ."""
    name = "env.obs_scale"
    if name in recommended and settings.resume != "never":
        with suppress(OSError, ValueError, KeyError, TypeError):
            before = json.loads((run_dir / CONFIG).read_text(encoding="utf-8"))["env_options"]
            scale = tuple(map(float, before.get("obs_scale", ())))  # older runs have none
            return {name: dataclasses.replace(recommended[name], value=scale)}
    return {}


def _build_rules(
    settings: Settings, game: Game, recommended: Mapping[str, Setting]
) -> tuple[Rules, dict[str, Setting]]:
    """Return the rules, with requested options overriding recommended ones, and the source of each option."""
    requested = options.parse(game.Config, settings.env_options, "env.")
    defaults = {name.removeprefix("env."): s for name, s in recommended.items() if name.startswith("env.")}
    config = options.build(game.Config, settings.env_options, "env.", {name: s.value for name, s in defaults.items()})
    rules = make_rules(settings.env, dataclasses.asdict(config), settings.time_limit)
    return rules, _sources(rules.config, requested, defaults, {}, "environment default", "env.")


def _build_algo_config(
    settings: Settings,
    algo: Algorithm,
    requested: dict[str, Any],
    recommended: Mapping[str, Setting],
    num_envs: int,
    rules: Rules,
    device: torch.device,
    run_dir: Path,
) -> tuple[Any, dict[str, Setting]]:
    """Return the algorithm's Config, by precedence: requested options, the preset, recommended options; then derived values."""
    defaults = {name: s for name, s in recommended.items() if "." not in name and name not in RUN_SETTINGS}
    if settings.preset is not None:
        preset = _find_preset(algo, settings.preset)
        defaults |= {name: Setting(value, "", f"preset {settings.preset}") for name, value in preset.items()}
    fits = requested.get("replay_capacity") == "auto"
    given = {name: value for name, value in requested.items() if not (fits and name == "replay_capacity")}
    config = options.build(algo.Config, given, f"{algo.group}.", {name: s.value for name, s in defaults.items()})
    derived: dict[str, Setting] = {}
    if fits:
        config, reason = fit_replay(config, rules, device, run_dir)
        derived["replay_capacity"] = Setting(config.replay_capacity, reason, "derived from free memory")
    config, reasons = algo.fill_defaults(config, num_envs, given.keys())
    derived |= {name: Setting(None, reason, "derived from num_envs") for name, reason in reasons.items()}
    return config, _sources(config, given, defaults, derived, "algorithm default")


def _sources(
    config: Any,
    requested: Mapping[str, Any],
    defaults: Mapping[str, Setting],
    derived: Mapping[str, Setting],
    otherwise: str,
    prefix: str = "",
) -> dict[str, Setting]:
    """Return value, source and reason of every field of a dataclass."""
    sources = {}
    for name, value in dataclasses.asdict(config).items():
        origin = Setting(value, "", otherwise)
        if name in derived:
            origin = derived[name]
        elif name in requested:
            origin = Setting(value, "", REQUESTED)
        elif name in defaults:
            origin = defaults[name]
        sources[prefix + name] = dataclasses.replace(origin, value=value)
    return sources


def _find_preset(algo: Algorithm, preset: str) -> dict[str, Any]:
    """Return the options of a preset."""
    if preset in algo.PRESETS:
        return dict(algo.PRESETS[preset])
    if algo.PRESETS:
        hint = nearest(preset, algo.PRESETS) or "."
        raise UserError(f"{algo.name} has no preset '{preset}'{hint} Presets: {', '.join(algo.PRESETS)}.")
    broken = algos.failures()
    others = [name for name in algos.names() if name not in broken and algos.load(name).PRESETS]
    raise UserError(f"{algo.name} has no presets; drop --preset or choose an --algo that has: {', '.join(others)}.")


def _choose_backplay(settings: Settings, game: Game, recommended: Mapping[str, Setting]) -> Setting:
    if settings.backplay and game.ON_CPU and not game.CAN_RESTORE:  # type: ignore[attr-defined]
        raise UserError(
            f"backplay is {settings.backplay}, but {settings.env} cannot restore a snapshot; drop --backplay."
        )
    default = Setting(0.0, "every episode starts from the beginning", "default")
    return _requested_or(settings.backplay, recommended.get("backplay", default))


def _choose_curriculum(settings: Settings, rules: Rules, recipe: Recipe) -> tuple[Curriculum | None, Setting]:
    requested = Setting(settings.curriculum is not False, "", REQUESTED)
    if settings.curriculum_file is not None:
        if rules.game.ON_CPU:
            raise UserError(
                f"curriculum_file is given, but options of {settings.env} cannot change while it is played."
            )
        return Curriculum(read_phases(settings.curriculum_file), rules), requested
    if settings.curriculum is False:
        return None, requested
    phases = phases_of(recipe.curriculum(rules.config), without=settings.env_options)
    source = f"recipe {recipe.name}" if recipe.name else "default"
    if not phases:
        if settings.curriculum:
            raise UserError(f"{settings.env} has no curriculum of its own; give one with --curriculum-file.")
        return None, Setting(False, f"{settings.env} has no curriculum for these options", source)
    try:
        return Curriculum(phases, rules), Setting(True, f"phases {', '.join(phase.name for phase in phases)}", source)
    except UserError as error:
        if settings.curriculum:
            raise
        return None, Setting(False, f"the recipe's curriculum does not fit these options: {error}", source)
