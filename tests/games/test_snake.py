"""Snake's rules on boards drawn by hand, and its food."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from versus_oracle import state_of

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Events
from redline.core.select import pack
from redline.envs import batch, make, make_rules
from redline.envs.batch import env_keys
from redline.games import _snake_views, snake
from redline.games._snake_grid import age_bits, every_age, mark_cell, occupied
from redline.games.snake import Config, State
from redline.oracles.snake import MOVES, Oracle
from redline.oracles.snake import _path as oracle_path

UP, RIGHT, DOWN, LEFT = range(4)


def draw(picture: str, heading: int, hunger: int = 0, **options: Any) -> tuple[Config, State]:
    """One game from a drawing: numbers are ages (the head has the highest), * the food, . free."""
    rows = [line.split() for line in picture.strip().splitlines()]
    marks = {(row, column): mark for row, line in enumerate(rows) for column, mark in enumerate(line)}
    player = Oracle(Config(width=len(rows[0]), height=len(rows), **options), key=12345)
    player.body = sorted((cell for cell in marks if marks[cell].isdigit()), key=lambda cell: -int(marks[cell]))
    player.food = next(cell for cell in marks if marks[cell] == "*")
    player.heading, player.hunger = heading, hunger
    return player.config, state_of(snake, [player])


def picture(config: Config, state: State) -> str:
    """The drawing of one game."""
    marks = [str(age) if age else "." for age in every_age(config, state.ages).flatten().tolist()]
    if state.food >= 0:
        marks[state.food] = "*"
    return "\n".join(" ".join(marks[row * config.width :][: config.width]) for row in range(config.height))


def in_words(config: Config, ages: Tensor) -> Tensor:
    """State.ages of boards of ages (N, H, W), cell by cell."""
    each = 32 // age_bits(config)
    words = torch.zeros(len(ages), -(-config.cells // each), dtype=torch.int32)
    for cell in range(config.cells):
        words[:, cell // each] |= ages.flatten(1)[:, cell].to(torch.int32) << age_bits(config) * (cell % each)
    return words


def move(config: Config, state: State, action: int) -> tuple[State, Tensor, Tensor, Events]:
    return snake.step(config, state, torch.tensor([action]))


def clean(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


BENT = """
    . . . . .
    . 1 2 . .
    . . 3 4 5
    . . . . .
    * . . . .
"""


def test_a_move_takes_the_tail_along() -> None:
    config, state = draw(BENT, RIGHT)
    after, reward, terminated, events = move(config, state, UP)
    assert picture(config, after) == clean("""
        . . . . .
        . . 1 . 5
        . . 2 3 4
        . . . . .
        * . . . .
    """)
    assert (after.heading, after.length, after.hunger, after.head) == (UP, 5, 1, 9)
    assert (reward, terminated, events.score, events.won, events.truncated) == (0, False, 0, False, False)


def test_eating_grows() -> None:
    config, state = draw("""
        . . . . .
        . 1 2 . .
        . . 3 4 5
        . . . . *
        . . . . .
    """, RIGHT, hunger=9)  # fmt: skip
    after, reward, terminated, events = move(config, state, DOWN)
    new_food = int(after.food)
    after = after._replace(food=torch.tensor([-1]))
    assert picture(config, after) == clean("""
        . . . . .
        . 1 2 . .
        . . 3 4 5
        . . . . 6
        . . . . .
    """)
    assert every_age(config, after.ages).flatten()[new_food] == 0
    assert (after.length, after.hunger) == (6, 0)
    assert (reward, terminated, events.score, events.won) == (config.reward_food, False, 1, False)


def test_the_tails_cell_is_free_to_enter() -> None:
    config, state = draw("""
        . . . .
        . 1 4 .
        . 2 3 .
        * . . .
    """, UP)  # fmt: skip
    after, _, terminated, _ = move(config, state, LEFT)
    assert not terminated
    assert picture(config, after) == clean("""
        . . . .
        . 4 3 .
        . 1 2 .
        * . . .
    """)


AT_THE_WALL = """
    * . . . .
    . . . . .
    . . 1 5 6
    . . 2 3 4
    . . . . .
"""
CURLED = """
    * . . . .
    . . 6 5 .
    . . 7 4 .
    . 1 2 3 .
    . . . . .
