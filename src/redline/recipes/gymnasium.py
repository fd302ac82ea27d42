"""Recipe for Gymnasium environments (`gym:ID`), chosen by their observation space and by random play.

- The observation is one of n states: a table of values, learned by DQN.
- Random play costs the same at every step and never reaches a goal, as in MountainCar: DQN.
- Large images: the usual preprocessing, and a network for pixels. Atari gets its standard preprocessing and more games.
- All others, vectors and small boards: every number is scaled to about 1.
"""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from redline.envs import atari
from redline.envs.frames import is_image
from redline.envs.gym_make import PREFIX, EnvInfo, probe
from redline.recipes import cpu_envs
from redline.recipes.recipe import ByClass, Request, Setting, Table, by_device, per_core

_LARGEST_TABLE = 100_000  # largest number of states for a table of values
_LARGE_IMAGE = 64  # images with at least as many rows and columns are resized
_SLOW_CORES = "a few cores learn from about a thousand images per second"
_NATURE = "as in Mnih et al. 2015"

_IMAGE_NETWORK: Table = {
    "net": Setting("pixels", "for images: a few convolutions with large strides"),
    "channels": Setting(ByClass((16, 32, 32), *[(32, 64, 64)] * 4), ByClass(_SLOW_CORES, *[_NATURE] * 4)),
    "hidden": Setting(ByClass((256,), *[(512,)] * 4), ByClass(_SLOW_CORES, *[_NATURE] * 4)),
    "learning_rate": Setting(5e-4, "normalized convolutions diverge above 1e-3"),
}
# These settings solved Taxi-v4 after 30 thousand steps; PPO had learned nothing by then.
_TABLE_DQN: Table = {
    "hidden": Setting((), "one of n states: a table with a value for every state and action, no network"),
    "n_step": Setting(1, "a table learns quickly enough, and longer returns would add noise from exploration"),
    "learning_rate": Setting(3e-3, "updating one state does not change the others"),
}

# On a CPU, the cost of small networks is mostly call overhead: make fewer calls with larger batches.
_VECTOR_PPO: Table = {
    "num_envs": Setting(by_device(cpu=per_core(at_least=16)), "enough to share the cost of a forward pass"),
    "rollout_steps": Setting(by_device(cpu=128), "2,048 steps between updates: enough of an episode to learn from"),
    "batch_size": Setting(by_device(cpu=128), "sixteen gradient steps per epoch, each with little overhead"),
}

# PPO's usual settings for Atari (Schulman et al. 2017: 8 games, batches of 256), scaled to the games the cores can play.
_ATARI_PPO: Table = {
    "learning_rate": Setting(5e-4, "twice the usual rate: batches are about four times as large"),
    "learning_rate_end": Setting(5e-5, "late updates make only small changes"),
    "clip_range": Setting(0.1, "as in Schulman et al. 2017"),
    "epochs": Setting(4, "as in Schulman et al. 2017"),
}
# DQN for emulator images: the replay memory holds minutes of play, not seconds.
EMULATOR_DQN: Table = {
    "learning_rate": Setting(2.5e-4, "each step is learned from many times"),
    "learning_rate_end": Setting(2.5e-5, "late updates make only small changes"),
    "n_step": Setting(3, "as in Hessel et al. 2018"),
    "distribution": Setting("quantile", "an action succeeds or fails: models both outcomes, not only their mean"),
    "dueling": Setting(True, "in most frames the choice of action matters little"),
    "tau": Setting(0.005, "a slowly moving target network keeps values from growing"),
    "replay_capacity": Setting(ByClass(20_000, 100_000, 100_000, 200_000, 500_000), "7 KB per frame"),
    "learning_starts": Setting(ByClass(1_000, 5_000, 5_000, 10_000, 20_000), "a few games of each environment"),
    "epsilon_steps": Setting(by_device(cpu=20_000, gpu=200_000), "the first minutes of play"),
    "epsilon_high": Setting(0.1, "some environments keep exploring"),
    "epsilon_low": Setting(0.002, "other environments play well to the end of a game"),
}
_GAMES_PER_CORE = 8  # emulators are fast: one group must keep its actor busy while the other group's actions are chosen

_IMAGE_ALGOS = ("dqn", "ppo", "pqn")  # the algorithms tested with the settings for images


def image_settings(request: Request, channels: int) -> dict[str, Setting]:
    """Return settings for images with `channels` channels."""
    rows: dict[str, Setting] = {}
    if channels == 3:
        rows["env.grey"] = Setting(True, "a third of the bytes; colour rarely matters")
    if channels != 4:  # four channels are already a stack of frames
        rows["env.size"] = Setting(84, "small images still show everything that matters")
        rows["env.stack"] = Setting(4, "several frames show movement")
    return rows | (dict(_IMAGE_NETWORK) if request.algo in _IMAGE_ALGOS else {})


