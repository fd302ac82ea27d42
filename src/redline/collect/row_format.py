"""What an actor says of a step of its environments: the fields of a row in its ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from redline.core.records import Spec
from redline.envs.gym_envs import frame_shape

# Of the environments, by the names they have there, (K,) each: what is learned from, and what is told of episodes.
LEARNED = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}
TOLD = {
    "episode_over": np.bool_,
    "lost": np.bool_,
    "won": np.bool_,
    "length": np.int64,
    "score": np.float64,
    "episode_return": np.float64,
}

ENDS = ("terminated", "truncated")  # where `final` is not what the next row sees

FROM_ENVS = ("final_obs", *LEARNED, *TOLD)


def row_fields(spec: Spec, num_envs: int, outputs: tuple[str, ...]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each, by name."""
    frame, seen = frame_shape(spec), torch.empty(0, dtype=spec.obs_dtype).numpy().dtype
    return {
        "obs": ((num_envs, *frame), seen),
        "episode_start": ((num_envs,), np.bool_),  # obs is the first of an episode
        "action": ((num_envs,), np.int64),
        **{f"out.{name}": ((num_envs,), np.float32) for name in outputs},  # what the behaviour policy said of it
        "final_obs": ((num_envs, *frame), seen),  # what was seen then, before any reset
        **{name: ((num_envs,), dtype) for name, dtype in (LEARNED | TOLD).items()},
        "version": ((), np.int64),  # of the policy
    }


def plain_spec(spec: Spec) -> dict[str, Any]:
    """What of it must be the same wherever the environment is made."""
    return {"shape": list(spec.obs_shape), "dtype": str(spec.obs_dtype), "actions": spec.num_actions}


class Differs(Exception):
    """An environment is another in an actor than where the learner was made."""


def check_spec(env: str, found: Spec, expected: dict[str, Any]) -> None:
    """Refuse an environment that is another here than where the learner was made."""
    mine = plain_spec(found)
    if mine != expected:
        differ = "; ".join(
            f"{k} {mine[k]} in the actor, {expected[k]} in the learner" for k in mine if mine[k] != expected[k]
        )
        raise Differs(f"{env} is not the same everywhere: {differ}. It must not depend on the process that makes it.")
