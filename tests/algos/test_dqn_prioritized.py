"""DQN with priorities: what is ranked after a gradient step, how samples are weighed, and a run that is continued."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from test_dqn import Outcome, State, anywhere, choose_then_earn, end_every_fourth, probe, stand_still, values_at
from torch import Tensor
from torch.nn import functional as F

from redline.algos import dqn
from redline.algos.dqn import Config, Learner
from redline.collect.device_collector import DeviceCollector
from redline.core.errors import UserError
from redline.core.records import Batch, Spec
from redline.engine.runtime import Runtime
from redline.envs import batch
from redline.envs.batch import Rules, env_keys
from redline.replay.priority import UNIT, Priorities
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

CPU = torch.device("cpu")
NUM_ENVS, ROWS = 12, 24


def roam(state: State, action: Tensor) -> Outcome:
    """From place to place, each with its own pay; from the last one there is a way to die."""
    reward = state.place * 0.7 - 1.1 + action * 0.3
    return (state.place + 1 + action) % 5, reward, (state.place == 4) & (action == 1)


def learner_of(
    rules: Rules | None = None, accumulate: int = 1, amp: torch.dtype | None = None, **options: Any
) -> Learner:
    """A learner that has played at random for longer than its memory reaches back."""
    rules = rules or probe(roam, anywhere, time_limit=6)
    chosen: dict[str, Any] = {
        "batch_size": 32,
        "hidden": (16,),
        "learning_rate": 1e-2,
        "gamma": 0.9,
        "n_step": 2,
        "tau": 0.1,
        "epsilon_high": 1.0,
        "epsilon_low": 1.0,
        "replay_capacity": NUM_ENVS * ROWS,
        "prioritized": True,
        "priority_alpha": 0.6,
    }
    num_envs = batch.reset(rules, env_keys(3, torch.arange(NUM_ENVS)))
    learner = Learner(rules, Config(**chosen | options), num_envs.game, NUM_ENVS, 1, Runtime(CPU, amp), accumulate)
    collector = DeviceCollector(rules, learner, num_envs)
    for _ in range(ROWS + 9):
        collector.step()
    return learner


def ranks(learner: Learner) -> Priorities:
    assert learner.memory.priorities is not None
    return learner.memory.priorities


class Drawn(NamedTuple):
    """One call of the memory's `sample`."""

    beta: float
    leaves: Tensor  # units before
    batch: Batch
    place: Tensor


def record(learner: Learner) -> list[Drawn]:
    """A list to which every later sample is added."""
    calls: list[Drawn] = []
    sample = learner.memory.sample

    def recorded(key: Tensor, size: int, beta: Tensor | float, *rest: Any) -> Batch:
        before, found = ranks(learner).levels[0].clone(), sample(key, size, beta, *rest)
        assert found.place is not None
        calls.append(Drawn(float(beta), before, found, found.place))
        return found

    learner.memory.sample = recorded  # type: ignore[assignment,method-assign]
    return calls


def slots_of(learner: Learner, drawn: Drawn) -> list[int]:
    """Where the sampled transitions lie in the tables."""
    return [place // NUM_ENVS % learner.memory.rows * NUM_ENVS + place % NUM_ENVS for place in drawn.place.tolist()]


def values_and_targets(learner: Learner, found: Batch) -> tuple[Tensor, Tensor]:
    """By the definition of double DQN."""
    values = learner.online(found.obs).gather(1, found.action.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        best = learner.online(found.next_obs).argmax(1, keepdim=True)
        following = learner.target(found.next_obs).gather(1, best).squeeze(1)
    return values, found.reward + found.discount * following


# ---- Ranks


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.6, 1.0])
def test_a_gradient_step_ranks_what_it_sampled(alpha: float) -> None:
    """By |value - target| ** alpha as it was before the step; what must not count gets 1 unit; others keep theirs."""
    learner = learner_of(priority_alpha=alpha)
    calls, lost = record(learner), 0
    for update in range(8):
        before = {k: v.clone() for k, v in learner.online.state_dict().items()}
        target = learner.target_weights.clone()
        learner.gradient_step()
        after = {k: v.clone() for k, v in learner.online.state_dict().items()}
        moved = learner.target_weights.clone()
        # The networks as the sample saw them.
        learner.online.load_state_dict(before)
        learner.target_weights.copy_(target)
        drawn = calls[update]
        values, targets = values_and_targets(learner, drawn.batch)
        learner.online.load_state_dict(after)
        learner.target_weights.copy_(moved)

        errors = (values - targets).detach().abs().tolist()
        slots, found = slots_of(learner, drawn), ranks(learner).levels[0]
        for slot, error, weight in zip(slots, errors, drawn.batch.weight.tolist(), strict=True):
            lost += weight == 0.0
            expected = max((error if weight else 0.0) ** alpha * UNIT, 1.0)
            assert found[slot].item() == pytest.approx(expected, rel=1e-4, abs=1.0), f"update {update}, slot {slot}"
        rest = torch.ones_like(found, dtype=torch.bool)
        rest[slots] = False
        assert torch.equal(found[rest], drawn.leaves[rest]), "a place that was not sampled has another rank"
    assert len(calls) == 8
    assert lost > 3, "no sample whose end is lost was met"
    if alpha:
        assert len(set(ranks(learner).levels[0].tolist())) > 20
    assert not torch.equal(calls[0].place, calls[1].place)


