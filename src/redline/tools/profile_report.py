"""The report of a profile: Markdown with charts, and the same findings as JSON."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from redline.core.errors import StorageError
from redline.run.progress import quantity
from redline.run.run_folder import write_json

# Keys of the JSON file and of `redline profile --json`: type and meaning. A run has all keys, a user's loop those in LOOP.
KEYS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "kind": (str, "`run` for redline profile, `loop` for redline.Profiler"),
    "title": (str, "what was measured"),
    "device": (str, "where it ran"),
    "bottleneck": (str, "one sentence"),
    "seconds": ((int, float), "wall-clock of the timed window"),
    "stages": (dict, "by name: `seconds` in the window and `share` of it; idle gaps included"),
    "stages_over_wall": ((int, float), "sum of the stages divided by the wall-clock of the same window"),
    "samples_per_second": ((int, float), "gradient samples per second"),
    "host_synchronisations": ((int, float), "times the host waits for the GPU per iteration or step; 0 on a CPU"),
    "recompilations": (int, "compilations inside the window"),
    "compile_seconds": ((int, float), "seconds they took"),
    "flops": (
        dict,
        "`per_step` and `ceiling_per_second`; for a run also `per_second` achieved and its `share` of the ceiling",
    ),
    "ceilings": (dict, "measured here: FLOP/s of a matrix product, bytes/s of copies"),
    "advice": (list, "ranked: `cause`, `change`, `predicted_gain`, `reason`, `options`, `measure`"),
    "env": (str, "environment"),
    "algo": (str, "algorithm"),
    "env_steps_per_second": ((int, float), "of the unmodified run"),
    "seconds_per_iteration": ((int, float), "of the unmodified run"),
    "staged_seconds_per_iteration": ((int, float), "of the run whose stages are compiled apart"),
    "timed_by": (str, "how stages were timed"),
    "gpu": (dict, "mean `use_percent`, `clock_mhz`, `power_watts`; empty without NVML"),
    "memory": (dict, "bytes by owner: games, replay, network, activations, and allocated, reserved, peak"),
    "bytes": (dict, "bytes/s of stages whose traffic can be counted"),
    "host": (dict, "seconds of a log point and of a checkpoint: copying it, and writing it in the background"),
    "start": (
        dict,
        "seconds from the command to the measurement, by stage: loading, settings, compiling each function",
    ),
    "tried": (
        dict,
        "the first advice as measured: `change`, `predicted_gain`, `measured_gain`; empty if none was tried",
    ),
    "settings": (dict, "every setting of the run"),
}
LOOP = tuple(KEYS)[:14]
_BAR = 40  # characters of the longest text bar
_MIN_SHARE = 0.0005  # smaller stages are left out of tables and charts


def describe_stages(seconds: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the seconds and the share of each stage, the longest first."""
    total = max(sum(seconds.values()), 1e-12)
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: {"seconds": spent, "share": spent / total} for name, spent in ordered}


