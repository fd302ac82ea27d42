"""Compare Redline's default command with Stable-Baselines3 and rl-zoo's settings, using equal CPU seconds.

    python bench/gym_envs.py --out FILE [--envs Taxi-v4,...] [--seeds 0,1,2] [--sb3-seeds 0]

Each `redline train gym:ID` gets the steps of ENVS, far fewer than two cores play in three minutes. The CPU seconds of its
process, including imports and start, are the budget of SB3's PPO and DQN: wall-clock means little on a busy machine. Both use
one thread and step their environments in the same process. SB3 uses rl-zoo's settings for this environment if there are any,
else its own defaults; schedules follow the CPU seconds. Scores are means of 100 greedy episodes. Results are added to the file,
so a measurement can be made in parts. MiniGrid, Box2D and SB3 must be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# By id: steps of Redline's run, and the score at which the environment counts as solved.
ENVS = {
    "CartPole-v1": (50_000, 475.0),
    "Acrobot-v1": (80_000, -100.0),
    "Taxi-v4": (50_000, 7.0),
    "FrozenLake-v1": (50_000, 0.70),
    "minigrid:MiniGrid-Empty-5x5-v0": (25_000, 0.9),
    "minigrid:MiniGrid-DoorKey-5x5-v0": (100_000, 0.9),
    "MountainCar-v0": (100_000, -110.0),
    "LunarLander-v3": (300_000, 200.0),
}
EPISODES = 100
_MINIGRID = {"n_steps": 128, "batch_size": 64, "n_epochs": 10, "learning_rate": 2.5e-4}
# rl-baselines3-zoo, hyperparams/ppo.yml and dqn.yml; `lin` marks a learning rate that falls linearly to 0.
ZOO: dict[str, dict[str, dict[str, Any]]] = {
    "ppo": {
        "CartPole-v1": {
            "n_envs": 8, "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
            "learning_rate": 1e-3, "clip_range": 0.2, "lin": True,
        },
        "Acrobot-v1": {"normalize": True, "n_envs": 16, "n_steps": 256, "gae_lambda": 0.94, "n_epochs": 4},
        "MountainCar-v0": {"normalize": True, "n_envs": 16, "n_steps": 16, "gae_lambda": 0.98, "n_epochs": 4},
        "LunarLander-v3": {
            "n_envs": 16, "n_steps": 1024, "batch_size": 64, "gae_lambda": 0.98, "gamma": 0.999, "n_epochs": 4,
            "ent_coef": 0.01,
        },
        "minigrid:MiniGrid-Empty-5x5-v0": {"normalize": True, "n_envs": 8, **_MINIGRID},
        "minigrid:MiniGrid-DoorKey-5x5-v0": {"normalize": True, "n_envs": 8, **_MINIGRID},
    },
    "dqn": {
        "CartPole-v1": {
            "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1_000,
            "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128, "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04, "policy_kwargs": {"net_arch": [256, 256]},
        },
        "MountainCar-v0": {
            "learning_rate": 4e-3, "batch_size": 128, "buffer_size": 10_000, "learning_starts": 1_000, "gamma": 0.98,
            "target_update_interval": 600, "train_freq": 16, "gradient_steps": 8, "exploration_fraction": 0.2,
            "exploration_final_eps": 0.07, "policy_kwargs": {"net_arch": [256, 256]},
        },
    }
    | {
        name: {
            "learning_rate": 6.3e-4, "batch_size": 128, "buffer_size": 50_000, "learning_starts": 0,
            "target_update_interval": 250, "train_freq": 4, "gradient_steps": -1, "exploration_fraction": 0.12,
            "exploration_final_eps": 0.1, "policy_kwargs": {"net_arch": [256, 256]},
        }
        for name in ("Acrobot-v1", "LunarLander-v3")
    },
}  # fmt: skip
ZOO_STEPS = {"CartPole-v1": 5e4, "MountainCar-v0": 1.2e5}  # of DQN; 1e5 for all others


def train_redline(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Run the default command for `steps` steps in a separate process; return the score and CPU seconds of training."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "redline", "train", f"gym:{name}", "--steps", str(steps), "--seed", str(seed)]
        command += ["--run-dir", f"{folder}/run", "--eval-episodes", "0", "--json"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = json.loads(done.stdout.splitlines()[-1])
        command = [sys.executable, "-m", "redline", "eval", f"{folder}/run", "--episodes", str(EPISODES), "--json"]
        scores = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"algo": result["algo"], "steps": result["env_steps"], "cpu_seconds": cpu, "score": scores["score_mean"]}


def train_sb3(algo: str, name: str, seed: int, cpu_seconds: float) -> dict[str, Any]:
    """Train in this process until it has used `cpu_seconds` CPU seconds, including imports; return score and steps."""
    import gymnasium
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    torch.set_num_threads(1)
    settings = dict(ZOO[algo].get(name, {}))
    count, normalize = settings.pop("n_envs", 1), settings.pop("normalize", False)
    if settings.pop("lin", False):
        for option in ("learning_rate", "clip_range"):
            settings[option] = _falling(settings[option], cpu_seconds)

    def make() -> Any:
        env = gymnasium.make(name)
        if name.startswith("minigrid:"):  # SB3 supports no text observations, and its convolutions no 7x7 images
            kept = [key for key in env.observation_space.spaces if key != "mission"]
            env = gymnasium.wrappers.FlattenObservation(gymnasium.wrappers.FilterObservation(env, kept))
        return stable_baselines3.common.monitor.Monitor(env)

    class Budget(BaseCallback):
        def _on_step(self) -> bool:
            return time.process_time() < cpu_seconds

    wrap = VecNormalize if normalize else (lambda env, **_: env)
    env = wrap(DummyVecEnv([make] * count))
    kind = {"ppo": stable_baselines3.PPO, "dqn": stable_baselines3.DQN}[algo]
    model = kind("MlpPolicy", env, seed=seed, device="cpu", **settings)
    model.learn(int(ZOO_STEPS.get(name, 1e5)) if algo == "dqn" else 10**9, callback=Budget())
    if algo == "dqn" and time.process_time() < cpu_seconds:
        model.exploration_schedule = lambda _: model.exploration_final_eps  # the old one would restart
        model.learn(10**9, callback=Budget(), reset_num_timesteps=False)
    used = time.process_time()
    held_out = wrap(DummyVecEnv([make]), training=False, norm_reward=False)
    if normalize:
        held_out.obs_rms = env.obs_rms
    held_out.seed(10_000 + seed)
    score, _ = evaluate_policy(model, held_out, EPISODES)
    return {"algo": algo, "steps": model.num_timesteps, "cpu_seconds": used, "score": float(score)}


def _falling(value: float, cpu_seconds: float) -> Any:
    """Return a schedule from `value` to 0 over the CPU seconds of this process."""
    return lambda _: value * max(0.0, 1 - time.process_time() / cpu_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--envs", default=",".join(list(ENVS)[:5]))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--sb3-seeds", default="0")
    parser.add_argument("--steps", type=int, help="of Redline's runs, instead of the table's")
    parser.add_argument(
        "--sb3", nargs=4, metavar=("ALGO", "ENV", "SEED", "CPU_SECONDS"), help="one run, in this process"
    )
    options = parser.parse_args()
    if options.sb3:
        algo, name, seed, cpu_seconds = options.sb3
        print(json.dumps(train_sb3(algo, name, int(seed), float(cpu_seconds))))
        return
    os.environ |= {"OMP_NUM_THREADS": "1"}
    record = json.loads(options.out.read_text()) if options.out.exists() else {"runs": []}
    # Imported here: in SB3's processes, it would use part of their budget.
    from redline.tools.bench import describe_machine

    record |= describe_machine("cpu")

    def add(system: str, name: str, seed: int, result: dict[str, Any]) -> None:
        run = {"system": system, "env": name, "seed": seed, "solved_from": ENVS[name][1], **result}
        record["runs"].append(run)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(
            f"{system:8} {name:32} seed {seed}  {run['steps']:9,} steps  {run['cpu_seconds']:5.0f} s  {run['score']:8.2f}"
        )

    for name in options.envs.split(","):
        budget = 0.0
        for seed in map(int, filter(None, options.seeds.split(","))):
            result = train_redline(name, seed, options.steps or ENVS[name][0])
            budget = max(budget, result["cpu_seconds"])
            add("redline", name, seed, result)
        for seed in map(int, filter(None, options.sb3_seeds.split(","))):
            for algo in ("ppo", "dqn"):
                arguments = ["--sb3", algo, name, str(seed), str(budget or _measured(record, name))]
                command = [sys.executable, __file__, "--out", str(options.out), *arguments]
                output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                add("sb3", name, seed, json.loads(output.splitlines()[-1]))


def _measured(record: dict[str, Any], name: str) -> float:
    """Return the largest CPU seconds of Redline's runs in the file."""
    runs = [run for run in record["runs"] if run["system"] == "redline" and run["env"] == name]
    return max(float(run["cpu_seconds"]) for run in runs)


if __name__ == "__main__":
    main()
