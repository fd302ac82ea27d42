"""The command line: `redline COMMAND [OPTIONS]`.

Each command is a file in `redline/cli/commands`. Errors that a user can cause are one sentence on standard error,
`redline: …`, with exit code 2. Help and usage errors appear without importing torch. Ctrl-C ends a command with one
sentence and exit code 130; training first writes a checkpoint.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from redline.cli import help as help_text
from redline.cli.command import COMMANDS, by_position
from redline.cli.parse import parse
from redline.core.errors import UserError, nearest

INTERRUPTED = 130  # exit code after Ctrl-C


def main(words: Sequence[str] | None = None) -> None:
    """Run the command in `words` (the program's arguments by default) and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± and … gets question marks, not a traceback
    try:
        code = run(list(sys.argv[1:] if words is None else words))
        if sys.stdout:
            sys.stdout.flush()  # a closed pipe raises here; at interpreter exit it would print a traceback
    except UserError as error:
        print(f"redline: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt as interrupt:
        code = _end_interrupted(interrupt, as_program=words is None)
    except BrokenPipeError:  # the program reading our output has exited, as in `redline list | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:  # a library may turn an interrupt into an error of its own
        if not (behind := _interrupt_behind(error)):
            raise
        code = _end_interrupted(behind, as_program=words is None)
    sys.exit(code)


def run(words: list[str]) -> int:
    """Run the command that `words` spell and return its exit code."""
    if not words or words[0] in ("-h", "--help") or words == ["help"]:
        print(help_text.overview())
        return 0
    if words[0] == "--version":
        print(f"redline {_version()}")
        return 0
    if words[0] == "help":
        words = [words[1], "--help", *words[2:]]
    name, rest = words[0], words[1:]
    if name not in COMMANDS.names():
        known = list(by_position())
        raise UserError(f"There is no command '{name}'{nearest(name, known) or '.'} Commands: {', '.join(known)}.")
    command = COMMANDS.load(name)
    if "-h" in rest or "--help" in rest:
        print(help_text.command_help(name, command, rest))
        return 0
    return command.run(parse(name, command, rest))


def _interrupt_behind(error: BaseException) -> BaseException | None:
    """Return the KeyboardInterrupt that led to an error, None where there is none."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause


def _end_interrupted(interrupt: BaseException, as_program: bool) -> int:
    """Acknowledge Ctrl-C and return the exit code. A program ends here, without waiting for threads still at work."""
    after_echo = "\n" if sys.stderr.isatty() else ""  # a terminal has shown ^C
    print(f"{after_echo}redline: {str(interrupt) or 'Interrupted.'}", file=sys.stderr, flush=True)
    if as_program:
        os._exit(INTERRUPTED)
    return INTERRUPTED


def _version() -> str:
    from redline import __version__

    return __version__
