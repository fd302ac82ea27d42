"""Measure published linear Tetris controllers on our engine: speed, and lines per game compared with the literature.

DT-10 and DT-20 (Scherrer et al., JMLR 16:1629) weight nine features of the board after a placement. Pieces are uniform and
there is no preview. If our rules and features match the literature's, they clear the published numbers: about 5,000 and 4,300
lines on 10x10, about 29 and 51 million on 10x20 (a step budget gives their censored estimate: lines per game over).

    python bench/tetris.py play [--games 10000]            lines a game on 10x10
    python bench/tetris.py play --height 20 --steps 10G    the censored estimate on 10x20
    python bench/tetris.py play --width 7 --height 14 --pieces bag7 --steps 1G
    python bench/tetris.py speed [--boards 65536]          placements a second, greedy over all afterstates
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline import recipes
from redline.core.records import assign, map_record
from redline.engine import fast, hardware
from redline.envs import Rules, batch, make_rules
from redline.games import tetris
from redline.games._tetris_placements import board_features
from redline.run.evaluate import evaluate
from redline.run.options import parse_number
from redline.run.run_folder import write_json
from redline.tools.bench import describe_machine, rate

NAMES = (
    *("landing_height", "eroded_cells", "row_transitions", "column_transitions", "holes", "wells"),
    *("hole_depth", "rows_with_holes", "diversity"),
)
WEIGHTS = {  # landing height is measured in half rows here
    "DT-10": (-2.18 / 2, 2.42, -2.17, -3.31, 0.95, -2.22, -0.81, -9.65, 1.27),
    "DT-20": (-2.68 / 2, 1.38, -2.41, -6.32, 2.03, -2.71, -0.43, -9.48, 0.89),
}


def controller(name: str, device: torch.device) -> Any:
    """Return the policy that takes the legal placement whose afterstate (N, A, F) scores highest."""
    weights = torch.zeros(len(tetris.FEATURES))
    for feature, weight in zip(NAMES, WEIGHTS[name], strict=True):
        weights[tetris.FEATURES.index(feature)] = weight
    weights = weights.to(device)

    def policy(obs: Tensor, legal: Tensor | None) -> Tensor:
        assert legal is not None
        scores = (obs[..., : len(weights)] * weights).sum(-1)
        return torch.where(legal, scores, -torch.inf).argmax(1)

    return policy


class Greedy:
    """N boards in static buffers, played by a controller; one call is one placement on all boards."""

    def __init__(
        self, rules: Rules, name: str, boards: int, device: torch.device, compiler: fast.Compiler, graph: bool
    ) -> None:
        keys = batch.env_keys(0, torch.arange(boards, device=device))
        self.rules, self.weights = rules, dict(zip(NAMES, WEIGHTS[name], strict=True))
        self.envs = map_record(torch.clone, batch.reset(rules, keys))
        self.call = fast.Graph(compiler(self.step), graph, compiler.notify)

    @torch.no_grad()
    def step(self) -> None:
        config, state = self.rules.config, self.envs.game
        after = tetris.afterstates(config, state)
        found = board_features(config, after.columns)
        found |= {"landing_height": after.landing, "eroded_cells": after.eroded}
        score = torch.zeros(after.legal.shape, device=after.legal.device)
        for feature, weight in self.weights.items():
            score = score + weight * found[feature].to(torch.float32)
        action = torch.where(after.legal, score, -torch.inf).argmax(1)
        envs, _ = batch.step(self.rules, self.envs, action)
        assign(self.envs, envs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("play", "speed"))
    parser.add_argument("--controller", choices=tuple(WEIGHTS), action="append")
    parser.add_argument("--width", type=int, default=10)
    parser.add_argument("--height", type=int, default=10)
    parser.add_argument("--pieces", choices=("uniform", "bag7"), default="uniform")
    parser.add_argument("--games", type=parse_number, default=10_000)
    parser.add_argument("--steps", type=parse_number, default=0, help="placements in all; 0: every game to its end")
    parser.add_argument("--boards", type=int, nargs="+", default=[4096, 65536])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()

    device = hardware.pick_device(wanted.device)
    options = {"width": wanted.width, "height": wanted.height, "pieces": wanted.pieces, "previews": 0}
    record: dict[str, Any] = describe_machine(str(device)) | {"options": options, "controllers": {}}
    for name in wanted.controller or list(WEIGHTS):
        if wanted.what == "play":
            rules = make_rules("tetris", options | {"view": "afterstates"})
            started = time.monotonic()
            result = evaluate(
                rules,
                controller(name, device),
                int(wanted.games),
                device,
                max_steps=int(wanted.steps),
                compile=True,
                graph=device.type == "cuda",
            ).summary() | {"seconds": time.monotonic() - started}
            record["controllers"][name] = result
            print(
                f"{name} {wanted.width}x{wanted.height} {wanted.pieces}: {result['score_censored'] or 0:,.0f} lines a game "
                f"over ({result['score_censored_low']:,.0f} to {result['score_censored_high'] or 0:,.0f}), "
                f"{result['game_overs']:,} game-overs, {result['seconds']:.0f} s",
                flush=True,
            )
        else:
            rates = {}
            for boards in wanted.boards:
                torch._dynamo.reset()
                rules = make_rules("tetris", options)
                compiler = fast.Compiler(True, print, device, recipes.compiler_options(rules.game))
                loop = Greedy(rules, name, boards, device, compiler, device.type == "cuda")
                rates[boards] = boards * rate(loop.call, wanted.seconds, device)
                print(
                    f"{name} {wanted.width}x{wanted.height}: {boards:,} boards, {rates[boards]:,.0f} placements/s",
                    flush=True,
                )
            record["controllers"][name] = {"placements_per_second": rates}
    if wanted.out:
        write_json(wanted.out, record)


if __name__ == "__main__":
    main()
