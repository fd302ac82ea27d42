"""Figures of `redline bench`: medians with their spread, device use, and comparison of two records."""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from redline.core.errors import UserError, nearest
from redline.run.progress import quantity
from redline.tools.profile_counters import GpuSampler

Figure = dict[str, Any]  # value: the median per second; low, high: of the repeats; repeats; and further measurements
_SAMPLE_SECONDS = 0.05
_MACHINE = ("hardware", "torch", "python")


def summarize(samples: Sequence[float], beside: Mapping[str, float] | None = None) -> Figure:
    """Return the figure of repeated measurements, together with further measurements (`beside`)."""
    spread = {"value": statistics.median(samples), "low": min(samples), "high": max(samples), "repeats": len(samples)}
    return spread | dict(beside or {})


def shown(figure: Figure | None) -> str:
    """Return a figure as a cell of a table: 371 k ±2%, or a dash."""
    if figure is None:
        return "-"
    half = (figure["high"] - figure["low"]) / 2 / figure["value"] if figure["value"] else 0.0
    return f"{quantity(figure['value'])} ±{100 * half:.0f}%"


class Use:
    """Measure device use and peak memory while entered.

    On exit, `record` has `gpu_percent` (if NVML or nvidia-smi is available) and the `peak_bytes` allocated on a GPU; on a
    CPU, `cpu_percent` of this process, 100 for each core, and its peak memory, sampled in a thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.record = device, dict[str, float]()
        self._gpu = GpuSampler(device)  # does nothing without a GPU
        self._process, self._resident = psutil.Process(), 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-use", daemon=True)

    def __enter__(self) -> Use:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._gpu.__enter__()
        self._process.cpu_percent()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._gpu.__exit__()
        self._done.set()
        self._thread.join()
        if self.device.type == "cuda":
            means = self._gpu.means()
            self.record = {"peak_bytes": torch.cuda.max_memory_allocated(self.device)}
            self.record |= {"gpu_percent": means["use_percent"]} if means else {}
        else:
            self.record = {"peak_bytes": self._resident, "cpu_percent": self._process.cpu_percent()}

    def _sample(self) -> None:
        while True:
            self._resident = max(self._resident, self._process.memory_info().rss)
            if self._done.wait(_SAMPLE_SECONDS):
                return


# -------------------------------------------------------------------------------------------------------- comparison


def find_figures(record: Mapping[str, Any]) -> dict[str, Figure]:
    """Return all figures of a record, named by benchmark, all settings that affect the figure, and column.

    Settings are all values next to a figure except floats, which are measurements themselves.
    """
    sections = {kind: section for kind, section in record.items() if isinstance(section, Mapping)}
    return {name: figure for kind, section in sections.items() for name, figure in _walk(section, kind)}


def _walk(value: Any, name: str) -> Iterator[tuple[str, Figure]]:
    if isinstance(value, list):
        for item in value:
            yield from _walk(item, name)
    elif isinstance(value, Mapping):
        if value.keys() >= {"value", "low", "high"}:
            yield name, dict(value)
            return
        parts = {key: part for key, part in value.items() if isinstance(part, Mapping) and key not in _OPTION_TABLES}
        parts |= {key: part for key, part in value.items() if _is_rows(part)}
        decisive = {k: v for k, v in value.items() if k not in parts and not isinstance(v, float) and v is not None}
        for key, text in ((k, v if isinstance(v, str) else json.dumps(v)) for k, v in decisive.items()):
            name += f", {key} {text}"
        for key, part in parts.items():
            yield from _walk(part, name if key == "rows" else f"{name}, {key}")


_OPTION_TABLES = ("env_options", "algo_options")


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def read_record(path: str) -> dict[str, Any]:
    """Return the record written by an earlier `redline bench --out`."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"compare is '{path}', which cannot be read ({error}); expected a file of --out.") from None
    if not isinstance(record, dict) or "hardware" not in record:
        raise UserError(f"compare is '{path}'; expected a file that redline bench --out has written.")
    return record


def check_machine(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise UserError if two records come from different hardware: their speeds are not comparable."""
    if old["hardware"] != new["hardware"]:
        raise UserError(
            f"The figures to compare with are of {old['hardware']}, this machine is {new['hardware']}; measure the old "
            "code here, with redline bench --out OLD.json."
        )


def compare(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> tuple[list[str], int]:
    """Return the comparison of two records as lines, and the number of regressions.

    A figure regressed if all its repeats are slower than all the old ones and its median dropped by more than `tolerance`
    percent.
    """
    before, after = find_figures(old), find_figures(new)
    common = [name for name in after if name in before]
    if not common:
        example = next(iter(after), "")
        hint = nearest(example, list(before)) or "."
        raise UserError(f"No figure of the two has the same settings, such as '{example}'{hint} Use the old options.")
    lines = [
        f"{key} was {old.get(key)}, now {new.get(key)}." for key in _MACHINE if old.get(key) != new.get(key)
    ]  # another torch version may explain a difference
    slower = faster = 0
    for name in common:
        was, now = before[name], after[name]
        change = 100 * (now["value"] / was["value"] - 1) if was["value"] else 0.0
        if now["high"] < was["low"] and change < -tolerance:
            slower += 1
            lines.append(f"SLOWER {-change:.0f}%  {shown(was)} -> {shown(now)}  {name}")
        elif now["low"] > was["high"] and change > tolerance:
            faster += 1
            lines.append(f"faster {change:.0f}%  {shown(was)} -> {shown(now)}  {name}")
    same = len(common) - slower - faster
    lines.append(
        f"{len(common)} figures compared with {old.get('commit')} of {old.get('date')}: {slower} slower, {faster} faster, "
        f"{same} within the spread and {tolerance:g} %."
    )
    return lines, slower
