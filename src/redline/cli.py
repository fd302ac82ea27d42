"""The command line. Each command is a dataclass of its options; words after it are parsed by its types."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import shlex
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline import __version__
from redline.core.errors import StorageError, UserError, nearest
from redline.run.options import parse_value
from redline.tools.bench_options import BenchOptions, Wanted
from redline.tools.wording import per_game_over as _per_game_over

# Torch and what needs it are imported by the commands, so that help and errors come at once.


@dataclass(frozen=True)
class Command:
    """A word of the command line."""

    summary: str
    argument: str  # its positional argument, empty: none; in brackets: may be left out
    options: Callable[[], type]  # dataclass of its options
    run: Callable[[str, dict[str, Any], bool], int]
    groups: str = ""  # option groups it takes besides, for the help text
    several: bool = False  # more positional arguments may follow; they are the option `more`


@dataclass(frozen=True)
class EvalOptions:
    """Options of `redline eval`."""

    episodes: int = 256  # games played, each to its end; with --max-steps: games played at once
    max_steps: int = 0  # play so many steps in all instead, for agents whose games are very long; 0: no budget
    sample: bool = False  # actions are drawn as in training instead of the likeliest being taken (PPO)
    seed: int = 0  # which set of held-out games
    device: str = "auto"


@dataclass(frozen=True)
class ReportOptions:
    """Options of `redline report`."""

    out: str | None = None  # folder to write to; else that of the run, for several runs the folder report


@dataclass(frozen=True)
class WatchOptions:
    """Options of `redline watch`."""

    terminal: bool = False  # play in this terminal
    gif: str | None = None  # write a GIF to this file
    seed: int = 0  # which game
    games: int = 1  # how many, one after the other (terminal)
    fps: float = 12.0  # moves a second
    max_steps: int = 2000  # of a GIF
    device: str = "cpu"


@dataclass(frozen=True)
class NoOptions:
    """No options of its own."""


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `redline doctor`."""

    env: str = "snake"
    algo: str = "auto"
    device: str = "auto"


def main(words: Sequence[str] | None = None) -> None:
    """Entry point: runs a command and exits with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± and … gets question marks, not a traceback
    try:
        code = run(list(sys.argv[1:] if words is None else words))
        if sys.stdout:
            sys.stdout.flush()  # here, where a reader that went away is met; at exit it would be a traceback
    except UserError as error:
        print(f"redline: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of our output went away: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def run(words: list[str]) -> int:
    """Run the command that `words` spell; returns the exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        print(f"redline {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS) or "."
        raise UserError(f"There is no command '{name}'{hint} Commands: {', '.join(COMMANDS)}.")
    command = COMMANDS[name]
    kind = command.options()
    if "-h" in rest or "--help" in rest:
        print(_help(name, command, kind))
        return 0
    argument, options = parse(name, command, kind, rest)
    as_json = parse_value(bool, str(options.pop("json", False)), "json")
    return command.run(argument, options, as_json)


def parse(name: str, command: Command, kind: type, words: list[str]) -> tuple[str, dict[str, Any]]:
    """The positional argument and the options by name (words not yet parsed by type, flags as True or False)."""
    hints = typing.get_type_hints(kind)
    flags = {field for field, hint in hints.items() if hint is bool or bool in typing.get_args(hint)}
    if command.groups:
        flags |= {key for key, kind in _group_fields() if kind is bool}
    known = {*hints, "json"} - {"env_options", "algo_options"}
    argument = ""
    found: dict[str, Any] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            if argument and command.several:
                found.setdefault("more", []).append(word)
                continue
            if argument or not command.argument:
                raise UserError(f"redline {name} does not know what to do with '{word}'; see redline {name} --help.")
            argument = word
            continue
        key, equals, value = word[2:].partition("=")
        plain = key.replace("-", "_")
        if plain in flags or plain == "json":
            if "." in plain and argument and queue and not queue[0].startswith("--"):
                found[plain] = queue.pop(0)  # --dqn.double false
            else:
                found[plain] = value if equals else True
            continue
        if "." in key and command.groups and not plain.startswith("no_"):
            pass
        elif plain.startswith("no_") and plain[3:] in flags:
            if equals:
                raise UserError(f"--{key} takes no value; see redline {name} --help.")
            found[plain[3:]] = False
            continue
        elif plain not in known or (plain == "env" and command.argument == "ENV"):
            raise UserError(f"redline {name} has no option --{key}{nearest(plain, known).replace('_', '-') or '.'}")
        if not equals:
            if not queue or (queue[0].startswith("--") and not queue[0][2:3].isdigit()):
                raise UserError(f"--{key} needs a value; see redline {name} --help.")
            value = queue.pop(0)
        found[plain] = value
    if command.argument and not argument and not command.argument.startswith("["):
        raise UserError(f"redline {name} needs {command.argument}; see redline {name} --help.")
    return argument, found


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, default=str), flush=True)


