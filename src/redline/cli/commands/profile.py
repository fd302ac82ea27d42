"""`redline profile ENV|RUN`: time every stage, name the bottleneck, and try what would help."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from redline.cli import schema
from redline.cli.command import Command, Request, show_progress
from redline.cli.commands import train
from redline.cli.parse import fold
from redline.cli.schema import Option
from redline.core.errors import UserError
from redline.run.options import build
from redline.run.settings import from_words

# Options of `redline train` that `redline profile` does not accept: budgets, files and evaluation.
_NOT_HERE = (
    *("steps", "episodes", "minutes", "run_dir", "resume", "checkpoint_minutes", "eval_episodes", "tensorboard"),
    *("wandb", "config", "print_config", "dashboard", "dashboard_host", "dashboard_port"),
)


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `redline profile` itself."""

    seconds: float = 10.0  # seconds to measure in all, compilation not counted
    out: str = "profile.md"  # report to write; its chart and JSON go beside it
    probes: int = 2  # changes of settings to measure for advice; 0: none
    trace: str | None = None  # also write a Chrome trace of a few iterations to this file
    trust: bool = False  # import the modules that a run of somebody else names as environment or algorithm


_OWN = ("seconds", "out", "probes", "trace", "trust")


def options() -> tuple[Option, ...]:
    """Return the profile's own options and those of `redline train`, except _NOT_HERE."""
    own = schema.read_options(__name__, "ProfileOptions")
    return (*own, *(option for option in train.options() if option.name not in _NOT_HERE))


def target(request: Request) -> tuple[str, str]:
    """Return environment and algorithm; an empty environment for a run folder, which has its own."""
    if request.arguments and _is_run(request.arguments[0]):
        return "", "auto"
    return train.target(request)


def _is_run(argument: str) -> bool:
    return (Path(argument) / "config.json").exists()


def run(request: Request) -> int:
    """Profile the run and print a table and the paths of the report."""
    argument = request.arguments[0]
    own = build(ProfileOptions, {name: word for name, word in request.options.items() if name in _OWN}, "")
    words = {name: word for name, word in request.options.items() if name not in _OWN}
    if own.seconds <= 0 or own.probes < 0:
        name, value = ("seconds", own.seconds) if own.seconds <= 0 else ("probes", own.probes)
        raise UserError(f"{name} is {value}; expected {'a number above 0' if name == 'seconds' else '0 or more'}.")
    if _is_run(argument) and words:
        given = ", ".join(sorted(words))
        raise UserError(
            f"{argument} is a run, which is profiled with its own settings; drop {given}, or name its game."
        )
    requested = None if _is_run(argument) else from_words(argument, fold(words))
    if requested:
        requested.check()
    with show_progress(f"profile {argument}", erase=True) as progress:
        from redline.tools.profile import profile, settings_of_run
        from redline.tools.profile_report import terminal_table

        settings = requested or settings_of_run(Path(argument), own.trust)
        trace = Path(own.trace) if own.trace else None
        loading = sum(progress.activity_seconds().values())
        progress.start_activity("Profiling")
        record = profile(settings, own.seconds, Path(own.out), own.probes, trace, progress.say, loading)
    if request.json:
        request.print_json(record)
    else:
        files = [record[name] for name in ("report", "chart", "json") if name in record]
        print("\n".join([terminal_table(record), "", *files, *([own.trace] if own.trace else [])]))
    sys.stdout.flush()
    return 0


COMMAND = Command(
    "time every stage of training, name the bottleneck and try what would help",
    run,
    "ENV|RUN",
    options,
    target,
    position=5,
)
