"""Compare Redline with Stable-Baselines3 on this machine, in one run: DQN on Snake 10x10.

SB3 plays the plain-Python Snake (the oracle, the fastest single game we have) in 8 environments, with the faster of its
two vector environments, net 256x3, batch 128, a gradient step every 4 vector steps. Redline is measured twice: with the
settings that `redline train snake --algo dqn` chooses here (env-steps/s), and with SB3's network and loss (gradient samples/s).
It uses the number of threads that `redline train` chooses; SB3 is measured with all cores and with one, and the better figure
counts.

    python bench/peers.py [--seconds 20] [--out bench/results/peers.json]

Speeds are in wall-clock time. If other programs keep the cores busy, only CPU time is comparable: bind the script to one core
(taskset -c 0) and read `samples_per_cpu_second`, the gradient samples per CPU second of the process.
"""

from __future__ import annotations

import redline  # noqa: F401  # before torch: decides when torch returns memory to the system

# isort: split
import argparse
import json
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from redline import games, oracles
from redline.run.session import Session
from redline.run.settings import Settings
from redline.run.thread_choice import decide
from redline.tools.bench import describe_machine, rates

GAME = "snake"
SB3_ENVS, SB3_BATCH, SB3_TRAIN_FREQ, SB3_NET = 8, 128, 4, [256, 256, 256]


class PlainSnake(gymnasium.Env[np.ndarray, int]):
    """The plain-Python game as a Gymnasium environment: planes of ages, head and food as float32."""

    def __init__(self) -> None:
        self.config = games.load(GAME).Config()
        shape = (3, self.config.height, self.config.width)
        self.observation_space = gymnasium.spaces.Box(0.0, 10.0, shape, np.float32)
        self.action_space = gymnasium.spaces.Discrete(4)
        self.episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed, options=options)
        self.game = oracles.load(GAME)(self.config, oracles.episode_key(seed or 0, 0, self.episode))
        self.episode += 1
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward, terminated, truncated, _, _ = self.game.step(int(action))
        return self._observe(), reward, terminated, truncated, {}

    def _observe(self) -> np.ndarray:
        # Written for speed instead of using the oracle's nested lists, so as not to slow SB3 down.
        planes = np.zeros(self.observation_space.shape, np.float32)
        body = self.game.body
        rows, columns = zip(*body, strict=True)
        planes[0, rows, columns] = np.arange(len(body), 0, -1) * 0.1
        planes[1][body[0]] = 1
        if self.game.food:
            planes[2][self.game.food] = 1
        return planes


def measure_sb3(vector: type[VecEnv], seconds: float) -> dict[str, float]:
    """Return env-steps/s and gradient samples/s of SB3's DQN once it is learning."""
    env = vector([PlainSnake] * SB3_ENVS)
    model = DQN(
        "MlpPolicy",
        env,
        policy_kwargs={"net_arch": SB3_NET},
        batch_size=SB3_BATCH,
        train_freq=SB3_TRAIN_FREQ,
        buffer_size=50_000,
        learning_starts=1_000,
        device="auto",
    )
    model.learn(2_000)  # warm-up, past learning_starts
    steps, updates = 0, model._n_updates
    started, computed = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        model.learn(2_000, reset_num_timesteps=False)
        steps += 2_000
    spent, computed = time.perf_counter() - started, time.process_time() - computed
    samples = (model._n_updates - updates) * SB3_BATCH
    env.close()
    speeds = {"env_steps_per_second": steps / spent, "samples_per_second": samples / spent}
    # SubprocVecEnv's processes also use CPU time.
    return speeds | ({"samples_per_cpu_second": samples / computed} if vector is DummyVecEnv else {})


def measure_ours(seconds: float, **changes: Any) -> dict[str, float]:
    """Return env-steps/s and gradient samples/s of `redline train` with these settings, once learning and compiled."""
    torch._dynamo.reset()
    plan = decide(Settings(env=GAME, algo="dqn", **changes))
    session = Session(plan, print)
    while not session.updates:
        session.iterate(1)
    samples = plan.algo_config.updates * session.learner.samples_per_update
    per_second, per_cpu_second = (
        rates(lambda: session.iterate(1), seconds, plan.device, 1, clock=clock)[0]
        for clock in (time.perf_counter, time.process_time)
    )
    return {
        "env_steps_per_second": per_second * plan.num_envs,
        "samples_per_second": per_second * samples,
        "samples_per_cpu_second": per_cpu_second * samples,
        "settings": plan.describe(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="measured for each figure")
    parser.add_argument("--out", type=Path, help="write the figures as JSON to this file")
    arguments = parser.parse_args()

    record = describe_machine("auto")
    sb3 = {vector.__name__: measure_sb3(vector, arguments.seconds) for vector in (DummyVecEnv, SubprocVecEnv)}
    ours = measure_ours(arguments.seconds)
    same_net = measure_ours(
        arguments.seconds,
        num_envs=512,
        batch_size=2048,
        n_step=1,
        replay_capacity=50_000,
        env_options={"view": "planes", "sight": 0},
        algo_options={"net": "mlp", "hidden": (256, 256, 256), "double": False, "updates": 4, "learning_starts": 5_000},
    )
    # SB3 again with one thread: small batches may be faster, or the machine less busy.
    torch.set_num_threads(1)
    for vector in (DummyVecEnv, SubprocVecEnv):
        again = measure_sb3(vector, arguments.seconds)
        sb3[vector.__name__] = max(sb3[vector.__name__], again, key=lambda r: r["env_steps_per_second"])
    best = max(sb3.values(), key=lambda r: r["env_steps_per_second"])
    record |= {
        "sb3": sb3,
        "redline_defaults": ours,
        "redline_sb3_net": same_net,
        "env_steps_ratio": ours["env_steps_per_second"] / best["env_steps_per_second"],
        "samples_ratio": same_net["samples_per_second"] / best["samples_per_second"],
        "samples_per_cpu_second_ratio": same_net["samples_per_cpu_second"]
        / sb3["DummyVecEnv"]["samples_per_cpu_second"],
    }
    for name, row in [*sb3.items(), ("Redline, its defaults", ours), ("Redline, net 256x3", same_net)]:
        speeds = f"{row['env_steps_per_second']:>12,.0f} env-steps/s {row['samples_per_second']:>12,.0f} samples/s"
        print(f"{name:<24}{speeds} {row.get('samples_per_cpu_second', 0.0):>12,.0f} per processor second")
    print(f"env-steps/s, Redline's defaults over SB3:            {record['env_steps_ratio']:.1f} times")
    print(f"gradient samples/s, SB3's network, Redline over SB3: {record['samples_ratio']:.1f} times")
    print(f"the same per second of the processor:                {record['samples_per_cpu_second_ratio']:.1f} times")
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
