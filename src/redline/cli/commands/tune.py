"""`redline tune ENV`: measure which sizes, precision and compile mode train fastest, and write them to a TOML file."""

from __future__ import annotations

import sys
from pathlib import Path

from redline.cli.command import Command, Request, options_of, show_progress
from redline.cli.commands.train import target
from redline.cli.parse import fold
from redline.core.errors import UserError
from redline.run.options import build
from redline.run.settings import from_words
from redline.tools.tune_options import TuneOptions


def run(request: Request) -> int:
    """Tune the settings, print the table and write the file."""
    plain = {name: word for name, word in request.options.items() if "." not in name}
    options = build(TuneOptions, plain, "")
    if not options.seconds > 0:
        raise UserError(f"seconds is {options.seconds}; expected a number above 0.")
    env = request.arguments[0]
    words = {name: word for name, word in request.options.items() if name not in ("seconds", "out")}
    settings = from_words(env, fold(words))
    settings.check()
    with show_progress(f"tune {env}", erase=True):
        from redline.tools.tune import default_path, tune

    path = Path(options.out) if options.out else default_path(env)
    out = sys.stderr if request.json else sys.stdout
    record = tune(settings, options.seconds, path, out, sys.stderr)
    if request.json:
        request.print_json(record)
    return 0


COMMAND = Command(
    "find the settings that train fastest on this machine, and write them for train --config",
    run,
    "ENV",
    options_of(TuneOptions),
    target,
    position=5,
)
