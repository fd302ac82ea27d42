"""bench/tetris.py: the controllers of the literature, on two engines of their own, play the same games."""

from __future__ import annotations

import torch

from bench_scripts import load_script
from redline.engine import fast
from redline.envs import batch, make_rules


def test_the_fast_loop_plays_as_the_policy_does() -> None:
    script, device = load_script("tetris"), torch.device("cpu")
    options = {"pieces": "uniform", "previews": 0, "height": 10}
    loop = script.Greedy(make_rules("tetris", options), "DT-10", 8, device, fast.Compiler(False, print), graph=False)
    rules, policy = make_rules("tetris", options | {"view": "afterstates"}), script.controller("DT-10", device)
    envs = batch.reset(rules, batch.env_keys(0, torch.arange(8)))
    for _ in range(40):
        loop.call()
        action = policy(rules.game.observe(rules.config, envs.game), batch.legal(rules, envs.game))
        envs, _ = batch.step(rules, envs, action)
    assert torch.equal(loop.envs.game.columns, envs.game.columns)
    assert loop.envs.episode.score.sum() > 0
