"""`redline watch RUN`: show a trained agent play, in the terminal or as a GIF."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from redline.cli.command import Command, Request, check_least, options_of, show_progress
from redline.core.errors import UserError
from redline.run.run_folder import read_config


@dataclass(frozen=True)
class WatchOptions:
    """Options of `redline watch`."""

    terminal: bool = False  # play in this terminal
    gif: str | None = None  # write an animation to this file, NAME.gif
    seed: int = 0  # which held-out game
    games: int = 1  # games to play one after the other, in the terminal
    fps: float = 12.0  # steps shown per second
    max_steps: int = 2000  # longest GIF, in steps
    device: str = "cpu"  # where the network runs: cpu, cuda, cuda:N, mps
    trust: bool = False  # import the modules that a run of somebody else names as environment or algorithm

    def __post_init__(self) -> None:
        check_least(self, seed=0, games=1, max_steps=1)
        if self.fps <= 0:
            raise UserError(f"fps is {self.fps:g}; expected more than 0 frames per second.")


def run(request: Request) -> int:
    """Play in the terminal, into a GIF, or both."""
    options = request.build(WatchOptions)
    if not options.terminal and not options.gif:
        raise UserError("redline watch needs --terminal (play here) or --gif FILE (write an animation).")
    if options.gif and Path(options.gif).suffix.lower() != ".gif":
        raise UserError(f"gif is '{options.gif}'; watch writes GIF files only: give a name that ends in .gif.")
    if options.gif and not (folder := Path(options.gif).parent).is_dir():
        raise UserError(f"gif is '{options.gif}', but there is no folder {folder}; create it first.")
    folder = Path(request.arguments[0])
    read_config(folder)
    with show_progress(str(folder), erase=True) as progress:
        from redline.run.agent import load_agent
        from redline.run.evaluate import HELD_OUT
        from redline.tools.watch import play_terminal, record_gif

        agent = load_agent(folder, options.device, options.trust)
        seed = HELD_OUT + options.seed  # one of the games that evaluation plays, never one of training
        if options.gif:
            progress.start_activity("Recording")
            path = Path(options.gif)
            results = [record_gif(agent.rules, agent.policy, seed, path, fps=options.fps, max_steps=options.max_steps)]
    if options.gif:
        print(f"{path}: {results[0].length} steps, score {results[0].score:g}, {results[0].outcome}", file=sys.stderr)
    if options.terminal:
        out = sys.stderr if request.json else sys.stdout
        results = play_terminal(agent.rules, agent.policy, seed, fps=options.fps, games=options.games, out=out)
    if request.json:
        games = [result._asdict() for result in results]
        request.print_json({"run": request.arguments[0], "env": agent.config["env"], "games": games})
    return 0


COMMAND = Command(
    "show a trained agent play, in the terminal or as a GIF", run, "RUN", options_of(WatchOptions), position=3
)
