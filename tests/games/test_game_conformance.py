"""What every game must keep, over the registry and every way of playing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from redline import games
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import leaves, map_record
from redline.envs import batch, make_rules
from redline.envs.batch import EnvState, Rules, env_keys

LANES, STEPS = 64, 30


def actions(rules: Rules, state: Any, t: int, envs: Tensor) -> Tensor:
    """The t-th action of the environments with these numbers (N,), a legal one: whatever else is in the batch."""
    legal = rules.game.legal(rules.config, state)
    rank = random.below(random.bits(random.seed_key(t), envs), legal.sum(1))
    return (legal.cumsum(1) <= rank.unsqueeze(1)).sum(1)


def rules_of(variant: Any) -> Rules:
    return make_rules(variant.game, variant.options)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves(a).values(), leaves(b).values(), strict=True))


def lane_of(record: Any, env_index: int) -> Any:
    return map_record(lambda x: x[env_index : env_index + 1], record)


def trajectory(rules: Rules, seed: int, envs: Tensor, other: Tensor | None = None) -> list[Any]:
    """All Lanes and Steps of STEPS steps; environments in `other` (N,) bool play other actions."""
    state = batch.reset(rules, env_keys(seed, envs))
    found: list[Any] = [state]
    for t in range(STEPS):
        action = actions(rules, state.game, t, envs)
        if other is not None:
            action = torch.where(other, actions(rules, state.game, t + STEPS, envs), action)
        state, step = batch.step(rules, state, action)
        found += [state, step]
    return found


def test_game_offers_all_that_games_do(game_name: str) -> None:
    game = games.load(game_name)
    assert isinstance(game.VERSION, int)
    assert set(game.HIDDEN) < set(game.State._fields)
    assert len({name for name, _ in game.PALETTE}) == len(game.PALETTE)
    for _, colour in game.PALETTE:
        assert all(0 <= channel <= 255 for channel in colour)


def test_state_is_small(game_name: str) -> None:
    """A replay stores what observations read: 120 bytes a game at most, in the settings the game comes with."""
    game = games.load(game_name)
    state = game.init(game.Config(), torch.zeros(1, dtype=torch.int32))
    sizes = {name: x.numel() * x.element_size() for name, x in leaves(state).items()}
    assert sum(size for name, size in sizes.items() if name not in game.HIDDEN) <= 120
    assert sum(sizes.values()) <= 160


def test_observation_keeps_the_spec(variant: Any) -> None:
    rules = rules_of(variant)
    game, config = rules.game, rules.config
    spec = game.spec(config)
    assert len(spec.obs_scale) == spec.obs_shape[-1 if spec.afterstates else 0]
    if spec.afterstates:
        assert spec.obs_shape[0] == spec.num_actions
        assert spec.obs_dtype == torch.float32
    state = batch.reset(rules, env_keys(0, torch.arange(LANES)))
    highest = torch.zeros(1)
    for t in range(STEPS):
        state, step = batch.step(rules, state, actions(rules, state.game, t, torch.arange(LANES)))
        for shown in (state.game, step.final_state):
            obs = game.observe(config, shown)
            assert (obs.shape, obs.dtype) == ((LANES, *spec.obs_shape), spec.obs_dtype)
            assert obs.min() >= spec.obs_low
            assert obs.max() <= spec.obs_high
            highest = torch.maximum(highest, obs.max().float())
    assert highest > 0


def test_step_keeps_shapes_and_dtypes(variant: Any) -> None:
    """Static shapes: a step returns the same structure as init, whatever the width of the actions' integers."""
    rules = rules_of(variant)
    game, config = rules.game, rules.config
    state = game.init(config, env_keys(0, torch.arange(LANES)))
    for dtype in (torch.int64, torch.int32, torch.uint8):
        after, reward, terminated, events = game.step(config, state, torch.zeros(LANES, dtype=dtype))
        assert [(x.shape, x.dtype) for x in leaves(after).values()] == [
            (x.shape, x.dtype) for x in leaves(state).values()
        ]
        assert (reward.shape, reward.dtype) == ((LANES,), torch.float32)
        assert (terminated.shape, terminated.dtype) == ((LANES,), torch.bool)
        assert [(x.shape, x.dtype) for x in events] == [((LANES,), d) for d in (torch.int32, torch.bool, torch.bool)]
        assert not (events.truncated & terminated).any()
        assert not (events.won & ~terminated).any()