"""


@pytest.mark.parametrize(
    ("before", "heading", "action"),
    [(AT_THE_WALL, RIGHT, RIGHT), (CURLED, DOWN, DOWN), (CURLED, DOWN, RIGHT), (CURLED, DOWN, UP)],
    ids=["wall", "body ahead", "body beside", "turning back is going straight on, into the body"],
)
def test_death(before: str, heading: int, action: int) -> None:
    config, state = draw(before, heading)
    after, reward, terminated, events = move(config, state, action)
    assert terminated
    assert (reward, events.won, events.truncated, events.score) == (config.reward_death, False, False, 0)
    assert picture(config, after) == clean(before)  # a dead snake stays where it was
    assert (after.length, after.hunger) == (state.length, 1)


@pytest.mark.parametrize("heading", range(4))
def test_turning_back_is_going_straight_on(heading: int) -> None:
    """Of a snake of one cell too: it has a heading."""
    config, state = draw("""
        . . . . *
        . . . . .
        . . 1 . .
        . . . . .
        . . . . .
    """, heading)  # fmt: skip
    back, _, _, _ = move(config, state, (heading + 2) % 4)
    on, _, _, _ = move(config, state, heading)
    assert all(torch.equal(a, b) for a, b in zip(back, on, strict=True))
    assert on.head == 12 + (-5, 1, 5, -1)[heading]


@pytest.mark.parametrize(("action", "head"), [(0, 8), (1, 14), (2, 18)])
def test_centred_actions_are_left_straight_right(action: int, head: int) -> None:
    config, state = draw("""
        . . . . *
        . . . . .
        . 1 2 3 .
        . . . . .
        . . . . .
    """, RIGHT, view="centred")  # fmt: skip
    after, _, terminated, _ = move(config, state, action)
    assert not terminated
    assert after.head == head


def test_starvation_truncates_and_does_not_terminate() -> None:
    config, state = draw(BENT, RIGHT, hunger=6, starvation=8)
    state, _, terminated, events = move(config, state, DOWN)
    assert not terminated
    assert not events.truncated
    state, reward, terminated, events = move(config, state, LEFT)
    assert not terminated
    assert events.truncated
    assert reward == 0


def test_starvation_gives_way_to_food_and_to_death() -> None:
    config, state = draw(BENT, RIGHT, hunger=7, starvation=8)
    _, _, terminated, events = move(config, state, RIGHT)
    assert terminated
    assert not events.truncated
    _, _, terminated, events = move(config, state._replace(food=state.head + 5), DOWN)
    assert not terminated
    assert not events.truncated
    assert events.score == 1


def test_winning_fills_the_board_and_terminates() -> None:
    config, state = draw("""
        1  2  3  4
        *  7  6  5
        15 8  9  10
        14 13 12 11
    """, LEFT, reward_win=7.0)  # fmt: skip
    after, reward, terminated, events = move(config, state, UP)
    assert terminated
    assert events.won
    assert not events.truncated
    assert reward == config.reward_food + 7.0
    assert after.food == -1
    assert sorted(every_age(config, after.ages).flatten().tolist()) == list(range(1, 17))
    assert snake.observe(config, after)[0, 2].sum() == 0
    assert (snake.cells(config, after) != 3).all()


def test_shaping_pays_for_each_step_nearer() -> None:
    config, state = draw(BENT, RIGHT, reward_closer=0.5, reward_step=-0.25)
    _, nearer, _, _ = move(config, state, DOWN)
    _, farther, _, _ = move(config, state, UP)
    assert (nearer, farther) == (0.25, -0.75)


def test_centred_view_is_seen_from_the_head_heading_up() -> None:
    config, state = draw("""
        . . . *
        . . . .
        . 1 2 3
        . . . .
    """, RIGHT, view="centred")  # fmt: skip
    ages, outside, food = snake.observe(config, state)[0].tolist()
    assert [row[3] for row in ages] == [0, 0, 0, 3, 2, 1, 0]  # the body trails straight down from the middle
    assert food[3][1] == 1  # the food lies two to the left
    assert sum(map(sum, food)) == 1
    assert outside[2] == [1] * 7  # the wall is right ahead
    assert [row[5] for row in outside] == [1, 1, 1, 1, 1, 1, 1]  # and two to the right


def test_wrapped_view_holds_the_whole_board_once() -> None:
    config, state = draw("""
        . . . .
        . . . .
        . 1 2 3
        . * . .
    """, RIGHT, view="wrapped")  # fmt: skip
    ages, deadly, food = snake.observe(config, state)[0].tolist()
    # Heading up, the food to the right as it is: columns of the board are rows, its right edge first.
    assert ages == [
        [0, 0, 0, 0, 0],  # the board's first column, beyond the wall
        [0, 0, 0, 0, 0],  # the wall to the right of the board
        [0, 0, 3, 0, 0],
        [0, 0, 2, 0, 0],
        [0, 0, 1, 0, 0],
    ]
    assert deadly == [
        [0, 0, 0, 0, 1],
        [1, 1, 1, 1, 1],
        [0, 0, 1, 0, 1],
        [0, 0, 1, 0, 1],
        [0, 0, 0, 0, 1],  # the tail's cell is free when the head arrives
    ]
    assert [(row, column) for row in range(5) for column in range(5) if food[row][column]] == [(4, 3)]


@pytest.mark.parametrize("size", [(5, 5), (4, 7), (7, 4)])
def test_wrapped_view_is_that_of_the_mirrored_board(size: tuple[int, int]) -> None:
    """Boards turned upside down look the same, and the same moves lead to boards that look the same."""
    height, width = size
    config = Config(width=width, height=height, view="wrapped", start="random", long_start=height * width // 2)
    state = snake.init(config, env_keys(3, torch.arange(300)))

    def flipped(cell: Tensor) -> Tensor:
        return torch.where(cell < 0, cell, (height - 1 - cell // width) * width + cell % width).to(torch.int16)

    heading = torch.where(state.heading % 2 == 0, 2 - state.heading, state.heading).to(torch.int8)
    other = state._replace(
        ages=in_words(config, every_age(config, state.ages).flip(1)),
        head=flipped(state.head),
        food=flipped(state.food),
        tail=flipped(state.tail),
        heading=heading,
    )
    aside = _snake_views._food(config, state)[1]
    lopsided = aside != 0  # in front of the head there is nothing to mirror by
    assert (aside < 0).any()
    assert (aside > 0).any()
    assert torch.equal(snake.observe(config, state)[lopsided], snake.observe(config, other)[lopsided])
    assert not torch.equal(snake.observe(config, state), snake.observe(config, other))
    for action in range(3):
        after, _, died, _ = snake.step(config, state, torch.full((300,), action))
        mirrored, _, died_too, _ = snake.step(config, other, torch.full((300,), action))
        assert torch.equal(died[lopsided], died_too[lopsided])
        assert torch.equal(flipped(after.head)[lopsided], mirrored.head[lopsided])
    assert (snake.observe(config, state)[:, 2].flatten(1).sum(1) == 1).all()


@pytest.mark.parametrize(("hunger", "shown"), [(0, 0), (5, 0), (6, 1), (47, 7), (48, 8)])
def test_hunger_is_shown_at_the_head(hunger: int, shown: int) -> None:
    board = """
        . . * .
        . . . .
        . 1 2 3
        . . . .
    """
    for view in ("wrapped", "centred"):
        plain, hungry = (
            snake.observe(*draw(board, RIGHT, hunger, view=view, show_hunger=show)) for show in (False, True)
        )
        head = hungry.shape[2] // 2
        assert plain[0, 2, head, head] == 0
        assert hungry[0, 2, head, head] == shown
        hungry[0, 2, head, head] = 0
        assert torch.equal(hungry, plain)


def test_wrapped_view_without_mirror_leaves_the_food_to_the_left() -> None:
    board = """
        . . * .
        . . . .
        . 1 2 3
        . . . .
    """
    foods, heads = [], []
    for mirror in (True, False):
        config, state = draw(board, RIGHT, view="wrapped", mirror=mirror)
        food = snake.observe(config, state)[0, 2]
        foods.append(food.nonzero().tolist())
        heads.append([snake.step(config, state, torch.tensor([turn]))[0].head.item() for turn in (0, 2)])
    assert foods == [[[3, 4]], [[3, 0]]]  # two rows beside the head, which is in row and column 2
    assert heads == [[15, 7], [7, 15]]  # away from the food and towards it; left and right
    assert snake.action_names(Config(view="wrapped")) == ("away from food", "straight on", "towards food")
    assert snake.action_names(Config(view="wrapped", mirror=False)) == ("left", "straight on", "right")


def test_food_of_a_new_game_is_uniform_over_the_free_cells(looks_uniform: Callable[[Tensor], bool]) -> None:
    config = Config()
    state = snake.init(config, env_keys(0, torch.arange(97 * 200)))
    free = (every_age(config, state.ages)[0] == 0).flatten()
    counts = torch.bincount(state.food.long(), minlength=config.cells)
    assert free.sum() == 97
    assert counts[~free].sum() == 0
    assert (counts[free] > 0).all()
    assert looks_uniform(counts[free])


def test_next_food_is_uniform_over_the_free_cells(looks_uniform: Callable[[Tensor], bool]) -> None:
    config, state = draw("""
        . . . . . . .
        . 1 2 . . . .
        . . 3 4 5 * .
        . . . . . . .
    """, RIGHT)  # fmt: skip
    keys = env_keys(1, torch.arange(22 * 300))
    many = State(*(x.expand(len(keys), *x.shape[1:]) for x in state))._replace(key=keys)
    after, _, _, _ = snake.step(config, many, torch.full((len(keys),), RIGHT))
    free = (every_age(config, after.ages)[0] == 0).flatten()
    counts = torch.bincount(after.food.long(), minlength=config.cells)
    assert free.sum() == 22
    assert counts[~free].sum() == 0
    assert looks_uniform(counts[free])


def test_random_start_is_uniform_and_whole(looks_uniform: Callable[[Tensor], bool]) -> None:
    """Every turn and every place that leaves room for the body, equally often within a turn."""
    config = Config(width=5, height=4, start="random", start_length=3)
    state = snake.init(config, env_keys(2, torch.arange(12_000)))
    ages = every_age(config, state.ages).flatten(1)
    assert torch.equal(ages.sort(1).values[:, -4:], torch.tensor([0, 1, 2, 3], dtype=torch.int32).expand(12_000, -1))
    assert looks_uniform(torch.bincount(state.heading.long(), minlength=4))
    for heading, places in ((UP, 10), (RIGHT, 12), (DOWN, 10), (LEFT, 12)):
        heads = torch.bincount(state.head[state.heading == heading].long())
        assert (heads > 0).sum() == places
        assert looks_uniform(heads[heads > 0])


@pytest.mark.parametrize(("width", "height"), [(6, 4), (5, 4), (4, 5), (5, 5), (7, 9), (32, 32), (40, 40)])
@pytest.mark.parametrize("start_length", [1, 3])
def test_long_starts_are_whole_snakes(
    width: int, height: int, start_length: int, looks_uniform: Callable[[Tensor], bool]
) -> None:
    """Every length equally often; each body one piece, the last move leading to its head, the cell ahead free."""
    longest = min(width * height - 2, 60)
    config = Config(width=width, height=height, start_length=start_length, long_start=longest)
    state = snake.init(config, env_keys(2, torch.arange(3000)))
    assert looks_uniform(torch.bincount(state.length.long(), minlength=longest + 1)[start_length:])
    heads = torch.bincount(state.head.long(), minlength=config.cells)
    assert (heads > 0).sum() > min(config.cells - 10, 900)  # everywhere
    ages = every_age(config, state.ages).flatten(1)
    assert torch.equal(ages.max(1).values.long(), state.length.long())
    assert torch.equal((ages > 0).sum(1), state.length.long())
    strides = torch.tensor([-width, 1, width, -1])
    for env_index in range(300):
        length = int(state.length[env_index])
        body = [int((ages[env_index] == age).nonzero()) for age in range(length, 0, -1)]
        assert (body[0], body[-1]) == (state.head[env_index], state.tail[env_index])
        places = torch.tensor([(cell // width, cell % width) for cell in body])
        assert (places.diff(dim=0).abs().sum(1) == 1).all()
        if length > 1:
            assert body[0] - body[1] == strides[state.heading[env_index].long()]
        assert ages[env_index, state.food[env_index].long()] == 0
    assert torch.equal(state.free, pack(ages == 0))
    every = [snake.step(config, state, torch.full((3000,), action))[2] for action in range(4)]
    assert not torch.stack(every).all(0).any()  # none is lost from the beginning


@pytest.mark.parametrize(("width", "height"), [(6, 4), (5, 4), (4, 5)])
def test_a_long_start_can_be_won(width: int, height: int) -> None:
    """The path's ends meet: who goes on along it wins, however long the snake was."""
    config = Config(width=width, height=height, long_start=width * height - 2)
    game = Oracle(config, 0)
    path, closed = oracle_path(height, width)
    assert closed
    ahead = {cell: path[(place + 1) % len(path)] for place, cell in enumerate(path)}
    for key in range(40):
        game, over = Oracle(config, key), False
        while not over:
            head, (row, column) = game.body[0], ahead[game.body[0]]
            _, over, truncated, _, won = game.step(MOVES.index((row - head[0], column - head[1])))
            assert not truncated
        assert won


