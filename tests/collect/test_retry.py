"""Lost games go on from some moves before the loss, as they were then; all others begin anew."""

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

LANES, STEPS = 64, 4


class Wanderer:
    """Moves at random, by lane and step."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.rollouts = []

    def act(self, obs, legal=None):
        del legal
        return torch.randint(4, (len(obs),), generator=self.generator)

    def ingest(self, rollout):
        self.rollouts.append(rollout)


def played(again: float, steps: int = 200) -> tuple[list, Collector, list]:
    rules = make_rules("snake", {"width": 6, "height": 6, "starvation": 20})
    collector = Collector(rules, Wanderer(), batch.reset(rules, lane_keys(0, torch.arange(LANES))), again, STEPS)
    before = []
    for _ in range(steps):
        before.append({k: v.clone() for k, v in leaves(collector.lanes).items()})
        collector.step()
    before.append({k: v.clone() for k, v in leaves(collector.lanes).items()})
    return before, collector, collector.learner.rollouts


def same(a: dict, b: dict, lane: int) -> bool:
    return all(torch.equal(a[k][lane], b[k][lane]) for k in a if k.startswith(("game.", "episode.")))


def test_every_lost_game_goes_on_from_a_moment_of_its_own_past():
    before, _, rollouts = played(again=0.999999)
    distances = []
    for t, rollout in enumerate(rollouts):
        lost = rollout.step.terminated & ~rollout.step.won
        for lane in torch.nonzero(lost).flatten().tolist():
            now = before[t + 1]
            past = [t - back for back in range(t + 1) if same(before[t - back], now, lane)]
            assert past, "a lane stands where it never stood"
            distances.append(t + 1 - past[0])
    assert len(distances) > 100
    assert min(distances) <= 2 * STEPS  # lost soon after the start, or after going back
    late = [d for d in distances if d > 2 * STEPS]
    assert not late, "no farther back than twice the steps: the newest moment that is old enough"


def test_games_that_were_not_lost_begin_anew():
    before, _, rollouts = played(again=0.999999)
    starved = 0
    for t, rollout in enumerate(rollouts):
        for lane in torch.nonzero(rollout.step.truncated).flatten().tolist():
            starved += 1
            assert before[t + 1]["episode.length"][lane] == 0
    assert starved


def test_the_share_is_the_share():
    before, _, rollouts = played(again=0.5, steps=400)
    lost = torch.stack([r.step.terminated & ~r.step.won for r in rollouts])
    anew = torch.stack([b["episode.length"] == 0 for b in before[1:]])
    begun = anew[lost].to(torch.float32).mean()  # some go back to the very start, which looks the same
    assert lost.sum() > 500
    none = torch.stack([b["episode.length"] == 0 for b in played(again=0.0)[0][1:]])
    assert 0.4 < begun < 0.9
    assert none.any()


def test_without_it_nothing_is_kept():
    _, collector, _ = played(again=0.0, steps=3)
    assert collector.moments is None
    assert not [name for name in collector.tensors() if name.startswith("moments.")]


def test_checkpoints_hold_the_moments():
    _, collector, _ = played(again=0.5, steps=30)
    names = collector.tensors()
    assert {"moments.since", "moments.older.game.head", "moments.newer.episode.score"} <= set(names)


def test_two_lanes_do_not_touch_each_other():
    """A batch equals its singles."""
    rules = make_rules("snake", {"width": 6, "height": 6})
    actions = torch.randint(4, (60, 8), generator=torch.Generator().manual_seed(1))

    def play(lanes: list[int]) -> list[torch.Tensor]:
        now = batch.reset(rules, lane_keys(0, torch.tensor(lanes)))
        moments, found = retry.keep(now), []
        for row in actions:
            now, step = batch.step(rules, now, row[lanes])
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
