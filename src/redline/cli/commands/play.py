"""`redline play GAME`: play a game yourself, in the browser, alone or against a trained agent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from redline.cli import catalog
from redline.cli.command import Command, Request, check_least, options_of
from redline.cli.page import check_port, serve_page, web_extra
from redline.cli.parse import fold
from redline.core.errors import UserError
from redline.run.options import build
from redline.run.run_folder import read_config


@dataclass(frozen=True)
class PlayOptions:
    """Options of `redline play`."""

    against: str | None = None  # run folder of an agent that plays a game of the same seed beside yours
    seed: int | None = None  # of the first game; default: another one each time
    host: str = "127.0.0.1"  # address of the page; others than this machine then need the token that is printed
    port: int | None = None  # port of the page; default: the first free one from 8750 on
    trust: bool = False  # import the modules that a run of somebody else names as environment or algorithm

    def __post_init__(self) -> None:
        check_port(self.port)
        if self.seed is not None:
            check_least(self, seed=0)


def target(request: Request) -> tuple[str, str]:
    """Return the environment whose options the command takes."""
    return (request.arguments[0] if request.arguments else ""), "auto"


def run(request: Request) -> int:
    """Serve the page on which to play."""
    env = request.arguments[0]
    plain = {name: word for name, word in request.options.items() if "." not in name}
    words = {name.removeprefix("env."): word for name, word in fold(request.options).items() if name.startswith("env.")}
    options = build(PlayOptions, plain, "")
    if env.partition(":")[0] in catalog.cpu_kinds():
        raise UserError(
            f"{env} cannot be played by keys: only tensor games name theirs. redline watch shows agents play it."
        )
    if options.against:
        trained = read_config(Path(options.against))["env"]
        if trained != env:
            raise UserError(f"The agent in {options.against} plays {trained}, not {env}.")
    with web_extra("redline play"):
        from redline.web.play_page import PlayPage
        from redline.web.scores import scores_file

        job = {"env": env, "options": words, "seed": options.seed, "against": options.against}
        page = PlayPage(job | {"trust": options.trust, "scores": str(scores_file())})
    return serve_page(page, options.host, options.port, request.json)


COMMAND = Command(
    "play a game yourself in the browser, alone or against an agent",
    run,
    "GAME",
    options_of(PlayOptions),
    target,
    position=4,
)