def write_report(record: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Write the report to `path`, with its chart and JSON next to it; return the paths by kind."""
    files = {"report": str(path), "json": str(path.with_suffix(".json"))}
    chart = None
    with suppress(ImportError):  # matplotlib is optional
        chart = draw_stages(record)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if chart is not None:
            picture = path.with_name(f"{path.stem}-stages.png")
            picture.write_bytes(chart)
            files["chart"] = str(picture)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_text(markdown(record, Path(files["chart"]).name if chart is not None else ""), encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise StorageError(
            f"Cannot write {path}: {error.strerror or error}. Choose another file with --out."
        ) from error
    write_json(Path(files["json"]), dict(record))
    return files


def markdown(record: Mapping[str, Any], chart: str = "") -> str:
    """Return the text of the report. chart: file name of its picture; empty without one."""
    lines = [f"# {record['title']}", "", f"**{record['bottleneck']}**", "", *_table(_figures(record)), ""]
    lines += ["## What to change", "", *_advice(record), "", "## Time by stage", ""]
    if chart:
        lines += [f"![Time by stage]({chart})", ""]
    lines += _stage_table(record["stages"], bars=not chart)
    if not chart:
        lines += ["", "Install matplotlib for a chart: `pip install 'redline[report]'`."]
    lines += ["", *_notes(record)]
    for title, rows in (
        ("Start", _start(record)),
        ("Memory", _memory(record)),
        ("Ceilings of this machine", _ceilings(record)),
    ):
        if rows:
            lines += ["", f"## {title}", "", *_table(rows)]
    return "\n".join(lines) + "\n"


def terminal_table(record: Mapping[str, Any]) -> str:
    """Return the stages and the advice as text for a terminal."""
    lines = [record["bottleneck"], ""]
    for name, stage in _shown(record["stages"]).items():
        bar = "█" * round(_BAR * stage["share"])
        lines.append(f"  {name:<22} {100 * stage['share']:5.1f} %  {bar}")
    if start := _start(record):
        lines += ["", f"  Start: {', '.join(f'{name} {seconds}' for name, seconds in start.items())}."]
    lines.append("")
    for number, advice in enumerate(record["advice"], 1):
        lines.append(f"  {number}. {advice['change']}: {advice['predicted_gain']:.1f} times ({advice['reason']})")
    if tried := record.get("tried"):
        lines.append(
            f"  Tried: {tried['change']} brought {tried['measured_gain']:.2f} times; predicted {tried['predicted_gain']:.2f}."
        )
    return "\n".join(lines)


def _shown(stages: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    return {name: stage for name, stage in stages.items() if stage["share"] >= _MIN_SHARE}


def _table(rows: Mapping[str, str]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())]


def _figures(record: Mapping[str, Any]) -> dict[str, str]:
    rows = {"device": record["device"]}
    if "env_steps_per_second" in record:
        rows["environment steps per second"] = quantity(record["env_steps_per_second"])
    rows["gradient samples per second"] = quantity(record["samples_per_second"])
    if "seconds_per_iteration" in record:
        rows["iteration"] = f"{1e3 * record['seconds_per_iteration']:.3g} ms"
    else:
        rows["step"] = f"{1e3 / record['steps_per_second']:.3g} ms"
    if record["device"] != "cpu":
        rows["host synchronisations per iteration"] = f"{record['host_synchronisations']:.3g}"
    rows["recompilations"] = f"{record['recompilations']} ({record['compile_seconds']:.1f} s)"
    for name, unit, title in (
        ("use_percent", "%", "GPU use"),
        ("clock_mhz", "MHz", "GPU clock"),
        ("power_watts", "W", "GPU power"),
    ):
        if name in record.get("gpu", {}):
            rows[title] = f"{record['gpu'][name]:.0f} {unit}"
    return rows


def _advice(record: Mapping[str, Any]) -> list[str]:
    if not record["advice"]:
        return ["Nothing that would help by 5 % or more."]
    lines = ["| | change | predicted gain | why |", "|---|---|---|---|"]
    for number, advice in enumerate(record["advice"], 1):
        change = f"{advice['change']} (`{_flags(advice['options'])}`)" if advice["options"] else advice["change"]
        lines.append(f"| {number} | {change} | {advice['predicted_gain']:.2f} times | {advice['reason']} |")
    if tried := record.get("tried"):
        lines += [
            "",
            f"Tried for {tried['seconds']:.1f} s: {tried['change']} brought **{tried['measured_gain']:.2f} times** the "
            f"{tried['measure'].replace('_', ' ')} ({quantity(tried['before'])} -> {quantity(tried['after'])}); "
            f"{tried['predicted_gain']:.2f} times were predicted.",
        ]
    return lines


def _flags(options: Mapping[str, Any]) -> str:
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        words.append((f"--{flag}" if value else f"--no-{flag}") if isinstance(value, bool) else f"--{flag} {value}")
    return " ".join(words)


def _stage_table(stages: Mapping[str, Mapping[str, float]], bars: bool) -> list[str]:
    lines = ["| stage | share | seconds |" + (" |" if bars else ""), "|---|---|---|" + ("---|" if bars else "")]
    for name, stage in _shown(stages).items():
        bar = f" {'█' * round(_BAR * stage['share'])} |" if bars else ""
        lines.append(f"| {name} | {100 * stage['share']:.1f} % | {stage['seconds']:.3f} |{bar}")
    return lines


def _notes(record: Mapping[str, Any]) -> list[str]:
    text = f"The stages add up to {100 * record['stages_over_wall']:.1f} % of the wall-clock of their window."
    if "timed_by" in record:
        whole, staged = record["seconds_per_iteration"], record["staged_seconds_per_iteration"]
        text += (
            f" {record['timed_by']} The unmodified run needs {1e3 * whole:.3g} ms for an iteration, the staged one "
            f"{1e3 * staged:.3g} ms ({100 * (staged / whole - 1):+.0f} %): shares tell where time goes, the speed is that of "
            "the unmodified run."
        )
    lines = [text]
    if host := record.get("host"):
        lines += [
            "",
            f"A log point takes {1e3 * host['log_point']:.2g} ms (one a second). A checkpoint takes "
            f"{1e3 * host['checkpoint_copy']:.3g} ms to copy, while training waits, and {host['checkpoint_write']:.2g} s to "
            "write in the background.",
        ]
    if record.get("synchronising_lines"):
        lines += ["", "Lines that made the host wait for the GPU:", ""]
        lines += [f"- `{line}` ({count:g} per step)" for line, count in record["synchronising_lines"].items()]
    return lines


def _start(record: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{seconds:.1f} s" for name, seconds in record.get("start", {}).items()}


def _memory(record: Mapping[str, Any]) -> dict[str, str]:
    return {name.replace("_", " "): f"{size / 1e6:,.1f} MB" for name, size in record.get("memory", {}).items()}


def _ceilings(record: Mapping[str, Any]) -> dict[str, str]:
    ceilings, flops = record["ceilings"], record["flops"]
    rows = {"matrix product": f"{quantity(ceilings['flops_per_second'])}FLOP/s"}
    if flops.get("per_second"):
        rows["achieved by the networks"] = f"{quantity(flops['per_second'])}FLOP/s ({100 * flops['share']:.1f} %)"
    rows["copy in device memory"] = f"{quantity(ceilings['bytes_per_second'])}B/s"
    for name, title in (("pageable", "copy from pageable memory"), ("pinned", "copy from page-locked memory")):
        if f"{name}_bytes_per_second" in ceilings:
            rows[title] = f"{quantity(ceilings[f'{name}_bytes_per_second'])}B/s"
    for stage, rate in record.get("bytes", {}).items():
        rows[f"{stage}, at least"] = f"{quantity(rate)}B/s ({100 * rate / ceilings['bytes_per_second']:.1f} %)"
    return rows


def draw_stages(record: Mapping[str, Any]) -> bytes:
    """Return a PNG with a bar for each stage. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and may open windows

    stages = _shown(record["stages"])
    figure = Figure(figsize=(8, 0.9 + 0.34 * len(stages)), dpi=120, layout="constrained")
    axes = figure.subplots()
    names, shares = list(stages), [100 * stage["share"] for stage in stages.values()]
    bars = axes.barh(range(len(names)), shares, color=["C7" if "idle" in name else "C0" for name in names])
    axes.bar_label(bars, labels=[f"{share:.1f} %" for share in shares], padding=3, fontsize="small")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(title=record["title"], xlabel="percent of the time", xlim=(0, 1.12 * max([*shares, 1.0])))
    axes.spines[["top", "right"]].set_visible(False)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()
