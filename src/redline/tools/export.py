"""Export an agent to a file that runs without Redline: ONNX or torch.export, from an observation to the greedy action.

The file holds one function, from obs (N, …) and legal (N, A) bool, True for legal actions, to action (N,) int64 and scores
(N, A) float32; the action has the largest score. The function includes scaling of observations and masking.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from redline.core.errors import UserError
from redline.run.agent import Agent
from redline.run.evaluate import evaluate, greedy

FORMATS = {"onnx": "agent.onnx", "torch": "agent.pt2"}  # name of the file by format
CHECKED = 1000  # observations for which the file must choose the agent's action
_TIE = 1e-5  # relative difference of scores that counts as rounding: either action may be chosen
_GAMES = 64  # played at once to collect observations
_SPEED_BATCHES, _SPEED_SECONDS = (1, 256), 0.5
ALLOWED_LOSS = 0.05  # fraction of the score that quantisation may cost

Run = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # obs, legal -> action, scores


class Samples(NamedTuple):
    """Observations and legal actions from played games."""

    obs: Tensor  # (N, …)
    legal: Tensor  # (N, A) bool


class Greedy(nn.Module):
    """The exported module: a network and the choice of its best action."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: Tensor, legal: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.net(obs, legal)
        return scores.argmax(1), scores


def export(agent: Agent, path: Path, format: str, samples: Samples) -> dict[str, Any]:
    """Write the agent to `path`, check it on `samples`, and return the results of the check.

    Raise UserError if a package is missing, or if the file chooses other actions than the agent; the file is then removed.
    """
    model = Greedy(agent.net).eval()
    if format == "onnx":
        need("onnx", "onnxscript", "onnxruntime")
        _write_onnx(model, samples, path)
        run = onnx_runner(path)
    else:
        program = torch.export.export(model, _examples(samples), dynamic_shapes=_any_batch())
        torch.export.save(program, path)
        run = torch.export.load(path).module()
    try:
        differing = check(model, run, samples)
    except UserError:
        path.unlink()
        raise
    return {"format": format, "file": str(path), "bytes": file_size(path), "checked": len(samples.obs), **differing}


def check(model: Run, run: Run, samples: Samples) -> dict[str, Any]:
    """Compare the choices of a file with the agent's; return the number of ties and the largest difference of scores.

    Raise UserError if they differ other than by a tie.
    """
    with torch.no_grad():
        action, scores = model(*samples)
        found, found_scores = run(*samples)
    best = scores.gather(1, action.unsqueeze(1)).squeeze(1)
    given_up = best - scores.gather(1, found.unsqueeze(1)).squeeze(1)
    wrong = (given_up > _TIE * best.abs().clamp(min=1)) & (found != action)
    if wrong.any():
        raise UserError(
            f"The exported file chooses another action than the agent in {int(wrong.sum())} of {len(action)} states, so that "
            "it was removed; please report it with the settings of the run."
        )
    error = (found_scores - scores)[samples.legal].abs().max()
    return {"ties": int((found != action).sum()), "largest_difference": float(error)}


def quantize(path: Path, out: Path, samples: Samples) -> None:
    """Write the ONNX file `path` in int8 to `out`: only weights in dense layers, also activations in convolutions."""
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    onnx: Any = importlib.import_module("onnx")
    model = onnx.load(path)
    del model.graph.value_info[
        :
    ]  # shapes recorded before the exporter simplified the graph; they will be inferred again
    with _quiet():
        if "Conv" in {node.op_type for node in model.graph.node}:
            quantization.quantize_static(model, out, _Calibration(samples), per_channel=True)
        else:
            quantization.quantize_dynamic(model, out, weight_type=quantization.QuantType.QInt8)


class _Calibration:
    """States for calibrating the range of every activation, with the interface of onnxruntime's CalibrationDataReader."""

    def __init__(self, samples: Samples, size: int = 50) -> None:
        parts = zip(samples.obs.split(size), samples.legal.split(size), strict=True)
        self._batches = iter([{"obs": obs.numpy(), "legal": legal.numpy()} for obs, legal in parts])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._batches, None)


