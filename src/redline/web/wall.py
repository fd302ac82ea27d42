"""A wall of games: several games of one run, played side by side by its agent."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from redline.core.records import where
from redline.envs import Rules, batch
from redline.envs.gym_game import GymState, stacked
from redline.games import draw_cells
from redline.run.agent import Agent
from redline.run.evaluate import HELD_OUT
from redline.tools.watch import film, paint_step
from redline.web.boards import Outputs, describe_stage, encode_games, encode_picture, outcome


class Wall(Protocol):
    """Games of one run. The agent may be replaced by one with newer weights at any time."""

    agent: Agent

    def stage(self) -> dict[str, Any]:
        """Return the stage message."""

    def frame(self) -> list[dict[str, Any]]:
        """Return the games as they are now."""

    def step(self) -> None:
        """Take one step in every game; games that had ended restart instead."""

    def close(self) -> None:
        """Release the environments."""


def make_wall(agent: Agent, count: int, seed: int = 0) -> Wall:
    """Return `count` held-out games of an agent's environment; at most four of a CPU environment."""
    if agent.rules.game.ON_CPU:
        return CpuWall(agent, min(count, 4), HELD_OUT + seed)
    return TensorWall(agent, count, HELD_OUT + seed)


class TensorGames:
    """Tensor games, played as one batch with given actions and drawn step by step."""

    def __init__(self, rules: Rules, count: int, seed: int) -> None:
        self.rules = rules
        self.envs = batch.reset(rules, batch.env_keys(seed, torch.arange(count)))
        self.painted = draw_cells(rules.game, rules.config, self.envs.game)
        self.over = torch.zeros(count, dtype=torch.bool)  # the game has ended; its last State is shown
        self.won, self.truncated = self.over, self.over

    @torch.inference_mode()
    def play(self, actions: Tensor) -> None:
        """Take the actions (N,); games that had ended restart instead."""
        rules, before, over = self.rules, self.envs, self.over
        state, reward, terminated, events = rules.game.step(rules.config, before.game, actions)
        episode = before.episode._replace(
            length=before.episode.length + 1,
            score=before.episode.score + events.score,
            episode_return=before.episode.episode_return + reward,
        )
        late = (episode.length >= rules.time_limit) if rules.time_limit else torch.zeros_like(terminated)
        painted = paint_step(rules, self.painted, before.game, state)
        self.envs = before._replace(game=state, episode=episode)
        if over.any():
            fresh = batch.next_episode(rules, before, over)
            self.envs = where(over, fresh, self.envs)
            painted = torch.where(over.view(-1, 1, 1), draw_cells(rules.game, rules.config, fresh.game), painted)
        self.painted = painted
        self.won, self.truncated = events.won & ~over, (events.truncated | late) & ~terminated & ~over
        self.over = (terminated & ~over) | self.truncated

    def frame(self) -> list[dict[str, Any]]:
        """Return the games as they are now."""
        messages, episode = encode_games(self.rules, self.envs.game, self.painted), self.envs.episode
        for game, message in enumerate(messages):
            message |= {"score": int(episode.score[game]), "length": int(episode.length[game])}
            message["reward"] = round(float(episode.episode_return[game]), 3)
            if self.over[game]:
                message["ended"] = outcome(bool(self.won[game]), bool(self.truncated[game]))
        return messages


class TensorWall(TensorGames):
    """Tensor games played by an agent."""

    def __init__(self, agent: Agent, count: int, seed: int) -> None:
        super().__init__(agent.rules, count, seed)
        self.agent = agent
        self.outputs = self._ask()

    def stage(self) -> dict[str, Any]:
        return describe_stage(self.rules, self.agent.config["algo"])

    @torch.inference_mode()
    def _ask(self) -> Outputs:
        state, rules = self.envs.game, self.rules
        return Outputs(self.agent, rules.game.observe(rules.config, state), batch.legal(rules, state))

    def step(self) -> None:
        self.play(self.outputs.actions)
        self.outputs = self._ask()

    def frame(self) -> list[dict[str, Any]]:
        messages = super().frame()
        for game, message in enumerate(messages):
            if "ended" not in message:
                message |= self.outputs.describe(game)
        return messages

    def close(self) -> None:
        """Nothing to release."""


class CpuWall:
    """Gymnasium environments, shown by the frames they render."""

    def __init__(self, agent: Agent, count: int, seed: int) -> None:
        self.agent, self.rules = agent, agent.rules
        self.envs, self.cameras = film(self.rules, count)
        self.frames = self.rules.game.spec(self.rules.config).frames
        self.envs.reset(seed)
        self.stack = torch.from_numpy(self.envs.obs).unsqueeze(1).repeat_interleave(self.frames, 1)
        self.begins = torch.ones(count, dtype=torch.bool)
        self.pictures = [camera.pictures.pop() for camera in self.cameras]
        self.outputs = self._ask()

    def stage(self) -> dict[str, Any]:
        stage = describe_stage(self.rules, self.agent.config["algo"])
        meanings = getattr(self.cameras[0].unwrapped, "get_action_meanings", None)
        names = [str(name).lower() for name in meanings()] if meanings else []
        return stage | ({"actions": names} if len(names) == len(stage["actions"]) else {})

    def _ask(self) -> Outputs:
        game: Any = self.rules.game
        self.stack = stacked(self.stack, torch.from_numpy(self.envs.obs), self.begins)
        newest: Tensor = self.stack if self.frames > 1 else self.stack[:, 0]
        return Outputs(self.agent, game.observe(self.rules.config, GymState(newest)), None)

    def step(self) -> None:
        for camera in self.cameras:
            camera.pictures.clear()
        self.envs.step(self.outputs.actions.numpy())
        self.begins = torch.from_numpy(self.envs.terminated | self.envs.truncated)
        self.pictures = [camera.pictures[0] for camera in self.cameras]
        self.outputs = self._ask()

    def frame(self) -> list[dict[str, Any]]:
        messages = []
        for game, picture in enumerate(self.pictures):
            rows, columns = picture.shape[:2]
            message: dict[str, Any] = {"rows": rows, "columns": columns, "picture": encode_picture(picture)}
            message |= {"score": round(float(self.envs.score[game]), 3), "length": int(self.envs.length[game])}
            message["reward"] = round(float(self.envs.episode_return[game]), 3)
            if self.envs.episode_over[game]:
                message["ended"] = outcome(bool(self.envs.won[game]), not bool(self.envs.lost[game]))
            else:
                message |= self.outputs.describe(game)
            messages.append(message)
        return messages

    def close(self) -> None:
        self.envs.close()