def choose_algo(request: Request) -> Setting:
    """Return DQN for tables of states, for goals that random play never reaches, and on a GPU for Atari; else PPO."""
    if _states(_look(request)):
        return Setting("dqn", "the observation is one of a number of states: replay fills a table of their values")
    if atari.is_atari(request.game.name):
        if request.on_gpu:
            return Setting(
                "dqn", "a GPU learns from each frame many times: with replay, DQN needs fewer frames than PPO"
            )
        return cpu_envs.ALGO
    game: Any = request.game
    if request.may_play and game.costs_are_constant(game.Config(**request.env_options)):
        return Setting("dqn", "every step of random play costs the same, which teaches PPO nothing")
    return cpu_envs.ALGO


def settings(request: Request) -> dict[str, Setting]:
    """Return settings for a table of states, for large images, or for any other observation."""
    env = _look(request)
    if is_image(env.observation_space) and min((env.observation_space.shape or ())[:2]) >= _LARGE_IMAGE:
        return _large_image(request, env)
    rows: dict[str, Setting] = {}
    if (states := _states(env)) and request.algo == "dqn":
        rows |= _TABLE_DQN | {"epsilon_steps": _table_exploration(states)}
    elif request.algo == "ppo":
        rows |= _VECTOR_PPO
    if "obs_scale" not in request.env_options and not request.env_option("binary"):
        game: Any = request.game
        config = game.Config(**request.env_options)
        if request.may_play:
            scale, reason = game.random_play(config).obs_scale, "scales the values seen in random play to about 1"
        else:
            scale, reason = game.announced_scale(config), "scales the bounds of the spaces to about 1"
        rows["env.obs_scale"] = Setting(scale, f"{reason}, as networks expect")
    return rows


def _look(request: Request) -> EnvInfo:
    return probe(request.game.name.removeprefix(PREFIX), request.env_options.get("kwargs"))


def _states(env: EnvInfo) -> int:
    """Return the number of states if the observation is one of a number that a table can hold; else 0."""
    space = env.observation_space
    return int(space.n) if isinstance(space, spaces.Discrete) and space.n <= _LARGEST_TABLE else 0


def _table_exploration(states: int) -> Setting:
    """Return the steps until epsilon is low for a table of so many states.

    With 10,000 steps, one of five seeds left some of Taxi's 500 states untried and failed in them; with 25,000, none of six.
    """
    return Setting(min(max(10_000, 50 * states), 100_000), "fifty steps for each state: every one is tried")


def _large_image(request: Request, env: EnvInfo) -> dict[str, Setting]:
    """Return the preprocessing and the network for images."""
    rows = image_settings(request, channels=(env.observation_space.shape or ())[2])
    rows |= _atari(request, env) if atari.is_atari(request.game.name) else {}
    frame_skip = request.env_option("frame_skip")
    may_skip = atari.is_atari(request.game.name) or env.kwargs.get("frameskip", 1) == 1
    if may_skip and "frame_skip" not in request.env_options:
        rows["env.frame_skip"] = Setting(4, "people do not decide faster either")
        frame_skip = 4
    if frame_skip != 1:
        rows["env.frame_max"] = Setting(True, "keeps flickering sprites visible")
    rows["env.reward_clip"] = Setting(True, "the same settings work for rewards of any size")
    return rows


def _atari(request: Request, env: EnvInfo) -> dict[str, Setting]:
    """Return the additional settings for Atari: how episodes start, and sizes for many cores."""
    rows = {"env.noops": Setting(30, "games start from different states, as in Mnih et al. 2015")}
    if "FIRE" in env.action_meanings:
        rows["env.fire"] = Setting(True, "some games wait for FIRE before they start")
    rows |= {"ppo": _ATARI_PPO, "dqn": EMULATOR_DQN}.get(request.algo, {})
    if request.hardware.tier != "cpu-few" and request.algo in ("ppo", "dqn"):
        games = _GAMES_PER_CORE * max(2, request.hardware.cores - 1)
        rows["num_envs"] = Setting(games, "eight per core that plays, to share a forward pass")
        rows["batch_size"] = Setting(ByClass(512, 512, 512, 512, 1024), "learns from each step many times")
        if request.algo == "ppo":
            rows["rollout_steps"] = Setting(64, "short rollouts of many games are more varied than long ones of few")
            rows["batch_size"] = Setting(games * 64 // 8, "an eighth of a rollout")
    return rows
