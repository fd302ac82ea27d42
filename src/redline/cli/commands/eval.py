"""`redline eval RUN...`: play held-out games with the agents of one or more runs and report the score."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.cli.command import Command, Request, check_least, options_of, show_progress
from redline.core.errors import StorageError
from redline.run.run_folder import read_config, to_stderr, write_json

if TYPE_CHECKING:
    from redline.run.agent import Agent
    from redline.run.progress import Progress


@dataclass(frozen=True)
class EvalOptions:
    """Options of `redline eval`."""

    episodes: int = 256  # games to play, each to its end; with --max-steps: games played at once
    max_steps: int = 0  # play this many steps in all instead, for agents whose games are very long; 0: no limit
    sample: bool = False  # sample actions from the policy, as in training, instead of taking the likeliest
    seed: int = 0  # which set of held-out games
    checkpoint: str = "newest"  # newest, best (by --eval-every) or the step of a checkpoint
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    trust: bool = False  # import the modules that a run of somebody else names as environment or algorithm

    def __post_init__(self) -> None:
        check_least(self, episodes=1, max_steps=0, seed=0)


def run(request: Request) -> int:
    """Evaluate every run on the same games, store each result in its run folder and print them."""
    options, folders = request.build(EvalOptions), [Path(run) for run in request.arguments]
    configs = [read_config(folder) for folder in folders]
    with show_progress(" · ".join(request.arguments)) as screen:
        from redline.run.agent import load_agent
        from redline.run.watchdog import watch_command
        from redline.tools.wording import comparison, evaluation

        with watch_command(configs[0]["env"], screen) as watchdog:
            agents = [load_agent(folder, options.device, options.trust, options.checkpoint) for folder in folders]
            watchdog.allow(agents[0].rules.config)
            result = evaluate(agents, options, screen)
    spec = agents[0].rules.game.spec(agents[0].rules.config)
    for agent, record in zip(agents, result.get("runs", [result]), strict=True):
        try:
            write_json(agent.path / "eval.json", record)
        except StorageError as error:  # the run folder may be read-only: still show the result
            to_stderr(f"redline: {error}")
    if request.json:
        request.print_json(result)
    else:
        print(comparison(result, spec) if len(agents) > 1 else evaluation(result, spec))
    return 0


def evaluate(agents: list[Agent], options: EvalOptions, screen: Progress) -> dict[str, Any]:
    """Return the result of one agent, or the combined result of several."""
    from redline.run.compare import evaluate_runs

    screen.start_activity("Evaluating")
    total, unit = (options.max_steps, "steps") if options.max_steps else (options.episodes, "games")

    def progress(number: int, done: int) -> None:
        of_runs = f", run {number + 1} of {len(agents)}" if len(agents) > 1 else ""
        screen.count(done, total, f"{unit}{of_runs}")

    budget = options.max_steps, options.sample
    if len(agents) > 1:
        return evaluate_runs(agents, options.episodes, options.seed, progress, *budget)
    return agents[0].evaluate(options.episodes, options.seed, functools.partial(progress, 0), *budget)


COMMAND = Command(
    "play held-out games and report mean, IQM and intervals; of several runs also over all of them",
    run,
    "RUN [RUN ...]",
    options_of(EvalOptions),
    position=2,
)