def test_each_part_of_an_accumulated_step_is_ranked_before_the_next_is_drawn() -> None:
    learner = learner_of(accumulate=3)
    calls = record(learner)
    learner.gradient_step()
    assert len(calls) == 3
    for earlier, later in itertools.pairwise(calls):
        slots = slots_of(learner, earlier)
        assert not torch.equal(later.leaves[slots], earlier.leaves[slots])
        assert not torch.equal(later.place, earlier.place)


def test_what_is_wrong_is_drawn_more_often() -> None:
    """Only one environment has surprising rewards: it is sampled far more often than its number of places."""
    learner = learner_of(probe(stand_still), priority_alpha=1.0, gamma=0.0, learning_rate=1e-9)
    learner.memory.reward.zero_()
    learner.memory.reward[5::NUM_ENVS] = 10.0
    calls = record(learner)
    for _ in range(60):
        learner.gradient_step()
    shares = [(drawn.place % NUM_ENVS == 5).double().mean().item() for drawn in calls]
    assert shares[0] == pytest.approx(1 / NUM_ENVS, abs=0.04)
    assert sum(shares[-5:]) / 5 > 0.5


def test_a_transition_that_is_not_a_number_is_soon_left_alone() -> None:
    """Steps that meet it are skipped, and it drops to the lowest rank there is."""
    learner = learner_of(n_step=1)
    slot = 7 * NUM_ENVS + 2
    learner.memory.reward[slot] = float("nan")
    for _ in range(60):
        learner.gradient_step()
    skipped = learner.optimizer.skipped.item()
    assert 1 <= skipped <= 3
    assert ranks(learner).levels[0][slot].item() == 1
    weights = learner.optimizer.flat.clone()
    for _ in range(10):
        learner.gradient_step()
    assert learner.optimizer.skipped.item() == skipped
    assert not torch.equal(weights, learner.optimizer.flat)
    assert torch.isfinite(learner.optimizer.flat).all()
    assert ranks(learner).highest.item() < 100 * UNIT


def test_ranks_in_reduced_precision_are_nearly_the_same() -> None:
    plain, rounded = learner_of(), learner_of(amp=torch.bfloat16)
    for learner in (plain, rounded):
        learner.gradient_step()
    ours, theirs = (ranks(learner).levels[0].double() for learner in (plain, rounded))
    assert torch.equal(ours == 0, theirs == 0)
    assert (ours - theirs).abs().mean() < 0.02 * ours.mean()
    assert not torch.equal(ours, theirs), "nothing ran in bfloat16"


