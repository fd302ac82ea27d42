"""`redline completion SHELL`: print a completion script for bash, zsh or tcsh."""

from __future__ import annotations

from redline.cli.command import Command, Request
from redline.core.errors import UserError, nearest

SHELLS = ("bash", "zsh", "tcsh")


def run(request: Request) -> int:
    """Print the completion script, to be sourced by the shell."""
    shell = request.arguments[0]
    if shell not in SHELLS:
        raise UserError(
            f"There is no completion for '{shell}'{nearest(shell, SHELLS) or '.'} Shells: {', '.join(SHELLS)}."
        )
    from redline.cli.completion import script

    text = script(shell)
    if request.json:
        request.print_json({"shell": shell, "script": text})
    else:
        print(text)
    return 0


COMMAND = Command('print a completion script: eval "$(redline completion bash)"', run, "SHELL", position=10)
