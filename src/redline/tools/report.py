"""Reports from run folders: tables and learning curves as Markdown with PNG files, and as one HTML page."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from redline.core.errors import StorageError
from redline.run.run_folder import explain_os_error
from redline.tools.curves import Curve, draw
from redline.tools.report_page import page
from redline.tools.report_runs import RunFolder, read_runs
from redline.tools.report_tables import (
    Group,
    Row,
    group_runs,
    group_summary,
    label,
    table_of_groups,
    table_of_runs,
    tables_of_settings,
)

_BOTH = ("env_steps", "seconds")
_CHARTS = (  # metric, label, factor, x axes
    ("eval_score", "score of evaluations in training", 1, _BOTH),
    ("score", "training score", 1, _BOTH),
    ("win_rate", "training games won in %", 100, _BOTH),
    ("env_steps_per_second", "env-steps per second", 1, ("seconds",)),
    ("gpu_percent", "GPU use in %", 1, ("seconds",)),
)
_UNITS = (("seconds", 1), ("minutes", 60), ("hours", 3600))  # of time; the largest with at least _FEW is used
_FEW = 5


class Picture(NamedTuple):
    """A chart, drawn for light and for dark pages."""

    name: str  # of its file
    caption: str
    light: bytes  # PNG
    dark: bytes


@dataclass
class Report:
    """The content of a report, in order. Texts come unescaped from run folders: escape them."""

    tables: list[tuple[str, list[Row]]]  # with a heading
    pictures: list[Picture] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # on how to read it
    notes: list[str] = field(default_factory=list)  # on files that could not be read


def write_report(paths: Sequence[Path], out: Path) -> dict[str, Any]:
    """Write `report.md`, its pictures and `report.html` to the folder `out`; return the fields of `redline report --json`.

    `notes` lists files that could not be read; `missing` explains why there are no pictures without matplotlib.
    """
    runs, notes = read_runs(paths)
    report, missing = compose(runs, notes), ""
    try:
        report.pictures = _pictures(runs)
    except ImportError:
        missing = (
            f"{out / 'report.md'} has no curves, because matplotlib is not installed; install it with "
            "pip install 'redline[report]'."
        )
    files = {out / picture.name: picture.light for picture in report.pictures}
    files[out / "report.md"] = markdown(report).encode(errors="surrogateescape")
    files[out / "report.html"] = page(report.tables, report.pictures, report.remarks, report.notes)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, data in files.items():
            _write(path, data)
    except OSError as error:
        path = out / "report.md"
        raise StorageError(
            f"Cannot write {path}: {explain_os_error(path, error)}. Choose another folder with --out."
        ) from error
    return {
        "report": str(out / "report.md"),
        "html": str(out / "report.html"),
        "pictures": [str(out / picture.name) for picture in report.pictures],
        "runs": [run.summary() for run in runs],
        "table": report.tables[0][1],  # table of the runs, as text
        "groups": [
            {"runs": [str(run.path) for run in group]} | group_summary(group)
            for group in group_runs(runs)
            if len(group) > 1
        ],
        "notes": notes,
        "missing": missing,
    }


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        with suppress(OSError):  # gone after success
            part.unlink()


def compose(runs: Sequence[RunFolder], notes: Sequence[str]) -> Report:
    """Return the report without its pictures."""
    groups = group_runs(runs)
    seeds = [group for group in groups if len(group) > 1]
    tables = [("Runs", table_of_runs(runs))]
    remarks = []
    if seeds:
        tables.append(
            ("Seeds: runs that differ only in their seed, by their evaluations", table_of_groups(seeds, runs))
        )
        remarks.append(
            "Runs that differ only in their seed are one line: their mean and its 95 % bootstrap interval over the runs, which "
            "for two or three runs is their range. It ends where the shortest of them ends."
        )
    tables += [("Settings in which the runs differ", rows) for rows in tables_of_settings(groups, runs)]
    if any(run.best() for run in runs):
        remarks.append(
            "The band around the evaluations of a single run is their 95 % interval over the games. The best checkpoint is the "
            "one with the highest of them: chosen by its score, it scores a little less in other games."
        )
    if any(run.metrics for run in runs):
        remarks.append("Speed and GPU use are medians over the log points; minutes include compilation.")
    return Report(tables, remarks=remarks, notes=list(notes))


# ---- Markdown


def markdown(report: Report) -> str:
    """Return the text of report.md."""
    lines = ["# Report"]
    for number, (heading, rows) in enumerate(report.tables):
        lines += ["", *([f"{heading}:", ""] if number else []), *_table(rows)]
    for picture in report.pictures:
        lines += ["", f"![{_escaped(picture.caption)}]({picture.name})"]
    for remark in report.remarks:
        lines += ["", remark]
    if report.notes:
        lines += ["", "Notes:", "", *(f"- {_escaped(note)}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    head, *body = [f"| {' | '.join(map(_escaped, line))} |" for line in cells]
    return [head, f"|{' --- |' * len(rows[0])}", *body]


def _escaped(text: str) -> str:
    """Return text on one line, escaped so that it forms no HTML, links, images, code or table cells."""
    plain = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"[\[\]`|]", lambda match: f"&#{ord(match[0])};", plain)


# ---- pictures


def _pictures(runs: Sequence[RunFolder]) -> list[Picture]:
    """Return the charts of every game."""
    pictures: list[Picture] = []
    for number, env in enumerate(dict.fromkeys(run.config["env"] for run in runs)):
        groups = group_runs([run for run in runs if run.config["env"] == env])
        prefix = re.sub(r"[^A-Za-z0-9]+", "-", env[:40]).strip("-") or "game"
        if any(picture.name.startswith(f"{prefix}-") for picture in pictures):
            prefix = f"{prefix}-{number}"
        for metric, title, factor, axes in _CHARTS:
            if metric == "win_rate" and not any(run.winnable for group in groups for run in group):
                continue
            for axis in axes:
                curves = _curves(groups, runs, axis, metric, factor)
                if curves:
                    unit = _in_units(curves) if axis == "seconds" else "env-steps"
                    name = f"{prefix}-{metric}-{axis}.png".replace("_", "-")
                    caption = f"{' '.join(env.split())}: {title} against {unit}"
                    light, dark = (draw(curves, env, unit, title, dark) for dark in (False, True))
                    pictures.append(Picture(name, caption, light, dark))
    return pictures


def _curves(
    groups: Sequence[Group], runs: Sequence[RunFolder], axis: str, metric: str, factor: float
) -> dict[str, list[Curve]]:
    """Return the curves of every group that has one, by its label."""
    curves = {}
    for group in groups:
        known = [curve for run in group if len((curve := run.curve(axis, metric)).x)]
        if known:
            curves[label(group, runs)] = [
                Curve(x, factor * y, factor * low, factor * high) for x, y, low, high in known
            ]
    return curves


def _in_units(curves: Mapping[str, list[Curve]]) -> str:
    """Convert the x axis from seconds to a unit that suits the longest run, and return the unit's name."""
    longest = max(curve.x[-1] for group in curves.values() for curve in group)
    unit, seconds = next((unit for unit in reversed(_UNITS) if longest >= _FEW * unit[1]), _UNITS[0])
    for group in curves.values():
        group[:] = [curve._replace(x=curve.x / seconds) for curve in group]
    return unit
