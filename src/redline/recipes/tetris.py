"""Recipe for Tetris: settings by way of playing, penalties that grow with progress, compiler options."""

from __future__ import annotations

from typing import Any

from redline.engine.fast import CompilerOptions
from redline.recipes import tensor_games
from redline.recipes.recipe import UNSET, ByClass, Phase, Request, Setting, Table, by_device

ALGO = tensor_games.ALGO

COMPILER = CompilerOptions(
    gpu_inline=40,  # 10 makes placements and afterstates 20 to 80 % slower on an H200
    unroll=18,  # sums over a few columns: as reductions they would be padded to a power of two
    fusion=512,  # all features of an afterstate are one kernel that keeps the board in registers, instead of fourteen
)

_AFTERSTATES: Table = {
    "env.view": Setting("afterstates", "judging the boards a piece can lead to is easier than judging moves"),
}
_AFTERSTATES_PPO: Table = {
    "hidden": Setting(
        by_device(cpu=(32,), gpu=(64, 64)), "the features say most of it, and each move evaluates 34 boards"
    ),
    "epochs": Setting(2, "each step already evaluates many boards"),
}
# On a GPU, raw boards are read by columns. On a CPU that takes several times as long as an MLP, and after 65 k steps both
# clear six to nine lines of 6x8. On a GPU, only DQN on a large one was tried.
_BOARDS: Table = {
    "net": Setting(by_device(gpu="columns"), "what is learned about one column holds for all"),
    "channels": Setting(by_device(gpu=(64, 64)), "heights and holes first, then how they fit together"),
    "hidden": Setting(by_device(cpu=(64, 64), gpu=(128,)), "each move evaluates up to 34 boards"),
    "num_envs": Setting(
        ByClass(UNSET, UNSET, 1_024, 2_048, 4_096), "up to 34 boards of 200 cells for each: 27 kB an observation"
    ),
}
_BOARDS_PPO: Table = {
    "epochs": _AFTERSTATES_PPO["epochs"],
    "learning_rate": Setting(by_device(gpu=8e-4), "a little less than the default, as for other convolutions"),
}
# Boards by DQN. On 7x14 with uniform pieces: 427 lines per game over (405 to 451) after 2.5 minutes on a shared H200, 73 M
# steps, one seed.
_BOARDS_DQN: Table = {
    "gamma": Setting(by_device(gpu=0.98), "fifty pieces: long enough to pay for a hole"),
    "huber": Setting(by_device(gpu=1_000.0), "squared errors: a limited one would make little of a rare loss"),
    "epsilon_high": Setting(by_device(gpu=0.02), "a random placement takes several others to repair"),
    "epsilon_low": Setting(by_device(gpu=5e-4), "most games must last until a mistake of the agent's own ends them"),
    "epsilon_steps": Setting(by_device(gpu=10_000_000), "a few seconds of play"),
    "learning_rate": Setting(by_device(gpu=5e-4), "half of the default: squared errors of a lost game are large"),
    "learning_rate_end": Setting(by_device(gpu=3e-5), "late in training, good placements differ by less than a line"),
    "batch_size": Setting(ByClass(UNSET, UNSET, 1_024, 2_048, 4_096), "one sample learned for each step played"),
    "minutes": Setting(by_device(gpu=8.0), "in the one run so far, the score still rose after two and a half"),
}
_KEYS_PPO: Table = {
    "learning_rate": Setting(5e-4, "one key changes little: its value is hard to estimate"),
    "hidden": Setting(by_device(cpu=(64, 64), gpu=(256, 256)), "wide enough for a whole board"),
}


def settings(request: Request) -> dict[str, Setting]:
    """Return settings for playing by placement with afterstates, unless keys or another view are requested."""
    algo, view = request.algo, request.env_options.get("view", "afterstates")
    if request.env_options.get("actions") == "keys":
        return dict(_KEYS_PPO) if algo == "ppo" else {}
    if view == "afterstates":
        return _AFTERSTATES | (_AFTERSTATES_PPO if algo == "ppo" else {})
    if view == "boards" and algo in ("ppo", "pqn", "dqn"):
        return _BOARDS | {"ppo": _BOARDS_PPO, "dqn": _BOARDS_DQN}.get(algo, {})
    return {}


def curriculum(config: Any) -> tuple[Phase, ...]:
    """Penalize boards that are hard to clear, lightly until the agent clears lines.

    On high boards, agents that see afterstates train below a ceiling: playing that keeps a stack of ten rows alive keeps
    one of twenty alive for good, and games that end teach it. On lower boards games end often enough. (With planes the
    piece would be drawn below the ceiling, which the final board does not have.)
    """
    low = {"ceiling": 10} if config.view != "planes" and config.height >= 16 and not config.ceiling else {}
    return (
        Phase("lines", 0.0, 0.33, {"reward_hole": -0.01, "reward_height": -0.01} | low),
        Phase("moderate", 0.33, 0.66, {"reward_hole": -0.05, "reward_height": -0.02} | low),
        Phase("full", 0.66, 1.0, {"reward_hole": -0.1, "reward_height": -0.05} | low),
    )
