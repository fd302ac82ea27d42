"""`redline watch RUN...`: show trained agents play, in the browser, in the terminal or as a file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.cli.command import Command, Request, check_least, options_of, show_progress
from redline.cli.page import check_port, serve_page, web_extra
from redline.core.errors import UserError
from redline.run.run_folder import read_config

if TYPE_CHECKING:
    from redline.run.agent import Agent
    from redline.run.progress import Progress


@dataclass(frozen=True)
class WatchOptions:
    """Options of `redline watch`."""

    terminal: bool = False  # play in this terminal
    gif: str | None = None  # write an animation to this file, NAME.gif
    mp4: str | None = None  # write a video to this file, NAME.mp4 (extra `video`)
    html: str | None = None  # write a page that replays games, with controls, to this file, NAME.html
    host: str = "127.0.0.1"  # address of the page; others than this machine then need the token that is printed
    port: int | None = None  # port of the page; default: the first free one from 8750 on
    wall: int = 12  # games of each run on the page
    seed: int = 0  # which held-out game
    games: int = 1  # games to play one after the other, in the terminal or into the HTML page
    fps: float = 12.0  # steps shown per second
    max_steps: int = 2000  # longest recording of a game, in steps
    checkpoint: str = "newest"  # newest, best (by --eval-every) or a step; not on the page in the browser
    device: str = "cpu"  # where the network runs: cpu, cuda, cuda:N, mps
    trust: bool = False  # import the modules that a run of somebody else names as environment or algorithm

    def __post_init__(self) -> None:
        check_least(self, seed=0, games=1, max_steps=1, wall=1)
        check_port(self.port)
        if self.wall > 64:
            raise UserError(f"wall is {self.wall}; expected at most 64 games.")
        if self.fps <= 0:
            raise UserError(f"fps is {self.fps:g}; expected more than 0 frames per second.")

    def files(self) -> dict[str, Path]:
        """Return the files to write, by kind."""
        named = {"gif": self.gif, "mp4": self.mp4, "html": self.html}
        return {kind: Path(name) for kind, name in named.items() if name}


def run(request: Request) -> int:
    """Serve the page, or play in the terminal, to files, or both."""
    options = request.build(WatchOptions)
    folders = [Path(word) for word in request.arguments]
    files = options.files()
    for name, file in files.items():
        check_file(name, file)
    for folder in folders:
        read_config(folder)
    if options.terminal or files:
        if len(folders) > 1:
            raise UserError(
                "--terminal and files show one run; name one, or leave them out for the page in the browser."
            )
        return play_here(request, options, folders[0], files)
    if options.checkpoint != "newest":
        raise UserError(
            "--checkpoint is for the terminal and for files; the page in the browser follows the newest weights."
        )
    with web_extra("redline watch"):
        from redline.web.watch_page import WatchPage

        page = WatchPage(folders, min(options.wall, 64 // len(folders) or 1), options.trust, options.seed)
    return serve_page(page, options.host, options.port, request.json)


def check_file(name: str, path: Path) -> None:
    """Raise UserError for a file whose suffix does not match the option, or in a folder that does not exist."""
    if path.suffix.lower() != f".{name}":
        raise UserError(f"{name} is '{path}'; give a name that ends in .{name}.")
    if not path.parent.is_dir():
        raise UserError(f"{name} is '{path}', but there is no folder {path.parent}; create it first.")
    if name == "mp4":
        from redline.tools.video import check_video

        check_video()


def play_here(request: Request, options: WatchOptions, folder: Path, files: dict[str, Path]) -> int:
    """Play one run in the terminal, to files, or both."""
    env = read_config(folder)["env"]
    with show_progress(str(folder), erase=True) as progress:
        from redline.run.agent import load_agent
        from redline.run.evaluate import HELD_OUT
        from redline.run.watchdog import watch_command
        from redline.tools.watch import leave_screen, play_terminal

        seed = HELD_OUT + options.seed  # a game of the evaluation, never one of training
        with watch_command(env, progress) as watchdog:
            agent = load_agent(folder, options.device, options.trust, options.checkpoint)
            watchdog.allow(agent.rules.config)
            results, lines = record_files(agent, seed, options, files, progress)
    for line in lines:
        print(line, file=sys.stderr)
    if options.terminal:
        out = sys.stderr if request.json else sys.stdout
        with watch_command(env, progress, restore=lambda: leave_screen(out)) as watchdog:
            watchdog.allow(agent.rules.config)
            results = play_terminal(agent.rules, agent.policy, seed, fps=options.fps, games=options.games, out=out)
    if request.json:
        games = [result._asdict() for result in results]
        request.print_json({"run": request.arguments[0], "env": agent.config["env"], "games": games})
    return 0


def record_files(
    agent: Agent, seed: int, options: WatchOptions, files: dict[str, Path], progress: Progress
) -> tuple[list[Any], list[str]]:
    """Write the files; return the results of the games in the last file, and a line about each file."""
    from redline.tools.watch import record_gif, record_mp4

    results: list[Any] = []
    lines = []
    for kind, path in files.items():
        progress.start_activity(f"Recording {path.name}")
        if kind == "html":
            results = record_page(agent, path, options)
            scores = ", ".join(f"{result.score:g}" for result in results)
            lines.append(f"{path}: {len(results)} game{'s' * (len(results) > 1)}, score {scores}")
            continue
        write = record_gif if kind == "gif" else record_mp4
        results = [write(agent.rules, agent.policy, seed, path, fps=options.fps, max_steps=options.max_steps)]
        lines.append(f"{path}: {results[0].length} steps, score {results[0].score:g}, {results[0].outcome}")
    return results, lines


def record_page(agent: Agent, path: Path, options: WatchOptions) -> list[Any]:
    """Write a page that replays games and return their results."""
    from redline.tools.watch import Result
    from redline.web.replay import record_games, write_replay

    record = record_games(agent, options.seed, options.games, options.max_steps)
    write_replay(path, record, options.fps)
    ends = [frames[-1] for frames in record["games"]]
    outcomes = [end.get("ended", "truncated") for end in ends]
    return [
        Result(end["score"], end["length"], end["reward"], outcome == "won", outcome == "truncated")
        for end, outcome in zip(ends, outcomes, strict=True)
    ]


COMMAND = Command(
    "show agents play: in the browser, in the terminal, or as a GIF, video or page to send",
    run,
    "RUN [RUN ...]",
    options_of(WatchOptions),
    position=3,
)