def test_long_starts_that_are_not_longer_change_nothing() -> None:
    keys = env_keys(2, torch.arange(50))
    plain = snake.init(Config(start="random", start_length=4), keys)
    for long_start in (1, 4):
        same = snake.init(Config(start="random", start_length=4, long_start=long_start), keys)
        assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))


@pytest.mark.parametrize("long_start", [-1, 99, 1000])
def test_impossible_long_starts(long_start: int) -> None:
    with pytest.raises(UserError, match=rf"env.long_start is {long_start}; .* up to 98 cells"):
        Config(long_start=long_start)


def test_a_hamiltonian_cycle_wins_every_game() -> None:
    """On 6x6, without the oracle: every environment's first episode fills the board."""
    config = {"width": 6, "height": 6, "start": "centre"}
    rules = make_rules("snake", config)
    order = [0, *(r * 6 + c for r in range(6) for c in (range(1, 6) if r % 2 == 0 else range(5, 0, -1)))]
    order += [r * 6 for r in range(5, 0, -1)]
    turn = {-6: UP, 1: RIGHT, 6: DOWN, -1: LEFT}
    backwards = torch.empty(36, dtype=torch.int64)  # the new snake heads right in a row the cycle takes to the left
    for cell, before in zip(order, [order[-1], *order[:-1]], strict=True):
        backwards[cell] = turn[before - cell]
    envs = batch.reset(rules, env_keys(4, torch.arange(16)))
    won = torch.zeros(16, dtype=torch.bool)
    for _ in range(1300):
        envs, step = batch.step(rules, envs, backwards[envs.game.head.long()])
        assert not step.truncated.any()
        assert torch.equal(step.terminated, step.won)
        first = step.won & ~won
        assert (step.final_state.food[first] == -1).all()
        assert (step.episode.score[first] == 33).all()
        assert (step.episode.episode_return[first] == 38.0).all()
        won |= step.won
        if won.all():
            break
    assert won.all()