def _train(argument: str, options: dict[str, Any], as_json: bool) -> int:
    from redline.run.config import from_words
    from redline.run.train import EXIT_CODES, train

    result = train(from_words(argument, options)).result
    if as_json:
        _print_json(result)
    else:
        print(_closing_words(result, options))
    return EXIT_CODES.get(result["stopped_by"], 0)


def _closing_words(result: dict[str, Any], options: dict[str, Any]) -> str:
    """What came of a training run, and the commands to go on with it."""
    from redline.envs import load_game
    from redline.run.progress import duration, quantity

    run_dir, env = result["run"], result["env"]
    prefix = "" if sys.prefix == sys.base_prefix or _on_path("redline") else f"{_relative(Path(sys.prefix) / 'bin')}/"
    minutes = result["settings"]["minutes"]
    again = {k: v for k, v in options.items() if k not in ("steps", "episodes", "minutes", "resume")}
    again |= {"minutes": f"{2 * minutes:g}"} if minutes else {"steps": str(2 * result["env_steps"])}
    lines = [
        f"{quantity(result['env_steps'])} steps in {duration(result['seconds'])} "
        f"({quantity(result['env_steps_per_second'])} env-steps/s, {quantity(result['samples_per_second'])} "
        f"gradient samples/s); stopped by {result['stopped_by']}."
    ]
    game: Any = load_game(env)
    host = game.ON_CPU  # not shown by watch; whether a game was won it may not say
    if "score_mean" in result:
        won = "" if host and not game.WON else f", won {100 * result['win_rate']:.1f} %"
        lines.append(
            f"Greedy score over {result['eval_episodes']} held-out games: {result['score_mean']:.2f} ± "
            f"{result['score_ci95']:.2f} (best {result['score_max']:.0f}{won})"
        )
        if going_on := result["eval_episodes"] - result["finished"]:
            lines.append(
                f"{going_on} of them were stopped after {result['eval_max_steps']:,} steps and count as they stood; "
                f"score per game over: {_per_game_over(result)}"
            )
    return "\n".join(
        [
            *lines,
            f"Run folder: {run_dir}",
            f"  evaluate:  {prefix}redline eval {run_dir}",
            *([] if host else [f"  watch:     {prefix}redline watch {run_dir} --terminal"]),
            f"  continue:  {prefix}redline train {env} {shlex.join(_spell(again))}",
        ]
    )


