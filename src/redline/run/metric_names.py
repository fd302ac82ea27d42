"""Names of metrics in TensorBoard and W&B: those of Stable-Baselines3 where they exist.

`metrics.jsonl` keeps the plain names, the keys here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {  # plain name -> name in TensorBoard and W&B
    "env_steps": "time/total_timesteps",
    "seconds": "time/time_elapsed",
    "env_steps_per_second": "time/fps",
    "samples_per_second": "time/samples_per_second",
    "updates_per_second": "time/updates_per_second",
    "eval_score": "eval/score",
    "eval_score_low": "eval/score_low",
    "eval_score_high": "eval/score_high",
    "eval_length": "eval/mean_ep_length",
    "eval_win_rate": "eval/success_rate",
    "reward": "rollout/ep_rew_mean",
    "length": "rollout/ep_len_mean",
    "win_rate": "rollout/success_rate",
    "epsilon": "rollout/exploration_rate",
    "episodes": "rollout/episodes",
    "score": "rollout/score",
    "score_max": "rollout/score_max",
    "truncated": "rollout/truncated",
    "phase_number": "rollout/phase_number",
    "updates": "train/n_updates",
    "samples_trained": "train/samples",
    "policy_loss": "train/policy_gradient_loss",
    "replay_fill": "replay/fill",
    "memory_gb": "system/memory_gb",
    "gpu_percent": "system/gpu_percent",
    "cpu_percent": "system/cpu_percent",
    "drops": "collect/drops",
    "policy_lag": "collect/policy_lag",
    "actor_busy": "collect/actor_busy",
    "learner_wait": "collect/learner_wait",
    "reader_ms": "collect/reader_ms",
    "restarts": "collect/restarts",
    "masked_values": "collect/masked_values",
}


def to_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a log record, keyed by their names in TensorBoard and W&B.

    Entropy becomes SB3's entropy loss, its negative. Names with a slash are kept; other names without an entry in NAMES are
    a learner's metrics: `q_mean` becomes `train/q_mean`.
    """
    scalars: dict[str, float] = {}
    for name, value in record.items():
        if not isinstance(value, int | float):
            continue
        if name == "entropy":
            scalars["train/entropy_loss"] = -value
        elif name.startswith("queue"):  # queue, queue_max, queue_1 for the first actor, …
            scalars[f"collect/{name}"] = value
        else:
            scalars[NAMES.get(name) or (name if "/" in name else f"train/{name}")] = value
    return scalars