# ---- Weights


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_loss_and_gradient_are_weighted(progress: float) -> None:
    learner = learner_of()
    for _ in range(5):
        learner.gradient_step()
    learner.progress.fill_(progress)
    calls = record(learner)
    handed_over: list[tuple[Tensor, ...]] = []
    learner._apply = handed_over.append
    learner.read_metrics(1)
    learner.gradient_step()
    drawn = calls[0]
    units = [drawn.leaves[slot].item() for slot in slots_of(learner, drawn)]
    counts = (drawn.batch.weight > 0).tolist()
    rarest = min(own for own, known in zip(units, counts, strict=True) if known)
    beta = 0.4 + 0.6 * progress
    weights = [(rarest / own) ** beta * known for own, known in zip(units, counts, strict=True)]
    assert drawn.batch.weight.tolist() == pytest.approx(weights, rel=1e-5)
    assert len({round(weight, 4) for weight in weights}) > 5

    values, targets = values_and_targets(learner, drawn.batch)
    losses = F.huber_loss(values, targets, reduction="none", delta=1.0)
    loss = (losses * torch.tensor(weights)).mean()
    assert learner.metric_sums["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert loss.item() != pytest.approx(losses.mean().item(), rel=0.05)
    expected = torch.autograd.grad(loss, list(learner.online.parameters()))
    for ours, theirs in zip(handed_over[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("start", "progress", "beta"),
    [
        (0.4, 0.0, 0.4),
        (0.4, 0.5, 0.7),
        (0.4, 1.0, 1.0),
        (0.0, 0.0, 0.0),
        (0.0, 0.25, 0.25),
        (1.0, 0.0, 1.0),
        (1.0, 0.6, 1.0),
    ],
)
def test_beta_goes_to_one_as_training_goes_on(start: float, progress: float, beta: float) -> None:
    learner = learner_of(priority_beta=start)
    calls = record(learner)
    learner.progress.fill_(progress)
    learner.gradient_step()
    assert [drawn.beta for drawn in calls] == pytest.approx([beta])


# ---- Without priorities


def test_without_priorities_nothing_is_placed_ranked_or_scheduled() -> None:
    learner = learner_of(prioritized=False)
    assert not learner.scheduled
    assert learner.memory.priorities is None
    learner._update_priorities = lambda *_: pytest.fail("ranked")
    loss, _, place, errors = learner.loss(torch.tensor(0))
    assert place is None
    assert loss.shape == ()
    assert errors.shape == (32,)
    assert not errors.requires_grad
    learner.update()
    assert not any("priorit" in name for name in learner.state_dict()["replay"])


def test_with_priorities_there_is_a_schedule_and_all_is_saved() -> None:
    learner = learner_of()
    assert learner.scheduled
    place, errors = learner.loss(torch.tensor(0))[2:]
    assert place is not None
    assert place.shape == errors.shape == (32,)
    assert not errors.requires_grad
    names = {name for name in learner.state_dict()["replay"] if name.startswith("priorities.")}
    assert names == {f"priorities.{name}" for name in ranks(learner).tensors()}


# ---- Values that are known


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (probe(stand_still, time_limit=4), {0: [2.0, 2.0]}),  # through a time limit: 1 a step for ever
        (probe(end_every_fourth), {0: [1.6, 1.6]}),  # an end one step in four, which the player cannot see coming
        (probe(choose_then_earn), {0: [0.0, 0.5], 1: [0.0, 0.0], 2: [1.0, 1.0]}),
    ],
    ids=["time limit", "endings", "choice"],
)
def test_values_are_those_of_plain_replay(rules: Rules, expected: dict[int, list[float]]) -> None:
    """With the weights of beta 1 the values are means over what happened, not over what was drawn."""
    options: dict[str, Any] = {
        "batch_size": 256,
        "gamma": 0.5,
        "n_step": 1,
        "tau": 0.2,
        "replay_capacity": NUM_ENVS * 33,
    }
    learner = learner_of(rules, huber=100.0, **options)
    learner.progress.fill_(1.0)
    for update in range(200):
        if update == 130:  # the last third with smaller steps: the values settle
            learner.optimizer.learning_rate = 1e-3
        learner.update()
    for place, values in expected.items():
        assert values_at(learner, place) == pytest.approx(values, abs=0.08), f"place {place}"


# ---- Settings


