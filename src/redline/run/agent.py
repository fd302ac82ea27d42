"""Load a trained agent from its run folder, to act, evaluate or watch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline import algos
from redline.core.errors import UserError
from redline.core.registry import UnknownName
from redline.engine import hardware
from redline.envs import Rules, make_rules
from redline.run.checkpoint import Checkpoints
from redline.run.evaluate import Evaluation, evaluate_net, greedy
from redline.run.manifest import check_weights
from redline.run.options import build
from redline.run.play import play
from redline.run.policies import outputs
from redline.run.run_folder import read_config
from redline.run.trust import check_trust

_SMALL_LAYER = 1 << 24  # weights that fit into any machine's memory


@dataclass(frozen=True)
class Agent:
    """A trained policy and the environment it was trained on. `redline.load(run)` returns one."""

    path: Path  # the run folder
    config: dict[str, Any]  # its config.json
    rules: Rules
    net: (
        nn.Module
    )  # (N, …) observations, (N, A) bool legal actions or None -> (N, A), the largest for the greedy action
    device: torch.device
    env_steps: int  # environment steps it was trained for
    checkpoint: str = "newest"  # how its weights were chosen: newest, best or a step

    @property
    def env_options(self) -> dict[str, Any]:
        """The options of the environment it was trained on: `redline.make(env, **agent.env_options)`."""
        return dict(vars(self.rules.config))

    def act(self, obs: Any, legal: Any = None, *, sample: bool = False) -> Any:
        """Return the greedy action for an observation, or the actions for a batch of N observations.

        obs: array or tensor on any device, one observation of the environment's `obs_shape` or a batch (N, *obs_shape).
        legal: bool array or tensor (A,) or (N, A), in environments where actions can be illegal; None: all are legal.
        sample: sample the action from the policy instead, with torch's random numbers; for algorithms that learn a policy.

        For a tensor, return a tensor, () or (N,) int64 on the agent's device; for anything else, NumPy: an int for one
        observation, an array (N,) int64 for a batch.
        """
        self.check(sample)
        choose = self._sampled if sample else self.policy
        action, single = self._apply(choose, obs, legal)
        if isinstance(obs, Tensor):
            return action
        return int(action) if single else action.cpu().numpy()

    def values(self, obs: Any, legal: Any = None) -> Any:
        """Return the Q-values (A,) or (N, A); with an actor-critic, the state values () or (N,).

        Arguments and the type of the result as in `act`. The Q-value of an illegal action is a large negative number.
        """
        value, _ = self._apply(self._values, obs, legal)
        return value if isinstance(obs, Tensor) else value.cpu().numpy()

    def play(self, env: Any, episodes: int = 1, seed: int = 0, sample: bool = False) -> dict[str, Any]:
        """Play an environment from `redline.make` or `gymnasium.make`; return the episodes' returns and lengths."""
        return play(self, env, episodes, seed, sample)

    def _apply(self, function: Callable[[Tensor, Tensor | None], Tensor], obs: Any, legal: Any) -> tuple[Tensor, bool]:
        """Return the function's result for a single observation or a batch, and whether `obs` was a single one."""
        tensor = torch.as_tensor(obs)
        shape = self.rules.game.spec(self.rules.config).obs_shape
        single = tuple(tensor.shape) == shape
        if not single and tuple(tensor.shape[1:]) != shape:
            raise UserError(
                f"The agent expects observations of shape {shape} or (N, *{shape}), got {tuple(tensor.shape)}."
            )
        mask = None if legal is None else torch.as_tensor(legal, dtype=torch.bool)
        if single:
            tensor, mask = tensor.unsqueeze(0), None if mask is None else mask.unsqueeze(0)
        result = function(tensor, mask)
        return (result[0] if single else result), single

    def policy(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Return the greedy actions (N,) int64 for observations (N, …) and legal actions (N, A) bool or None."""
        return greedy(self.net, self.device)(obs, legal)

    @torch.no_grad()
    def _sampled(self, obs: Tensor, legal: Tensor | None) -> Tensor:
        probabilities = outputs(self.net, self.device, obs, legal).softmax(1)
        return probabilities.multinomial(1).squeeze(1)

    @torch.no_grad()
    def _values(self, obs: Tensor, legal: Tensor | None) -> Tensor:
        net: Any = self.net
        if not hasattr(net, "with_value"):
            return outputs(net, self.device, obs, legal)
        value: Tensor = net.with_value(obs.to(self.device), None if legal is None else legal.to(self.device))[1]
        return value

    def evaluate(
        self,
        episodes: int,
        seed: int = 0,
        progress: Callable[[int], None] = lambda _: None,
        max_steps: int = 0,
        sample: bool = False,
    ) -> dict[str, Any]:
        """Play held-out games and return the fields of `redline eval --json`. Arguments as in `evaluate_net`."""
        self.check(sample)
        started = time.monotonic()
        evaluation = evaluate_net(self.net, self.rules, self.device, episodes, seed, progress, max_steps, sample)
        return self.record(evaluation, started, sample)

    def check(self, sample: bool) -> None:
        """Raise UserError if `sample` is set for an algorithm without a stochastic policy."""
        algo = self.config["algo"]
        if sample and not algos.load(algo).STOCHASTIC:
            raise UserError(f"sample is set, but {algo} learns values and has no policy to sample from; drop --sample.")

    def record(self, evaluation: Evaluation, started: float, sample: bool = False) -> dict[str, Any]:
        """Return the fields of `redline eval --json` for an evaluation that started at the monotonic time `started`."""
        return {
            "env": self.config["env"],
            "algo": self.config["algo"],
            "device": str(self.device),
            "run": str(self.path),
            "env_steps": self.env_steps,
            "checkpoint": self.checkpoint,
            "actions": "sampled actions" if sample else "greedy",
            **evaluation.summary(),
            "winnable": self.rules.game.spec(self.rules.config).winnable,
            "seconds": time.monotonic() - started,
            "settings": self.config,
        }


def load_agent(run_dir: Path, device: str = "auto", trust: bool = False, checkpoint: str = "newest") -> Agent:
    """Return the agent from a run's newest good checkpoint, or from the one named by `checkpoint`.

    trust: allow a run from somebody else to import the modules of its environment and algorithm; refused otherwise.
    checkpoint: newest, best (by the evaluations of --eval-every) or the step of a checkpoint.
    """
    config, rules = open_run(run_dir, trust)
    torch_device = hardware.pick_device(device)
    saved = Checkpoints(run_dir, check=check_weights).select(checkpoint, groups=("model",))
    if saved is None:
        raise UserError(f"There is no checkpoint in {run_dir} yet; let the run train a little longer.")
    return build_agent(run_dir, config, rules, saved.tensors["model"], saved.step, torch_device, checkpoint)


def open_run(run_dir: Path, trust: bool = False) -> tuple[dict[str, Any], Rules]:
    """Return a run's config.json and environment; raise UserError if its code is missing or not trusted."""
    config = read_config(run_dir)
    check_trust(run_dir, config, trust)
    try:
        rules = make_rules(config["env"], config["env_options"], config.get("time_limit", 0))
        algos.load(config["algo"])
    except UnknownName as error:
        raise UserError(
            f"The run {run_dir} needs the game {config['env']} and the algorithm {config['algo']}, and one of them cannot be "
            "found from here; start in the folder it was trained from, or add that folder to PYTHONPATH."
        ) from error
    return config, rules


def build_agent(
    run_dir: Path,
    config: dict[str, Any],
    rules: Rules,
    model: dict[str, Tensor],
    env_steps: int,
    device: torch.device,
    checkpoint: str = "newest",
) -> Agent:
    """Return the agent with weights `model`, the model group of the checkpoint `checkpoint`, trained for `env_steps` steps."""
    algo = algos.load(config["algo"])
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in config["algo_options"].items()}
    algo_config = build(algo.Config, settings, f"{algo.group}.")
    _check_widths(run_dir, algo_config, model)
    try:
        net = algo.policy_network(rules.game.spec(rules.config), algo_config, model)
    except RuntimeError as error:  # torch lists every weight that is missing or has the wrong shape
        raise UserError(f"The agent in {run_dir} was saved by another version of Redline; train it anew.") from error
    return Agent(run_dir, config, rules, net.to(device), device, env_steps, checkpoint)


def _check_widths(run_dir: Path, algo_config: Any, model: dict[str, Tensor]) -> None:
    """Raise UserError for layers larger than all saved weights together, before memory is allocated for them."""
    saved = sum(weight.numel() for weight in model.values())
    most = max(saved, _SMALL_LAYER)  # unused widths may exceed the weights
    for name in ("hidden", "channels"):
        widths = (1, *getattr(algo_config, name, ()))
        if any(width * following > most for width, following in pairwise(widths)):
            raise UserError(
                f"The agent in {run_dir} has {saved:,} weights, which cannot be layers of {name} {widths[1:]}: its config.json "
                "is of another run; restore it or train the agent anew."
            )
