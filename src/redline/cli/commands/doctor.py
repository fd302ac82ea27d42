"""`redline doctor`: the hardware found, the settings chosen for it, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from redline.cli import catalog
from redline.cli.command import Command, Request, options_of, show_progress


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `redline doctor`."""

    env: str = "snake"  # environment to choose settings for
    algo: str = "auto"  # algorithm to choose settings for
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps


def run(request: Request) -> int:
    """Print the hardware and the settings that `redline train` would start with."""
    options = request.build(DoctorOptions)
    catalog.env_options(options.env)
    if options.algo != "auto":
        catalog.algorithm_options(options.algo)
    with show_progress("doctor", erase=True) as progress:
        from redline.tools.doctor import examine, report

        progress.start_activity("Examining the machine")
        findings = examine(**asdict(options))
    if request.json:
        request.print_json(findings)
    else:
        print(report(findings))
    return 0


COMMAND = Command(
    "show the hardware, the settings chosen for it and why", run, "", options_of(DoctorOptions), position=7
)