@pytest.mark.parametrize("field", ["priority_alpha", "priority_beta"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_impossible_settings_are_errors_that_name_them(field: str, value: float) -> None:
    wrong: dict[str, Any] = {field: value}
    with pytest.raises(UserError, match=rf"^dqn\.{field} is .*; expected a number from 0 to 1\.$"):
        Config(**wrong)


def test_memory_of_the_ranks_is_counted() -> None:
    spec = Spec((5,), torch.uint8, (1.0,) * 5, 1, 2, "points")
    plain, ranked = (
        dqn.memory_bytes(Config(prioritized=wanted, replay_capacity=1_000_000), spec, 100, 16)["replay_capacity"]
        for wanted in (False, True)
    )
    assert ranked - plain == pytest.approx(4.53e6, rel=0.01)  # 4 bytes a leaf, a fifteenth of 8 above


# ---- Whole sessions


def session_of(**changes: Any) -> Session:
    """Snake on a small board with a time limit, so that there are ends of both kinds."""
    options = {"hidden": (16, 16), "learning_starts": 64, "epsilon_steps": 500, "priority_beta": 0.2}
    chosen: dict[str, Any] = {
        "env": "snake",
        "algo": "dqn",
        "num_envs": 8,
        "batch_size": 16,
        "n_step": 2,
        "replay_capacity": 8 * 20,
        "prioritized": True,
        "steps": 8 * 60,
        "time_limit": 12,
        "seed": 1,
        "device": "cpu",
        "compile": False,
        "curriculum": False,
        "env_options": {"width": 5, "height": 5},
        "algo_options": options,
    }
    return Session(resolve(Settings(**chosen | changes)), pytest.fail)


Groups = Mapping[str, Mapping[str, Tensor]]


def saved(session: Session) -> dict[str, dict[str, Tensor]]:
    return {group: {k: v.clone() for k, v in some.items()} for group, some in session.tensors().items()}


def differences(ours: Groups, theirs: Groups) -> list[str]:
    assert {group: set(some) for group, some in ours.items()} == {group: set(some) for group, some in theirs.items()}
    return [
        f"{g}.{name}" for g, some in ours.items() for name, x in some.items() if not torch.equal(x, theirs[g][name])
    ]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_session_trains_and_beta_follows_its_steps(seed: int) -> None:
    session = session_of(seed=seed)
    start = session.learner.optimizer.flat.clone()
    calls = record(session.learner)
    session.iterate(60)
    assert session.updates == 60 - 8 == len(calls)
    # The share done as each iteration begins: 8 of 60, 9 of 60, …
    assert [drawn.beta for drawn in calls] == pytest.approx([0.2 + 0.8 * done / 60 for done in range(8, 60)])
    session.iterate(3)
    assert [drawn.beta for drawn in calls[-3:]] == pytest.approx([1.0] * 3)
    assert not torch.equal(start, session.learner.optimizer.flat)
    assert torch.isfinite(session.learner.optimizer.flat).all()
    assert session.learner.optimizer.skipped.item() == 0
    leaves = ranks(session.learner).levels[0]
    assert len(set(leaves.tolist())) > 30
    assert (leaves > 0).sum().item() == 8 * (20 - 2), "all but the newest two rows can be drawn"
    assert all(drawn.batch.weight.max().item() == 1.0 for drawn in calls)


def test_progress_is_left_alone_without_priorities() -> None:
    view = {"view": "planes"}  # for which no recipe lets the learning rate or the discount follow progress
    session = session_of(prioritized=False, env_options={"width": 5, "height": 5} | view)
    session.iterate(40)
    assert session.progress > 0.5
    assert session.learner.progress.item() == 0.0


@pytest.mark.parametrize("iterations", [5, 15, 40], ids=["not yet learning", "partly filled", "come round"])
def test_a_continued_session_goes_on_as_if_it_had_not_stopped(iterations: int) -> None:
    whole = session_of()
    whole.iterate(iterations)
    groups, counters = saved(whole), whole.counters()
    whole.iterate(60 - iterations)

    part = session_of(seed=2)
    part.iterate(min(iterations, 25))  # what is loaded into has a past of its own
    assert differences(saved(part), groups)
    part.load(groups, counters)
    assert not differences(saved(part), groups)
    part.iterate(60 - iterations)
    assert not differences(saved(part), saved(whole))
    assert part.updates == whole.updates == 52
    assert part.learner.progress.item() == whole.learner.progress.item() > 0.9


def test_what_is_ranked_is_part_of_what_comes_next() -> None:
    """The negative control: with the ranks of another past the same session learns something else."""
    sessions = session_of(), session_of()
    for session in sessions:
        session.iterate(30)
    leaf = ranks(sessions[1].learner).levels[0]
    place = leaf.nonzero().flatten()
    ranks(sessions[1].learner).set(place, (place * 1000 + 1).to(torch.int32))
    for session in sessions:
        session.iterate(3)
    assert "model.online.dense.head.out.bias" in differences(*(saved(session) for session in sessions))


def test_a_session_continued_without_its_memory_fills_it_again() -> None:
    first = session_of()
    first.iterate(30)
    groups = {group: some for group, some in saved(first).items() if group != "replay"}
    session = session_of()
    session.load(groups, first.counters())
    assert ranks(session.learner).total.item() == 0
    session.iterate(8)
    assert session.updates == first.updates, "it learned from an empty memory"
    session.iterate(20)
    assert session.updates == first.updates + 20
    assert torch.isfinite(session.learner.optimizer.flat).all()


def test_sessions_repeat_by_seed_and_differ_by_priorities() -> None:
    ours, again, plain = (session_of(prioritized=wanted) for wanted in (True, True, False))
    for session in (ours, again, plain):
        session.iterate(25)
    assert not differences(saved(ours), saved(again))
    assert not torch.equal(ours.learner.optimizer.flat, plain.learner.optimizer.flat)


def test_an_algorithm_without_a_memory_has_no_priorities() -> None:
    with pytest.raises(UserError, match=r"^ppo has no prioritized; drop --prioritized or choose another --algo\.$"):
        resolve(Settings(env="snake", algo="ppo", prioritized=True, device="cpu"))


def test_a_run_is_not_continued_with_other_priorities() -> None:
    plans = [
        resolve(Settings(env="snake", algo="dqn", prioritized=wanted, device="cpu")) for wanted in (True, False, None)
    ]
    assert [plan.algo_config.prioritized for plan in plans] == [True, False, False]
    assert plans[0].identity_hash != plans[1].identity_hash == plans[2].identity_hash
