"""The Collector contract, sentence by sentence, over every collector there is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from redline.collect.actor_collector import ActorCollector
from redline.collect.collector import Collector
from redline.collect.device_collector import DeviceCollector
from redline.collect.sync_collector import SyncCollector
from redline.core.records import Transition, leaves, map_record
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

NUM_ENVS, NUMBER = 4, 7
GYM = "gym:CartPole-v1"
KINDS: dict[str, tuple[type[Collector], str, dict[str, Any]]] = {
    "device": (DeviceCollector, "snake", {"backplay": 0.0}),
    "device with backplay": (DeviceCollector, "snake", {"backplay": 0.5}),
    "sync": (SyncCollector, GYM, {"actors": 0}),
    "actors": (ActorCollector, GYM, {"actors": 1, "inference": "actors"}),
    "central": (ActorCollector, GYM, {"actors": 1, "inference": "central"}),
}


def make_session(kind: str) -> Session:
    _, env, options = KINDS[kind]
    algo_options = {"hidden": (8,), "rollout_steps": 8, "batch_size": 32}
    settings = Settings(
        env, "ppo", num_envs=NUM_ENVS, device="cpu", compile=False, steps=10_000, algo_options=algo_options, **options
    )
    return Session(resolve(settings), pytest.fail)


class Recorded:
    """A collector that has started, and the transitions its learner was given."""

    def __init__(self, kind: str) -> None:
        self.session = make_session(kind)
        self.transitions: list[Transition] = []
        self.made = self.session.collector
        ingest = self.session.learner.ingest

        def record(transition: Transition) -> None:
            self.transitions.append(map_record(torch.clone, transition))
            ingest(transition)

        self.session.learner.ingest = record  # type: ignore[method-assign]
        self.made.restart_episodes(0, NUMBER)
        self.collector = self.made.start(0.25)
        for _ in range(8):
            self.collector.step()


@pytest.fixture(scope="module", params=KINDS)
def recorded(request: pytest.FixtureRequest) -> Iterator[Recorded]:
    made = Recorded(request.param)
    made.kind = request.param  # type: ignore[attr-defined]
    yield made
    made.collector.close()
    made.collector.close()  # a second call does nothing
    made.session.close()


def concrete(kind: type[Collector]) -> set[type[Collector]]:
    own = set() if inspect.isabstract(kind) else {kind}
    return own.union(*(concrete(sub) for sub in kind.__subclasses__() if sub.__module__.startswith("redline.")))


def test_every_collector_is_tested() -> None:
    assert concrete(Collector) == {kind for kind, _, _ in KINDS.values()}


def test_the_factory_chooses_by_environment_and_actors(recorded: Recorded) -> None:
    assert type(recorded.made) is KINDS[recorded.kind][0]  # type: ignore[attr-defined]


def test_start_returns_the_collector_to_use_and_starts_once(recorded: Recorded) -> None:
    assert recorded.collector is recorded.made
    assert recorded.collector.start(0.5) is recorded.collector


def test_a_step_is_one_transition_of_all_environments(recorded: Recorded) -> None:
    assert len(recorded.transitions) == 8
    for transition in recorded.transitions:
        step = transition.step
        assert (transition.action.shape, transition.action.dtype) == ((NUM_ENVS,), torch.int64)
        assert (step.reward.shape, step.reward.dtype) == ((NUM_ENVS,), torch.float32)
        for flag in (step.terminated, step.truncated):
            assert (flag.shape, flag.dtype) == ((NUM_ENVS,), torch.bool)
        assert not (step.terminated & step.truncated).any()
        states, finals = leaves(transition.state), leaves(step.final_state)
        assert {k: (x.shape, x.dtype) for k, x in states.items()} == {k: (x.shape, x.dtype) for k, x in finals.items()}
        assert all(len(x) == NUM_ENVS for x in states.values())


def test_the_state_after_a_step_is_the_next_one_unless_the_episode_ended(recorded: Recorded) -> None:
    for before, after in zip(recorded.transitions, recorded.transitions[1:], strict=False):
        goes_on = ~(before.step.terminated | before.step.truncated)
        for name, x in leaves(after.state).items():
            assert torch.equal(x[goes_on], leaves(before.step.final_state)[name][goes_on]), name


def test_the_number_chooses_the_episodes(recorded: Recorded) -> None:
    """The same number begins the same episodes, whatever process plays them; another number others."""
    kind = "sync" if KINDS[recorded.kind][1] == GYM else "device"  # type: ignore[attr-defined]
    first = leaves(recorded.transitions[0].state)
    equal = []
    for number in (NUMBER, NUMBER + 1):
        session = make_session(kind)
        session.collector.restart_episodes(0, number)
        states: list[Any] = []
        session.learner.ingest = lambda transition, into=states: into.append(map_record(torch.clone, transition.state))  # type: ignore[method-assign,misc]
        session.collector.start(0.0).step()
        session.close()
        equal.append(all(torch.equal(x, first[name]) for name, x in leaves(states[0]).items()))
    assert equal == [True, False]


def test_tensors_are_the_buffers_and_tell_whether_episodes_are_restored(recorded: Recorded) -> None:
    tensors, again = recorded.collector.tensors(), recorded.collector.tensors()
    assert {k: x.data_ptr() for k, x in tensors.items()} == {k: x.data_ptr() for k, x in again.items()}
    assert bool(tensors) == recorded.collector.restores_episodes
    assert set(recorded.collector.adapt(tensors)) == set(tensors)


def test_a_checkpoint_with_or_without_snapshots_fits() -> None:
    plain, backplay = (make_session(kind).collector for kind in ("device", "device with backplay"))
    for ours, theirs in ((plain, backplay), (backplay, plain)):
        assert set(ours.adapt(theirs.tensors())) == set(ours.tensors())


def test_updates_and_metrics(recorded: Recorded) -> None:
    recorded.collector.on_update(0.5)
    metrics = recorded.collector.metrics()
    assert all(isinstance(value, float) for value in metrics.values())
    assert metrics.keys() == recorded.collector.metrics().keys()


def test_reading_episode_statistics_starts_them_over(recorded: Recorded) -> None:
    for _ in range(60):
        recorded.collector.step()
    stats = recorded.collector.episode_stats.read()
    assert set(stats) == {"episodes", "score", "score_max", "length", "reward", "win_rate", "truncated"}
    assert stats["episodes"] > 0
    assert recorded.collector.episode_stats.read() == {"episodes": 0}
