"""Recipe for Super Mario Bros. (`mario`, `mario:WORLD-STAGE`)."""

from __future__ import annotations

from redline.recipes import cpu_envs
from redline.recipes.gymnasium import EMULATOR_DQN, image_settings
from redline.recipes.recipe import Request, Setting, Table

ALGO = cpu_envs.ALGO

_RUN: Table = {
    "backplay": Setting(0.5, "practises the moments before a death more often than the way there"),
    "env.frame_skip": Setting(4, "people do not decide faster either"),
    "env.show_action": Setting(True, "a jump needs the button released first, and the screen does not show its state"),
}

# With these and `_ppo_many_cores`, nine of ten games reached the flag after a quarter of an hour on 16 cores and a GPU. At
# that time actors chose their own actions and jumps were still rewarded in the air. Winning earned 1.
_STABLE = "the largest change per update at which training with many epochs stays stable"
_PPO: Table = {
    "gamma": Setting(0.95, "the outcome of a jump shows within a second"),
    "learning_rate": Setting(2.5e-4, _STABLE),
    "learning_rate_end": Setting(5e-5, "late in training every jump counts"),
    "target_kl": Setting(0.04, _STABLE),
    "ema_decay": Setting(0.998, "averaged weights play more consistently than the latest weights"),
}

_DQN: Table = EMULATOR_DQN | {"gamma": _PPO["gamma"], "n_step": Setting(5, "a jump lasts about five decisions")}


def _dqn_many_cores(cores: int) -> dict[str, Setting]:
    games = 4 * max(2, cores - 1)
    return {
        "num_envs": Setting(games, "four per core that plays, to share a forward pass"),
        "batch_size": Setting(min(512, 16 * games), "emulators are slow: learn from each step about sixteen times"),
        "updates": Setting(max(1, games // 30), "emulators are slow: learn from each step about sixteen times"),
    }


def _ppo_many_cores(cores: int) -> dict[str, Setting]:
    games = 4 * max(2, cores - 1)
    return {
        "num_envs": Setting(games, "four per core that plays, to share a forward pass"),
        "rollout_steps": Setting(64, "longer than any jump; short rollouts of many games are more varied"),
        "batch_size": Setting(games * 64 // 6, "a sixth of a rollout"),
        "epochs": Setting(5, "emulators are slow: learn from each step many times"),
    }


def settings(request: Request) -> dict[str, Setting]:
    """Return settings for the emulator's images; PPO and DQN add their own, and more games if there are many cores."""
    rows = _RUN | image_settings(request, channels=3)
    many_cores = request.hardware.tier != "cpu-few"
    if request.algo == "ppo":
        rows |= _PPO | (_ppo_many_cores(request.hardware.cores) if many_cores else {})
    elif request.algo == "dqn":
        rows |= _DQN | (_dqn_many_cores(request.hardware.cores) if many_cores else {})
    return rows