def test_rules_have_not_changed_without_a_new_version() -> None:
    """The digest of a long trajectory. When the rules change on purpose, raise VERSION and put the new digest here."""
    env = make("snake", num_envs=64, seed=123, start="random", starvation=40)
    env.reset()
    digest = hashlib.sha256()
    for t in range(150):
        step = env.step(random.below(random.bits(random.seed_key(t), torch.arange(64)), 4))
        for x in (step.obs, step.final_obs, step.reward, step.terminated, step.truncated, step.episode.score):
            digest.update(x.numpy().tobytes())
    assert (snake.VERSION, digest.hexdigest()[:16]) == (1, "55fb075c52d54164")


@pytest.mark.parametrize("size", [(10, 10), (6, 6), (5, 5), (12, 11), (13, 11), (20, 20), (16, 17), (15, 15)], ids=str)
def test_boards_in_words(size: tuple[int, int]) -> None:
    """Words hold the ages of all cells, and planes made of words are those made cell by cell; a won board has no food."""
    config = Config(width=size[0], height=size[1], start="random", long_start=size[0] * size[1] - 2)
    state = snake.init(config, env_keys(3, torch.arange(256)))
    state = state._replace(food=torch.where(torch.arange(256) % 7 == 0, -1, state.food).to(torch.int16))
    ages = every_age(config, state.ages)
    assert ages.max() > 0.9 * config.cells
    assert torch.equal(in_words(config, ages), state.ages)
    assert torch.equal(occupied(config, state.ages), in_words(config, ages > 0))
    obs = snake.observe(config, state)
    for plane, expected in enumerate((ages, mark_cell(config, state.head), mark_cell(config, state.food))):
        assert torch.equal(obs[:, plane], expected.to(obs.dtype))


def test_occupied_cells_of_any_age() -> None:
    """No age of a board disturbs its neighbours in the word."""
    for config in (Config(), Config(width=40, height=40)):
        ages = torch.arange(config.cells).view(1, config.height, config.width)
        for boards in (ages, ages.flip(2), ages * 0 + config.cells, ages % 2 * config.cells):
            assert torch.equal(occupied(config, in_words(config, boards)), in_words(config, boards > 0))
