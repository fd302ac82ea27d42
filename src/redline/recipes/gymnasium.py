"""Recipe for Gymnasium environments (`gym:ID`): image preprocessing and networks for large images."""

from __future__ import annotations

from redline.envs.frames import is_image
from redline.envs.gym_make import PREFIX, probe
from redline.recipes import cpu_envs
from redline.recipes.recipe import ByClass, Request, Setting, Table

ALGO = cpu_envs.ALGO

_LARGE_IMAGE = 64  # rows and columns from which images are resized
_SLOW_CORES = "a few cores learn from about a thousand images per second"
_NATURE = "as in Mnih et al. 2015"

_IMAGE_NETWORK: Table = {
    "net": Setting("pixels", "images: a few convolutions with large strides"),
    "channels": Setting(ByClass((16, 32, 32), *[(32, 64, 64)] * 4), ByClass(_SLOW_CORES, *[_NATURE] * 4)),
    "hidden": Setting(ByClass((256,), *[(512,)] * 4), ByClass(_SLOW_CORES, *[_NATURE] * 4)),
    "learning_rate": Setting(5e-4, "normalized convolutions diverge above 1e-3"),
}
_IMAGE_ALGOS = ("dqn", "ppo", "pqn")  # the algorithms these were tried with


def image_settings(request: Request, channels: int) -> dict[str, Setting]:
    """Return settings for images with `channels` channels, whatever they show."""
    rows: dict[str, Setting] = {}
    if channels == 3:
        rows["env.grey"] = Setting(True, "a third of the bytes; colour rarely matters")
    if channels != 4:  # four channels are a stack of frames already
        rows["env.size"] = Setting(84, "small images keep what matters")
        rows["env.stack"] = Setting(4, "several frames show movement")
    return rows | (dict(_IMAGE_NETWORK) if request.algo in _IMAGE_ALGOS else {})


def settings(request: Request) -> dict[str, Setting]:
    """Return nothing for small observations; for large images, preprocessing and a network for pixels."""
    env = probe(request.game.name.removeprefix(PREFIX), request.env_options.get("kwargs"))
    shape = env.observation_space.shape or ()
    if not (is_image(env.observation_space) and min(shape[:2]) >= _LARGE_IMAGE):
        return {}
    rows = image_settings(request, channels=shape[2])
    frame_skip = request.env_option("frame_skip")
    if env.kwargs.get("frameskip", 1) == 1 and "frame_skip" not in request.env_options:
        rows["env.frame_skip"] = Setting(4, "people decide no faster")
        frame_skip = 4
    if frame_skip != 1:
        rows["env.frame_max"] = Setting(True, "keeps flickering sprites visible")
    rows["env.reward_clip"] = Setting(True, "the same settings learn from rewards of any size")
    return rows
