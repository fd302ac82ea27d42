"""Recipe for Snake: settings by view, board size and hardware; mirrored views of the whole board start with long snakes."""

from __future__ import annotations

from typing import Any

from redline.engine.fast import CompilerOptions
from redline.recipes import tensor_games
from redline.recipes.recipe import UNSET, ByClass, Phase, Request, Setting, Table, by_device

ALGO = tensor_games.ALGO

COMPILER = CompilerOptions(fusion=512)  # on a GPU, one kernel for everything that a step computes once per game

_SMALL = 7  # largest number of columns and rows of a board that a CPU learns to fill
_MEDIUM = 12  # largest number of columns and rows of a board that PPO and DQN see whole on a CPU

# Larger boards on a CPU, and medium ones with PQN: the surroundings of the head.
_CENTRED: Table = {
    "env.view": Setting("centred", "a view centred on the head looks the same in every part of the board"),
    "env.sight": Setting(4, "nearby cells and the way to the food: a quarter of the inputs of the whole board"),
}

# Small boards, medium ones with PPO and DQN, and every board on a GPU: the whole board, centred on the head.
_WRAPPED: Table = {
    "env.view": Setting("wrapped", "the last foods require planning around the body, so the whole board must be seen"),
    "env.reward_starve": Setting(
        by_device(cpu=-2.0, gpu=-5.0), "with a discount near 1, circling costs little unless starving is penalized"
    ),
    "backplay": Setting(by_device(gpu=0.8), "practises rare losses more often"),
}
_QUICK = "in a view centred on the head an MLP works, and is fifteen times faster than a CNN"
_WIDE = "a GPU multiplies wider layers at little cost"
_WRAPPED_GPU: Table = {"net": Setting("mlp", _QUICK), "hidden": Setting((512, 512), _WIDE)}
_WRAPPED_LARGE_GPU: Table = {"net": Setting("mlp", _QUICK), "hidden": Setting((1024, 512), _WIDE)}
_POLISH = "nearly perfect play needs only small changes"

# Boards of up to 12x12. On 6x6, PPO filled 99.85 % of boards unmirrored without long snakes at the start, 99.46 % unmirrored
# with them, and 99.27 % mirrored with them (one seed each). Its games took 195, 171 and 172 moves.
_UNMIRRORED: Table = {
    "env.mirror": Setting(False, "a snake that always turns the same way need not learn to turn the other way"),
    "backplay": Setting(0.8, "practises the ends of long games more often than their easy beginnings"),
}

