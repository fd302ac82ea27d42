"""Pack a trained agent: write a run folder with only the files needed to play, small enough to send or commit.

It contains config.json, one checkpoint with the policy's weights, some points of metrics.jsonl and the result. `redline watch`,
`eval` and `export` accept it like any run; training cannot be resumed from it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from redline.core.errors import UserError
from redline.run.agent import Agent, build_agent, load_agent
from redline.run.checkpoint import Checkpoints, RunLock
from redline.run.manifest import check_weights
from redline.run.packed_weights import LEFT, RIGHT, to_int8
from redline.run.run_folder import METRICS, RESULT, read_result, write_config, write_json
from redline.tools.export import Samples, collect_samples

POINTS = 100  # kept of metrics.jsonl
_STATES = 64 * 900  # from the beginnings of games, to record the outputs of a layer
_SMALL = 16_384  # tensors with fewer weights are not packed: rounding an output layer changes choices
_RARELY = 0.01  # smallest weight of a unit's errors, as the square root of its fraction of positive outputs
Weights = dict[str, Tensor]


def pack(
    run: Path, out: Path, int8: bool = False, rank: int = 0, checkpoint: str = "newest", trust: bool = False
) -> Agent:
    """Write the agent of `run` to the run folder `out` and return it, reloaded from there.

    An existing packed agent is replaced; any other folder is refused.

    int8: store large tensors in int8, in a quarter of the bytes.
    rank: store the largest matrix as a product of two matrices, of this rank.
    Either of the two may change the agent's choices: evaluate it.
    trust: load the modules that a packed `run` names, see redline.run.trust.
    """
    if out.exists() and (run.resolve().is_relative_to(out.resolve()) or not _is_packed(out)):
        raise UserError(f"{out} exists and is no packed agent; choose another folder.")
    agent = load_agent(run, "cpu", trust, checkpoint)
    saved = Checkpoints(run, check=check_weights).select(checkpoint, groups=("model",))
    assert saved is not None  # the agent was loaded from it
    samples = collect_samples(agent)
    weights = policy_weights(agent, saved.tensors["model"], samples)
    if rank:
        weights = _in_factors(agent, weights, rank)
    if int8:
        weights = _in_int8(weights)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    config = {key: value for key, value in agent.config.items() if key != "signature"}
    write_config(out, config | {"run_dir": f"runs/{out.name}"})
    with RunLock(out) as lock:
        Checkpoints(out, lock=lock).save(
            saved.step,
            {"model": weights},
            saved.state,
            score=saved.manifest["score"],
            resume_level="L0",
            background=False,
        )
    (out / ".lock").unlink()
    lines = (run / METRICS).read_text(encoding="utf-8").splitlines(keepends=True) if (run / METRICS).exists() else []
    (out / METRICS).write_text("".join(lines[:: -(-len(lines) // POINTS) or 1]), encoding="utf-8")
    if result := read_result(run):
        result |= {"run": f"runs/{out.name}"}
        write_json(out / RESULT, {key: value for key, value in result.items() if key != "settings"})
    packed = load_agent(out, "cpu", trust=True)  # it names the same code as `run`, which was loaded already
    if not int8 and not rank and not _same_scores(agent, packed, samples):
        raise UserError(f"The packed agent in {out} does not play like the one in {run}; please report it.")
    return packed


def _is_packed(folder: Path) -> bool:
    """Return whether the checkpoints of a run folder contain only weights."""
    return {path.name for path in folder.glob("checkpoints/*/*.safetensors")} == {"model.safetensors"}


def policy_weights(agent: Agent, model: Weights, samples: Samples) -> Weights:
    """Return the weights that the policy needs, without target networks or the weights behind an average."""
    for prefix in dict.fromkeys(name.partition(".")[0] for name in model):
        fewer = {name: weight for name, weight in model.items() if name.partition(".")[0] != prefix}
        try:
            smaller = build_agent(agent.path, agent.config, agent.rules, fewer, agent.env_steps, agent.device)
        except (UserError, KeyError):
            continue
        if _same_scores(agent, smaller, samples):
            model = fewer
    return model


@torch.no_grad()
def _same_scores(agent: Agent, other: Agent, samples: Samples) -> bool:
    return torch.equal(agent.net(*samples), other.net(*samples))


class _Outputs(TorchFunctionMode):
    """Record the outputs (N, F) of the linear layer that has `weight`."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.outputs = weight, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.linear and args[1] is self.weight:
            self.outputs.append(out)
        return out


@torch.no_grad()
def _in_factors(agent: Agent, weights: Weights, rank: int) -> Weights:
    """Return the weights, with the largest matrix in two factors that keep the principal components of its layer's outputs.

    A ReLU follows the layer, so a unit's errors are weighted by how often its output is positive in play (an approximation
    if layer normalisation comes in between). Components have deviation 1, so that no row of the left factor dwarfs others.
    """
    name = max((name for name in weights if weights[name].dim() == 2), key=lambda name: weights[name].numel())
    weight, bias_name = weights[name], name.removesuffix("weight") + "bias"
    parameters = [p for p in agent.net.parameters() if p.shape == weight.shape and torch.equal(p.data, weight)]
    if not parameters or bias_name not in weights or not 0 < rank <= min(weight.shape):
        raise UserError(f"'{name}', the largest matrix of the agent, cannot be stored as a product of rank {rank}.")
    samples = collect_samples(agent, _STATES)
    with _Outputs(parameters[0]) as layer:
        for obs, legal in zip(samples.obs.split(1024), samples.legal.split(1024), strict=True):
            agent.net(obs, legal)
    outputs = torch.cat(layer.outputs).double()
    mean = outputs.mean(0)
    importance = (outputs > 0).double().mean(0).sqrt().clamp(min=_RARELY)
    variances, components = torch.linalg.eigh(torch.cov(((outputs - mean) * importance).T))  # in ascending order
    deviations = variances[-rank:].clamp(min=1e-12).sqrt()
    left = components[:, -rank:] / importance.unsqueeze(1) * deviations
    right = components[:, -rank:].T * importance / deviations.unsqueeze(1)
    bias = mean + left @ (right @ (weights[bias_name].double() - mean))
    factors = {name + LEFT: left.float(), name + RIGHT: (right @ weight.double()).float()}
    return {key: value for key, value in weights.items() if key != name} | factors | {bias_name: bias.float()}


def _in_int8(weights: Weights) -> Weights:
    """Return the weights with large ones in int8; left factors are kept, since every unit adds up the errors of a row."""
    packed: Weights = {}
    for name, weight in weights.items():
        large = weight.is_floating_point() and weight.dim() > 1 and weight.numel() >= _SMALL and not name.endswith(LEFT)
        packed |= to_int8(name, weight) if large else {name: weight}
    return packed


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
