"""Practice begins at moments before losses, is cut short and is not counted; all other games are whole."""

import dataclasses

import pytest
import torch

from redline.collect import retry
from redline.collect.device import Collector
from redline.core.errors import UserError
from redline.core.records import leaves
from redline.envs import batch, make_rules
from redline.envs.batch import lane_keys
from redline.run.config import Settings, resolve
from redline.run.train import train

LANES, STEPS = 64, 4


class Wanderer:
    """Moves at random."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.rollouts = []

    def act(self, obs, legal=None):
        del legal
        return torch.randint(4, (len(obs),), generator=self.generator)

    def ingest(self, rollout):
        self.rollouts.append(rollout)


class Played:
    """What lanes went through: `stood[t]` before step t, `left[t]` steps of practice then."""

    def __init__(self, again: float, steps: int = 200) -> None:
        rules = make_rules("snake", {"width": 6, "height": 6, "starvation": 20})
        lanes = batch.reset(rules, lane_keys(0, torch.arange(LANES)))
        self.collector = Collector(rules, Wanderer(), lanes, again, STEPS)
        self.stood, self.left = [], []
        for _ in range(steps):
            self._note()
            self.collector.step()
        self._note()
        self.rollouts = self.collector.learner.rollouts

    def _note(self) -> None:
        self.stood.append({k: v.clone() for k, v in leaves(self.collector.lanes).items()})
        moments = self.collector.moments
        self.left.append(torch.zeros(LANES) if moments is None else moments.left.clone())

    def same(self, a: int, b: int, lane: int) -> bool:
        fields = [k for k in self.stood[0] if k.startswith(("game.", "episode."))]
        return all(torch.equal(self.stood[a][k][lane], self.stood[b][k][lane]) for k in fields)


@pytest.fixture(scope="module")
def practised() -> Played:
    return Played(again=0.999999)


def test_practice_begins_where_the_lane_stood_before_its_last_loss(practised):
    checked = 0
    losses = {}
    for t, rollout in enumerate(practised.rollouts):
        step = rollout.step
        for lane in torch.nonzero(step.terminated & ~step.won).flatten().tolist():
            losses[lane] = t
        begins = (step.terminated | step.truncated) & (practised.left[t + 1] > 0)
        for lane in torch.nonzero(begins).flatten().tolist():
            loss = losses[lane]
            assert practised.left[t + 1][lane] == 4 * STEPS
            back = [loss - s for s in range(loss + 1) if practised.same(s, t + 1, lane)]
            assert back, "a lane stands where it never stood"
            assert min(back) < 2 * STEPS, "no farther back than twice the steps"
            checked += 1
    assert checked > 300


def test_practice_is_cut_short(practised):
    cuts = 0
    for t, rollout in enumerate(practised.rollouts):
        ending = practised.left[t] == 1
        step = rollout.step
        assert (step.terminated | step.truncated)[ending].all()
        cuts += int(step.truncated[ending].sum())
    assert cuts > 20


def test_practice_is_not_counted(practised):
    whole = sum(
        int(((r.step.terminated | r.step.truncated) & (practised.left[t] == 0)).sum())
        for t, r in enumerate(practised.rollouts)
    )
    every = sum(int((r.step.terminated | r.step.truncated).sum()) for r in practised.rollouts)
    assert practised.collector.tally.read()["episodes"] == whole < every


def test_the_share_is_the_share():
    played = Played(again=0.5, steps=400)
    begun = practised = 0
    for t, rollout in enumerate(played.rollouts):
        ended = rollout.step.terminated | rollout.step.truncated
        begun += int(ended.sum())
        practised += int((played.left[t + 1][ended] > 0).sum())
    assert begun > 1000
    assert abs(practised / begun - 0.5) < 0.06


def test_without_it_nothing_is_kept():
    collector = Played(again=0.0, steps=3).collector
    assert collector.moments is None
    assert not [name for name in collector.tensors() if name.startswith("moments.")]


def test_checkpoints_hold_the_moments():
    names = set(Played(again=0.5, steps=10).collector.tensors())
    assert {"moments.since", "moments.older.game.head", "moments.lost.episode.score", "moments.left"} <= names


def test_lanes_do_not_touch_each_other():
    """A batch equals its singles."""
    rules = make_rules("snake", {"width": 6, "height": 6})
    actions = torch.randint(4, (60, 8), generator=torch.Generator().manual_seed(1))

    def play(lanes: list[int]) -> list[torch.Tensor]:
        now = batch.reset(rules, lane_keys(0, torch.tensor(lanes)))
        moments, found = retry.keep(now), []
        for row in actions:
            now, step = batch.step(rules, now, row[lanes], moments.left == 1)
            now, moments = retry.go_back(now, moments, step, 0.5, STEPS)
            found.append(now.game.head.clone())
        return found

    together = play(list(range(8)))
    for lane in range(8):
        assert [int(x[lane]) for x in together] == [int(x[0]) for x in play([lane])]


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_shares_that_cannot_be_are_refused(value):
    with pytest.raises(UserError, match="retry is"):
        resolve(Settings("snake", retry=value))


def test_environments_of_the_host_cannot_go_back():
    with pytest.raises(UserError, match="cannot go back"):
        resolve(Settings("gym:CartPole-v1", retry=0.5))
    assert resolve(dataclasses.replace(Settings("gym:CartPole-v1"), retry=0.0)).retry == 0


def test_a_run_may_be_continued_with_and_without_practice(tmp_path):
    def train_(steps: int, retry: float) -> int:
        options = {"hidden": (8,), "rollout": 8, "batch_size": 128}
        settings = Settings(
            "snake",
            "ppo",
            num_envs=16,
            steps=steps,
            retry=retry,
            device="cpu",
            compile=False,
            run_dir=str(tmp_path),
            eval_episodes=0,
            algo_options=options,
        )
        return train(settings).result["env_steps"]

    assert [train_(256, 0.0), train_(512, 0.5), train_(768, 0.0)] == [256, 512, 768]