# From 85 % of the positions 32 moves before a loss, PPO never lost again. With backplay from 8 moves before, and hunger shown,
# it lost 0.01 instead of 0.50 % of 6x6 games after 4 M steps (two seeds). On 8x8 it lost 0.1 to 0.4 % after 10 M steps with a
# starvation penalty of 1, and 0.1 to 12 % with a penalty of 5 (three seeds). With backplay from 8 moves and hunger shown, DQN
# filled 18 instead of 93 % of 6x6 boards (one seed).
_WRAPPED_PPO: Table = {
    "env.show_hunger": Setting(by_device(cpu=True), "a snake that goes in circles sees that its time runs out"),
    "env.reward_starve": Setting(
        by_device(cpu=-1.0, gpu=-5.0), "a snake that sees its hunger prefers to die if starving costs more"
    ),
    "backplay_steps": Setting(
        by_device(cpu=8), "the last moves before a loss decide: started 32 moves before, most games are won"
    ),
    "gamma": Setting(0.995, "a full board is hundreds of moves away"),
    "gamma_end": Setting(0.999, "late in training, saving a few moves is not worth a risk"),
    "hidden": Setting(by_device(cpu=(128, 128)), "wide enough for a small board"),
    "rollout_steps": Setting(by_device(cpu=64), "longer than the way to a food"),
    "entropy_end": Setting(by_device(gpu=3e-4), "late in training any random move may be the last"),
}
_WRAPPED_PQN: Table = {
    "gamma": _WRAPPED_PPO["gamma"],
    "epsilon_high": Setting(0.02, "a random move may be the last"),
    "epsilon_low": Setting(5e-4, "a game has hundreds of moves, any of which may be random"),
    "hidden": _WRAPPED_PPO["hidden"],
    "q_lambda": Setting(by_device(gpu=0.9), "foods are many moves apart"),
}
_WRAPPED_DQN: Table = {
    "gamma": _WRAPPED_PPO["gamma"],
    "gamma_end": _WRAPPED_PPO["gamma_end"],
    "n_step": Setting(10, "a full board is hundreds of moves away: its value comes back ten moves at a time"),
    "epsilon_high": _WRAPPED_PQN["epsilon_high"],
    "epsilon_low": Setting(5e-5, "most games must last until the board is nearly full"),
    "epsilon_steps": Setting(by_device(cpu=500_000), "about half a minute of play"),
    "learning_rate_end": Setting(2e-5, _POLISH),
    "huber": Setting(1_000.0, "squared errors: Huber's limit would give rare losses too little weight"),
    "dueling": Setting(True, "moves differ by little: on a GPU, rounding values of 60 to bfloat16 would hide that"),
    "num_envs": Setting(by_device(cpu=512), "learning takes most of the time: two samples per step played"),
    "batch_size": Setting(by_device(cpu=1_024), "two samples per step played"),
    "hidden": Setting(ByClass((64, 64), (128, 128), UNSET, UNSET, UNSET), "small layers: more samples a second"),
}

# On a CPU, on boards of 8x8 to 12x12.
_DQN_MEDIUM_CPU: Table = {
    "env.reward_starve": Setting(-5.0, "greedy play would otherwise circle until it starves in a third of the games"),
}
_PPO_MEDIUM_CPU: Table = {
    "hidden": Setting(ByClass((64, 64), (128, 128), UNSET, UNSET, UNSET), "twice the width halves the games played"),
    "rollout_steps": Setting(32, "frequent updates: a few minutes allow only hundreds of rollouts"),
    "learning_rate": Setting(1.5e-3, "a few minutes leave no time for small steps"),
}

# PPO on a large GPU. On an H200, these settings filled 99.66 % of 10x10 boards after 4.1 minutes of training. Variants, one
# seed each: convolutions of 64 channels and stride 1, half as fast, 99.60 % after 3.5 minutes; the CPU's backplay from 8 moves
# with hunger shown, 99.24 %; the latter with an MLP of 1024 and 512 units, 98.5 % after 3 minutes on half of the GPU.
_FEWER_CELLS = "every convolution after the first divides the cells by four: twice as many steps a second"
_PPO_CONVOLUTIONAL: Table = {
    "net": Setting("cnn", "needs a twentieth of the games that a wide MLP needs, and so less time on this GPU"),
    "channels": Setting((64, 128, 128), "more features where there are fewer cells"),
    "stride": Setting(2, _FEWER_CELLS),
    "hidden": Setting((512,), "combines the features of the convolutions"),
    "num_envs": Setting(4_096, "enough to keep this GPU busy with convolutions"),
    "batch_size": Setting(16_384, "an eighth of a rollout"),
    "learning_rate": Setting(6e-4, "as much as convolutions tolerate"),
    "learning_rate_end": Setting(1e-5, _POLISH),
    "minutes": Setting(3.5, "with compilation and evaluation less than five"),
}
# Boards above 12x12. On part of an H200, these settings filled 85.5 % of 20x20 boards after 1.7 G steps in 23.5 minutes of
# training, and with backplay in 0.8 of the games 74.9 % after 1.3 G steps in 20 (one seed each). Unmirrored and without long
# snakes, the agent had learned less after ten minutes. `_PPO_MLP` had filled 56 % after eight.
_PPO_LARGE_BOARD: Table = _PPO_CONVOLUTIONAL | {
    "backplay": Setting(0.95, "games are so long that practising losses in most of them takes little of the time"),
    "minutes": Setting(23.0, "a game has ten thousand moves"),
}
# PPO on other GPUs.
_PPO_MLP: Table = {
    "learning_rate": Setting(8e-4, "half a million steps per update give steady gradients"),
    "learning_rate_end": Setting(2e-5, _POLISH),
}

