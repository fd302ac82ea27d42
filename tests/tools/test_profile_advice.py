"""Diagnosis from numbers: each planted cause is named first, and predictions follow from the measurement."""

from __future__ import annotations

from typing import Any

import pytest

from redline.engine.stages import IDLE
from redline.tools.profile_advice import Actors, Measurement, bottleneck, diagnose, group_of

# A healthy step of 10 ms: the networks reach a good part of the ceiling and nothing else takes long.
HEALTHY: dict[str, Any] = {
    "seconds": 10e-3,
    "stages": {"environment": 2e-3, "forward": 3e-3, "backward": 4e-3, "optimizer": 0.5e-3, IDLE: 0.5e-3},
    "batch_size": 1024,
    "cores": 4,
    "flops": 2e9,
    "flops_ceiling": 1e12,
    "synchronisation_seconds": 20e-6,
    "pinned_speedup": 4.0,
}
PLANTED: dict[str, dict[str, Any]] = {
    "slow environment": {"seconds": 50e-3, "stages": HEALTHY["stages"] | {"environment": 42e-3}},
    "host synchronisation": {"synchronisations": 200.0, "device_busy": 5e-3},
    "tiny batch": {"batch_size": 8, "flops": 2e7},
    "pageable copies": {
        "seconds": 30e-3,
        "stages": HEALTHY["stages"] | {"copy": 20e-3},
        "pageable_seconds": 18e-3,
        "synchronisations": 1.0,
    },
    "recompiling shapes": {
        "seconds": 200e-3,
        "stages": HEALTHY["stages"] | {"forward": 193e-3},
        "recompilations": 1.0,
        "compile_seconds": 185e-3,
        "batch_size": 8,
        "flops": 2e7,
    },
    "starved actors": {"actors": Actors(count=4, busy=0.2, learner_wait=0.02)},
}


def test_launches_after_synchronisations_are_charged_to_these() -> None:
    """A loop that reads 200 numbers a step: launching the small operations in between takes longer than the reads."""
    busy = {"seconds": 10e-3, "device_busy": 1e-3, "synchronisation_seconds": 10e-6, "batch_size": 8192, "flops": 1e6}
    stages = {"forward": 9.5e-3, "backward": 0.5e-3}
    measured = Measurement(**HEALTHY | busy | {"stages": stages, "synchronisations": 200.0})
    assert diagnose(measured)[0].cause == "host synchronisation"
    rare = Measurement(**HEALTHY | busy | {"stages": stages, "synchronisations": 1.0})
    assert diagnose(rare)[0].cause == "tiny batch"


def test_a_healthy_loop_gets_no_advice() -> None:
    measured = Measurement(**HEALTHY)
    assert diagnose(measured) == []
    assert bottleneck(measured, []) == "The bottleneck is learning, with 75 % of the time, most of it backward."


@pytest.mark.parametrize("cause", PLANTED)
def test_the_planted_cause_is_named_first(cause: str) -> None:
    measured = Measurement(**HEALTHY | PLANTED[cause])
    advice = diagnose(measured)
    assert advice[0].cause == cause
    assert advice[0].gain > 1.05
    assert bottleneck(measured, advice).startswith("The bottleneck is ")


def test_every_planted_cause_needs_its_plant() -> None:
    """Without the planted numbers none of the causes is named: the tests above can fail."""
    assert not {advice.cause for advice in diagnose(Measurement(**HEALTHY))} & PLANTED.keys()


def test_predictions() -> None:
    slow = diagnose(Measurement(**HEALTHY | PLANTED["slow environment"]))[0]
    assert slow.gain == pytest.approx(50 / (8 + 42 / 4))
    shapes = diagnose(Measurement(**HEALTHY | PLANTED["recompiling shapes"]))[0]
    assert shapes.gain == pytest.approx(200 / 15)
    pinned = diagnose(Measurement(**HEALTHY | PLANTED["pageable copies"]))[0]
    assert pinned.gain == pytest.approx(30 / (30 - 20 * 0.75))


def test_tensor_environments_need_no_processes() -> None:
    planted = HEALTHY | PLANTED["slow environment"] | {"env_workers": 0}
    assert diagnose(Measurement(**planted)) == []


def test_waiting_actors_and_learners() -> None:
    few = diagnose(Measurement(**HEALTHY | {"actors": Actors(2, busy=0.95, learner_wait=0.6)}))
    assert (few[0].cause, few[0].options) == ("too few actors", {"actors": 4})
    central = diagnose(Measurement(**HEALTHY | {"actors": Actors(2, busy=0.3, learner_wait=0.6)}))
    assert (central[0].cause, central[0].options) == ("starved actors", {"inference": "actors"})
    assert diagnose(Measurement(**HEALTHY | {"actors": Actors(4, busy=0.9, learner_wait=0.1)})) == []
    full = diagnose(Measurement(**HEALTHY | {"actors": Actors(4, busy=0.95, learner_wait=0.6)}))
    assert not full, "all cores play already"


@pytest.mark.parametrize(
    ("stage", "group"),
    [
        ("environment step", "environment"),
        ("env.step", "environment"),
        ("actors' wait", "actors"),
        ("host-device copies", "copies"),
        ("policy loss", "learner"),
        ("act", "inference"),
        ("replay write", "replay"),
        ("target network", "learner"),
        ("lunch", "other"),
        (IDLE, "idle"),
    ],
)
def test_groups(stage: str, group: str) -> None:
    assert group_of(stage) == group
