"""Make docs/reference/cli.md: `python bench/make_cli_page.py [--check]`.

Commands, games and algorithms come from their registries, options from the schema that parses the command line. Does not import
torch. `--check` writes nothing and fails if the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from redline.cli import catalog, help
from redline.cli.command import Command, by_position, own_options
from redline.cli.schema import Option

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "cli.md"
# An environment of each kind that is not a registered game, for its options.
OTHER_ENVS = {"gym:ID": "gym:CartPole-v1", "mario": "mario"}
INTRODUCTION = """\
<!-- Made by bench/make_cli_page.py from the options in the source: run `make docs`. -->
# Command line

`redline COMMAND [OPTIONS]`. Options and arguments may come in any order, `--name VALUE` or `--name=VALUE`, with hyphens or
underscores; a flag is switched off by `--no-name`. `20M` and `1.5k` are numbers. Values in brackets are defaults; where it
says auto, the recipe and the hardware decide, and `redline doctor --env ENV` shows the result. With `--json` the last line of
standard output is one JSON object.

Exit codes: 0 done, 1 a check or a comparison failed, 2 a mistake in the command, 70 environments or numbers that cannot go on,
74 storage, 75 stopped by a signal and resumable, 130 Ctrl-C.
"""


def page() -> str:
    """Return the text of docs/reference/cli.md."""
    parts = [INTRODUCTION, _table(("command", ""), [_overview(*item) for item in by_position().items()])]
    for name, command in by_position().items():
        usage = " ".join(filter(None, ("redline", name, command.argument, "[OPTIONS]")))
        parts += [f"## redline {name}", f"`{usage}`: {command.summary}.", _options(own_options(command).values(), "")]
        if command.target:
            parts.append("Also takes the options of [environments](#environments) and [algorithms](#algorithms).")
    parts += [
        "## Environments",
        "Every environment has the general options of a run, such as `--time-limit`, and those below.",
    ]
    names = {name: name for name in catalog.GAMES.names()} | OTHER_ENVS
    for title, env in names.items():
        parts += [f"### {title}", _options(catalog.env_options(env), "env.")]
    parts += ["## Algorithms", "The defaults below are the algorithm's own; recipes change many of them."]
    for algo in catalog.ALGORITHMS.names():
        parts += [f"### {algo}", _options(catalog.algorithm_options(algo), f"{algo}.")]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _overview(name: str, command: Command) -> tuple[str, str]:
    return f"[redline {name}](#redline-{name})", command.summary


def _options(options: Iterable[Option], prefix: str) -> str:
    rows = [help.describe(option, prefix) for option in options]
    return _table(("option", ""), [(_code(shown), _escaped(text)) for shown, text in rows])


def _code(text: str) -> str:
    """Return code for a table cell; mkdocs and GitHub disagree about `|` between backticks."""
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    cells = [head, ("---", "---"), *rows]
    return "\n".join(f"| {left} | {right} |" for left, right in cells)


def _escaped(text: str) -> str:
    """Return text with Markdown escaped, except code between backticks."""
    return text.replace("|", "&#124;").replace("[", "\\[").replace("<", "&lt;").replace("*", "\\*")


def main() -> None:
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date: run `make docs`.")


if __name__ == "__main__":
    main()
