"""Snake and Tetris equal their oracles over long games and unusual options, exactly, every step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from versus_oracle import play, same_observation, same_state, state_of

from redline import oracles
from redline.games import snake
from redline.games._snake_grid import every_age
from redline.oracles.snake import MOVES
from redline.oracles.tetris import CLOCKWISE, COUNTER, HARD, LEFT, RIGHT, SOFT, bumpiness, drop, heights, holes


def any_legal(env_index: int, game: Any, rng: random.Random) -> int:  # noqa: ARG001
    return rng.choice([action for action, legal in enumerate(game.legal()) if legal])


def cycle(width: int, height: int) -> list[tuple[int, int]]:
    """All cells of a board with an even side, each beside the one before it, the last beside the first."""
    if height % 2:
        return [(row, column) for column, row in cycle(height, width)]
    cells = [(0, 0)]
    for row in range(height):
        columns = range(1, width)
        cells += [(row, column) for column in (columns if row % 2 == 0 else reversed(columns))]
    return cells + [(row, 0) for row in range(height - 1, 0, -1)]


def towards(game: Any, goal: tuple[int, int]) -> int | None:
    """The action that moves the snake to a cell beside its head, None if turning back would be needed."""
    head = game.body[0]
    heading = MOVES.index((goal[0] - head[0], goal[1] - head[1]))
    turn = (heading - game.heading) % 4
    if turn == 2:
        return None
    if game.mirrored():
        turn = -turn
    return heading if game.config.view == "planes" else (turn + 1) % 4


def blind(env_index: int, game: Any, rng: random.Random) -> int:  # noqa: ARG001
    return rng.randrange(4 if game.config.view == "planes" else 3)


def greedy(env_index: int, game: Any, rng: random.Random) -> int:
    """A safe move nearest to the food."""
    row, column = game.body[0]
    taken = set(game.body[:-1])
    goals = [(row + down, column + right) for down, right in MOVES]
    rng.shuffle(goals)
    safe = [
        (abs(goal[0] - game.food[0]) + abs(goal[1] - game.food[1]), action)
        for goal in goals
        if 0 <= goal[0] < game.config.height and 0 <= goal[1] < game.config.width and goal not in taken
        if (action := towards(game, goal)) is not None
    ]
    return min(safe)[1] if safe else blind(env_index, game, rng)


def follow_cycle(env_index: int, game: Any, rng: random.Random) -> int:
    """Along the cycle, in the direction the snake can take: fills the board."""
    cells = cycle(game.config.width, game.config.height)
    place = cells.index(game.body[0])
    ahead, behind = cells[(place + 1) % len(cells)], cells[place - 1]
    goal = behind if ahead in game.body[1:2] or (ahead in game.body[:-1] and behind not in game.body[:-1]) else ahead
    action = towards(game, goal)
    return blind(env_index, game, rng) if action is None else action


def mostly_greedy(env_index: int, game: Any, rng: random.Random) -> int:
    """Most environments play to eat, one in four blindly: short and long games side by side."""
    return blind(env_index, game, rng) if env_index % 4 == 0 else greedy(env_index, game, rng)


def filling(env_index: int, game: Any, rng: random.Random) -> int:
    return follow_cycle(env_index, game, rng) if env_index % 2 else mostly_greedy(env_index // 2, game, rng)


# Rewards are binary fractions: the sums are the same in float32 and in Python's float64.
SHAPED = {
    "reward_closer": 0.25,
    "reward_step": -0.125,
    "reward_starve": -1.5,
    "reward_win": 8.0,
    "reward_death": -3.0,
    "reward_food": 2.5,
}
SNAKES: dict[
    str, tuple[dict[str, Any], Any, int, int, int]
] = {  # options, policy, environments, steps, episodes at least
    "10x10 blind": ({}, blind, 384, 50, 500),
    "10x10 greedy": ({}, greedy, 24, 280, 20),
    "centred": ({"width": 6, "height": 5, "view": "centred"}, mostly_greedy, 96, 80, 200),
    "centred 10x10": ({"view": "centred", "start": "random"}, mostly_greedy, 32, 50, 20),
    "wrapped": ({"width": 6, "height": 5, "view": "wrapped"}, mostly_greedy, 96, 80, 200),
    "wrapped 10x10": ({"view": "wrapped", "start": "random"}, mostly_greedy, 32, 50, 20),
    "wrapped, not mirrored": (
        {"width": 6, "height": 5, "view": "wrapped", "mirror": False},
        mostly_greedy,
        96,
        80,
        200,
    ),
    "hungry": (
        {"width": 6, "height": 5, "view": "wrapped", "show_hunger": True, "starvation": 5},
        mostly_greedy,
        96,
        80,
        200,
    ),
    "hungry centred": ({"view": "centred", "sight": 4, "show_hunger": True}, blind, 64, 80, 20),
    "long start 5x5 wrapped": ({"width": 5, "height": 5, "view": "wrapped", "long_start": 23}, blind, 200, 30, 500),
    "shaped wrapped": ({"width": 4, "height": 4, "view": "wrapped", **SHAPED}, filling, 24, 180, 60),
    "random start": ({"width": 7, "height": 9, "start": "random", "start_length": 4}, mostly_greedy, 256, 40, 300),
    "4x4": ({"width": 4, "height": 4}, filling, 40, 200, 200),
    "5x7": ({"width": 5, "height": 7}, mostly_greedy, 96, 60, 100),
    "7x5 random long start": ({"width": 7, "height": 5, "start": "random", "start_length": 5}, blind, 200, 30, 500),
    "16x16": ({"width": 16, "height": 16, "start_length": 16, "start": "random"}, mostly_greedy, 48, 40, 10),
    "length 1": ({"width": 6, "height": 6, "start": "random", "start_length": 1}, mostly_greedy, 128, 50, 100),
    "starving": ({"width": 5, "height": 5, "starvation": 3}, mostly_greedy, 128, 50, 500),
    "starving and shaped": ({"width": 5, "height": 5, "starvation": 3, **SHAPED}, mostly_greedy, 128, 50, 500),
    "shaped": ({"width": 5, "height": 6, "start": "random", **SHAPED}, mostly_greedy, 128, 60, 200),
    "long start": ({"long_start": 98}, mostly_greedy, 64, 40, 20),
    "long start 6x5 centred": (
        {"width": 6, "height": 5, "view": "centred", "long_start": 28},
        mostly_greedy,
        128,
        40,
        150,
    ),
    "long start 5x6": ({"width": 5, "height": 6, "long_start": 20, "start_length": 1}, filling, 64, 40, 20),
    "long start 7x5": ({"width": 7, "height": 5, "long_start": 33, "start_length": 1}, blind, 200, 30, 500),
    "long start 5x5 centred": ({"width": 5, "height": 5, "view": "centred", "long_start": 23}, blind, 200, 30, 500),
    "long start 16x12": ({"width": 16, "height": 12, "long_start": 190, "start": "random"}, mostly_greedy, 24, 30, 5),
    "long start 40x40": ({"width": 40, "height": 40, "long_start": 1598}, blind, 16, 20, 5),
    "shaped centred": ({"width": 4, "height": 4, "view": "centred", **SHAPED}, filling, 24, 180, 60),
}


@pytest.mark.fault("G9")
@pytest.mark.parametrize("kind", SNAKES)
def test_snake_equals_its_oracle(kind: str) -> None:
    options, policy, envs, steps, at_least = SNAKES[kind]
    episode_stats = play("snake", options, policy, envs, steps, seed=sum(map(ord, kind)) << 33)
    assert episode_stats.episodes >= at_least
    if policy is filling and "long_start" not in options:
        assert episode_stats.wins >= 10
    if "starvation" in options:
        assert episode_stats.truncations >= 100
    if policy is greedy:
        assert episode_stats.longest >= 150


@pytest.mark.parametrize("view", ["planes", "centred", "wrapped"])
@pytest.mark.parametrize(("width", "height"), [(10, 10), (9, 14), (8, 16), (15, 16), (16, 16), (32, 32)])
def test_snake_that_fills_the_board(width: int, height: int, view: str) -> None:
    """Snakes lying along the cycle with few cells left, to the win: ages at both ends of int8 and uint8, and beyond."""
    config = snake.Config(width=width, height=height, view=view, **SHAPED)  # type: ignore[arg-type]
    envs, left = (2, 4) if config.cells > 500 else (8, 9)
    cells, oracle = cycle(width, height), oracles.load("snake")
    players: list[Any] = []
    for env_index in range(envs):
        game: Any = oracle(config, oracles.episode_key(5, env_index, 0))
        start = env_index * 37
        game.body = [cells[(start - place) % len(cells)] for place in range(config.cells - left)]
        game.heading = MOVES.index(tuple(a - b for a, b in zip(*game.body[:2], strict=True)))
        game.food = game._new_food()
        players.append(game)
    state = state_of(snake, players)
    assert snake.spec(config).obs_dtype == (torch.uint8 if config.cells <= 255 else torch.int16)
    same_state(state, players)
    finished: set[int] = set()
    rng = random.Random(0)
    for _ in range(left * (left + 1) // 2):
        actions = [follow_cycle(env_index, game, rng) for env_index, game in enumerate(players)]
        state, reward, terminated, events = snake.step(config, state, torch.tensor(actions))
        for env_index, (game, action) in enumerate(zip(players, actions, strict=True)):
            if env_index in finished:
                continue
            result = game.step(action)
            assert (
                reward[env_index].item(),
                terminated[env_index].item(),
                events.truncated[env_index].item(),
            ) == result[:3]
            assert (events.score[env_index].item(), events.won[env_index].item()) == result[3:]
            only = snake.State(*(x[env_index : env_index + 1] for x in state))
            same_state(only, [game])
            same_observation(snake.observe(config, only), [game])
            if result[1]:
                assert result[4]
                assert state.food[env_index] == -1
                ages = every_age(config, only.ages)
                assert ages.max() == config.cells
                assert ages.min() == 1
                finished.add(env_index)
        if len(finished) == envs:
            break
    assert len(finished) == envs


def low(env_index: int, game: Any, rng: random.Random) -> int:  # noqa: ARG001
    """The placement that leaves few holes and a low and even stack: games that do not end, with many lines."""
    boards = {action: after.board for action, after in enumerate(game.afterstates()) if after.legal}
    cost = {action: 4 * holes(board) + bumpiness(board) + sum(heights(board)) for action, board in boards.items()}
    return min(cost, key=lambda action: (cost[action], rng.random()))


def lying_low(env_index: int, game: Any, rng: random.Random) -> int:
    """The placement whose top lies lowest, which costs little to find; now and then one that need not be legal."""
    if rng.random() < 0.004:
        return rng.randrange(game.num_actions)
    if env_index % 4 == 0:
        return any_legal(env_index, game, rng)
    tops = [y + shape.height + rng.random() for shape, y, _ in game._placements()]
    return tops.index(min(tops))


def any_key(env_index: int, game: Any, rng: random.Random) -> int:
    """Every environment with its own liking for sideways, turns, drops and holding; a drop follows only after some steps."""
    if game.y > game.config.height // 2 and env_index % 3 == 0:
        return rng.choice([LEFT, RIGHT, CLOCKWISE, COUNTER, SOFT])
    liked = [[LEFT, LEFT, CLOCKWISE], [RIGHT, RIGHT, COUNTER], [LEFT, RIGHT], [HARD]][env_index % 4]
    return rng.choice([*range(game.num_actions), *liked])


def to_columns(env_index: int, game: Any, rng: random.Random) -> int:
    """To the column where the piece falls deepest, and drop it there: lines and long games with keys."""
    if rng.random() < 0.2:
        return rng.randrange(game.num_actions)
    columns = range(game.config.width - game.shape.width + 1)
    goal = min(columns, key=lambda x: (drop(game.board, game.shape, game.y, x), (x * 7 + env_index) % 5))
    return HARD if game.x == goal else LEFT if game.x > goal else RIGHT


ODD = {"reward_line": 1.1, "reward_death": -0.7, "reward_hole": -0.3, "reward_height": 0.1, "reward_piece": 0.013}
KEYS = {"actions": "keys"}
SHORT: dict[str, Any] = {"width": 6, "height": 9}
TETRISES: dict[str, tuple[dict[str, Any], Any, int, int, int, int]] = {  # options, policy, environments, steps, episodes, lines
    "10x20": ({}, lying_low, 48, 40, 10, 50),
    "10x20 low": ({}, low, 1, 70, 0, 15),
    "10x20 uniform": ({"pieces": "uniform", "previews": 2, "start_height": 16}, lying_low, 64, 25, 30, 50),
    "10x20 keys": ({**KEYS, "hold": True, "start_height": 16}, any_key, 64, 35, 8, 0),
    "10x20 keys to columns": ({**KEYS, "pieces": "uniform", **ODD}, to_columns, 40, 50, 0, 1),
    "7x14 low": ({"width": 7, "height": 14, "previews": 0, **ODD}, low, 2, 60, 0, 20),
    "7x14 keys": ({"width": 7, "height": 14, **KEYS, "gravity": 1, "previews": 2}, any_key, 80, 32, 15, 0),
    "4x6": ({"width": 4, "height": 6, "previews": 0}, lying_low, 200, 25, 600, 1000),
    "4x7 keys": ({"width": 4, "height": 7, **KEYS, "hold": True, "previews": 2}, any_key, 150, 30, 80, 40),
    "16x32": ({"width": 16, "height": 32, "start_height": 28, **ODD}, lying_low, 48, 25, 4, 10),
    "16x32 keys": ({"width": 16, "height": 32, **KEYS, "start_height": 28}, any_key, 48, 32, 4, 0),
    "5x25": ({"width": 5, "height": 25, "start_height": 21, "pieces": "uniform"}, lying_low, 64, 30, 50, 300),
    "6x24 keys": ({"width": 6, "height": 24, "start_height": 20, **KEYS, "hold": True, **ODD}, to_columns, 50, 35, 10, 10),
    "stacked": ({**SHORT, "start_height": 5, **ODD}, lying_low, 160, 20, 200, 300),
    "stacked keys": ({**SHORT, "start_height": 5, **KEYS, "hold": True, "gravity": 2, **ODD}, to_columns, 120, 30, 80, 40),
    "uniform stacked": ({**SHORT, "start_height": 5, "pieces": "uniform", "previews": 2}, any_legal, 200, 15, 300, 100),
    "ceiling": ({"width": 6, "height": 15, "ceiling": 8, "start_height": 4, **ODD}, lying_low, 120, 15, 100, 100),
    "ceiling keys": ({**SHORT, "height": 13, "ceiling": 8, **KEYS, "hold": True, **ODD}, any_key, 120, 30, 30, 0),
    "keys without previews": ({**SHORT, **KEYS, "pieces": "uniform", "previews": 0, "hold": True}, any_key, 100, 40, 20, 0),
}  # fmt: skip


@pytest.mark.fault("G9")
@pytest.mark.parametrize("kind", TETRISES)
def test_tetris_equals_its_oracle(kind: str) -> None:
    options, policy, envs, steps, episodes, lines = TETRISES[kind]
    episode_stats = play("tetris", options, policy, envs, steps, seed=sum(map(ord, kind)) << 33)
    assert episode_stats.episodes >= episodes
    assert episode_stats.score >= lines
