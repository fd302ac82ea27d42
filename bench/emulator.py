"""Compare Redline's emulator with nes-py's in Super Mario Bros. 1-1: `python bench/emulator.py [--out FILE] [--rounds 5]`.

Both play the same buttons from the same state in turn; the best of several rounds counts. Redline's draws only frames whose
screen is read, nes-py's every frame. Whole steps are those of an actor: four frames, the last of them read, converted to
greyscale and resized to 84x84, including everything around the emulator.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from redline.envs import images, mario, nes
from redline.tools.bench import describe_machine

FRAMES, STEPS = 600, 200  # of a round
BUTTONS = (128, 129, 130, 131)  # to the right, jumping, running


def environment(fast: bool) -> Any:
    """Return an environment as used by actors, with Redline's emulator and image library, or with nes-py and NumPy."""
    mario._emulator.cache_clear()
    game = mario.MarioGame("mario:1-1")
    config = game.Config(frame_skip=4, grey=True, size=84, show_action=True)
    if fast:
        return game.make(config)
    without = mock.patch.object(nes, "library", side_effect=OSError("not wanted"))
    with without, mock.patch.object(images, "library", return_value=None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return game.make(config)


def seconds(play: Callable[[], None], count: int) -> float:
    began = time.perf_counter()
    play()
    return (time.perf_counter() - began) / count


def play_frames(env: Any, draw: bool) -> None:
    emulator, rng = env.unwrapped.emulator, random.Random(0)
    console = getattr(emulator, "console", None)
    env.reset(seed=0)
    for frame in range(FRAMES):
        if frame % 12 == 0:
            buttons = rng.choice(BUTTONS)
        if console:
            console.step(buttons, draw)
        else:
            emulator._frame_advance(buttons)


def play_steps(env: Any) -> None:
    rng, over = random.Random(0), True
    for _ in range(STEPS):
        if over:
            env.reset(seed=0)
        *_, terminated, truncated, _ = env.step(rng.randrange(1, 5))
        over = terminated or truncated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    envs = {"nes-py": environment(False), "redline": environment(True)}
    plays: dict[str, tuple[Callable[[Any], None], int]] = {
        "frame_ms": (lambda env: play_frames(env, draw=True), FRAMES),
        "hidden_frame_ms": (lambda env: play_frames(env, draw=False), FRAMES),
        "step_ms": (play_steps, STEPS),
    }
    figures = {name: dict.fromkeys(plays, float("inf")) for name in envs}
    for _ in range(arguments.rounds):
        for name, env in envs.items():
            for key, (play, count) in plays.items():
                figures[name][key] = min(figures[name][key], 1e3 * seconds(lambda p=play, e=env: p(e), count))
    ratios = {key: figures["nes-py"][key] / figures["redline"][key] for key in plays}
    print("milliseconds   a frame  not drawn  a step of four, preprocessed")
    for name, row in (*figures.items(), ("ratio", ratios)):
        print(f"{name:12}{row['frame_ms']:10.3f}{row['hidden_frame_ms']:11.3f}{row['step_ms']:11.3f}")
    if arguments.out:
        record = describe_machine("cpu") | {
            "command": "python bench/emulator.py",
            "milliseconds": figures,
            "ratios": ratios,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
