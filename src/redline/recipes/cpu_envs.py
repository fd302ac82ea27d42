"""Defaults for any environment that only a CPU can step (Gymnasium, Mario), by algorithm and class of hardware."""

from __future__ import annotations

from redline.recipes.recipe import Request, Setting, Table, by_device, per_core

ALGO = Setting("ppo", "the least sensitive to its settings")

_SLOW = "these environments are slow: learn from each step many times"
_WIDTH = "the learner waits for the environments: wide layers cost little"
_FEW_STEPS = "few steps are played: each must teach more"

_DQN: Table = {
    "num_envs": Setting(per_core(at_least=16), "one per core, and at least enough for varied experience"),
    "batch_size": Setting(256, "these environments are slow: learn from each step sixteen times"),
    "hidden": Setting(by_device(cpu=(128, 128), gpu=(256, 256, 256)), _WIDTH),
    "layer_norm": Setting(True, "keeps values from growing beyond the returns observed"),
    "learning_rate": Setting(1e-3, _FEW_STEPS),
    "learning_rate_end": Setting(5e-5, "keeps late updates from undoing what was learned"),
    "gamma": Setting(0.99, "the length of an episode is not known"),
    "n_step": Setting(10, "time steps are small: the effect of an action shows only after several"),
    "replay_capacity": Setting(50_000, "a few minutes of play"),
    "learning_starts": Setting(1_000, "enough for varied first batches"),
    "epsilon_steps": Setting(10_000, "enough to see most of the environment"),
    "epsilon_low": Setting(0.02, "few environments: each of them must explore"),
}

_PPO: Table = {
    "num_envs": Setting(per_core(at_least=8), "one per core, and enough to share the cost of a forward pass"),
    "rollout_steps": Setting(by_device(cpu=256, gpu=512), "few environments: only long rollouts hold enough samples"),
    "epochs": Setting(by_device(cpu=4, gpu=10), _SLOW),
    "batch_size": Setting(by_device(cpu=64, gpu=256), "many small gradient steps per rollout"),
    "hidden": Setting(by_device(cpu=(128, 128), gpu=(256, 256)), _WIDTH),
}

_PQN: Table = {
    "num_envs": Setting(per_core(at_least=16), "without replay, only many environments give varied samples"),
    "rollout_steps": Setting(64, "short enough to learn from recent play"),
    "epochs": _PPO["epochs"],
    "batch_size": Setting(0, "an eighth of a rollout"),
    "hidden": _PPO["hidden"],
    "q_lambda": Setting(0.95, "propagates late rewards through the whole rollout"),
    "learning_rate": Setting(1e-3, _FEW_STEPS),
}

_TABLES: dict[str, Table] = {"dqn": _DQN, "ppo": _PPO, "pqn": _PQN}
_ANY_ALGORITHM: Table = {"num_envs": Setting(per_core(at_least=8), "one per core")}


def settings(request: Request) -> dict[str, Setting]:
    """Return the defaults for any CPU environment; without a table for the algorithm, only the number of environments."""
    return dict(_TABLES.get(request.algo, _ANY_ALGORITHM))
