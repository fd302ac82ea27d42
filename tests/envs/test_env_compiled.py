"""Fast path equals slow path: compiled equals eager, and a GPU equals a CPU, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from redline.core import random
from redline.core.records import from_leaves, leaves, map_record
from redline.engine import fast
from redline.envs import batch, change_rules, live_rules, make_rules, set_live
from redline.envs.batch import EnvState, Rules


def playing(rules: Rules) -> Any:
    """One step and its observation, as one function to compile."""

    def play(envs: EnvState, action: Tensor) -> tuple[EnvState, Any, Tensor]:
        envs, step = batch.step(rules, envs, action)
        return envs, step, rules.game.observe(rules.config, envs.game)

    return play


def compile_step(slow: Any, device: str) -> Any:
    """The step compiled, with flat outputs: torch 2.11 cannot return a NamedTuple made inside a compiled function."""

    def flat(envs: EnvState, action: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        after, step, obs = slow(envs, action)
        return leaves(after), leaves(step), obs

    # As training compiles it: with no shape left open, so that a batch of one and a batch of many are compiled each for itself.
    compiled = fast.Compiler(True, pytest.fail, torch.device(device))(flat)

    like: list[Any] = []  # a step's record, for its fields

    def call(envs: EnvState, action: Tensor) -> Any:
        after, step, obs = compiled(envs, action)
        like[:] = like or [slow(envs, action)[1]]
        return from_leaves(envs, after), from_leaves(like[0], step), obs

    return call


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
    under_test = compile_step(slow, device) if compiled else slow
    expected, envs = start(rules, num_envs, "cpu"), start(rules, num_envs, device)
    for t in range(steps):
        action = random_action(rules, num_envs, t)
        ours, theirs = slow(expected, action), under_test(envs, action.to(device))
        assert_same(ours, theirs, f"at step {t}")
        expected, envs = ours[0], map_record(torch.clone, theirs[0])
    return int(expected.played.sum())


def start(rules: Rules, num_envs: int, device: str) -> EnvState:
    return batch.reset(rules, batch.env_keys(21, torch.arange(num_envs, device=device)))


def random_action(rules: Rules, num_envs: int, t: int) -> Tensor:
    bits = random.bits(random.seed_key(t), torch.arange(num_envs))
    return random.below(bits, rules.game.spec(rules.config).num_actions)


def test_compiled_equals_eager_and_sees_new_values_of_live_options() -> None:
    """Random start, shaping with rewards that are no binary fractions, starvation, time limit: all in a small game.

    Live options change half way. Torch is told to fail rather than to compile again, and the numbers are those of plain
    options, before and after.
    """
    options = {"width": 6, "height": 5, "start": "random", "starvation": 12, "reward_closer": 0.1, "reward_step": -0.01}
    rules = make_rules("snake", options, time_limit=20)
    changed = change_rules(
        rules,
        {"long_start": 25, "reward_food": 0.3, "reward_death": -0.7, "reward_step": -0.1, "reward_closer": 0.2},
    )
    live = live_rules(rules, rules.game.LIVE, "cpu")
    torch.compiler.reset()
    compiled = compile_step(playing(live), "cpu")
    expected, envs, longest = start(rules, 16, "cpu"), start(live, 16, "cpu"), [0, 0]
    for t in range(80):
        plain = changed if t >= 40 else rules
        set_live(live, plain)
        action = random_action(rules, 16, t)
        ours = playing(plain)(expected, action)
        with torch.compiler.set_stance("fail_on_recompile" if t else "default"):
            theirs = compiled(envs, action)
        assert_same(ours, theirs, f"at step {t}")
        expected, envs = ours[0], map_record(torch.clone, theirs[0])
        longest[t >= 40] = max(longest[t >= 40], int(envs.game.length.max()))
    assert int(expected.played.sum()) > 32
    assert longest[0] < 10 < 20 < longest[1]  # long starts were played


@pytest.mark.gpu
@pytest.mark.parametrize("num_envs", [1, 4096])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gpu_equals_cpu(any_variant: Any, num_envs: int, compiled: bool) -> None:
    torch.compiler.reset()  # else the functions before this one count towards the limit of recompilations
    rules = make_rules(any_variant.game, any_variant.options, time_limit=40)
    ended = compare(rules, num_envs, 48, "cuda", compiled)
    assert ended >= num_envs