def _spell(options: dict[str, Any]) -> list[str]:
    """Options as the words that give them."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def _on_path(program: str) -> bool:
    import shutil

    return shutil.which(program) is not None


def _relative(path: Path) -> Path:
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path


def _eval(argument: str, options: dict[str, Any], as_json: bool) -> int:
    from redline.run.agent import load_agent
    from redline.run.compare import evaluate_runs
    from redline.run.options import build
    from redline.run.run_folder import write_json
    from redline.tools.wording import comparison, evaluation

    runs = [argument, *options.pop("more", [])]
    wanted = build(EvalOptions, options, "")
    agents = [load_agent(Path(run), wanted.device) for run in runs]
    shown = sys.stderr.isatty()

    def progress(number: int, done: int) -> None:
        if shown:
            text = (
                f"{done:,} of {wanted.max_steps:,} steps" if wanted.max_steps else f"{done} of {wanted.episodes} games"
            )
            of_run = f"run {number + 1} of {len(runs)}: " if len(runs) > 1 else ""
            print(f"\r{of_run}{text}", end="", file=sys.stderr, flush=True)

    if len(agents) > 1:
        result = evaluate_runs(agents, wanted.episodes, wanted.seed, progress, wanted.max_steps, wanted.sample)
    else:
        tell = functools.partial(progress, 0)
        result = agents[0].evaluate(wanted.episodes, wanted.seed, tell, wanted.max_steps, wanted.sample)
    if shown:
        print("\r", end="", file=sys.stderr)
    for agent, record in zip(agents, result.get("runs", [result]), strict=True):
        try:
            write_json(agent.path / "eval.json", record)
        except StorageError as error:  # somebody else's run may be evaluated: the result is still worth showing
            print(f"redline: {error}", file=sys.stderr)
    if as_json:
        _print_json(result)
        return 0
    name = agents[0].rules.game.spec(agents[0].rules.config).score_name
    print(comparison(result, name) if len(agents) > 1 else evaluation(result, name))
    return 0


def _report(argument: str, options: dict[str, Any], as_json: bool) -> int:
    from redline.run.options import build
    from redline.tools.report import write_report

    runs = [Path(run) for run in (argument, *options.pop("more", []))]
    out = build(ReportOptions, options, "").out
    found = write_report(runs, Path(out) if out else runs[0] if len(runs) == 1 else Path("report"))
    for note in found["notes"]:
        print(note, file=sys.stderr)
    if as_json:
        _print_json(found)
    else:
        print("\n".join([found["report"], *found["pictures"]]))
    if found["missing"]:
        raise UserError(found["missing"])
    return 0


def _watch(argument: str, options: dict[str, Any], as_json: bool) -> int:
    from redline.run.agent import load_agent
    from redline.run.evaluate import HELD_OUT
    from redline.run.options import build
    from redline.tools.watch import play_terminal, record_gif

    wanted = build(WatchOptions, options, "")
    if not wanted.terminal and not wanted.gif:
        raise UserError("redline watch needs --terminal (play here) or --gif FILE (write a picture that moves).")
    agent = load_agent(Path(argument), wanted.device)
    seed = HELD_OUT + wanted.seed  # a game of those that evaluation plays, not one it was trained on
    if wanted.gif:
        results = [
            record_gif(agent.rules, agent.policy, seed, Path(wanted.gif), fps=wanted.fps, max_steps=wanted.max_steps)
        ]
        print(
            f"{wanted.gif}: {results[0].length} steps, score {results[0].score}, {results[0].outcome}", file=sys.stderr
        )
    if wanted.terminal:
        out = sys.stderr if as_json else sys.stdout
        results = play_terminal(agent.rules, agent.policy, seed, fps=wanted.fps, games=wanted.games, out=out)
    if as_json:
        _print_json({"run": argument, "env": agent.config["env"], "games": [r._asdict() for r in results]})
    return 0


def _bench(argument: str, options: dict[str, Any], as_json: bool) -> int:
    from redline.run.config import split_groups
    from redline.run.options import build
    from redline.tools import bench
    from redline.tools.bench_collect import bench_collect
    from redline.tools.bench_replay import bench_replay

    kinds = {"env": bench.bench_env, "train": bench.bench_train, "replay": bench_replay, "collect": bench_collect}
    if argument and argument not in kinds:
        hint = nearest(argument, kinds) or "."
        raise UserError(f"There is no benchmark '{argument}'{hint} Benchmarks: {', '.join(kinds)}.")
    plain, groups = split_groups(options, str(options.get("algo", BenchOptions.algo)))
    asked = build(BenchOptions, plain, "")
    wanted = Wanted(**vars(asked), env_options=groups["env"], algo_options=groups[asked.algo])
    record = bench.describe_machine(wanted.device)
    for kind in [argument] if argument else list(kinds):
        record[kind] = kinds[kind](wanted, sys.stderr if as_json else sys.stdout)
    if wanted.out:
        from redline.run.run_folder import write_json

        write_json(Path(wanted.out), record)
    if as_json:
        _print_json(record)
    return 0


REPLAY = {
    "device": "States in a ring on the device; observations are made when sampled",
    "pinned": "in page-locked host memory; batches are copied to the device ahead of time",
    "memmap": "in a file of the run folder, for capacities beyond memory; found again by --resume",
}


def _list(argument: str, options: dict[str, Any], as_json: bool) -> int:
    del argument, options
    from redline import algos, games
    from redline.envs import CPU_ENVS

    found = {"games": games.names(), "algorithms": algos.names(), "replay": list(REPLAY)}
    found["hosts"] = [host.SPELLING for host in CPU_ENVS.values()]
    if as_json:
        _print_json(found)
        return 0
    print("Games")
    for name in found["games"]:
        print(f"  {name:<10} {_first_sentence(games.load(name))}")
    for host in CPU_ENVS.values():
        print(f"  {host.SPELLING:<10} {_first_sentence(sys.modules[host.__module__])}")
    print("Algorithms")
    for name in found["algorithms"]:
        print(f"  {name:<10} {_first_sentence(algos.load(name).module)}")
    print("Replay")
    for name, what in REPLAY.items():
        print(f"  {name:<10} {what}")
    return 0


def _first_sentence(module: Any) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]


def _doctor(argument: str, options: dict[str, Any], as_json: bool) -> int:
    del argument
    from redline.run.options import build
    from redline.tools.doctor import examine, report

    found = examine(**dataclasses.asdict(build(DoctorOptions, options, "")))
    if as_json:
        _print_json(found)
    else:
        print(report(found))
    return 0


def _settings() -> type:
    from redline.run.config import Settings

    return Settings


COMMANDS = {
    "train": Command("trains; the same command again continues", "ENV", _settings, _train, "env. and the algorithm's"),
    "eval": Command(
        "plays held-out seeds, greedily by default, and reports the score; of several runs also over all of them",
        "RUN [RUN ...]",
        lambda: EvalOptions,
        _eval,
        several=True,
    ),
    "report": Command(
        "tables and curves of runs, as Markdown and PNG",
        "RUN [RUN ...]",
        lambda: ReportOptions,
        _report,
        several=True,
    ),
    "watch": Command("shows a trained agent in the terminal or as a GIF", "RUN", lambda: WatchOptions, _watch),
    "bench": Command(
        "throughput on this machine: env, train, replay or collect",
        "[env|train|replay|collect]",
        lambda: BenchOptions,
        _bench,
        "env. and the algorithm's",
    ),
    "doctor": Command("what was found and which settings follow", "", lambda: DoctorOptions, _doctor),
    "list": Command("games, algorithms, replay kinds", "", lambda: NoOptions, _list),
}


def _overview() -> str:
    lines = ["usage: redline COMMAND … [--json]", ""]
    lines += [f"  {name + ' ' + c.argument:<20} {c.summary}" for name, c in COMMANDS.items()]
    return "\n".join([*lines, "", "redline COMMAND --help shows the options of a command."])


def _help(name: str, command: Command, kind: type) -> str:
    import inspect

    comments = {}
    for line in inspect.getsource(kind).splitlines():
        code, hash_sign, comment = line.partition("  # ")
        if hash_sign and ":" in code:
            comments[code.split(":")[0].strip()] = comment
    lines = [f"usage: redline {name} {command.argument} [options]", "", f"  {command.summary}", "", "options:"]
    for field in dataclasses.fields(kind):
        if field.name in ("env_options", "algo_options") or field.default is dataclasses.MISSING:
            continue
        flag = "--" + field.name.replace("_", "-")
        default = "auto" if field.default is None else field.default
        lines.append(f"  {flag:<22} {comments.get(field.name, '')} [{default}]")
    lines.append(f"  {'--json':<22} one JSON object on the last line of standard output, nothing else there")
    if command.groups:
        lines += ["", "option groups:"]
        lines += [f"  --{group}.{text}" for group, text in _group_options()]
    return "\n".join(lines)


def _group_fields() -> list[tuple[str, Any]]:
    """Every option of a game or an algorithm, as env.NAME or ALGO.NAME, with its type."""
    from redline import algos, games
    from redline.envs import CPU_ENVS

    found = []
    envs: list[Any] = [*map(games.load, games.names()), *CPU_ENVS.values()]
    for group, module in [("env", env) for env in envs] + [(a, algos.load(a)) for a in algos.names()]:
        found += [(f"{group}.{name}", hint) for name, hint in typing.get_type_hints(module.Config).items()]
    return found


def _group_options() -> list[tuple[str, str]]:
    from redline import algos, games
    from redline.envs import CPU_ENVS

    found = []
    hosts = {host.SPELLING: host for host in CPU_ENVS.values()}
    listed: dict[str, Any] = {name: games.load(name) for name in games.names()} | hosts
    for name, game in listed.items():
        for field in dataclasses.fields(game.Config):
            sharing = [other for other in hosts if name in hosts and hasattr(hosts[other].Config, field.name)] or [name]
            if name == sharing[0]:  # kinds of the host share most of theirs
                found.append(("env", f"{field.name:<18} [{field.default}] env ({', '.join(sharing)})"))
    for algo in algos.names():
        for field in dataclasses.fields(algos.load(algo).Config):
            found.append((algo, f"{field.name:<18} [{field.default}] {algo}"))
    return found
