"""Defaults for any tensor game, by algorithm and class of hardware."""

from __future__ import annotations

from redline.recipes.recipe import UNSET, ByClass, Request, Setting, Table, by_device

ALGO = Setting("ppo", "learns from fresh experience, and a tensor game makes that cheap")

_FILL_GPU = "enough games to keep a GPU of this size busy"
_WIDE_ON_GPU = "a GPU multiplies wider layers at little cost"
_MATMULS = "matrix products take most of a CPU's time"
_MORE_CORES = "with more cores, wider layers are as fast"
_WIDTH = ByClass(_MATMULS, _MORE_CORES, _WIDE_ON_GPU, _WIDE_ON_GPU, _WIDE_ON_GPU)

# Classes in each ByClass: CPUs with up to 4 cores, CPUs with more; GPUs below 10 GB, up to 30 GB, above.
_DQN: Table = {
    "num_envs": Setting(
        ByClass(2_048, 4_096, 4_096, 8_192, 16_384),
        ByClass(
            "hides the overhead of a call and still fits in the cache of a few cores",
            "hides the overhead of a call; twice as many as for a few cores",
            *[_FILL_GPU] * 3,
        ),
    ),
    "batch_size": Setting(
        ByClass(512, 1_024, 4_096, 8_192, 16_384),
        by_device(
            cpu="a quarter of the steps played: on a CPU, learning from a sample costs as much as four steps",
            gpu="one large matrix product is faster than many small ones",
        ),
    ),
    "hidden": Setting(ByClass((64, 64), (128, 128), (256, 256), (256, 256), (256, 256)), _WIDTH),
    "replay_capacity": Setting(
        ByClass(500_000, 1_000_000, 1_000_000, 2_000_000, 4_000_000),
        ByClass(
            "about 60 MB in a checkpoint",
            "about 120 MB in a checkpoint",
            "about 120 MB on the device",
            "about 240 MB on the device",
            "about 480 MB on the device",
        ),
    ),
    "epsilon_steps": Setting(ByClass(UNSET, UNSET, 5_000_000, 10_000_000, 20_000_000), "a few seconds of play"),
}

_ON_POLICY: Table = {
    "num_envs": Setting(
        ByClass(512, 1_024, 4_096, 8_192, 16_384),
        by_device(cpu="enough games to share the cost of a step, few enough for frequent updates", gpu=_FILL_GPU),
    ),
    "rollout_steps": Setting(32, "short rollouts of many games: the policy learns from its own recent play"),
    "epochs": Setting(
        by_device(cpu=3, gpu=2),
        by_device(
            cpu="playing takes most of a CPU's time: learn from each step three times",
            gpu="playing costs little on a GPU: more steps are better than more epochs",
        ),
    ),
}

_PPO: Table = _ON_POLICY | {
    "hidden": Setting(ByClass((64, 64), (128, 128), (256, 256), (256, 256), (512, 512)), _WIDTH),
}

_PQN: Table = _ON_POLICY | {
    "hidden": Setting(
        ByClass((64, 64), (64, 64), (128, 128), (128, 128), (256, 256)),
        "narrower than for PPO: normalizing a layer costs as much as its matrix product",
    ),
}

_TABLES: dict[str, Table] = {"dqn": _DQN, "ppo": _PPO, "pqn": _PQN}
_ANY_ALGORITHM: Table = {"num_envs": _ON_POLICY["num_envs"]}


def settings(request: Request) -> dict[str, Setting]:
    """Return the defaults for any tensor game; for an algorithm without a table, only the number of games."""
    return dict(_TABLES.get(request.algo, _ANY_ALGORITHM))
