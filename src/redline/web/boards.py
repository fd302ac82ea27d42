"""Encode games as messages: a stage, sent once, and a frame for each step.

stage  palette, size, names of actions and side boards: everything that never changes
frame  cells as base64 of (H, W) bytes, or a picture as a JPEG; score, outcome, outputs of the network
"""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from redline import algos
from redline.envs import Rules
from redline.run.agent import Agent
from redline.tools.draw import Palette, Pixels

PICTURE_SIDE = 480  # maximum pixels of a rendered frame's longer side


def describe_stage(rules: Rules, algo: str | None = None) -> dict[str, Any]:
    """Return the stage of an environment: everything constant, including a description of the algorithm's outputs."""
    game, spec = rules.game, rules.game.spec(rules.config)
    names = getattr(game, "action_names", None)
    stage: dict[str, Any] = {
        "kind": "picture" if game.ON_CPU else "cells",
        "score": spec.score_name,
        "actions": list(names(rules.config) if names else map(str, range(spec.num_actions))),
    }
    if algo:
        stage["outputs"] = "Action probabilities" if algos.load(algo).STOCHASTIC else "Q-values"
    if not game.ON_CPU:
        stage |= {"palette": hex_colours(game.PALETTE), "names": [name for name, _ in game.PALETTE]}
        stage |= {"links": game.links is not None}
    return stage


def hex_colours(palette: Palette) -> list[str]:
    """Return the colours of a palette as CSS hex strings."""
    return ["#{:02x}{:02x}{:02x}".format(*rgb) for _, rgb in palette]


def encode_board(board: Tensor) -> dict[str, Any]:
    """Return a board (H, W) uint8 as rows, columns and base64 of its bytes."""
    rows, columns = board.shape
    return {"rows": rows, "columns": columns, "cells": base64.b64encode(board.contiguous().numpy().tobytes()).decode()}


def encode_picture(picture: Pixels, side: int = PICTURE_SIDE) -> str:
    """Return an RGB picture (H, W, 3) as a data URL, reduced to at most `side` pixels."""
    image = Image.fromarray(picture)
    image.thumbnail((side, side))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()


def encode_games(rules: Rules, state: Any, painted: Tensor) -> list[dict[str, Any]]:
    """Return a message for each game of a State: its board `painted` (N, H, W), links and side boards."""
    game, config = rules.game, rules.config
    messages = [encode_board(board) for board in painted]
    if game.links:
        for message, links in zip(messages, game.links(config, state), strict=True):
            message["links"] = encode_board(links)["cells"]
    if game.side_boards:
        for title, boards in game.side_boards(config, state).items():
            for message, board in zip(messages, boards, strict=True):
                message.setdefault("side", {})[title] = encode_board(board)
    return messages


class Outputs:
    """The outputs of an agent's network for N games: greedy actions and figures to show."""

    def __init__(self, agent: Agent, obs: Tensor, legal: Tensor | None) -> None:
        net: Any = agent.net
        obs, legal = obs.to(agent.device), None if legal is None else legal.to(agent.device)
        with torch.inference_mode():
            if algos.load(agent.config["algo"]).STOCHASTIC:
                logits, values = net.with_value(obs, legal) if hasattr(net, "with_value") else (net(obs, legal), None)
                figures = logits.softmax(1)
            else:
                logits = figures = net(obs) if legal is None else net(obs, legal)
                values = logits.amax(1)
            self.actions = logits.argmax(1).cpu()
        self._figures = figures.cpu().tolist()
        self._values = None if values is None else values.cpu().tolist()
        self._legal = None if legal is None else legal.cpu().tolist()

    def describe(self, game: int) -> dict[str, Any]:
        """Return the outputs to show next to a game: a figure for each action (None: illegal), the action and the value."""
        legal = self._legal[game] if self._legal else [True] * len(self._figures[game])
        figures = [finite(x) if allowed else None for x, allowed in zip(self._figures[game], legal, strict=True)]
        shown = {"outputs": figures, "action": int(self.actions[game])}
        return shown | ({"value": finite(self._values[game])} if self._values else {})


def finite(value: float, digits: int = 4) -> float | None:
    """Return a number rounded for JSON; None for NaN and infinities."""
    return round(value, digits) if math.isfinite(value) else None


def outcome(won: bool, truncated: bool) -> str:
    return "won" if won else "truncated" if truncated else "game over"
