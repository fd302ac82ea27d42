"""Device collector: episode statistics against a plain count, and a step against the parts it is made of."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.collect.device_collector import DeviceCollector
from redline.collect.episode_stats import DeviceEpisodeStats
from redline.core import random
from redline.core.records import Episode, Step, Transition, leaves, map_record
from redline.envs import batch, make_rules
from redline.envs.batch import Rules, env_keys

CPU = torch.device("cpu")
NUM_ENVS = 5


class RandomLearner:
    """Plays at random and keeps every observation and transition."""

    def __init__(self, num_actions: int) -> None:
        self.num_actions = num_actions
        self.shown: list[Tensor] = []
        self.given: list[Transition] = []

    def act(self, obs: Tensor, legal: Tensor | None) -> Tensor:
        assert legal is None, "a game that forbids nothing has no mask"
        self.shown.append(obs.clone())
        return random.below(random.bits(random.seed_key(len(self.shown)), torch.arange(len(obs))), self.num_actions)

    def ingest(self, transition: Transition) -> None:
        self.given.append(map_record(torch.clone, transition))


@pytest.fixture
def rules() -> Rules:
    return make_rules("snake", {"width": 4, "height": 4, "starvation": 6, "start_length": 2}, time_limit=9)


def learner_of(rules: Rules) -> RandomLearner:
    return RandomLearner(rules.game.spec(rules.config).num_actions)


def collector_of(rules: Rules, envs: int) -> DeviceCollector:
    return DeviceCollector(rules, learner_of(rules), batch.reset(rules, env_keys(4, torch.arange(envs))))


def count(steps: list[Step]) -> dict[str, float]:
    """Return what episode statistics should be after these steps, counted one episode at a time."""
    episodes = []
    for step, env_index in itertools.product(steps, range(len(steps[0].reward) if steps else 0)):
        if step.terminated[env_index] or step.truncated[env_index]:
            length, score, reward = (x[env_index].item() for x in step.episode)
            episodes.append((length, score, reward, bool(step.won[env_index]), bool(step.truncated[env_index])))
    number = len(episodes)
    if not number:
        return {"episodes": 0}
    lengths, scores, rewards, won, truncated = zip(*episodes, strict=True)
    return {
        "episodes": number,
        "score": sum(scores) / number,
        "score_max": max(scores),
        "length": sum(lengths) / number,
        "reward": sum(rewards) / number,
        "win_rate": sum(won) / number,
        "truncated": sum(truncated) / number,
    }


def step_of(length: int, score: int, reward: float, ending: str = "", won: bool = False) -> Step:
    """A step in which environment 0 has these results; the other environments go on, with numbers that must not be counted."""

    def envs(first: Any, others: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor([first, *[others] * (NUM_ENVS - 1)], dtype=dtype)

    return Step(
        reward=envs(99.0, 99.0, torch.float32),
        terminated=envs(ending == "terminated", False, torch.bool),
        truncated=envs(ending == "truncated", False, torch.bool),
        won=envs(won, False, torch.bool),
        final_state=None,
        episode=Episode(
            envs(length, 1000, torch.int32), envs(score, 500, torch.int32), envs(reward, 77.0, torch.float32)
        ),
    )


def test_episode_stats_by_hand() -> None:
    episode_stats = DeviceEpisodeStats.zero(NUM_ENVS, CPU)
    episode_stats.add(step_of(10, 3, 1.5, "terminated"))
    episode_stats.add(step_of(11, 900, 44.0))  # nothing ended: nothing counts
    episode_stats.add(step_of(20, 7, 2.5, "truncated"))
    episode_stats.add(step_of(30, 5, 4.0, "terminated", won=True))
    episode_stats.add(step_of(40, 1, 0.0, "terminated"))
    assert episode_stats.read() == {
        "episodes": 4,
        "score": 4.0,
        "score_max": 7,
        "length": 25.0,
        "reward": 2.0,
        "win_rate": 0.25,
        "truncated": 0.25,
    }


def test_reading_starts_episode_stats_over() -> None:
    episode_stats = DeviceEpisodeStats.zero(NUM_ENVS, CPU)
    tensors = [x.data_ptr() for x in episode_stats]
    episode_stats.add(step_of(10, 30, 1.0, "terminated"))
    assert episode_stats.read()["score_max"] == 30
    assert episode_stats.read() == {"episodes": 0}, "no means of no episodes"
    episode_stats.add(step_of(4, 2, 0.5, "truncated"))
    found = episode_stats.read()
    assert (found["episodes"], found["score_max"], found["score"], found["truncated"]) == (1, 2, 2.0, 1.0)
    assert [x.data_ptr() for x in episode_stats] == tensors, "a captured graph adds to the old tensors"


def test_episode_stats_against_a_plain_count(rules: Rules) -> None:
    collector = collector_of(rules, 16)
    for length in (60, 1, 30):
        collector.learner.given.clear()
        for _ in range(length):
            collector.step()
        expected = count([transition.step for transition in collector.learner.given])
        assert collector.episode_stats.read() == pytest.approx(expected)
        assert length == 1 or expected["episodes"] > 16
        assert length != 60 or 0 < expected["truncated"] < 1


def test_large_sums_keep_their_digits() -> None:
    episode_stats = DeviceEpisodeStats.zero(NUM_ENVS, CPU)
    for _ in range(1000):
        episode_stats.add(step_of(2_000_003, 3_000_001, 0.5, "terminated"))
    found = episode_stats.read()  # sums beyond int32
    assert found["length"] == pytest.approx(2_000_003, rel=1e-6)
    assert found["score"] == pytest.approx(3_000_001, rel=1e-6)


def test_a_step_is_act_step_ingest(rules: Rules) -> None:
    """Beside the collector the same games are played by hand: each transition holds the State acted in, not the next."""
    collector = collector_of(rules, 6)
    envs = batch.reset(rules, env_keys(4, torch.arange(6)))
    buffers = {name: x.data_ptr() for name, x in leaves(collector.envs).items()}
    again = learner_of(rules)
    for t in range(40):
        collector.step()
        obs = rules.game.observe(rules.config, envs.game)
        action = again.act(obs, None)
        assert torch.equal(collector.learner.shown[t], obs)
        after, step = batch.step(rules, envs, action)
        for (name, x), y in zip(
            leaves(collector.learner.given[t]).items(),
            leaves(Transition(envs.game, action, step)).values(),
            strict=True,
        ):
            assert torch.equal(x, y), f"{name} differs at step {t}"
        envs = after
    for name, x in leaves(envs).items():
        assert torch.equal(collector.tensors()[name], x)
    assert {name: x.data_ptr() for name, x in collector.tensors().items()} == buffers, (
        "buffers must stay where they are"
    )


def test_the_collector_leaves_the_given_environments_alone(rules: Rules) -> None:
    envs = batch.reset(rules, env_keys(4, torch.arange(3)))
    before = map_record(torch.clone, envs)
    collector = DeviceCollector(rules, learner_of(rules), envs)
    for _ in range(5):
        collector.step()
    assert all(torch.equal(x, y) for x, y in zip(leaves(envs).values(), leaves(before).values(), strict=True))