def onnx_runner(path: Path, threads: int = 0) -> Run:
    """Return a function that runs an ONNX file on the CPU; with threads 0, onnxruntime chooses their number."""
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(obs: Tensor, legal: Tensor) -> tuple[Tensor, Tensor]:
        action, scores = session.run(None, {"obs": obs.numpy(), "legal": legal.numpy()})
        return torch.from_numpy(action), torch.from_numpy(scores)

    return run


def score(agent: Agent, run: Run, episodes: int, seed: int, progress: Callable[[int], None]) -> dict[str, Any]:
    """Play held-out games with an exported file on the CPU and return the statistics of `redline eval`."""
    actions = agent.rules.game.spec(agent.rules.config).num_actions

    def policy(obs: Tensor, legal: Tensor | None) -> Tensor:
        mask = torch.ones(len(obs), actions, dtype=torch.bool) if legal is None else legal
        return run(obs.contiguous(), mask)[0]

    return evaluate(agent.rules, policy, episodes, torch.device("cpu"), seed, progress).summary()


def latencies(files: Sequence[Path], samples: Samples, seconds: float = _SPEED_SECONDS) -> dict[str, list[float]]:
    """Return the seconds of the fastest call to each ONNX file on one thread, by batch size.

    The files are called in turn for `seconds` each. The fastest call counts because other load only slows calls down.
    """
    runs = [onnx_runner(file, threads=1) for file in files]
    fastest = {}
    for size in _SPEED_BATCHES:
        index = torch.arange(size) % len(samples.obs)
        obs, legal = samples.obs[index], samples.legal[index]
        times: list[list[float]] = [[] for _ in runs]
        ends = time.perf_counter() + seconds * len(runs)
        while time.perf_counter() < ends or not times[0]:
            for run, taken in zip(runs, times, strict=True):
                started = time.perf_counter()
                run(obs, legal)
                taken.append(time.perf_counter() - started)
        fastest[str(size)] = [min(taken) for taken in times]
    return fastest


def collect_samples(agent: Agent, count: int = CHECKED, seed: int = 1) -> Samples:
    """Return `count` states from games played by the agent."""
    choose = greedy(agent.net, agent.device)
    obs_rows: list[Tensor] = []
    legal_rows: list[Tensor] = []
    actions = agent.rules.game.spec(agent.rules.config).num_actions

    def policy(obs: Tensor, legal: Tensor | None) -> Tensor:
        if sum(map(len, obs_rows)) < count:
            obs_rows.append(obs.cpu().clone())
            mask = torch.ones(len(obs), actions, dtype=torch.bool) if legal is None else legal.cpu().clone()
            legal_rows.append(mask)
        return choose(obs, legal)

    steps = -(-count // _GAMES)
    evaluate(agent.rules, policy, 4 * _GAMES, agent.device, seed, slot_steps=steps)
    return Samples(torch.cat(obs_rows)[:count].contiguous(), torch.cat(legal_rows)[:count].contiguous())


def need(*packages: str) -> None:
    """Raise UserError with the install command if a package is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"This export needs {' and '.join(missing)}: pip install 'redline[export]'.")


def _write_onnx(model: nn.Module, samples: Samples, path: Path) -> None:
    with _quiet():
        program = torch.onnx.export(
            model,
            _examples(samples),
            dynamo=True,
            input_names=["obs", "legal"],
            output_names=["action", "scores"],
            dynamic_shapes=_any_batch(),
            verbose=False,
        )
        assert program is not None
        program.save(path)


def _examples(samples: Samples) -> tuple[Tensor, Tensor]:
    """Return a few states to trace with: a batch of one would be treated as the only possible size."""
    return samples.obs[:3].clone(), samples.legal[:3].clone()


def _any_batch() -> dict[str, Any]:
    batch = {0: torch.export.Dim.DYNAMIC}
    return {"obs": batch, "legal": batch}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress, warnings and logs of the exporter; the result is checked afterwards."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def relative_loss(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Return the loss of mean score, relative to its magnitude before."""
    lost = before["score_mean"] - after["score_mean"]
    return float(lost / max(abs(before["score_mean"]), np.finfo(float).eps))


def file_size(path: Path) -> int:
    """Return the bytes of a file, including weights that ONNX may store in a second file."""
    beside = path.with_name(path.name + ".data")
    return os.path.getsize(path) + (os.path.getsize(beside) if beside.exists() else 0)
