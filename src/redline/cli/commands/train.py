"""`redline train ENV`: train an agent into a run folder, or continue the run that is there."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from redline.cli import catalog, schema, streams
from redline.cli.command import Command, Request, show_progress
from redline.cli.page import check_port, web_extra
from redline.cli.parse import fold, merge_config
from redline.cli.schema import Option
from redline.core.errors import StorageError
from redline.engine.launch import follows
from redline.run.options import parse_value
from redline.run.run_folder import check_writable, to_stderr
from redline.run.settings import Settings, from_words
from redline.run.signals import StopSignals

_GROUPS = ("env", "env_options", "algo_options")  # fields of Settings that are not options themselves
PAGE = ("dashboard", "dashboard_host", "dashboard_port")  # options that are not settings of the run
_BUDGET = ("steps", "episodes", "minutes", "resume")  # options left out of the suggested command to resume


def options() -> tuple[Option, ...]:
    """Return the general options: the settings of a run, --config, --print-config and --dashboard."""
    settings = schema.read_options("redline.run.settings", "Settings")
    config = Option(
        "config", str | None, None, "TOML file with any of these options; tables [env] and [ALGO] hold theirs"
    )
    print_config = Option(
        "print_config", bool, False, "print all settings of this command as such a file; train nothing"
    )
    dashboard = Option("dashboard", bool, False, "serve a page with games and curves of this run; prints its address")
    host = Option(
        "dashboard_host", str, "127.0.0.1", "address of that page; with another one it needs the token printed"
    )
    port = Option("dashboard_port", int | None, None, "port of that page; default: the first free one from 8750 on")
    return (*(option for option in settings if option.name not in _GROUPS), config, print_config, dashboard, host, port)


def target(request: Request) -> tuple[str, str]:
    """Return environment and algorithm; if no algorithm is named, the one whose options are given."""
    env = request.arguments[0] if request.arguments else ""
    algo = str(request.options.get("algo", "auto"))
    if algo == "auto":
        groups = {key.partition(".")[0] for key in request.options if "." in key}
        given = [name for name in catalog.ALGORITHMS.names() if name in groups]
        algo = given[0] if len(given) == 1 else "auto"
    return env, algo


def run(request: Request) -> int:
    """Train, print the result and the next commands; return an exit code for the reason training stopped."""
    merged = merge_config("train", COMMAND, request)
    if parse_value(bool, str(merged.options.pop("print_config", False)), "print_config"):
        return print_config(merged)
    page, settings = dashboard_options(merged.options), read_settings(merged)
    quiet = follows()  # only rank 0 prints
    if not quiet:
        check_writable(Path(settings.run_dir or "runs"))  # before torch is loaded, which takes seconds
    progress = show_progress(settings.env, quiet=quiet)
    with ExitStack() as stack:
        stack.enter_context(progress)
        signals = stack.enter_context(StopSignals(progress.say, settings.grace, progress.close, ends_process=True))
        from redline.run.train import EXIT_CODES, train

        def open_dashboard(run_dir: Path) -> None:
            if page and not quiet:
                from redline.web.dashboard import Dashboard

                stack.callback(Dashboard(run_dir, *page, progress.say).close)

        result = train(settings, progress, signals, open_dashboard).result
        code = EXIT_CODES.get(result["stopped_by"], 0)
        try:
            if quiet:
                pass
            elif request.json:
                request.print_json(result)
            else:
                streams.write(closing_lines(result, request.options) + "\n")
        except StorageError as error:  # the run is saved: keep its exit code
            to_stderr(f"redline: {error}")
            code = code or error.exit_code
    return code


def read_settings(request: Request) -> Settings:
    """Return the settings of the requested run."""
    settings = from_words(request.arguments[0], fold({k: v for k, v in request.options.items() if k not in PAGE}))
    settings.check()
    return settings


def dashboard_options(options: Mapping[str, Any]) -> tuple[str, int | None] | None:
    """Return host and port of the dashboard; None if none is requested."""
    if not parse_value(bool, str(options.get("dashboard", False)), "dashboard"):
        return None
    with web_extra("--dashboard"):
        for name in ("starlette", "uvicorn", "websockets"):
            if importlib.util.find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
    word = options.get("dashboard_port")
    port = None if word is None else parse_value(int, str(word), "dashboard_port")
    check_port(port)
    return str(options.get("dashboard_host", "127.0.0.1")), port


def print_config(request: Request) -> int:
    """Print the plan of a request as TOML, or with --json in the form of config.json."""
    settings = read_settings(request)
    with show_progress(settings.env) as progress:
        from redline.run.config_file import plan_to_toml
        from redline.run.thread_choice import decide

        progress.start_activity("Choosing settings")
        plan = decide(settings)
    if request.json:
        request.print_json(plan.describe())
    else:
        print(plan_to_toml(plan), end="")
    return 0


def closing_lines(result: dict[str, Any], options: dict[str, Any]) -> str:
    """Return the summary of a training run and the commands to evaluate, watch and resume it."""
    from redline.envs import make_rules
    from redline.run.progress import duration, quantity
    from redline.run.train import EXIT_CODES
    from redline.tools.watch import why_not_drawn
    from redline.tools.wording import final_score

    settings = result["settings"]
    rules = make_rules(result["env"], settings["env_options"], settings.get("time_limit", 0))
    preparation = result.get("preparation_seconds", 0.0)
    prepared = f" of training after {duration(preparation)} of preparation" if preparation >= 1 else ""
    lines = [
        f"{quantity(result['env_steps'])} steps in {duration(result['seconds'] - preparation)}{prepared} "
        f"({quantity(result['env_steps_per_second'])} env-steps/s, {quantity(result['samples_per_second'])} "
        f"gradient samples/s); stopped by {result['stopped_by']}."
    ]
    if "score_mean" in result:
        lines += final_score(result, rules.game.spec(rules.config))
        lines += _nothing_learned(result, options)
    if result["stopped_by"] in EXIT_CODES:  # before the budget was used up: the same command resumes it
        repeated = {name: value for name, value in options.items() if name != "resume"}
    else:
        minutes, steps = settings["minutes"], result["env_steps"]
        budget = {"minutes": f"{2 * minutes:g}"} if minutes else {"steps": 2 * steps}
        repeated = {name: value for name, value in options.items() if name not in _BUDGET} | budget
    program, run_dir = _program(), result["run"]
    in_terminal = "" if importlib.util.find_spec("starlette") else " --terminal"  # without the extra `web`
    again = f"torchrun --standalone --nproc-per-node={settings['ranks']} -m redline" if "ranks" in settings else program
    return "\n".join(
        [
            *lines,
            f"Run folder: {run_dir}",
            f"  evaluate:  {program} eval {shlex.quote(run_dir)}",
            f"  watch:     {why_not_drawn(rules) or f'{program} watch {shlex.quote(run_dir)}{in_terminal}'}",
            f"  continue:  {again} train {shlex.join([result['env'], *_words(repeated)])}",
        ]
    )


def _nothing_learned(result: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Return advice if all held-out games scored the same as the first games of training and none was won, else no lines."""
    from redline.run.run_folder import METRICS

    with suppress(OSError, ValueError):  # only advice: a run without a readable log must still end normally
        metrics = map(json.loads, (Path(result["run"]) / METRICS).read_text(encoding="utf-8").splitlines())
        first = next((line["score"] for line in metrics if "score" in line), None)
        same = result["score_min"] == result["score_max"] == first
        if same and result["eval_episodes"] > 1 and not result["win_rate"]:
            other = "ppo" if result["algo"] == "dqn" else "dqn"
            folder = " and another --run-dir" if "run_dir" in options else ""
            return [
                f"Every game scored {first:g}, as at the start of training: nothing was learned. Another algorithm may explore "
                f"further: try --algo {other}{folder}."
            ]
    return []


def _words(options: dict[str, Any]) -> list[str]:
    """Return options as command-line words."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def _program() -> str:
    """Return the command that runs redline here: its path if its virtual environment is not active."""
    if sys.prefix == sys.base_prefix or shutil.which("redline"):
        return "redline"
    folder = Path(sys.prefix) / "bin"
    with suppress(ValueError):
        folder = folder.relative_to(Path.cwd())
    return f"{folder}/redline"


COMMAND = Command("train an agent; the same command again continues the run", run, "ENV", options, target, position=1)
