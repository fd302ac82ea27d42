"""Play held-out games in parallel with a policy and return the results.

Counting the first games to finish would favour short games, so each slot plays its quota of games to the end. With a step
budget, for very long games, every slot plays until the budget is used up, and the score per game over is estimated from all
games, finished or not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from redline.core.errors import UserError
from redline.core.faults import reach
from redline.engine import hardware
from redline.envs.batch import Rules
from redline.run.evaluate_cpu_envs import CPUGames
from redline.run.evaluate_tensor_games import TensorGames
from redline.run.evaluation import Evaluation
from redline.run.policies import HELD_OUT, MAX_SEED, Policy, greedy, sampled
from redline.run.run_folder import to_stderr

__all__ = ["HELD_OUT", "MAX_SEED", "Evaluation", "Policy", "evaluate", "evaluate_net", "greedy", "sampled"]


def evaluate_net(
    net: nn.Module,
    rules: Rules,
    device: torch.device,
    episodes: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
    max_steps: int = 0,
    sample: bool = False,
) -> Evaluation:
    """Evaluate the greedy policy of `net` on `device`, compiled and with CUDA graphs where the device supports them.

    sample: sample actions from the logits of `net` instead. Other arguments as in `evaluate`.
    """
    machine = hardware.detect(device)
    compiles = machine.kind == "cuda" or (machine.kind == "cpu" and bool(machine.compiler))
    return evaluate(
        rules,
        sampled(net, device, seed) if sample else greedy(net, device),
        episodes,
        device,
        seed,
        progress,
        max_steps=max_steps,
        compile=compiles,
        graph=machine.kind == "cuda",
    )


@torch.no_grad()
def evaluate(
    rules: Rules,
    policy: Policy,
    episodes: int,
    device: torch.device,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
    *,
    max_steps: int = 0,
    slot_steps: int = 0,
    compile: bool = False,
    graph: bool = False,
    notify: Callable[[str], None] = to_stderr,
) -> Evaluation:
    """Play `episodes` games with `policy`, each to its end.

    progress: called with the number of finished games, or with `max_steps` the number of steps.
    max_steps: play this many steps in total instead, in `episodes` slots, game after game.
    slot_steps: stop a slot (with CPU environments, a game) after this many steps; its game counts as unfinished.
    compile, graph: compile the steps of long games and replay them as CUDA graphs.
    """
    if episodes < 1:
        raise UserError(f"episodes is {episodes}; expected at least 1.")
    if max_steps < 0:
        raise UserError(f"max_steps is {max_steps}; expected 0 (play every game to its end) or a number of steps.")
    if not 0 <= seed < MAX_SEED:
        raise UserError(f"seed is {seed}; expected 0 to {MAX_SEED - 1:,}.")
    reach("evaluate")
    if rules.game.ON_CPU:
        return CPUGames(rules, policy, episodes, seed, max_steps, slot_steps).run(progress, notify)
    games = TensorGames(
        rules,
        policy,
        episodes,
        device,
        seed,
        max_steps=max_steps,
        slot_steps=slot_steps,
        compile=compile,
        graph=graph,
        notify=notify,
    )
    return games.run(progress)
