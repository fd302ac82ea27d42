"""The rules of the game contract, one function each: `check_*(rules)` raises Broken with a sentence if a game breaks it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from redline import games
from redline.core.records import from_leaves, leaves, map_record
from redline.envs import batch, live_rules
from redline.envs.batch import EnvState, Rules
from redline.testing.play import (
    NUM_ENVS,
    SEED,
    STEPS,
    Broken,
    Record,
    any_actions,
    baseline,
    compare,
    describe_place,
    first_environment,
    flat_record,
    legal_actions,
    play,
    take_rows,
)


def check_members(rules: Rules) -> None:
    """Check the types, shapes and dtypes of all members."""
    games.validate(rules.game, rules.config)


def check_purity(rules: Rules) -> None:
    """Check that functions do not modify their inputs and return the same for the same inputs."""
    game, config = rules.game, rules.config
    state = baseline(rules)[5].envs.game
    action = legal_actions(rules, state, 5, torch.arange(NUM_ENVS))
    functions: dict[str, Callable[[], Any]] = {
        "step": lambda: game.step(config, state, action),
        "observe": lambda: game.observe(config, state),
        "legal": lambda: game.legal(config, state),
    }
    if game.cells is not None:
        functions["cells"] = lambda: games.draw_cells(game, config, state)
    for name, function in functions.items():
        before, action_before = map_record(torch.clone, state), action.clone()
        first = _tensors(function())
        first = [x.clone() for x in first]
        for field, x in leaves(state).items():
            if not torch.equal(x, leaves(before)[field]):
                raise Broken(f"{name} changes State.{field} of its input; return new tensors instead.")
        if not torch.equal(action, action_before):
            raise Broken(f"{name} changes the actions it is given; return new tensors instead.")
        if not all(map(torch.equal, first, _tensors(function()))):
            raise Broken(
                f"{name} returns something else for the same inputs; draw random numbers from State's key only."
            )


def check_action_dtypes(rules: Rules) -> None:
    """Check that actions may be integers of any width."""
    state = baseline(rules)[3].envs.game
    action = legal_actions(rules, state, 3, torch.arange(NUM_ENVS))
    expected = _tensors(rules.game.step(rules.config, state, action))
    for dtype in (torch.int32, torch.uint8):
        results = _tensors(rules.game.step(rules.config, state, action.to(dtype)))
        if not all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(expected, results, strict=True)):
            raise Broken(f"step returns something else for actions of {dtype} than for int64; convert them first.")


def check_batch(rules: Rules) -> None:
    """Check that a game in a batch equals the same game alone: no reduction runs across games."""
    for env_index in (0, NUM_ENVS - 1):
        alone = torch.tensor([env_index])
        compare(
            baseline(rules), play(rules, env_index=alone), "A batch differs from the same games played alone", alone
        )


def check_independence(rules: Rules) -> None:
    """Check that a game is unaffected by the actions in other games."""
    other = torch.arange(NUM_ENVS) % 2 == 1

    def choose(rules: Rules, state: Any, t: int, env_index: Tensor) -> Tensor:
        return torch.where(
            other, legal_actions(rules, state, t + STEPS, env_index), legal_actions(rules, state, t, env_index)
        )

    ours, theirs = baseline(rules), play(rules, choose=choose)
    compare(
        [take_rows(record, ~other) for record in ours],
        [take_rows(record, ~other) for record in theirs],
        "A game changes with the actions of another",
    )
    others = [[take_rows(record, other) for record in records] for records in (ours, theirs)]
    if all(map(torch.equal, flat_record(others[0][-1]).values(), flat_record(others[1][-1]).values())):
        raise Broken("step ignores its actions: other actions lead to the same games.")


def check_indices(rules: Rules) -> None:
    """Check that illegal and out-of-range actions do no harm: the game continues or ends, and others are unaffected."""
    count = rules.game.spec(rules.config).num_actions
    wild = torch.tensor([-1, -100, count, count + 1, count + 1000])
    safe = torch.arange(NUM_ENVS) >= len(wild)

    def choose(rules: Rules, state: Any, t: int, env_index: Tensor) -> Tensor:
        action = legal_actions(rules, state, t, env_index).cpu()
        return torch.cat([wild, action[len(wild) :]])

    try:
        records, illegal = play(rules, choose=choose), play(rules, choose=any_actions)
    except Exception as error:
        raise Broken(f"An out-of-range or illegal action fails with {type(error).__name__}: {error}") from error
    compare(
        [take_rows(record, safe) for record in baseline(rules)],
        [take_rows(record, safe) for record in records],
        "A game changes with the out-of-range action of another",
    )
    for record in (*records, *illegal):
        _check_seen(rules, record)


def check_observations(rules: Rules) -> None:
    """Check that observations are within the spec's bounds, games differ, legal actions exist and cells are in the palette."""
    records = baseline(rules)
    for t, record in enumerate(records):
        _check_seen(rules, record, t)
    spec, last = rules.game.spec(rules.config), records[-1].obs
    if last.flatten(1).unique(dim=0).shape[0] == 1:
        raise Broken(f"observe returns the same for {NUM_ENVS} games after {STEPS} steps of random actions.")
    if all(bool((record.obs == 0).all()) for record in records):
        raise Broken(f"observe returns nothing but 0; expected up to {spec.obs_high}.")


