"""Backplay starts from snapshots before losses, is truncated and is not counted; all other games are whole."""

import dataclasses

import pytest
import torch

from redline.collect.backplay import init_backplay, step_backplay
from redline.collect.device_collector import DeviceCollector
from redline.core.errors import UserError
from redline.core.records import leaves
from redline.envs import batch, make_rules
from redline.envs.batch import env_keys
from redline.run.resolve import resolve
from redline.run.settings import Settings
from redline.run.train import train

NUM_ENVS, STEPS = 64, 4


class Wanderer:
    """Moves at random."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.rollouts = []

    def act(self, obs, legal=None):
        del legal
        return torch.randint(4, (len(obs),), generator=self.generator)

    def ingest(self, transition):
        self.rollouts.append(transition)


class Played:
    """What environments went through: `stood[t]` before step t, `left[t]` steps of practice then."""

    def __init__(self, again: float, steps: int = 200) -> None:
        rules = make_rules("snake", {"width": 6, "height": 6, "starvation": 20})
        envs = batch.reset(rules, env_keys(0, torch.arange(NUM_ENVS)))
        self.collector = DeviceCollector(rules, Wanderer(), envs, again, STEPS)
        self.stood, self.left = [], []
        for _ in range(steps):
            self._note()
            self.collector.step()
        self._note()
        self.rollouts = self.collector.learner.rollouts

    def _note(self) -> None:
        self.stood.append({k: v.clone() for k, v in leaves(self.collector.envs).items()})
        snapshots = self.collector.snapshots
        self.left.append(torch.zeros(NUM_ENVS) if snapshots is None else snapshots.left.clone())

    def same(self, a: int, b: int, env_index: int) -> bool:
        fields = [k for k in self.stood[0] if k.startswith(("game.", "episode."))]
        return all(torch.equal(self.stood[a][k][env_index], self.stood[b][k][env_index]) for k in fields)


@pytest.fixture(scope="module")
def practised() -> Played:
    return Played(again=0.999999)


def test_backplay_starts_where_the_environment_was_before_its_last_loss(practised):
    checked = 0
    losses = {}
    for t, transition in enumerate(practised.rollouts):
        step = transition.step
        for env_index in torch.nonzero(step.terminated & ~step.won).flatten().tolist():
            losses[env_index] = t
        begins = (step.terminated | step.truncated) & (practised.left[t + 1] > 0)
        for env_index in torch.nonzero(begins).flatten().tolist():
            loss = losses[env_index]
            assert practised.left[t + 1][env_index] == 4 * STEPS
            back = [loss - s for s in range(loss + 1) if practised.same(s, t + 1, env_index)]
            assert back, "an environment is in a state it was never in"
            assert min(back) < 2 * STEPS, "no farther back than twice the steps"
            checked += 1
    assert checked > 300


def test_backplay_is_truncated(practised):
    cuts = 0
    for t, transition in enumerate(practised.rollouts):
        ending = practised.left[t] == 1
        step = transition.step
        assert (step.terminated | step.truncated)[ending].all()
        cuts += int(step.truncated[ending].sum())
    assert cuts > 20


def test_backplay_is_not_counted(practised):
    whole = sum(
        int(((r.step.terminated | r.step.truncated) & (practised.left[t] == 0)).sum())
        for t, r in enumerate(practised.rollouts)
    )
    every = sum(int((r.step.terminated | r.step.truncated).sum()) for r in practised.rollouts)
    assert practised.collector.episode_stats.read()["episodes"] == whole < every


def test_the_fraction_is_kept():
    played = Played(again=0.5, steps=400)
    begun = practised = 0
    for t, transition in enumerate(played.rollouts):
        ended = transition.step.terminated | transition.step.truncated
        begun += int(ended.sum())
        practised += int((played.left[t + 1][ended] > 0).sum())
    assert begun > 1000
    assert abs(practised / begun - 0.5) < 0.06


def test_without_it_nothing_is_kept():
    collector = Played(again=0.0, steps=3).collector
    assert collector.snapshots is None
    assert not [name for name in collector.tensors() if name.startswith("snapshots.")]


def test_checkpoints_hold_the_snapshots():
    names = set(Played(again=0.5, steps=10).collector.tensors())
    assert {"snapshots.since", "snapshots.older.game.head", "snapshots.lost.episode.score", "snapshots.left"} <= names


def test_environments_do_not_touch_each_other():
    """A batch equals its singles."""
    rules = make_rules("snake", {"width": 6, "height": 6})
    actions = torch.randint(4, (60, 4), generator=torch.Generator().manual_seed(1))

    def play(envs: list[int]) -> list[torch.Tensor]:
        now = batch.reset(rules, env_keys(0, torch.tensor(envs)))
        snapshots, found = init_backplay(now), []
        for row in actions:
            now, step = batch.step(rules, now, row[envs], snapshots.left == 1)
            now, snapshots = step_backplay(now, snapshots, step, 0.5, STEPS)
            found.append(now.game.head.clone())
        return found

    together = play(list(range(4)))
    for env_index in range(4):
        assert [int(x[env_index]) for x in together] == [int(x[0]) for x in play([env_index])]


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_impossible_fractions_are_refused(value):
    with pytest.raises(UserError, match="backplay is"):
        resolve(Settings("snake", backplay=value))


def test_cpu_environments_without_snapshots_are_refused():
    with pytest.raises(UserError, match="cannot restore a snapshot"):
        resolve(Settings("gym:CartPole-v1", backplay=0.5))
    assert resolve(dataclasses.replace(Settings("gym:CartPole-v1"), backplay=0.0)).backplay == 0


def test_a_run_may_be_resumed_with_and_without_backplay(tmp_path):
    def train_(steps: int, backplay: float) -> int:
        options = {"hidden": (8,), "rollout_steps": 8, "batch_size": 128}
        settings = Settings(
            "snake",
            "ppo",
            num_envs=16,
            steps=steps,
            backplay=backplay,
            device="cpu",
            compile=False,
            run_dir=str(tmp_path),
            eval_episodes=0,
            algo_options=options,
        )
        return train(settings).result["env_steps"]

    assert [train_(256, 0.0), train_(512, 0.5), train_(768, 0.0)] == [256, 512, 768]
