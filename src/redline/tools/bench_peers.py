"""Peers for `redline bench collect`: Gymnasium's AsyncVectorEnv, SB3's PPO over SubprocVecEnv, a multiprocessing queue."""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch

from redline.collect.env_supervisor import EnvSupervisor
from redline.collect.row_format import row_fields
from redline.collect.shared_memory import Memory, SharedLayout
from redline.collect.shared_ring import SharedRing, SharedRingSpec
from redline.collect.sync_collector import SyncCollector
from redline.core.records import Spec
from redline.envs import Rules
from redline.run.plan import Plan
from redline.run.session import Session

TRANSPORT_PROCESSES = 2
_TRANSPORT_ENVS, _RING_ROWS = 8, 256


def train_over_gymnasium(
    session: Session, measure: Callable[[Session, float], dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """Return the result of `measure` for the session's learner over Gymnasium's AsyncVectorEnv; close the session."""
    session.collector.close()
    plan = session.plan
    try:
        envs: Any = _GymnasiumEnvs(plan.rules, plan.num_envs)
        supervisor = EnvSupervisor(envs, session.notify)
        session.collector = SyncCollector(plan.rules, session.learner, supervisor, plan.device, session._fast)
        return measure(session, seconds)
    finally:
        session.close()


class _GymnasiumEnvs:
    """AsyncVectorEnv with the arrays of GymEnvs, and same-step autoreset for comparability. Episodes are not counted."""

    def __init__(self, rules: Rules, num_envs: int) -> None:
        mode = gymnasium.vector.AutoresetMode.SAME_STEP
        make = functools.partial(rules.game.make, rules.config)  # type: ignore[attr-defined]
        self.vector = gymnasium.vector.AsyncVectorEnv([make] * num_envs, shared_memory=True, autoreset_mode=mode)
        self.envs, self.config = [None] * num_envs, rules.config
        self.discarded: list[int] = []
        self.masked = 0
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


def sb3_frames(plan: Plan, seconds: float) -> float:
    """Return frames per second of SB3's PPO with equally many environments, steps and epochs, one process per environment."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # old Gym, if installed, prints a banner when imported
            from stable_baselines3 import PPO
            from stable_baselines3.common.callbacks import BaseCallback
            from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack
    except ImportError as error:
        raise ImportError("pip install 'redline[sb3]'") from error

    rules, config = plan.rules, plan.algo_config
    make = functools.partial(rules.game.make, rules.config)  # type: ignore[attr-defined]
    envs: Any = SubprocVecEnv([make] * plan.num_envs, start_method="fork")
    image = len(rules.game.spec(rules.config).obs_shape) == 3
    if rules.config.stack > 1:
        envs = VecFrameStack(envs, rules.config.stack, channels_order="first" if image else "last")
    model = PPO(
        "CnnPolicy" if image else "MlpPolicy",
        envs,
        n_steps=config.rollout_steps,
        batch_size=config.batch_size,
        n_epochs=config.epochs,
        device=str(plan.device),
        policy_kwargs={} if image else {"net_arch": list(config.hidden)},
    )

    class Clock(BaseCallback):
        """Time whole rollouts with their updates, after one of warm-up."""

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
    envs.close()
    return float(clock.rate * rules.config.frame_skip)


# ------------------------------------------------------------------------------------------------------- transport


def transport(seconds: float) -> dict[str, float]:
    """Return transitions per second received from other processes, through rings and a queue, with CartPole's shapes."""
    spec = Spec((4,), torch.float32, (1.0,) * 4, 1.0, 2, "return")
    ring_spec = SharedRingSpec(SharedLayout(row_fields(spec, _TRANSPORT_ENVS, ("value", "logp"))), _RING_ROWS)
    size = ring_spec.layout.bytes
    memory = Memory.create(TRANSPORT_PROCESSES * size)
    rings = [SharedRing(memory, number * size, ring_spec) for number in range(TRANSPORT_PROCESSES)]
    rows = {k: np.zeros((_RING_ROWS, *shape), dtype) for k, (shape, dtype) in ring_spec.row.fields.items()}
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_rows, args=(ring,), daemon=True) for ring in rings]

    def take() -> int:
        return sum(ring.take(_RING_ROWS, rows) for ring in rings) * _TRANSPORT_ENVS

    ring_rate = _transfer_rate(writers, take, seconds)
    queue: Any = context.Queue(_RING_ROWS * _TRANSPORT_ENVS)
    putters = [context.Process(target=_put_transitions, args=(queue,), daemon=True) for _ in range(TRANSPORT_PROCESSES)]

    def get() -> int:
        queue.get()
        return 1

    queue_rate = _transfer_rate(putters, get, seconds)
    memory.close()
    return {"rings": ring_rate, "queue": queue_rate}


def _transfer_rate(processes: list[Any], receive: Callable[[], int], seconds: float) -> float:
    """Return transitions per second that `receive` gets from `processes`, which this function starts and kills."""
    for process in processes:
        process.start()
    while not receive():  # wait until they send
        pass
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        count += receive()
    rate = count / (time.perf_counter() - began)
    for process in processes:
        process.kill()
        process.join()
    return rate


def _write_rows(ring: SharedRing) -> None:
    """Write rows like an actor, until killed."""
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
    """Put one transition at a time, as is common, until killed."""
    obs, final_obs = np.ones(4, np.float32), np.ones(4, np.float32)
    while True:
        queue.put((obs, 1, final_obs, 1.0, False, False, 0.5, -0.7))