def check_endings(rules: Rules) -> None:
    """Check that won games are terminated, truncated ones are not, and only games with `spec.truncates` truncate."""
    spec = rules.game.spec(rules.config)
    records = baseline(rules)
    for t, (before, after) in enumerate(itertools.pairwise(records), 1):
        action = after.action
        _, _, terminated, events = rules.game.step(rules.config, before.envs.game, action)
        if (wrong := events.won & ~terminated).any():
            raise Broken(f"Events.won without terminated {describe_place(t, first_environment(wrong), action)}.")
        if (wrong := events.truncated & terminated).any():
            raise Broken(
                f"Events.truncated together with terminated {describe_place(t, first_environment(wrong), action)}."
            )
        if events.truncated.any() and not spec.truncates:
            place = describe_place(t, first_environment(events.truncated), action)
            raise Broken(f"Events.truncated although spec.truncates is False {place}.")


def check_hidden(rules: Rules) -> None:
    """Check that `observe` and `legal` read no field named in HIDDEN, which replay does not store."""
    game, config = rules.game, rules.config
    state = baseline(rules)[-1].envs.game
    obs, legal = game.observe(config, state), game.legal(config, state)
    for name in game.HIDDEN:
        x = getattr(state, name)
        changed = state._replace(**{name: _scramble(x)})
        for function, expected in (("observe", obs), ("legal", legal)):
            if not torch.equal(getattr(game, function)(config, changed), expected):
                raise Broken(f"{function} reads State.{name}, which HIDDEN names; take it out of HIDDEN.")
    rolled = type(state)(*(x.roll(1, 0) for x in state))
    if not torch.equal(game.observe(config, rolled), obs.roll(1, 0)):
        raise Broken("observe depends on a game's place in the batch; expected a function of State alone.")


def check_live(rules: Rules) -> None:
    """Check that options named in LIVE may be 0-dim tensors, with the same results."""
    if rules.game.LIVE:
        try:
            theirs = play(live_rules(rules, rules.game.LIVE, "cpu"))
        except Exception as error:
            names = ", ".join(rules.game.LIVE)
            raise Broken(f"The options in LIVE ({names}) cannot be tensors: {type(error).__name__}: {error}") from error
        compare(baseline(rules), theirs, "With the options in LIVE as tensors")


def check_seeds(rules: Rules) -> None:
    """Check that the same seed repeats its games and two seeds give different ones."""
    compare(baseline(rules), play(rules), "The same seed and actions give other games")
    other = play(rules, SEED + (1 << 40), steps=3)[-1].envs.game
    if all(map(torch.equal, baseline(rules)[3].envs.game[:-1], other[:-1])):
        raise Broken("Two seeds give the same games; draw from the key that init is given.")


