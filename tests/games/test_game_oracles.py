"""Every game against its plain-Python oracle, exactly: State, observation, reward, endings, statistics, every step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from versus_oracle import play, same_observation, same_state, state_of

from redline import games, oracles
from redline.games import snake
from redline.oracles.snake import MOVES


def test_game_equals_its_oracle_at_random(game_name: str) -> None:
    game = games.load(game_name)
    actions = game.spec(game.Config()).num_actions
    tally = play(game_name, {}, lambda _lane, _game, rng: rng.randrange(actions), lanes=64, steps=60, seed=11)
    assert tally.episodes > 0


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
    return (turn + 1) % 4 if game.config.view == "centred" else heading


def blind(lane: int, game: Any, rng: random.Random) -> int:  # noqa: ARG001
    return rng.randrange(3 if game.config.view == "centred" else 4)


def greedy(lane: int, game: Any, rng: random.Random) -> int:
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
    return min(safe)[1] if safe else blind(lane, game, rng)


def follow_cycle(lane: int, game: Any, rng: random.Random) -> int:
    """Along the cycle, in the direction the snake can take: fills the board."""
    cells = cycle(game.config.width, game.config.height)
    place = cells.index(game.body[0])
    ahead, behind = cells[(place + 1) % len(cells)], cells[place - 1]
    goal = behind if ahead in game.body[1:2] or (ahead in game.body[:-1] and behind not in game.body[:-1]) else ahead
    action = towards(game, goal)
    return blind(lane, game, rng) if action is None else action


def mostly_greedy(lane: int, game: Any, rng: random.Random) -> int:
    """Most lanes play to eat, one in four blindly: short and long games side by side."""
    return blind(lane, game, rng) if lane % 4 == 0 else greedy(lane, game, rng)


def filling(lane: int, game: Any, rng: random.Random) -> int:
    return follow_cycle(lane, game, rng) if lane % 2 else mostly_greedy(lane // 2, game, rng)


# Rewards are binary fractions: the sums are the same in float32 and in Python's float64.
SHAPED = {"reward_closer": 0.25, "reward_step": -0.125, "reward_win": 8.0, "reward_death": -3.0, "reward_food": 2.5}
SNAKES: dict[str, tuple[dict[str, Any], Any, int, int, int]] = {  # options, policy, lanes, steps, episodes at least
    "10x10 blind": ({}, blind, 384, 50, 500),
    "10x10 greedy": ({}, greedy, 24, 280, 20),
    "centred": ({"width": 6, "height": 5, "view": "centred"}, mostly_greedy, 96, 80, 200),
    "centred 10x10": ({"view": "centred", "start": "random"}, mostly_greedy, 32, 50, 20),
    "random start": ({"width": 7, "height": 9, "start": "random", "start_length": 4}, mostly_greedy, 256, 40, 300),
    "4x4": ({"width": 4, "height": 4}, filling, 40, 200, 200),
    "5x7": ({"width": 5, "height": 7}, mostly_greedy, 96, 60, 100),
    "7x5 random long start": ({"width": 7, "height": 5, "start": "random", "start_length": 5}, blind, 200, 30, 500),
    "16x16": ({"width": 16, "height": 16, "start_length": 16, "start": "random"}, mostly_greedy, 48, 40, 10),
    "length 1": ({"width": 6, "height": 6, "start": "random", "start_length": 1}, mostly_greedy, 128, 50, 100),
    "starving": ({"width": 5, "height": 5, "starvation": 3}, mostly_greedy, 128, 50, 500),
    "shaped": ({"width": 5, "height": 6, "start": "random", **SHAPED}, mostly_greedy, 128, 60, 200),
    "shaped centred": ({"width": 4, "height": 4, "view": "centred", **SHAPED}, filling, 24, 180, 60),
}


@pytest.mark.parametrize("kind", SNAKES)
def test_snake_equals_its_oracle(kind: str) -> None:
    options, policy, lanes, steps, at_least = SNAKES[kind]
    tally = play("snake", options, policy, lanes, steps, seed=sum(map(ord, kind)) << 33)
    assert tally.episodes >= at_least
    if policy is filling:
        assert tally.wins >= 10
    if "starvation" in options:
        assert tally.truncations >= 100
    if policy is greedy:
        assert tally.longest >= 150


@pytest.mark.parametrize("view", ["planes", "centred"])
@pytest.mark.parametrize(("width", "height"), [(10, 10), (9, 14), (8, 16), (15, 16), (16, 16), (32, 32)])
def test_snake_that_fills_the_board(width: int, height: int, view: str) -> None:
    """Snakes lying along the cycle with few cells left, to the win: ages at both ends of int8 and uint8, and beyond."""
    config = snake.Config(width=width, height=height, view=view, **SHAPED)  # type: ignore[arg-type]
    lanes, left = (2, 4) if config.cells > 500 else (8, 9)
    cells, oracle = cycle(width, height), oracles.load("snake")
    players: list[Any] = []
    for lane in range(lanes):
        game: Any = oracle(config, oracles.episode_key(5, lane, 0))
        start = lane * 37
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
        actions = [follow_cycle(lane, game, rng) for lane, game in enumerate(players)]
        state, reward, terminated, events = snake.step(config, state, torch.tensor(actions))
        for lane, (game, action) in enumerate(zip(players, actions, strict=True)):
            if lane in finished:
                continue
            result = game.step(action)
            assert (reward[lane].item(), terminated[lane].item(), events.truncated[lane].item()) == result[:3]
            assert (events.score[lane].item(), events.won[lane].item()) == result[3:]
            only = snake.State(*(x[lane : lane + 1] for x in state))
            same_state(only, [game])
            same_observation(snake.observe(config, only), [game])
            if result[1]:
                assert result[4]
                assert state.food[lane] == -1
                assert state.ages[lane].max() == config.cells
                assert state.ages[lane].min() == 1
                finished.add(lane)
        if len(finished) == lanes:
            break
    assert len(finished) == lanes
