"""A trained agent, read from its run folder: for evaluating and watching."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline import algos
from redline.core.errors import UserError
from redline.engine import hardware
from redline.envs import Rules, make_rules
from redline.run.checkpoint import Checkpoints
from redline.run.evaluate import Evaluation, evaluate_net, greedy
from redline.run.options import build
from redline.run.run_folder import read_config


@dataclass(frozen=True)
class Agent:
    """A greedy policy and the game it was trained on."""

    path: Path
    config: dict[str, Any]
    rules: Rules
    net: nn.Module
    device: torch.device
    env_steps: int

    def policy(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Greedy actions (N,) int64; of the legal ones (N, A) in a game where some are not."""
        return greedy(self.net, self.device)(obs, legal)

    def evaluate(
        self,
        episodes: int,
        seed: int = 0,
        progress: Callable[[int], None] = lambda _: None,
        max_steps: int = 0,
        sample: bool = False,
    ) -> dict[str, Any]:
        """Held-out games, or with `max_steps` so many steps of them; fields as of `redline eval --json`."""
        self.check(sample)
        started = time.monotonic()
        outcome = evaluate_net(self.net, self.rules, self.device, episodes, seed, progress, max_steps, sample)
        return self.record(outcome, started, sample)

    def check(self, sample: bool) -> None:
        """Refuse to `sample` where there is nothing to draw from."""
        algo = self.config["algo"]
        if sample and not algos.load(algo).STOCHASTIC:
            raise UserError(f"sample is set, but {algo} has values and no policy to draw from; leave it away.")

    def record(self, outcome: Evaluation, started: float, sample: bool = False) -> dict[str, Any]:
        """What is told of an evaluation that began at `started`, by the monotonic clock."""
        return {
            "env": self.config["env"],
            "algo": self.config["algo"],
            "device": str(self.device),
            "run": str(self.path),
            "env_steps": self.env_steps,
            "actions": "actions drawn" if sample else "greedy",
            **outcome.summary(),
            "winnable": self.rules.game.spec(self.rules.config).winnable,
            "seconds": time.monotonic() - started,
            "settings": self.config,
        }


def load_agent(run_dir: Path, device: str = "auto") -> Agent:
    """The agent of a run's newest good checkpoint."""
    if not run_dir.is_dir():
        raise UserError(f"There is no run folder {run_dir}; train one with redline train.")
    config = read_config(run_dir)
    rules = make_rules(config["env"], config["env_options"], config.get("time_limit", 0))
    algo = algos.load(config["algo"])
    place = hardware.pick_device(device)
    found = Checkpoints(run_dir).load(groups=("model",))
    if found is None:
        raise UserError(f"There is no checkpoint in {run_dir} yet; the run has to train a little longer.")
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in config["algo_options"].items()}
    algo_config = build(algo.Config, settings, f"{algo.group}.")
    try:
        net = algo.policy_network(rules.game.spec(rules.config), algo_config, found.tensors["model"])
    except RuntimeError as error:  # torch lists every weight that is missing or of another shape
        raise UserError(f"The agent in {run_dir} was saved by another version of Redline; train it anew.") from error
    return Agent(run_dir, config, rules, net.to(place), place, found.step)