# DQN on a large GPU, on boards of up to 12x12. After seven minutes on half of an H200, squared errors filled 98.5 % of 10x10
# boards and a categorical distribution 97.6 %, one seed each.
_DQN_CONVOLUTIONAL: Table = {name: _PPO_CONVOLUTIONAL[name] for name in ("net", "hidden", "learning_rate_end")} | {
    "channels": Setting((64, 64, 64), "as wide as this GPU multiplies at full speed"),
    "stride": Setting(1, "every cell counts"),
    "num_envs": Setting(2_048, "two samples per step played"),
    "batch_size": Setting(
        4_096, "progress depends on the number of gradient steps: a batch four times as large learned no more per step"
    ),
    "learning_rate": Setting(3e-4, "half of PPO's, whose batches are four times as large"),
    "epsilon_steps": Setting(10_000_000, "about ten seconds of play"),
    "minutes": Setting(7.0, "replay learns more slowly than PPO; with compilation and evaluation about eight"),
}


def settings(request: Request) -> dict[str, Setting]:
    """Return settings for the view that suits the board and the hardware, or for the requested view."""
    algo, on_gpu, large = request.algo, request.on_gpu, request.hardware.tier == "gpu-large"
    side = max(request.env_option("width"), request.env_option("height"))
    unmirrored = side <= _MEDIUM and algo in ("ppo", "dqn")
    sees_all = "sight" not in request.env_options and (on_gpu or side <= _SMALL or unmirrored)
    view = request.env_options.get("view", "wrapped" if sees_all else "centred")
    if view != "wrapped":
        return dict(_CENTRED) if view == "centred" else {}
    rows = _WRAPPED | (_UNMIRRORED if unmirrored else {})
    rows |= {"ppo": _WRAPPED_PPO, "pqn": _WRAPPED_PQN, "dqn": _WRAPPED_DQN}.get(algo, {})
    if algo == "dqn":
        rows |= {"v_max": Setting(_highest_return(request), "all foods and the win, for distributional DQN")}
        if request.algo_options.get("distribution") == "quantile":
            del rows["huber"]  # for quantiles it sets the scale of the loss, not a limit of errors
    if on_gpu and algo in ("dqn", "ppo", "pqn"):
        rows |= _WRAPPED_LARGE_GPU if large else _WRAPPED_GPU
    if on_gpu and algo == "ppo":
        convolutional = _PPO_CONVOLUTIONAL if side <= _MEDIUM else _PPO_LARGE_BOARD
        rows |= convolutional if large else _PPO_MLP
    if large and algo == "dqn" and side <= _MEDIUM:
        rows |= _DQN_CONVOLUTIONAL
    if not on_gpu and _SMALL < side <= _MEDIUM:
        rows |= {"ppo": _PPO_MEDIUM_CPU, "dqn": _DQN_MEDIUM_CPU}.get(algo, {})
    return rows


def _highest_return(request: Request) -> float:
    """Return the highest undiscounted return of a game that fills the board."""
    cells = request.env_option("width") * request.env_option("height")
    return max(0.0, float(cells * request.env_option("reward_food") + request.env_option("reward_win")))


def curriculum(config: Any) -> tuple[Phase, ...]:
    """Start with snakes of any length in mirrored views of the whole board: the agent learns to win before it learns to grow.

    Without this, some runs on mirrored views never fill a board. Unmirrored, backplay alone gives enough practice with long
    snakes, and more boards are filled in the end.
    """
    if config.view != "wrapped" or not config.mirror:
        return ()
    return (Phase("long", 0.0, 0.5, {"long_start": config.cells - 2}),)
