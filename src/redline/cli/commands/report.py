"""`redline report RUN...`: tables and learning curves of runs, as Markdown and PNG."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from redline.cli.command import Command, Request, options_of
from redline.core.errors import UserError


@dataclass(frozen=True)
class ReportOptions:
    """Options of `redline report`."""

    out: str | None = None  # folder to write to; by default the run's own, for several runs the folder report


def run(request: Request) -> int:
    """Write the report and print the paths of its files."""
    runs = [Path(run) for run in request.arguments]
    out = request.build(ReportOptions).out
    from redline.run.progress import Progress

    with Progress("report", erase=True) as progress:
        progress.start_activity("Reading and drawing")
        from redline.tools.report import write_report

        report = write_report(runs, Path(out) if out else runs[0] if len(runs) == 1 else Path("report"))
    for note in report["notes"]:
        print(note, file=sys.stderr)
    if request.json:
        request.print_json(report)
    else:
        print("\n".join([report["report"], *report["pictures"]]))
    if report["missing"]:
        raise UserError(report["missing"])
    return 0


COMMAND = Command(
    "write tables and learning curves of runs, as Markdown and PNG",
    run,
    "RUN [RUN ...]",
    options_of(ReportOptions),
    position=4,
)
