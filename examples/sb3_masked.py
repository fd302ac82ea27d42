"""Stable-Baselines3 on Redline's games: MaskablePPO from sb3-contrib on Tetris or, without sb3-contrib, PPO on Snake.

    pip install 'redline[sb3]' sb3-contrib
    python examples/sb3_masked.py --steps 100000

`SB3VecEnv` turns a batch of tensor games into one vectorised environment. MaskablePPO asks it for `action_masks()`, so
the agent never chooses a placement that does not fit.
"""

from __future__ import annotations

import argparse
from typing import Any

from stable_baselines3 import PPO

import redline
from redline.envs.sb3 import SB3VecEnv

try:
    from sb3_contrib import MaskablePPO
except ModuleNotFoundError:
    MaskablePPO = None


def train(steps: int, num_envs: int = 16, n_steps: int = 64) -> Any:
    """Return the trained model."""
    masked = MaskablePPO is not None
    game, algorithm = ("tetris", MaskablePPO) if masked else ("snake", PPO)
    print(f"{algorithm.__name__} on {game}" + ("" if masked else "; install sb3-contrib for MaskablePPO on Tetris"))
    envs = SB3VecEnv(redline.make(game, num_envs), on_illegal="raise")
    model = algorithm("MlpPolicy", envs, n_steps=n_steps, batch_size=256, seed=0, verbose=1)
    return model.learn(steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    train(parser.parse_args().steps)
