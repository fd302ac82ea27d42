"""Sessions and runs of the environment in faulty.py, for the tests of environments and actors that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import forked
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

HERE = str(Path(__file__).parent)
ENV = "gym:faulty:Faulty-v0"


class Sessions:
    """Makes sessions, closes them, and keeps their messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.made: list[Session] = []

    def __call__(self, env: str = ENV, algo: str = "dqn", **options: Any) -> Session:
        """Return a session with these settings, on the CPU with four environments unless they say otherwise."""
        settings = Settings(env, algo, **{"num_envs": 4, "device": "cpu", "steps": 100_000} | options)
        self.made.append(Session(resolve(settings), self.messages.append))
        return self.made[-1]

    @property
    def reports(self) -> list[str]:
        return [text for text in self.messages if not text.startswith("Waiting for")]  # a busy machine starts slowly

    def close(self) -> None:
        for session in self.made:
            session.close()
            session.close()  # twice is fine


def check_memory(session: Session, samples: int = 600) -> float:
    """Check that every sample that counts is finite, of one episode, and followed by the state that followed it.

    gamma is 0.5 and n_step 2. Return the fraction that counts.
    """
    batch = session.learner.memory.sample(torch.tensor(3, dtype=torch.int32), samples)
    assert torch.isfinite(batch.obs).all()
    assert torch.isfinite(batch.reward).all()
    for row in batch.weight.nonzero().flatten().tolist():
        episode, at, luck = batch.obs[row].tolist()
        assert 0 <= at < 5
        if batch.discount[row] > 0:
            then = batch.next_obs[row].tolist()
            assert then[0] == episode
            assert then[2] == luck, "a sample spans two episodes"
            assert then[1] - at in (1, 2)
            assert batch.discount[row] == 0.5 ** (then[1] - at)
        else:
            assert at >= 3, "only the fifth step terminates"
    return float(batch.weight.mean())


def command(folder: Path, *more: str, **environment: str) -> forked.Process:
    """Start `redline train` of the environment with a tiny PPO, as a program."""
    words = ["train", ENV, "--algo", "ppo", "--num-envs", "4", "--run-dir", str(folder), "--eval-episodes", "0"]
    words += ["--ppo.hidden", "8", "--ppo.rollout_steps", "16", "--batch-size", "64", "--device", "cpu", *more]
    return forked.start(*words, path=(HERE,), **environment)
