"""Fast path equals slow path: compiled equals eager, and a GPU equals a CPU, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from redline.core import random
from redline.core.records import from_leaves, leaves, map_record
from redline.envs import batch, make_rules
from redline.envs.batch import EnvState, Rules


def playing(rules: Rules) -> Any:
    """One step and its observation, as one function to compile."""

    def play(envs: EnvState, action: Tensor) -> tuple[EnvState, Any, Tensor]:
        envs, step = batch.step(rules, envs, action)
        return envs, step, rules.game.observe(rules.config, envs.game)

    return play


def compile_step(slow: Any) -> Any:
    """The step compiled, with flat outputs: torch 2.11 cannot return a NamedTuple made inside a compiled function."""

    def flat(envs: EnvState, action: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        after, step, obs = slow(envs, action)
        return leaves(after), leaves(step), obs

    # No shape is left open: a batch of one and a batch of many are compiled each for itself.
    compiled = torch.compile(flat, fullgraph=True, dynamic=False)

    def fast(envs: EnvState, action: Tensor) -> Any:
        after, step, obs = compiled(envs, action)
        like = slow(envs, action)[1]
        return from_leaves(envs, after), from_leaves(like, step), obs

    return fast


def assert_same(ours: Any, theirs: Any, when: str) -> None:
    (envs, step, obs), (envs_2, step_2, obs_2) = ours, theirs
    for record, record_2 in ((envs, envs_2), (step, step_2)):
        for (name, x), y in zip(leaves(record).items(), leaves(record_2).values(), strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y.cpu()), f"{name} differs {when}"
    assert torch.equal(obs, obs_2.cpu()), f"the observation differs {when}"


def compare(rules: Rules, num_envs: int, steps: int, device: str, compiled: bool) -> int:
    """Eager on the CPU beside the way under test; returns how many episodes were played to their end."""
    slow = playing(rules)
    fast = compile_step(slow) if compiled else slow
    expected = batch.reset(rules, batch.env_keys(21, torch.arange(num_envs)))
    envs = batch.reset(rules, batch.env_keys(21, torch.arange(num_envs, device=device)))
    for t in range(steps):
        bits = random.bits(random.seed_key(t), torch.arange(num_envs))
        action = random.below(bits, rules.game.spec(rules.config).num_actions)
        ours, theirs = slow(expected, action), fast(envs, action.to(device))
        assert_same(ours, theirs, f"at step {t}")
        expected, envs = ours[0], map_record(torch.clone, theirs[0])
    return int(expected.played.sum())


def test_compiled_equals_eager() -> None:
    """Random start, shaping with rewards that are no binary fractions, starvation, time limit: all in a small game."""
    options = {"width": 6, "height": 5, "start": "random", "starvation": 12, "reward_closer": 0.1, "reward_step": -0.01}
    assert compare(make_rules("snake", options, time_limit=20), 16, 50, "cpu", compiled=True) > 16


@pytest.mark.gpu
@pytest.mark.parametrize("num_envs", [1, 4096])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gpu_equals_cpu(any_variant: Any, num_envs: int, compiled: bool) -> None:
    torch.compiler.reset()  # else the functions before this one count towards the limit of recompilations
    rules = make_rules(any_variant.game, any_variant.options, time_limit=40)
    ended = compare(rules, num_envs, 64, "cuda", compiled)
    assert ended >= num_envs
