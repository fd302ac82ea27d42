"""The arena: a person plays a game with keys, alone or against an agent that plays a game with the same seed."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from redline.core.errors import UserError
from redline.envs import Rules, batch, change_rules, make_rules
from redline.games import Controls
from redline.run.agent import Agent, load_agent
from redline.run.options import parse
from redline.web.boards import describe_stage
from redline.web.player import Commands, Send
from redline.web.scores import add_score, read_scores
from redline.web.wall import TensorGames, TensorWall

YOU, AGENT = 0, 1  # indices of the two games in messages
_UNHURRIED = 2.0  # steps per second of an opponent in games that wait for keys
_WAITING_KEYS = 2  # buffered keys, if pressed faster than steps are taken; more are dropped


def human_rules(env: str, options: dict[str, Any], agent: Agent | None = None) -> Rules:
    """Return the rules for a human player: the game's options for people, with the agent's board."""
    shared = agent.env_options if agent else {}
    plain = make_rules(env, {})
    if plain.game.ON_CPU or plain.game.controls is None:
        raise UserError(f"{env} names no keys (controls) with which a person could play it.")
    rules = change_rules(plain, shared | plain.game.HUMAN | parse(plain.game.Config, options, "env."), env)
    if rules.game.controls is None or rules.game.controls(rules.config, 1) is None:
        raise UserError(f"{env} cannot be played by keys with these options.")
    return rules


class Arena:
    """Play one match after another, in the phases ready, playing, paused and over."""

    def __init__(self, job: dict[str, Any], send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self.job, self.send, self.clock = job, send, clock
        self.agent = load_agent(Path(job["against"]), "cpu", job["trust"]) if job.get("against") else None
        self.base_rules = human_rules(job["env"], job["options"], self.agent)
        self.scores_file, self.board = Path(job["scores"]), board_name(job["env"], self.base_rules)
        self.matches = 0
        self.start()

    def start(self) -> None:
        """Set up a new match: both games with the same seed."""
        seed = secrets.randbelow(1 << 31) if self.job.get("seed") is None else self.job["seed"] + self.matches
        self.matches += 1
        self.phase, self.level = "ready", 1
        self.rank: int | None = None  # among the high scores
        self.keys: deque[int] = deque(maxlen=_WAITING_KEYS)
        self.last: int | None = None
        self.controls = self._controls()
        self.you = TensorGames(self.base_rules, 1, seed)
        self.opponent = TensorWall(self.agent, 1, seed) if self.agent else None
        self.opponent_over = False
        self._due = self._opponent_due = 0.0
        self._changed = True

    def _controls(self) -> Controls:
        game = self.base_rules.game
        controls = game.controls(self.base_rules.config, self.level) if game.controls else None
        assert controls is not None
        return controls

    @property
    def score(self) -> int:
        return int(self.you.envs.episode.score[0])

    def obey(self, command: dict[str, Any]) -> None:
        """Handle a command: a key, a new match, or a pause."""
        do, value = command.get("do"), command.get("value")
        if do == "new" or (do == "key" and value == "Enter" and self.phase == "over"):
            self.start()
        elif do == "pause" and self.phase in ("playing", "paused"):
            self._enter("paused" if value else "playing")
        elif do == "key" and isinstance(value, str) and self.phase in ("ready", "playing"):
            action = self.controls.keys.get(value)
            if action is None:
                return
            if self.phase == "ready":
                self._enter("playing")
            turns = self.controls.idle is None and self.controls.ticks  # a key held down must not fill the queue
            if not (turns and self.keys and self.keys[-1] == action):
                self.keys.append(action)

    def _enter(self, phase: str) -> None:
        self.phase, self._changed = phase, True
        self._due = self._opponent_due = self.clock()

    def advance(self) -> float:
        """Take the steps that are due and send changes; return the seconds until the next step."""
        now = self.clock()
        if self.phase == "playing" and (now >= self._due if self.controls.ticks else self.keys):
            self._due = max(self._due + 1 / self.controls.ticks, now) if self.controls.ticks else now
            self._step()
        racing = self.opponent and not self.opponent_over and self.phase in ("playing", "over")
        if racing and now >= self._opponent_due:
            self._opponent_due = max(self._opponent_due + 1 / self._opponent_ticks(), now)
            self._step_opponent()
        if self._changed:
            self._changed = False
            self.send_all()
        waits = [self._due] if self.phase == "playing" and self.controls.ticks else []
        waits += [self._opponent_due] if racing and not self.opponent_over else []
        return min((due - self.clock() for due in waits), default=0.5)

    def _step(self) -> None:
        idle = self.last if self.controls.idle is None else self.controls.idle
        action = self.keys.popleft() if self.keys else idle
        legal = batch.legal(self.you.rules, self.you.envs.game)
        if action is None or (legal is not None and not legal[0, action]):  # ignore illegal keys
            return
        self.last = action
        self.you.play(torch.tensor([action]))
        self._changed = True
        level = 1 + self.score // self.controls.level_score if self.controls.level_score else 1
        if level != self.level:
            self.level = level
            self.controls = self._controls()
            self.you.rules = change_rules(self.base_rules, self.controls.options)
        if bool(self.you.over[0]):
            self.phase = "over"
            self.rank = add_score(self.scores_file, self.board, self.score, int(self.you.envs.episode.length[0]))

    def _opponent_ticks(self) -> float:
        same = self.agent is not None and self.agent.rules.config == self.base_rules.config
        ticks = self.controls.ticks if same or not self.controls.agent_ticks else self.controls.agent_ticks
        return ticks or _UNHURRIED

    def _step_opponent(self) -> None:
        assert self.opponent
        self.opponent.step()
        self.opponent_over = bool(self.opponent.over[0])
        self._changed = True

    def send_stages(self) -> None:
        """Send the stages of the games, once."""
        self.send({"type": "stage", "run": YOU, **describe_stage(self.base_rules)})
        if self.opponent:
            self.send({"type": "stage", "run": AGENT, **self.opponent.stage()})

    def send_all(self) -> None:
        """Send the state of the match and both games."""
        names = describe_stage(self.base_rules)["actions"]
        keys: dict[str, list[str]] = {}
        for key, action in self.controls.keys.items():
            keys.setdefault(names[action], []).append(key)
        state = {"type": "state", "run": YOU, "phase": self.phase, "level": self.level, "rank": self.rank, "keys": keys}
        state |= {"scores": read_scores(self.scores_file, self.board), "levels": bool(self.controls.level_score)}
        if self.agent:
            state["opponent"] = {"name": self.agent.path.resolve().name, "over": self.opponent_over}
        self.send(state)
        self.send({"type": "frame", "run": YOU, "games": self.you.frame()})
        if self.opponent:
            self.send({"type": "frame", "run": AGENT, "games": self.opponent.frame()})

    def run(self, commands: Commands) -> None:
        """Play until the command stream ends."""
        self.send_stages()
        wait = 0.0
        while True:
            for command in commands.wait(wait):
                self.obey(command)
            wait = self.advance()


def board_name(env: str, rules: Rules) -> str:
    """Return the key of the high-score table: the game and its options that differ from the defaults for people.

    Options of rewards are ignored: a person plays for the score.
    """
    usual = vars(change_rules(make_rules(env, {}), rules.game.HUMAN).config)
    options = {name: value for name, value in sorted(vars(rules.config).items()) if usual[name] != value}
    return " ".join([env, *(f"{name}={value}" for name, value in options.items() if not name.startswith("reward"))])
