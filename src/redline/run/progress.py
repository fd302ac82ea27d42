"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere. All on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

_PLAIN_EVERY = 10.0  # seconds between plain lines


def quantity(number: float) -> str:
    """1234567 -> 1.23 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """75 -> 1:15."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def device_use(device: torch.device) -> dict[str, float]:
    """GPU use in percent (where NVML answers) and memory in GB; of the process on a CPU."""
    if device.type != "cuda":
        return {"memory_gb": psutil.Process().memory_info().rss / 2**30}
    use = {"memory_gb": torch.cuda.memory_reserved(device) / 2**30}
    with contextlib.suppress(Exception):  # no NVML bindings, or a driver that does not tell: the run goes on without
        use["gpu_percent"] = float(torch.cuda.utilization(device))
    return use


class _Console(Console):
    def on_broken_pipe(self) -> None:
        self.quiet = True  # rich would end the program; a closed terminal is no reason to stop training


class Progress:
    """Shows log records; messages stand above the panel."""

    def __init__(self, title: str, score_name: str, phases: int = 0) -> None:
        """`phases`: of the curriculum, 0 without one."""
        self.title, self.score_name, self.phases = title, score_name, phases
        self.console = _Console(file=sys.stderr, highlight=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None
        self.last_line = 0.0
        if self.live:
            self.live.start()

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def show(self, record: dict[str, Any], progress_done: float, seconds_left: float | None) -> None:
        """One log record: `env_steps`, rates, score, loss, device use, phase of the curriculum, actors."""
        parts = {
            "steps": quantity(record["env_steps"]),
            "steps/s": quantity(record["env_steps_per_second"]),
            "samples/s": quantity(record["samples_per_second"]),
            self.score_name: f"{record['score']:.2f}" if "score" in record else "-",
            "loss": f"{record['loss']:.4f}" if "loss" in record else "-",
            "memory": f"{record['memory_gb']:.1f} GB",
            "done": f"{100 * min(progress_done, 1):.0f} %",
            "left": duration(seconds_left) if seconds_left is not None else "-",
        }
        if self.phases:
            parts["phase"] = f"{record['phase']} {record['phase_number']}/{self.phases}"
        if "actor_busy" in record:
            parts["actors"] = f"{100 * record['actor_busy']:.0f} % busy"
            parts["queue"] = f"{100 * record['queue']:.0f} %"
            parts["lag"] = f"{record['policy_lag']:.1f}"
            parts["waiting"] = f"{100 * record['learner_wait']:.0f} %"
            if record["drops"]:
                parts["dropped"] = quantity(record["drops"])
        if "gpu_percent" in record:
            parts["GPU"] = f"{record['gpu_percent']:.0f} %"
        if self.live:
            table = Table(title=self.title, title_style="bold")
            for name in parts:
                table.add_column(name, justify="right")
            table.add_row(*parts.values())
            self.live.update(table, refresh=True)
        elif time.monotonic() - self.last_line >= _PLAIN_EVERY:
            self.last_line = time.monotonic()
            self.say("  ".join(f"{name} {value}" for name, value in parts.items()))

    def close(self) -> None:
        if self.live:
            self.live.stop()
            self.live = None