def check_gpu(rules: Rules, num_envs: int = NUM_ENVS, steps: int = STEPS, device: str = "cuda") -> None:
    """Check that games are the same, bit for bit, on another device."""
    env_index = torch.arange(num_envs)
    ours = play(rules, SEED, env_index, steps)
    actions = iter([record.action for record in ours[1:]])
    theirs = play(rules, SEED, env_index, steps, lambda *_: next(actions), device)
    compare(ours, theirs, f"{device} differs from the CPU")


def check_compiled(rules: Rules, num_envs: int = NUM_ENVS, steps: int = STEPS) -> None:
    """Check that games are the same, bit for bit, with the compiled step."""

    def flat(envs: EnvState, action: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        after, step = batch.step(rules, envs, action)
        return leaves(after), leaves(step)

    compiled = torch.compile(flat, fullgraph=True, dynamic=False)

    def step(rules: Rules, envs: EnvState, action: Tensor) -> tuple[EnvState, Any]:
        after, outcome = compiled(envs, action)
        return from_leaves(envs, after), from_leaves(batch.step(rules, envs, action)[1], outcome)

    env_index = torch.arange(num_envs)
    try:
        theirs = play(rules, SEED, env_index, steps, step=step)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise Broken(f"step cannot be compiled whole: {type(error).__name__}: {reason}") from error
    compare(play(rules, SEED, env_index, steps), theirs, "The compiled step differs from the eager one")


CHECKS: dict[str, Callable[[Rules], None]] = {
    "members": check_members,
    "purity": check_purity,
    "action dtypes": check_action_dtypes,
    "observations": check_observations,
    "endings": check_endings,
    "batch equals singles": check_batch,
    "environments are independent": check_independence,
    "out-of-range actions": check_indices,
    "hidden fields": check_hidden,
    "live options": check_live,
    "seeds": check_seeds,
}


def _check_seen(rules: Rules, record: Record, t: int = -1) -> None:
    """Check observations and cells of the new State and of the last one of ended episodes, and the new legal actions."""
    game, config, spec = rules.game, rules.config, rules.game.spec(rules.config)
    place = f" at step {t}" if t >= 0 else " after illegal actions"
    for state in [record.envs.game] + ([] if record.step is None else [record.step.final_state]):
        obs = game.observe(config, state)
        if (obs.shape[1:], obs.dtype) != (spec.obs_shape, spec.obs_dtype):
            raise Broken(f"observe returns {tuple(obs.shape)} {obs.dtype}{place}; expected (N, *{spec.obs_shape}).")
        if obs.min() < spec.obs_low or obs.max() > spec.obs_high:
            bounds = f"{spec.obs_low} to {spec.obs_high}"
            raise Broken(f"observe returns {obs.min().item()} to {obs.max().item()}{place}; the spec says {bounds}.")
        if game.cells is not None and (drawn := game.cells(config, state)).max() >= len(game.PALETTE):
            raise Broken(f"cells returns {int(drawn.max())}{place}; PALETTE has {len(game.PALETTE)} entries.")
    legal = game.legal(config, record.envs.game)
    if not legal.any(1).all():
        where = first_environment(~legal.any(1))
        raise Broken(f"legal allows no action{place} in environment {where}; a game without a legal action has ended.")
    if not (spec.masked or legal.all()):
        raise Broken(f"legal forbids actions{place} although spec.masked is False.")


def _tensors(result: Any) -> list[Tensor]:
    """Return all tensors in a function's result, including nested tuples."""
    if isinstance(result, Tensor):
        return [result]
    return [x for part in result for x in _tensors(part)]


def _scramble(x: Tensor) -> Tensor:
    """Return random values of the same shape and dtype."""
    if x.dtype == torch.bool:
        return torch.rand(x.shape) < 0.5
    if x.dtype.is_floating_point:
        return torch.randn(x.shape, dtype=x.dtype) * 1e6
    info = torch.iinfo(x.dtype)
    return torch.randint(info.min, info.max, x.shape).to(x.dtype)
