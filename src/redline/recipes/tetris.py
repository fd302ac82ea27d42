"""Recipe for Tetris: settings by action type and view, penalties that grow during training, compiler options."""

from __future__ import annotations

from typing import Any

from redline.engine.fast import CompilerOptions
from redline.recipes import tensor_games
from redline.recipes.recipe import UNSET, ByClass, Phase, Request, Setting, Table, by_device

ALGO = tensor_games.ALGO

COMPILER = CompilerOptions(
    gpu_inline=40,  # 10 makes placements and afterstates 20 to 80 % slower on an H200
    unroll=18,  # sums over a few columns: as reductions they would be padded to a power of two
    fusion=512,  # one kernel computes all features of an afterstate with the board in registers, instead of fourteen kernels
)

_AFTERSTATES: Table = {
    "env.view": Setting("afterstates", "evaluating the boards after each placement is easier than evaluating moves"),
}
_AFTERSTATES_PPO: Table = {
    "hidden": Setting(
        by_device(cpu=(32,), gpu=(64, 64)), "the features carry most of the information; each move evaluates 34 boards"
    ),
    "epochs": Setting(2, "each step already evaluates many boards"),
}
# On a GPU, the network `columns` reads raw boards. On a CPU it takes several times as long as an MLP, and after 65 k steps both
# clear six to nine lines on 6x8. Among GPUs, only DQN on a large one was tested.
_BOARDS: Table = {
    "net": Setting(by_device(gpu="columns"), "features learned for one column apply to all columns"),
    "channels": Setting(by_device(gpu=(64, 64)), "the first layer sees heights and holes, the second how they combine"),
    "hidden": Setting(by_device(cpu=(64, 64), gpu=(128,)), "each move evaluates up to 34 boards"),
    "num_envs": Setting(
        ByClass(UNSET, UNSET, 1_024, 2_048, 4_096), "an observation has up to 34 boards of 200 cells: 27 kB"
    ),
}
_BOARDS_PPO: Table = {
    "epochs": _AFTERSTATES_PPO["epochs"],
    "learning_rate": Setting(by_device(gpu=8e-4), "a little less than the default, as for other convolutions"),
}
# Boards by DQN. On 7x14 with uniform pieces, on a shared H200, one seed each: 427 lines per game over (405 to 451) after 73 M
# steps in 2.5 minutes, 1,203 (1,126 to 1,287) after 484 M steps in 6.
_BOARDS_DQN: Table = {
    "gamma": Setting(by_device(gpu=0.98), "looks fifty pieces ahead: long enough to see the cost of a hole"),
    "huber": Setting(by_device(gpu=1_000.0), "squared errors: Huber's limit would give rare losses too little weight"),
    "epsilon_high": Setting(by_device(gpu=0.02), "repairing a random placement takes several others"),
    "epsilon_low": Setting(by_device(gpu=5e-4), "most games must end by a mistake of the agent, not by a random move"),
    "epsilon_steps": Setting(by_device(gpu=10_000_000), "a few seconds of play"),
    "learning_rate": Setting(by_device(gpu=5e-4), "half of the default: squared errors of a lost game are large"),
    "learning_rate_end": Setting(by_device(gpu=3e-5), "late in training, good placements differ by less than a line"),
    "batch_size": Setting(ByClass(UNSET, UNSET, 1_024, 2_048, 4_096), "one sample per step played"),
    "minutes": Setting(by_device(gpu=8.0), "the score was still rising after six"),
}
_KEYS_PPO: Table = {
    "learning_rate": Setting(5e-4, "the effect of a single key is small and its value hard to estimate"),
    "hidden": Setting(by_device(cpu=(64, 64), gpu=(256, 256)), "wide enough for a whole board"),
}


def settings(request: Request) -> dict[str, Setting]:
    """Return settings for placing pieces by afterstates, unless keys or another view are requested."""
    algo, view = request.algo, request.env_options.get("view", "afterstates")
    if request.env_options.get("actions") == "keys":
        return dict(_KEYS_PPO) if algo == "ppo" else {}
    if view == "afterstates":
        return _AFTERSTATES | (_AFTERSTATES_PPO if algo == "ppo" else {})
    if view == "boards" and algo in ("ppo", "pqn", "dqn"):
        return _BOARDS | {"ppo": _BOARDS_PPO, "dqn": _BOARDS_DQN}.get(algo, {})
    return {}


def curriculum(config: Any) -> tuple[Phase, ...]:
    """Penalize boards that are hard to clear, only lightly until the agent clears lines.

    On high boards, agents that see afterstates train below a ceiling: a policy that survives on ten rows survives almost for
    ever on twenty, and it needs games that end to learn from. On lower boards, games end often enough. (With planes, the
    piece would be drawn below the ceiling, which the final board does not have.)
    """
    low = {"ceiling": 10} if config.view != "planes" and config.height >= 16 and not config.ceiling else {}
    return (
        Phase("lines", 0.0, 0.33, {"reward_hole": -0.01, "reward_height": -0.01} | low),
        Phase("moderate", 0.33, 0.66, {"reward_hole": -0.05, "reward_height": -0.02} | low),
        Phase("full", 0.66, 1.0, {"reward_hole": -0.1, "reward_height": -0.05} | low),
    )
