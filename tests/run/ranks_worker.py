"""One rank of the tests in test_ranks.py, started by torchrun: `ranks_worker.py FOLDER JOB...`.

Every job is a function here; what it returns is written to FOLDER/JOB-RANK.json, tensors to FOLDER/JOB-RANK.pt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline import cli
from redline.algos import networks
from redline.core.errors import UserError
from redline.engine import distributed
from redline.engine.distributed import Ranks
from redline.engine.launch import launched
from redline.run import ranks as rank_share
from redline.run.options import build
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.run.train import train

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
TINY = {"num_envs": 16, "device": "cpu", "compile": False, "threads": 1, "env_options": {"width": 5, "height": 5}}
PLAIN = {"precision": "fp32", "graph": False}  # so that gradients can be recorded and compared, on a GPU as well
DEVICE = os.environ.get("DEVICE", "cpu")
ON_POLICY = {"rollout_steps": 8, "hidden": (16,), "batch_size": 32, "epochs": 2}
# By name: settings of a run whose gradients do not depend on the number of ranks that share it.
LEARNERS: dict[str, dict[str, Any]] = {
    "ppo": {"algo": "ppo", "algo_options": ON_POLICY},
    "ppo-kl-average": {"algo": "ppo", "algo_options": ON_POLICY | {"target_kl": 0.02, "ema_decay": 0.9}},
    "ppo-accumulate": {"algo": "ppo", "accumulate": 2, "algo_options": ON_POLICY},
    "pqn": {"algo": "pqn", "algo_options": ON_POLICY},
    "dqn": {
        "algo": "dqn",
        "algo_options": {
            "batch_size": 32,
            "hidden": (16,),
            "learning_starts": 64,
            "learning_rate_end": None,
            "gamma_end": None,
            "replay_capacity": 1024,
            "updates": 2,
        },
    },
}
ITERATIONS = {"dqn": 24}
# A run that test_ranks.py interrupts in several ways; uninterrupted here.
RUN = TINY | {"algo": "ppo", "algo_options": ON_POLICY, "steps": 2560, "eval_episodes": 0, "seed": 3}


def plan_of(name: str, ranks: Ranks = distributed.SINGLE, device: str = DEVICE) -> Any:
    """Return the plan of a learner's test run."""
    options = {"env": "snake", "seed": 5, **TINY, **PLAIN, "device": device, **LEARNERS[name]}
    plan = resolve(build(Settings, options, ""))
    return dataclasses.replace(plan, ranks=ranks)


def learn(session: Session, iterations: int) -> dict[str, Tensor]:
    """Return the gradients of every step, as they reach the optimizer, and the final weights and statistics."""
    gradients: list[Tensor] = []
    apply = session.learner._apply  # type: ignore[attr-defined]

    def record(step: tuple[Tensor, ...]) -> None:
        gradients.append(torch.cat([g.flatten() for g in step]).clone())
        apply(step)

    session.learner._apply = record  # type: ignore[attr-defined]
    session.iterate(iterations)
    metrics = session.learner.read_metrics(len(gradients))
    return {
        "gradients": torch.stack(gradients),
        **{f"model.{k}": x for k, x in session.tensors()["model"].items()},
        "loss": torch.tensor(metrics["loss"]),
    }


def gradients(ranks: Ranks) -> dict[str, Any]:
    """Train each of LEARNERS for a few iterations."""
    for name in LEARNERS:
        session = Session(plan_of(name, ranks), print)
        torch.save(learn(session, ITERATIONS.get(name, 2)), FOLDER / f"{name}-{ranks.rank}.pt")
    return {}


def exchanges(ranks: Ranks) -> dict[str, Any]:
    """Use every exchange once."""
    rank, results = ranks.rank, {}
    results["gather"] = ranks.gather({"rank": rank, "long": "x" * 100 * rank})
    results["broadcast"] = ranks.broadcast({"from": rank})
    results["lead"] = ranks.lead(lambda: [rank])
    try:
        ranks.lead(lambda: (_ for _ in ()).throw(UserError("It is wrong.")))
    except UserError as error:
        results["led error"] = [str(error), error.exit_code, getattr(error, "reported", False)]
    both = ranks.mean_of([torch.full((2, 3), float(rank)), torch.tensor([rank, 2.0])])
    results["mean_of"] = [x.tolist() for x in both]
    samples = torch.arange(8.0).view(2, 4) + 1000 * rank
    results["var_mean"] = [x.tolist() for x in ranks.var_mean(samples)]
    gathered = {}
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float64):
        gathered[str(dtype)] = [
            x.to(torch.float64).tolist() for x in ranks.gather_tensor(torch.tensor(rank, dtype=dtype))
        ]
    results["gather_tensor"] = gathered
    results["gather_empty"] = len(ranks.gather_tensor(torch.zeros(0, 3)))
    own = torch.arange(4, dtype=torch.int16) if ranks.leads else None
    results["broadcast_tensor"] = ranks.broadcast_tensor(own, (4,), torch.int16).tolist()
    passed = ranks.pass_tensor(own, 1, (4,), torch.int16)
    results["pass_tensor"] = None if passed is None else passed.tolist()
    return results


def bad_gradient(ranks: Ranks) -> dict[str, Any]:
    """Poison the gradients of rank 1 only: no rank must take the step."""
    session = Session(plan_of("ppo", ranks), print)
    learner: Any = session.learner
    inner = learner.gradients

    def poisoned(batch: Tensor) -> Any:
        values, metrics = inner(batch)
        return tuple(g + torch.nan for g in values) if ranks.rank == 1 else values, metrics

    learner.gradients = poisoned
    session.iterate(1)
    return {"skipped": int(learner.optimizer.skipped), "steps": float(learner.optimizer.steps)}


