"""Fields of a row: one step of a group of an actor's environments, as written to a shared ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from redline.core.records import Spec
from redline.envs.gym_game import frame_shape

# Arrays of GymEnvs by name, (K,) each: those that learners need, and those that episode statistics need.
STEP_FIELDS = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}
EPISODE_FIELDS = {
    "episode_over": np.bool_,
    "lost": np.bool_,
    "won": np.bool_,
    "length": np.int64,
    "score": np.float64,
    "episode_return": np.float64,
    "level": np.int16,
}
ENV_FIELDS = ("final_obs", *STEP_FIELDS, *EPISODE_FIELDS)  # copied from GymEnvs after a step

END_FLAGS = ("terminated", "truncated")  # where neither is set, `final_obs` equals `obs` of the next row


def row_fields(spec: Spec, num_envs: int, outputs: tuple[str, ...]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape and dtype of every field by name; `outputs` are the algorithm's POLICY_OUTPUTS."""
    frame, obs_dtype = frame_shape(spec), torch.empty(0, dtype=spec.obs_dtype).numpy().dtype
    return {
        "obs": ((num_envs, *frame), obs_dtype),
        "episode_start": ((num_envs,), np.bool_),  # obs is the first of an episode
        "action": ((num_envs,), np.int64),
        **{f"out.{name}": ((num_envs,), np.float32) for name in outputs},  # outputs of the behaviour policy
        "final_obs": ((num_envs, *frame), obs_dtype),  # observation after the action, before any reset
        **{name: ((num_envs,), dtype) for name, dtype in (STEP_FIELDS | EPISODE_FIELDS).items()},
        "version": ((), np.int64),  # of the policy's weights
    }


def spec_to_json(spec: Spec) -> dict[str, Any]:
    """Return the parts of a spec that must be the same in every process."""
    return {"shape": list(spec.obs_shape), "dtype": str(spec.obs_dtype), "actions": spec.num_actions}


class SpecMismatch(Exception):
    """An environment's spec in a child process differs from the one in the learner's process."""


def check_spec(env: str, spec: Spec, expected: dict[str, Any]) -> None:
    """Raise SpecMismatch if `spec` differs from `expected`, the `spec_to_json` of the learner's spec."""
    actual = spec_to_json(spec)
    if actual != expected:
        differences = "; ".join(
            f"{k} {actual[k]} in the actor, {expected[k]} in the learner" for k in actual if actual[k] != expected[k]
        )
        raise SpecMismatch(
            f"{env} is not the same in every process: {differences}. Its spaces must not depend on the process that makes it."
        )
