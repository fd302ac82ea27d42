"""A run as shown on the page: name, settings with reasons, state, newest figures, and a sentence about the bottleneck."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from redline.core.errors import UserError
from redline.run.progress import duration, quantity
from redline.run.run_folder import RESULT, read_config, read_result
from redline.web.history import MetricsReader

_TRAINING_SECONDS = 20.0  # after its last record a run counts as stopped
_ENDINGS = {"SIGINT": "stopped", "SIGTERM": "stopped", "actors": "actors lost", "diverged": "diverged"}  # by stopped_by
_MAX_TEXT = 600  # characters of a setting or a reason


class RunView:
    """One run folder, reread repeatedly. Nothing outside of the folder is opened."""

    def __init__(self, number: int, path: Path) -> None:
        self.number, self.path = number, path
        self.reader = MetricsReader(path)
        self.config: dict[str, Any] = {}
        self._config_version = -1.0

    def read_config(self) -> bool:
        """Read config.json if it has changed; return whether it has."""
        try:
            version = (self.path / "config.json").stat().st_mtime
            if version == self._config_version:
                return False
            self.config = read_config(self.path)
        except (OSError, UserError):  # not written yet
            return False
        self._config_version = version
        return True

    def describe(self) -> dict[str, Any]:
        """Return the parts that rarely change: names and settings."""
        config = self.config
        return {
            "run": self.number,
            "name": self.path.resolve().name,
            "path": str(self.path),
            "env": _text(config.get("env", "")),
            "algo": _text(config.get("algo", "")),
            "device": _text(config.get("device", "")),
            "settings": settings_table(config),
        }

    def status(self) -> dict[str, Any]:
        """Return the parts that change all the time: state, figures, bottleneck."""
        last, modified = self.reader.last, self.reader.modified
        result = read_result(self.path) if (self.path / RESULT).exists() else None
        training = time.time() - modified < _TRAINING_SECONDS
        ended = result if result and result.get("env_steps", 0) >= last.get("env_steps", 0) else None
        state = (
            _ENDINGS.get(str(ended.get("stopped_by")), "finished") if ended else "training" if training else "stopped"
        )
        if not last:
            state = "starting"
        figures = {}
        if last:
            figures = {"steps": quantity(_figure(last, "env_steps")), "time": duration(_figure(last, "seconds"))}
            figures["steps/s"] = quantity(_figure(last, "env_steps_per_second"))
        return {
            "run": self.number,
            "state": state,
            "live": state == "training",
            "figures": figures,
            "bottleneck": bottleneck(last),
        }


def _figure(record: dict[str, Any], name: str) -> float:
    value = record.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _text(value: Any) -> str:
    text = "none" if value is None else ("yes" if value else "no") if isinstance(value, bool) else str(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def settings_table(config: dict[str, Any]) -> list[dict[str, str]]:
    """Return every setting with its value, source and reason, those with a reason first."""
    provenance = config.get("provenance")
    rows = []
    for name, setting in (provenance if isinstance(provenance, dict) else {}).items():
        if isinstance(setting, dict):
            words = {key: _text(setting.get(key) or "") for key in ("source", "reason")}
            rows.append({"name": _text(name), "value": _text(setting.get("value"))} | words)
    return sorted(rows, key=lambda row: (not row["reason"], row["name"]))[:300]


def bottleneck(record: dict[str, Any]) -> str:
    """Return a sentence about the bottleneck of training, from the newest log record."""
    if not record:
        return "There is no measurement yet."
    wait, queue = _figure(record, "learner_wait"), _figure(record, "queue")
    if "learner_wait" in record:
        if wait >= 0.25:
            return (
                f"The environments: the learner waits for actors {100 * wait:.0f} % of the time. More actors, or environments "
                "that step faster, would help."
            )
        if queue >= 0.75:
            return (
                f"The learner: the actors' queues are {100 * queue:.0f} % full, and actors wait for it. Fewer gradient steps "
                "for each environment step, or a faster device, would help."
            )
        return (
            f"Well balanced: queues are {100 * queue:.0f} % full and the learner waits {100 * wait:.0f} % of the time."
        )
    if "gpu_percent" in record:
        use = _figure(record, "gpu_percent")
        if use >= 85:
            return f"The GPU, as it should be: it is {use:.0f} % busy."
        return f"Not the GPU, which is {use:.0f} % busy: larger batches or more games at once may help; see redline profile."
    cores = _figure(record, "cpu_percent") / 100
    return f"The CPU: training keeps {cores:.1f} core{'s' * (round(cores, 1) != 1)} busy. redline profile shows the stages."
