"""examples/hindsight: the game keeps the contract, and replay gives samples goals that their own episodes reached later."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import redline
from redline import games, oracles, replay
from redline.core import random
from redline.core.errors import UserError
from redline.envs import batch, make_rules
from redline.replay.contract import ReplayRequest
from redline.testing import check_game

FOLDER = Path(__file__).parents[2] / "examples" / "hindsight"
NUM_ENVS, ROWS, STEPS = 16, 64, 100


@pytest.fixture(autouse=True)
def _in_the_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(FOLDER)
    yield
    for name in ("skyline", "skyline_oracle", "hindsight"):
        sys.modules.pop(name, None)
    for registry in (games.registry, oracles.registry, replay.registry):
        registry.refresh()


def request_of(env: str, n_step: int = 1) -> ReplayRequest:
    rules = make_rules(env, {"width": 4} if env == "skyline" else {})
    envs = batch.reset(rules, batch.env_keys(3, torch.arange(NUM_ENVS)))
    return ReplayRequest(rules, envs.game, NUM_ENVS * ROWS, n_step, gamma=0.9)


def played() -> tuple[Any, list[Any], list[Any]]:
    """Return a memory after random play, and the States and Steps of every row."""
    request = request_of("skyline")
    memory = replay.load("hindsight").make(request)
    envs = batch.reset(request.rules, batch.env_keys(3, torch.arange(NUM_ENVS)))
    states, steps = [], []
    for number in range(STEPS):
        draws = random.bits(random.seed_key(number), torch.arange(NUM_ENVS))
        action = random.below(draws, 4)
        states.append(envs.game)
        after, step = batch.step(request.rules, envs, action)
        memory.write(envs.game, action, step)
        steps.append(step)
        envs = after
    return memory, states, steps


def test_it_keeps_the_contract() -> None:
    assert check_game("skyline").ok


def test_goals_are_those_that_the_same_episode_reached_later(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, states, steps = played()
    monkeypatch.setattr(sys.modules["hindsight"], "SHARE", 1.0)
    draw = memory.ring.draw(random.seed_key(1), 512)
    window, found = memory._read(draw.row, draw.env_index)
    relabelled, changed = memory._relabel(random.seed_key(2), window, found)
    kept = reached = 0
    for sample, (row, env) in enumerate(zip(draw.row.tolist(), draw.env_index.tolist(), strict=True)):
        goal, before, after = (
            changed["goal"][sample].tolist(),
            changed["heights"][sample].tolist(),
            changed["heights"][512 + sample].tolist(),
        )
        assert before == states[row].heights[env].tolist()
        later = []
        for number in range(row, STEPS - 1):
            if steps[number].terminated[env] or steps[number].truncated[env]:
                break
            later.append(states[number + 1].heights[env].tolist())
        if not later:  # the episode's last step
            kept += 1
            assert goal == states[row].goal[env].tolist()
            assert relabelled.reward[sample] == window.reward[sample]
            assert relabelled.discount[sample] == window.discount[sample]
            continue
        assert goal in later
        assert changed["goal"][512 + sample].tolist() == goal
        reached += goal == after
        assert relabelled.reward[sample] == float(goal == after)
        assert relabelled.discount[sample] == pytest.approx(0.0 if goal == after else 0.9)
    assert kept > 20
    assert reached > 20


def test_a_fifth_of_the_samples_keeps_its_goal() -> None:
    memory, _, _ = played()
    draw = memory.ring.draw(random.seed_key(1), 4096)
    window, found = memory._read(draw.row, draw.env_index)
    _, follows = memory._later_state(random.seed_key(2), window)
    _, changed = memory._relabel(random.seed_key(2), window, found)
    new = (changed["goal"][:4096] != found["goal"][:4096]).any(1)
    assert not (new & ~follows).any()
    assert 0.7 < new[follows].float().mean() < 0.82  # some later State had the very goal


def test_what_it_needs_is_told() -> None:
    with pytest.raises(UserError, match="the game has no goals: it does not define achieved, with_goal, judge"):
        replay.load("hindsight").make(request_of("snake"))
    with pytest.raises(UserError, match="n_step is 3; hindsight needs 1"):
        replay.load("hindsight").make(request_of("skyline", 3))


def test_hindsight_learns_where_plain_replay_sees_no_reward(tmp_path: Path) -> None:
    """Skylines of five columns, after a few seconds: with hindsight most games are won."""
    win_rates = {}
    for kind in ("device", "hindsight"):
        run = redline.train(
            "skyline",
            algo="dqn",
            run_dir=str(tmp_path / kind),
            steps=12_000,
            num_envs=32,
            batch_size=64,
            seed=1,
            device="cpu",
            compile=False,
            eval_episodes=256,
            env_options={"width": 5, "height": 2},
            algo_options={
                "replay": kind,
                "n_step": 1,
                "hidden": (64, 64),
                "learning_starts": 1000,
                "epsilon_steps": 4000,
                "replay_capacity": 12_000,
            },
        )
        win_rates[kind] = run.result["win_rate"]
    assert win_rates["hindsight"] > win_rates["device"] + 0.2, win_rates
