"""Live options: tensors in the place of numbers, changed in place. Compiled, they are tested in test_env_compiled.py."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from redline import games
from redline.core import random, select
from redline.core.errors import UserError
from redline.core.records import leaves
from redline.envs import batch, change_rules, live_rules, make_rules, set_live
from redline.envs.batch import EnvState, Rules

NUM_ENVS = 32
SMALL = {"width": 6, "height": 5}


def start(rules: Rules) -> EnvState:
    return batch.reset(rules, batch.env_keys(3, torch.arange(NUM_ENVS)))


def action(rules: Rules, t: int) -> Tensor:
    bits = random.bits(random.seed_key(t), torch.arange(NUM_ENVS))
    return random.below(bits, rules.game.spec(rules.config).num_actions)


def same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(leaves(a).values(), leaves(b).values(), strict=True)
    )


def test_live_options_give_the_numbers_of_plain_ones(any_variant: Any) -> None:
    """Every live option of every game, bit for bit: States, rewards, observations."""
    rules = make_rules(any_variant.game, any_variant.options)
    live = live_rules(rules, rules.game.LIVE, "cpu")
    assert all(isinstance(getattr(live.config, name), Tensor) for name in rules.game.LIVE)
    assert rules.game.spec(live.config) == rules.game.spec(rules.config)
    a, b = start(rules), start(live)
    for t in range(30):
        assert same(a, b)
        obs, live_obs = rules.game.observe(rules.config, a.game), live.game.observe(live.config, b.game)
        assert torch.equal(obs, live_obs)
        (a, step), (b, live_step) = batch.step(rules, a, action(rules, t)), batch.step(live, b, action(rules, t))
        assert same(step, live_step)


@pytest.mark.parametrize("actions", ["placement", "keys"])
def test_live_rules_of_tetris_away_from_their_defaults(actions: str) -> None:
    """A ceiling, a starting stack and odd rewards as tensors: what is legal too, with legal actions played."""
    odd = {"reward_line": 1.1, "reward_death": -0.7, "reward_hole": -0.3, "reward_height": -0.2, "reward_piece": 0.1}
    wanted = {"actions": actions, "ceiling": 10, "start_height": 4, **odd}
    rules, plain = make_rules("tetris", wanted), make_rules("tetris", {"actions": actions})
    live = live_rules(plain, plain.game.LIVE, "cpu")
    set_live(live, rules)
    a, b = start(rules), start(live)
    ended = 0
    for t in range(30):
        legal, live_legal = rules.game.legal(rules.config, a.game), live.game.legal(live.config, b.game)
        assert same(a, b)
        assert torch.equal(legal, live_legal)
        chosen = select.draw(legal, random.bits(random.seed_key(t), torch.arange(NUM_ENVS)))
        (a, step), (b, live_step) = batch.step(rules, a, chosen), batch.step(live, b, chosen)
        assert same(step, live_step)
        ended += int(step.terminated.sum())
    assert ended > NUM_ENVS // 4


def test_every_live_option_is_an_option(game_name: str) -> None:
    game = games.load(game_name)
    types = get_type_hints(game.Config)
    assert all(types[name] in (int, float) for name in game.LIVE)


def test_setting_leaves_the_plain_rules_alone() -> None:
    rules = make_rules("snake", SMALL)
    live = live_rules(rules, ["reward_food"], "cpu")
    held = live.config.reward_food
    set_live(live, change_rules(rules, {"reward_food": 0.25}))
    assert live.config.reward_food is held
    assert (held.item(), held.dtype, rules.config.reward_food) == (0.25, torch.float32, 1.0)
    assert live.config.reward_death == -1.0  # not live, a plain number
    assert live_rules(rules, ["long_start"], "cpu").config.long_start.dtype == torch.int32


def test_what_cannot_be_live() -> None:
    with pytest.raises(ValueError, match="width cannot be live"):
        live_rules(make_rules("snake"), ["width"], "cpu")


def test_changed_rules_are_checked() -> None:
    rules = make_rules("snake", SMALL, time_limit=9)
    assert change_rules(rules, {"start": "random"}) == make_rules("snake", {**SMALL, "start": "random"}, 9)
    for options, sentence in (
        ({"long_start": 29}, r"env.long_start is 29; a snake on a 6x5 board can start with up to 28 cells"),
        ({"long_strat": 9}, r"no option 'long_strat'; did you mean 'long_start'"),
        ({"long_start": 9.5}, r"env.long_start is 9.5; expected a whole number"),
        ({"reward_food": "much"}, r"env.reward_food is 'much'; expected a number"),
    ):
        with pytest.raises(UserError, match=sentence):
            change_rules(rules, options)
    assert dataclasses.asdict(rules.config)["long_start"] == 0