def test_step_leaves_what_it_was_given_alone(variant: Any) -> None:
    rules = rules_of(variant)
    state = rules.game.init(rules.config, env_keys(0, torch.arange(LANES)))
    before = map_record(torch.clone, state)
    rules.game.step(rules.config, state, torch.ones(LANES, dtype=torch.int64))
    rules.game.observe(rules.config, state)
    rules.game.cells(rules.config, state)
    assert same(state, before)


def test_hidden_fields_are_not_read_by_observe(variant: Any) -> None:
    """The replay does not store them: whatever they hold, the observation is the same; the others alone make it."""
    rules = rules_of(variant)
    game, config = rules.game, rules.config
    state = trajectory(rules, 0, torch.arange(LANES))[-2].game
    obs = game.observe(config, state)
    for name in game.HIDDEN:
        x = getattr(state, name)
        wild = torch.randint(torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max, x.shape).to(x.dtype)
        assert torch.equal(game.observe(config, state._replace(**{name: wild})), obs), f"observe reads {name}"
    shown = {name: getattr(state, name).roll(1, 0) for name in state._fields if name not in game.HIDDEN}
    assert torch.equal(game.observe(config, state._replace(**shown)), obs.roll(1, 0))


def test_legal_and_cells(variant: Any) -> None:
    rules = rules_of(variant)
    game, config = rules.game, rules.config
    for record in trajectory(rules, 0, torch.arange(LANES)):
        if isinstance(record, EnvState):
            legal, cells = game.legal(config, record.game), game.cells(config, record.game)
            assert (legal.shape, legal.dtype) == ((LANES, game.spec(config).num_actions), torch.bool)
            assert legal.any(1).all()
            assert game.spec(config).masked or legal.all()
            assert (cells.dim(), cells.dtype) == (3, torch.uint8)
            assert cells.max() < len(game.PALETTE)


def test_only_rules_that_say_so_truncate(variant: Any) -> None:
    rules = rules_of(variant)
    steps = [record for record in trajectory(rules, 0, torch.arange(LANES)) if not isinstance(record, EnvState)]
    assert len(steps) == STEPS
    assert rules.game.spec(rules.config).truncates or not any(step.truncated.any() for step in steps)


def test_a_batch_equals_its_singles(any_variant: Any) -> None:
    """Lane i of 64 equals a batch that holds environment i alone, bit for bit: no reduction runs across games."""
    rules = rules_of(any_variant)
    whole = trajectory(rules, 3, torch.arange(LANES))
    for env_index in (0, 17, LANES - 1):
        alone = trajectory(rules, 3, torch.tensor([env_index]))
        for t, (record, single) in enumerate(zip(whole, alone, strict=True)):
            assert same(lane_of(record, env_index), single), f"environment {env_index} differs at record {t}"


def test_a_lane_is_untouched_by_the_others(variant: Any) -> None:
    rules = rules_of(variant)
    envs = torch.arange(LANES)
    other = envs % 2 == 1
    ours, theirs = trajectory(rules, 3, envs), trajectory(rules, 3, envs, other)
    for a, b in zip(ours, theirs, strict=True):
        assert same(map_record(lambda x: x[~other], a), map_record(lambda x: x[~other], b))
    assert not same(map_record(lambda x: x[other], ours[-1]), map_record(lambda x: x[other], theirs[-1]))


def test_a_seed_repeats_and_two_differ(variant: Any) -> None:
    rules = rules_of(variant)
    envs = torch.arange(8)
    one, again, two = (trajectory(rules, seed, envs) for seed in (5, 5, 6))
    assert all(same(a, b) for a, b in zip(one, again, strict=True))
    assert not same(one[0], two[0])
    assert not same(one[-1], two[-1])
    high = trajectory(rules, 5 + (1 << 40), envs)
    assert not same(one[0], high[0])


def test_lanes_differ(variant: Any) -> None:
    rules = rules_of(variant)
    obs = rules.game.observe(rules.config, trajectory(rules, 0, torch.arange(LANES))[-2].game)
    assert obs.flatten(1).unique(dim=0).shape[0] > LANES // 4


@pytest.mark.parametrize("wrong", ["", "snak", "tetris2", "../snake"])
def test_unknown_game(wrong: str) -> None:
    with pytest.raises(UserError, match=r"There is no game '.*'.* Games: .*snake.*\.$"):
        games.load(wrong)
