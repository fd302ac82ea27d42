"""The command line: `redline COMMAND [OPTIONS]`.

Each command is a file in `redline/cli/commands`. User errors print one sentence to standard error, `redline: …`, and exit with
code 2. Help and usage errors appear without importing torch. Ctrl-C ends a command with one sentence and exit code 130;
training first saves a checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from redline.cli import help as help_text
from redline.cli import streams
from redline.cli.command import COMMANDS, by_position
from redline.cli.parse import parse
from redline.core.errors import StorageError, UserError, nearest
from redline.engine.launch import launched
from redline.run.run_folder import reason, to_stderr

INTERRUPTED = 130  # exit code after Ctrl-C


def main(words: Sequence[str] | None = None) -> None:
    """Run the command in `words` (the program's arguments by default) and exit with its code."""
    streams.prepare()
    try:
        code = run(list(sys.argv[1:] if words is None else words))
        streams.flush_output()
    except UserError as error:
        if not getattr(error, "reported", False):
            to_stderr(f"redline{_rank()}: {error}")
        code = error.exit_code
    except KeyboardInterrupt as interrupt:
        code = _end_interrupted(interrupt, as_program=words is None)
    except BrokenPipeError:  # the program reading the output has exited, as in `redline list | head -1`
        streams.silence(sys.stdout)
        code = 0
    except OSError as error:  # from a full disk behind standard output, or a file that a command needs
        place = f" ({error.filename})" if error.filename else ""
        to_stderr(f"redline: Reading or writing failed: {reason(error)}{place}.")
        code = StorageError.exit_code
    except Exception as error:
        if behind := _interrupt_behind(error):  # a library may turn an interrupt into another error
            code = _end_interrupted(behind, as_program=words is None)
        elif sentence := _out_of_memory(error):
            to_stderr(f"redline: {sentence}")
            code = UserError.exit_code
        else:
            raise
    streams.finish()
    sys.exit(code)


def run(words: list[str]) -> int:
    """Run the command given by `words` and return its exit code."""
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
    """Return the KeyboardInterrupt that led to an error; None if there is none."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause


def _end_interrupted(interrupt: BaseException, as_program: bool) -> int:
    """Acknowledge Ctrl-C and return the exit code. A program exits here, without waiting for running threads."""
    code: int = getattr(interrupt, "exit_code", INTERRUPTED)
    after_echo = "\n" if code == INTERRUPTED and sys.stderr.isatty() else ""  # the terminal shows ^C
    to_stderr(f"{after_echo}redline: {str(interrupt) or 'Interrupted.'}")
    if as_program:
        os._exit(code)
    return code


def _out_of_memory(error: Exception) -> str:
    """Return a sentence if an error means that memory ran out, or an empty string."""
    if "torch" not in sys.modules and not isinstance(error, MemoryError):
        return ""
    from redline.engine.out_of_memory import is_out_of_memory

    if not is_out_of_memory(error):
        return ""
    return (
        "There is too little memory for this command: end other programs, or choose smaller sizes or another --device."
    )


def _rank() -> str:
    """Return ` (rank N)` on ranks other than 0, else an empty string."""
    return f" (rank {launch.rank})" if (launch := launched()) and launch.rank else ""


def _version() -> str:
    from redline import __version__

    return __version__
