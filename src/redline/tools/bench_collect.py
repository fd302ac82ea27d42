"""How much of the environments' own speed is left in training: `redline bench collect`.

First the environments alone, a process a core and nothing else; then training with actor processes, its policy asked in them
and centrally, and in step; then the same learner over Gymnasium's AsyncVectorEnv, and SB3's PPO over its SubprocVecEnv with the
same numbers of environments, steps and epochs. Last what carries transitions: rings beside a queue of multiprocessing.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import gymnasium
import numpy as np
import torch

from redline.collect.actor_collector import ActorCollector
from redline.collect.row_format import row_fields
from redline.collect.shared_memory import Memory, SharedLayout
from redline.collect.shared_ring import SharedRing, SharedRingSpec
from redline.collect.sync_collector import SyncCollector
from redline.core.errors import UserError
from redline.core.records import Spec
from redline.envs import Rules, load_game, make_rules
from redline.envs.gym_envs import GymEnvs
from redline.run.plan import Plan
from redline.run.progress import quantity
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools.bench_options import BenchRequest

_FAST = "gym:CartPole-v1"
_START = 12.0  # seconds after which workers begin, all at once
_LANES, _RING_ROWS, _TRANSPORTERS = 8, 256, 2  # of what carries transitions


def bench_collect(wanted: BenchRequest, out: TextIO) -> dict[str, Any]:
    """Frames a second: what the environments could play, and what they play in training."""
    env = wanted.env if load_game(wanted.env).ON_CPU else _FAST
    algo = "ppo" if wanted.algo == "dqn" else wanted.algo  # SB3's is beside it
    games, seconds, actors = wanted.games, wanted.seconds, wanted.actors
    settings = Settings(
        env=env,
        algo=algo,
        num_envs=games[0] if len(games) == 1 else None,
        device=wanted.device,
        precision=wanted.precision,
        compile=wanted.compile,
        backplay=0.0,  # whole games, as the others play
        env_options=dict(wanted.env_options),
        algo_options=dict(wanted.algo_options),
    )
    cores = resolve(settings).hardware.cores
    own = max(1, cores - 1) if actors is None else actors
    settings = Settings(**(vars(settings) | {"actors": own}))
    plan = resolve(settings)
    skip, num_envs = plan.rules.config.frame_skip, plan.num_envs
    print(
        f"{env}: frames/s, {num_envs} environments, {own} of {cores} cores play, {skip} frames a step, {algo} on {plan.device}",
        file=out,
    )
    record: dict[str, Any] = {
        "env": env,
        "algo": algo,
        "envs": num_envs,
        "actors": own,
        "frame_skip": skip,
        "seconds": seconds,
    }

    def show(name: str, what: str, measure: Callable[[], Any]) -> None:
        print(f"  {what:<58}", end="", file=out, flush=True)
        try:
            record[name] = measure()
        except ImportError as error:
            record[name] = None
            print(f"{'-':>10}  ({error})", file=out, flush=True)
            return
        rate = record[name]["frames"] if isinstance(record[name], dict) else record[name]
        ceiling = record["bare"]["of_actors"] if isinstance(record.get("bare"), dict) else None
        fraction = f"  {100 * rate / ceiling:5.1f} % of the ceiling" if ceiling and name != "bare" else ""
        print(f"{quantity(rate):>10}{fraction}", file=out, flush=True)

    def bare() -> dict[str, float]:
        return {
            "frames": alone(plan, cores, seconds, treated=False),
            "of_actors": alone(plan, own, seconds, treated=False),
        }

    show("bare", f"environments alone, {cores} processes and nothing else", bare)
    print(
        f"  {'the same, as many processes as actors: the ceiling':<58}{quantity(record['bare']['of_actors']):>10}",
        file=out,
    )
    show("treated", "environments as they are seen, as many processes", lambda: alone(plan, own, seconds, treated=True))
    for processes in dict.fromkeys((own, cores)):
        for inference in ("central", "actors"):
            where = "centrally" if inference == "central" else "in them"
            asked = Settings(**(vars(settings) | {"inference": inference, "actors": processes}))
            told = f"training, {processes} actor{'s' * (processes > 1)}, actions chosen {where}"
            show(f"{inference}_{processes}", told, functools.partial(training, asked, seconds))
    show("in_step", "training in step, all in one process", functools.partial(in_step, settings, seconds))
    show(
        "gymnasium",
        "the same learner over Gymnasium's AsyncVectorEnv",
        functools.partial(gymnasiums, settings, seconds),
    )
    if algo == "ppo":
        show("sb3", "SB3's PPO over SubprocVecEnv", functools.partial(sb3s, plan, seconds))
    record["transport"] = transport(min(seconds, 5.0))
    rings, queue = record["transport"]["rings"], record["transport"]["queue"]
    print(
        f"  transitions/s from {_TRANSPORTERS} processes: rings {quantity(rings)}, queue {quantity(queue)} ",
        end="",
        file=out,
    )
    print(f"({rings / queue:.0f} times)", file=out, flush=True)
    return record


# ----------------------------------------------------------------------------------------------- environments alone


def alone(plan: Plan, processes: int, seconds: float, treated: bool) -> float:
    """Frames a second of so many processes with the run's environments and random actions; `treated`: as an agent sees them."""
    num_envs = -(-plan.num_envs // max(plan.actors, 1))
    job = {"env": plan.settings.env, "options": vars(plan.rules.config), "time_limit": plan.rules.time_limit}
    job |= {"num_envs": num_envs, "treated": treated, "seconds": seconds, "begin": time.time() + _START}
    words = [sys.executable, "-m", __name__]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    started = []
    for number in range(processes):
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdin
        process.stdin.write(json.dumps(job | {"seed": number}))
        process.stdin.close()
        started.append(process)
    rates = []
    for process in started:
        assert process.stdout
        said = process.stdout.read().split()
        if process.wait():
            raise UserError(f"{plan.settings.env} cannot be played alone; what it said stands above.")
        rates.append(float(said[-1]))
    return sum(rates)


def _play_alone(job: dict[str, Any]) -> float:
    torch.set_num_threads(1)
    rules = make_rules(job["env"], job["options"], job["time_limit"])
    skip = rules.config.frame_skip
    rng = np.random.default_rng(job["seed"])
    if job["treated"]:
        envs = GymEnvs(rules.game, rules.config, job["num_envs"], rules.time_limit)
        envs.reset(job["seed"])
        choices = rules.game.spec(rules.config).num_actions
        step, frames = (lambda: envs.step(rng.integers(choices, size=job["num_envs"]))), skip * job["num_envs"]
    else:
        bare = [rules.game.open(rules.config) for _ in range(job["num_envs"])]  # type: ignore[attr-defined]
        for env in bare:
            env.reset(seed=job["seed"])
        held = [0] * len(bare)

        def step() -> None:
            for env_index, env in enumerate(bare):
                held[env_index] = int(env.action_space.sample())
                for _ in range(skip):
                    _, _, terminated, truncated, _ = env.step(held[env_index])
                    if terminated or truncated:
                        env.reset()

        frames = skip * job["num_envs"]
    step()
    if time.time() > job["begin"]:
        print(f"late by {time.time() - job['begin']:.1f} s", file=sys.stderr)
    time.sleep(max(0.0, job["begin"] - time.time()))
    began, rows, seconds = time.perf_counter(), 0, float(job["seconds"])
    while time.perf_counter() - began < seconds:
        step()
        rows += 1
    return float(rows * frames / (time.perf_counter() - began))


# -------------------------------------------------------------------------------------------------------- training


def training(settings: Settings, seconds: float) -> dict[str, float]:
    """Frames a second in training, and how collecting went."""
    session = Session(resolve(settings), _complain)
    try:
        return _measured(session, seconds)
    finally:
        session.close()


def _measured(session: Session, seconds: float) -> dict[str, float]:
    """Over whole iterations, after two. Of actors what they played counts: the learner takes it in large pieces."""

    def played() -> int:
        collector = session.collector
        if isinstance(collector, ActorCollector):
            return collector.env_steps_played
        return session.env_steps

    session.iterate(2)
    session.read_metrics(0)
    began, before = time.perf_counter(), played()
    while (spent := time.perf_counter() - began) < seconds:
        session.iterate(1)
    found = {"frames": (played() - before) * session.plan.rules.config.frame_skip / spent}
    return found | session.read_metrics(0)


def in_step(settings: Settings, seconds: float) -> dict[str, float]:
    """Without actors."""
    return training(Settings(**(vars(settings) | {"actors": 0})), seconds)


def gymnasiums(settings: Settings, seconds: float) -> dict[str, float]:
    """The same learner in step with environments in the processes of Gymnasium's vector environment."""
    session = Session(resolve(Settings(**(vars(settings) | {"actors": 0}))), _complain)
    session.collector.close()
    plan = session.plan
    try:
        envs: Any = _GymnasiumEnvs(plan.rules, plan.num_envs)
        session.collector = SyncCollector(plan.rules, session.learner, envs, plan.device, session._fast)
        return _measured(session, seconds)
    finally:
        session.close()


class _GymnasiumEnvs:
    """AsyncVectorEnv as HostEnvs is read: same-step autoreset, so that it is comparable."""

    def __init__(self, rules: Rules, num_envs: int) -> None:
        mode = gymnasium.vector.AutoresetMode.SAME_STEP
        make = functools.partial(rules.game.make, rules.config)  # type: ignore[attr-defined]
        self.vector = gymnasium.vector.AsyncVectorEnv([make] * num_envs, shared_memory=True, autoreset_mode=mode)
        self.envs = [None] * num_envs
        self.obs, _ = self.vector.reset(seed=0)
        self.final_obs = self.obs.copy()
        none = np.zeros(num_envs)
        self.reward = none.astype(np.float32)
        self.terminated = self.truncated = self.episode_over = self.lost = self.won = none.astype(bool)
        self.score = self.length = self.episode_return = none

    def step(self, actions: np.ndarray[Any, Any]) -> None:
        self.obs, reward, self.terminated, self.truncated, info = self.vector.step(actions)
        self.reward = reward.astype(np.float32)
        self.final_obs[:] = self.obs
        for env_index in np.flatnonzero(info.get("_final_obs", ())):
            self.final_obs[env_index] = info["final_obs"][env_index]

    def close(self) -> None:
        self.vector.close()


def sb3s(plan: Plan, seconds: float) -> float:
    """SB3's PPO with as many environments, steps and epochs; a process for each environment."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # old Gym, where it is installed, greets whoever imports it
            from stable_baselines3 import PPO
            from stable_baselines3.common.callbacks import BaseCallback
            from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack
    except ImportError as error:
        raise ImportError("pip install 'redline[sb3]'") from error

    rules, config = plan.rules, plan.algo_config
    make = functools.partial(rules.game.make, rules.config)  # type: ignore[attr-defined]
    vector: Any = SubprocVecEnv([make] * plan.num_envs, start_method="fork")
    image = len(rules.game.spec(rules.config).obs_shape) == 3
    if rules.config.stack > 1:
        vector = VecFrameStack(vector, rules.config.stack, channels_order="first" if image else "last")
    model = PPO(
        "CnnPolicy" if image else "MlpPolicy",
        vector,
        n_steps=config.rollout_steps,
        batch_size=config.batch_size,
        n_epochs=config.epochs,
        device=str(plan.device),
        policy_kwargs={} if image else {"net_arch": list(config.hidden)},
    )

    class Clock(BaseCallback):
        """Times whole rollouts with their updates, after one."""

        began, steps = 0.0, 0

        def _on_rollout_start(self) -> None:
            now = time.perf_counter()
            if self.num_timesteps == config.rollout_steps * plan.num_envs:
                self.began, self.steps = now, self.num_timesteps
            elif self.began:
                self.rate = (self.num_timesteps - self.steps) / (now - self.began)
                self.done = now - self.began >= seconds

        def _on_step(self) -> bool:
            return not getattr(self, "done", False)

    clock = Clock()
    model.learn(10**9, callback=clock)
    vector.close()
    return float(clock.rate * rules.config.frame_skip)


# ------------------------------------------------------------------------------------------------------- transport


def transport(seconds: float) -> dict[str, float]:
    """Transitions a second of CartPole's shape from two processes to this one, through rings and through a queue."""
    spec = Spec((4,), torch.float32, (1.0,) * 4, 1.0, 2, "return")
    plan = SharedRingSpec(SharedLayout(row_fields(spec, _LANES, ("value", "logp"))), _RING_ROWS)
    size = plan.layout.bytes
    memory = Memory.create(_TRANSPORTERS * size)
    rings = [SharedRing(memory, number * size, plan) for number in range(_TRANSPORTERS)]
    into = {k: np.zeros((_RING_ROWS, *shape), dtype) for k, (shape, dtype) in plan.row.fields.items()}
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_rows, args=(ring,), daemon=True) for ring in rings]

    def take() -> int:
        return sum(ring.take(_RING_ROWS, into) for ring in rings) * _LANES

    carried = _carried(writers, take, seconds)
    queue: Any = context.Queue(_RING_ROWS * _LANES)
    putters = [context.Process(target=_put_transitions, args=(queue,), daemon=True) for _ in range(_TRANSPORTERS)]

    def get() -> int:
        queue.get()
        return 1

    queued = _carried(putters, get, seconds)
    memory.close()
    return {"rings": carried, "queue": queued}


def _carried(processes: list[Any], take: Callable[[], int], seconds: float) -> float:
    for process in processes:
        process.start()
    while not take():  # until they have begun
        pass
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        count += take()
    rate = count / (time.perf_counter() - began)
    for process in processes:
        process.kill()
        process.join()
    return rate


def _write_rows(ring: SharedRing) -> None:
    """Rows of CartPole as an actor writes them, for ever."""
    values = {k: np.ones(shape, dtype) for k, (shape, dtype) in ring.spec.row.fields.items()}
    while True:
        row = ring.open()
        if row is None:
            time.sleep(0)
            continue
        for name, value in values.items():
            row[name][...] = value
        ring.commit()


def _put_transitions(queue: Any) -> None:
    """The same, a transition at a time, as is usual."""
    obs, final = np.ones(4, np.float32), np.ones(4, np.float32)
    while True:
        queue.put((obs, 1, final, 1.0, False, False, 0.5, -0.7))


def _complain(text: str) -> None:
    print(f"\n{text}", file=sys.stderr)


if __name__ == "__main__":
    try:
        print(_play_alone(json.loads(sys.stdin.read())))
    except UserError as error:
        sys.exit(str(error))
