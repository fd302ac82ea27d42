"""`redline watch RUN...`: show trained agents play, in the browser, in the terminal or as a file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from redline.cli.command import Command, Request, check_least, options_of, show_progress
from redline.cli.page import check_port, serve_page, web_extra
from redline.core.errors import UserError
from redline.run.run_folder import read_config


@dataclass(frozen=True)
class WatchOptions:
    """Options of `redline watch`."""

    terminal: bool = False  # play in this terminal
    gif: str | None = None  # write an animation to this file, NAME.gif
    host: str = "127.0.0.1"  # address of the page; others than this machine then need the token that is printed
    port: int | None = None  # port of the page; default: the first free one from 8750 on
    wall: int = 12  # games of each run on the page
    seed: int = 0  # which held-out game
    games: int = 1  # games to play one after the other, in the terminal
    fps: float = 12.0  # steps shown per second
    max_steps: int = 2000  # longest GIF, in steps
    device: str = "cpu"  # where the network runs: cpu, cuda, cuda:N, mps
    trust: bool = False  # import the modules that a run of somebody else names as environment or algorithm

    def __post_init__(self) -> None:
        check_least(self, seed=0, games=1, max_steps=1, wall=1)
        check_port(self.port)
        if self.wall > 64:
            raise UserError(f"wall is {self.wall}; expected at most 64 games.")
        if self.fps <= 0:
            raise UserError(f"fps is {self.fps:g}; expected more than 0 frames per second.")


def run(request: Request) -> int:
    """Serve the page, or play in the terminal, into a file, or both."""
    options = request.build(WatchOptions)
    folders = [Path(word) for word in request.arguments]
    for folder in folders:
        read_config(folder)
    if options.terminal or options.gif:
        return play_here(request, options, folders)
    with web_extra("redline watch"):
        from redline.web.watch_page import WatchPage

        page = WatchPage(folders, min(options.wall, 64 // len(folders) or 1), options.trust, options.seed)
    return serve_page(page, options.host, options.port, request.json)


def play_here(request: Request, options: WatchOptions, folders: list[Path]) -> int:
    """Play one run in the terminal, into a GIF, or both."""
    if len(folders) > 1:
        raise UserError("--terminal and --gif show one run; name one, or leave them out for the page in the browser.")
    if options.gif and Path(options.gif).suffix.lower() != ".gif":
        raise UserError(f"gif is '{options.gif}'; watch writes GIF files only: give a name that ends in .gif.")
    if options.gif and not (target := Path(options.gif).parent).is_dir():
        raise UserError(f"gif is '{options.gif}', but there is no folder {target}; create it first.")
    folder = folders[0]
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
    "show agents play: in the browser, in the terminal, or as a GIF",
    run,
    "RUN [RUN ...]",
    options_of(WatchOptions),
    position=3,
)