def shares(ranks: Ranks) -> dict[str, Any]:
    """Return the messages of settings that cannot be shared, or differ between ranks."""
    messages = {}
    cases: dict[str, dict[str, Any]] = {
        "envs": {"num_envs": 15},
        "batch": {"num_envs": 6, "algo_options": {"batch_size": 3, "rollout_steps": 8}},
        "auto": {"algo": "dqn", "replay_capacity": "auto"},
        "impossible": {"algo_options": {"gamma": 7}},
        "seed": {"seed": ranks.rank},
        "option": {"algo_options": {"gamma": 0.9 + 0.01 * ranks.rank}},
    }
    for name, options in cases.items():
        try:
            rank_share.decide(build(Settings, {"env": "snake", **TINY, "algo": "ppo", **options}, ""), ranks)
        except UserError as error:
            messages[name] = str(error)
    return messages


def call(*words: str) -> dict[str, Any]:
    """Run a command line; return its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(list(words))
        except SystemExit as end:
            return {"code": end.code, "out": out.getvalue(), "err": err.getvalue()}
    raise AssertionError("main always exits")


SMALL = ("--num-envs", "16", "--no-compile", "--device", "cpu", "--eval-episodes", "4")
SMALL += ("--algo", "ppo", "--ppo.rollout-steps", "8", "--ppo.hidden", "16")


def other_seeds() -> dict[str, Any]:
    """Start ranks with different seeds."""
    return call(
        "train", "snake", *SMALL, "--steps", "256", "--run-dir", str(FOLDER / "s"), "--seed", os.environ["RANK"]
    )


def other_weights() -> dict[str, Any]:
    """Start ranks whose weights differ, as those of another version might."""
    build_actor_critic = networks.build_actor_critic

    def changed(*arguments: Any) -> networks.ActorCritic:
        net = build_actor_critic(*arguments)
        with torch.no_grad():
            next(net.parameters()).add_(float(os.environ["RANK"]))
        return net

    networks.build_actor_critic = changed
    try:
        return call("train", "snake", *SMALL, "--steps", "256", "--run-dir", str(FOLDER / "w"))
    finally:
        networks.build_actor_critic = build_actor_critic


def uninterrupted() -> dict[str, Any]:
    """Train RUN by the command's function; return what rank r knows of the result."""
    run = train(build(Settings, {"env": "snake", **RUN, "run_dir": str(FOLDER / "run")}, ""))
    return {
        name: run.result.get(name) for name in ("env_steps", "episodes", "updates", "samples_trained", "stopped_by")
    }


def continued() -> dict[str, Any]:
    """Train DQN to the end at once, and in two starts with the replay memory of each rank in the checkpoint."""
    options = TINY | LEARNERS["dqn"] | {"eval_episodes": 0, "curriculum": False}  # schedules would follow the budget
    for name, budgets in (("straight", (512,)), ("parts", (256, 512))):
        for steps in budgets:
            train(build(Settings, {"env": "snake", **options, "steps": steps, "run_dir": str(FOLDER / name)}, ""))
    return {}


def command() -> dict[str, Any]:
    """Train by the command line, evaluation included."""
    return call("train", "snake", *SMALL, "--steps", "512", "--run-dir", str(FOLDER / "c"), "--json")


def evaluated() -> dict[str, Any]:
    """Train RUN with evaluations in between."""
    options = RUN | {"eval_every": 640, "eval_episodes": 4, "run_dir": str(FOLDER / "e")}
    run = train(build(Settings, {"env": "snake", **options}, ""))
    return {name: run.result.get(name) for name in ("env_steps", "stopped_by", "score_mean")}


def uneven() -> dict[str, Any]:
    """Train on environments whose episodes last one step on rank 0 and never end on rank 1."""
    sys.path.insert(0, str(Path(__file__).parent))
    name = "gym:ranks_worker:Uneven-v0"
    steps = ("--steps", "256", "--num-envs", "4", "--actors", "0", "--algo", "dqn", "--dqn.learning-starts", "32")
    return call(
        "train", name, *steps, "--device", "cpu", "--eval-episodes", "0", "--run-dir", str(FOLDER / "u"), "--json"
    )


def _register() -> None:
    import gymnasium

    class Uneven(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed, options=options)
            return self.observation_space.low, {}

        def step(self, action: Any) -> Any:
            del action
            ends = os.environ.get("RANK") == "0"
            return self.np_random.random(3, np.float32), 1.0, ends, False, {}

    gymnasium.register("Uneven-v0", Uneven)


_register()
WITH_RANKS = (exchanges, gradients, bad_gradient, shares)
ALONE = (other_seeds, other_weights, uninterrupted, continued, command, evaluated, uneven)


def main() -> None:
    torch.set_num_threads(1)
    launch = launched()
    assert launch
    jobs = sys.argv[2:]
    ranks = distributed.connect(launch, DEVICE, 120)
    for job in WITH_RANKS:
        if job.__name__ in jobs:
            _write(job.__name__, job(ranks))
    ranks.close()
    for alone in ALONE:
        if alone.__name__ in jobs:
            _write(alone.__name__, alone())


def _write(job: str, results: dict[str, Any]) -> None:
    (FOLDER / f"{job}-{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
