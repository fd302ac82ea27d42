"""`redline report RUN...`: tables and learning curves of runs, as Markdown, PNG and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from redline.cli import streams
from redline.cli.command import Command, Request, options_of
from redline.core.errors import UserError
from redline.run.run_folder import to_stderr


@dataclass(frozen=True)
class ReportOptions:
    """Options of `redline report`."""

    out: str | None = None  # folder to write to; by default the run's own, for several runs the folder report


def run(request: Request) -> int:
    """Write the report and print its table and the paths of its files."""
    runs = [Path(run) for run in request.arguments]
    out = request.build(ReportOptions).out
    from redline.run.progress import Progress

    with Progress("report", erase=True) as progress:
        progress.start_activity("Reading and drawing")
        from redline.tools.report import write_report

        report = write_report(runs, Path(out) if out else runs[0] if len(runs) == 1 else Path("report"))
    for note in report["notes"]:
        to_stderr(_printable(note))
    files = [report["html"], report["report"], *report["pictures"]]
    if request.json:
        request.print_json(report)
    else:
        streams.write("\n".join([*_terminal(report["table"]), "", *files, ""]))
    if report["missing"]:
        raise UserError(report["missing"])
    return 0


def _terminal(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the table as aligned lines, without empty columns."""
    from redline.tools.wording import table

    names = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
    return table([names, *([_printable(row[name]) for name in names] for row in rows)])


def _printable(text: str) -> str:
    """Return text without control characters, which an untrusted run folder may contain."""
    return "".join(character if character.isprintable() else " " for character in text)


COMMAND = Command(
    "write tables and learning curves of runs, as an HTML page, Markdown and PNG",
    run,
    "RUN [RUN ...]",
    options_of(ReportOptions),
    position=4,
)
