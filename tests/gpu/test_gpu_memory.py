"""Out of memory on a GPU, for real: torch may take only a part of the memory. Run with `make gpu-test`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import redline
from redline.engine.out_of_memory import free_caches
from redline.run.memory import estimate, probe_plan
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {
        "num_envs": 2048,
        "batch_size": 32768,
        "algo_options": {"rollout_steps": 16, "epochs": 1, "net": "cnn", "channels": (64, 64)},
    },
    "dqn": {
        "num_envs": 1024,
        "batch_size": 32768,
        "replay_capacity": 65536,
        "algo_options": {"net": "cnn", "channels": (64, 64), "learning_starts": 0, "n_step": 1},
    },
}


def plan_of(algo: str, folder: Path, graph: bool = False, compile: bool = False) -> Plan:
    settings = {"device": "cuda", "precision": "fp32", "run_dir": str(folder), "graph": graph, "compile": compile}
    return resolve(Settings("snake", algo, **settings, **OPTIONS[algo]))


def limit_memory(plan: Plan, parts: int) -> None:
    """Leave as much memory as the plan needs with batches in so many parts, and a tenth more."""
    allowed = 1.1 * sum(estimate(plan, probe_plan(plan), parts)[plan.device].values())
    free_caches()
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)


@pytest.fixture(autouse=True)
def all_memory() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    free_caches()


class Recorded:
    """A session that keeps the gradient of each of its steps, and its messages."""

    def __init__(self, plan: Plan) -> None:
        self.messages: list[str] = []
        self.gradients: list[Tensor] = []
        self.session = Session(plan, self.messages.append)
        learner: Any = self.session.learner
        apply = learner._apply

        def recording(gradients: tuple[Tensor, ...]) -> None:
            self.gradients.append(torch.cat([g.flatten() for g in gradients]).cpu())
            apply(gradients)

        learner._apply = recording

    @property
    def parts(self) -> int:
        return self.session.learner.micro_batches

    def close(self) -> None:
        self.session.close()
        del self.session
        free_caches()


# Relative difference of a gradient in parts, in fp32. PPO's samples have advantages of both signs, which cancel: the same
# rounding of each product is a larger part of what remains.
ROUNDING = {"dqn": 2e-5, "ppo": 5e-6}  # squared errors of both signs cancel


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.fault("E1")
@pytest.mark.parametrize("algo", OPTIONS)
def test_a_batch_four_times_what_fits_has_the_same_gradient(algo: str, tmp_path: Path) -> None:
    plan = plan_of(algo, tmp_path)
    whole = Recorded(plan)
    whole.session.iterate(4)
    assert whole.parts == 1
    whole.close()
    limit_memory(plan, parts=4)
    split = Recorded(plan)
    split.session.iterate(4)
    assert split.parts >= 4
    assert len(split.messages) == 1
    assert "ran out of memory" in split.messages[0]
    assert relative_difference(split.gradients[0], whole.gradients[0]) <= ROUNDING[algo]
    split.close()


@pytest.mark.fault("E2")
@pytest.mark.parametrize("algo", OPTIONS)
def test_running_out_in_mid_training_changes_nothing_but_the_parts(algo: str, tmp_path: Path) -> None:
    plan = plan_of(algo, tmp_path)
    straight = Recorded(plan)
    straight.session.iterate(8)
    expected = straight.gradients
    straight.close()
    broken = Recorded(plan)
    broken.session.iterate(5)
    before = len(broken.gradients)
    limit_memory(plan, parts=4)  # measures a learner of its own, then frees what is cached
    broken.session.iterate(3)
    assert broken.parts >= 2
    assert len(broken.messages) == 1
    assert len(broken.gradients) == len(expected)
    assert relative_difference(broken.gradients[before], expected[before]) <= 1e-3  # weights already differ by rounding
    broken.close()


@pytest.mark.parametrize("compile", [False, True])
def test_a_captured_iteration_is_captured_again_in_parts(compile: bool, tmp_path: Path) -> None:
    plan = plan_of("ppo", tmp_path, graph=True, compile=compile)
    limit_memory(plan, parts=4)
    messages: list[str] = []
    session = Session(plan, messages.append)
    session.iterate(12)
    torch.cuda.synchronize()
    assert session.learner.micro_batches >= 2
    assert session.updates == 12 * session.learner.updates_per_iteration
    assert not [message for message in messages if "without" in message]  # neither the compiler nor the graph gave up
    torch.cuda.set_per_process_memory_fraction(1.0)  # the check needs memory, too
    assert all(bool(torch.isfinite(x).all()) for x in session.learner.state_dict()["model"].values())
    session.close()


def test_training_goes_on_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = plan_of("ppo", tmp_path / "plan", graph=True)
    limit_memory(plan, parts=4)
    options = OPTIONS["ppo"] | {"device": "cuda", "precision": "fp32", "compile": False, "eval_episodes": 0}
    run = redline.train("snake", algo="ppo", run_dir=str(tmp_path / "run"), steps=12 * 2048 * 16, **options)
    assert run.result["stopped_by"] == "steps"
    assert run.result["micro_batches"] >= 2
    assert run.result["peak_memory_bytes"] > 2**20
    assert "ran out of memory: gradients of a batch" in " ".join(capfd.readouterr().err.split())
