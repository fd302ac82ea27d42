"""Afterstates and what is counted on them: by hand on drawn boards, and against plain Python on thousands of others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_tetris import LINES
from tetris_drawn import Game, action_of, board_of
from torch import Tensor
from versus_oracle import state_of

from redline.core.bits import heights
from redline.games import tetris
from redline.games._tetris_placements import board_features
from redline.games.tetris import FEATURES, Config
from redline.oracles import tetris as plain
from redline.oracles.tetris import Board, Oracle

COUNTS = FEATURES[4:]  # of a board; the four before them are of the placement

COUNTED = {  # picture, rows; transitions of rows and columns, holes, wells, hole depth, rows with holes, diversity, bumpiness
    "empty": ("....", 6, (12, 4, 0, 0, 0, 0, 1, 0)),
    "overhang": ("""
        ....#
        .....
        #....
        #.#.#
    """, 6, (14, 7, 2, 2, 2, 2, 3, 8)),  # wells of one cell in the second and the fourth column
    "towers": ("""
        ..#...
        ..#..#
        #.##.#
        #.#..#
        ####.#
        .##..#
    """, 8, (26, 12, 3, 13, 6, 2, 1, 17)),  # wells two and four deep: 3 + 10
    "to the top": ("""
        #..#
        #..#
        #...
        #.##
        ##.#
        #.##
    """, 6, (12, 10, 3, 1, 4, 3, 1, 8)),
    "wells at the walls": ("""
        .##.
        .##.
        .##.
        .###
    """, 7, (20, 4, 0, 16, 0, 0, 1, 7)),  # four deep and three deep: 10 + 6
    "steps": ("""
        ..#.........
        .##...##....
        ###.########
    """, 9, (24, 12, 0, 2, 0, 0, 3, 8)),
}  # fmt: skip


def columns_of(boards: list[Board]) -> Tensor:
    """(W, N), as the tensor game keeps boards."""
    dtype = torch.int32 if len(boards[0]) <= 24 else torch.int64
    packed = [[sum(cell << row for row, cell in enumerate(column)) for column in plain.columns(b)] for b in boards]
    return torch.tensor(packed).to(dtype).t()


def counted(config: Config, boards: list[Board]) -> dict[str, list[int]]:
    columns = columns_of(boards)
    found = board_features(config, columns.unbind(0))
    assert {tensor.dtype for tensor in found.values()} == {torch.int32}
    return {name: tensor.tolist() for name, tensor in found.items()}


@pytest.mark.parametrize("which", COUNTED)
def test_boards_counted_by_hand(which: str) -> None:
    picture, height, expected = COUNTED[which]
    board = board_of(picture, height)
    found = counted(Config(width=len(board[0]), height=height), [board])
    assert {name: found[name][0] for name in COUNTS} == dict(zip(COUNTS, expected, strict=True))
    assert tuple(getattr(plain, name)(board) for name in COUNTS) == expected


def test_heights_counted_by_hand() -> None:
    board = board_of(COUNTED["towers"][0], 8)
    assert plain.heights(board) == [4, 2, 6, 4, 0, 5]
    assert heights(columns_of([board]))[:, 0].tolist() == [4, 2, 6, 4, 0, 5]


SIZES = [(10, 20), (4, 6), (16, 32), (7, 14), (5, 24), (6, 25), (16, 6)]


def random_boards(width: int, height: int, count: int, seed: int) -> list[Board]:
    """Loose and dense ones, low ones and some up to the top row; many rows lack one to four cells beside each other."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, height, width)
    settled = torch.rand(shape, generator=generator) < torch.rand(count, 1, width, generator=generator)
    gap = torch.randint(width, (count, 1, 1), generator=generator)
    size = torch.randint(1, 5, (count, height, 1), generator=generator)
    place = torch.arange(width)
    nearly_full = (place < gap) | (place >= gap + size)
    settled = torch.where(torch.rand(count, height, 1, generator=generator) < 0.6, nearly_full, settled)
    top = torch.randint(0, height + 1, (count, 1, width), generator=generator)
    top = torch.where(torch.rand(count, 1, 1, generator=generator) < 0.5, top.amax(2, keepdim=True), top)
    settled &= torch.arange(height).view(1, -1, 1) < top
    settled &= ~settled.all(2, keepdim=True)
    return settled.int().tolist()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_counts_equal_plain_python(width: int, height: int) -> None:
    boards = random_boards(width, height, 500, seed=1)
    found = counted(Config(width=width, height=height), boards)
    for name in COUNTS:
        count = getattr(plain, name)
        assert found[name] == [count(board) for board in boards], name
    assert heights(columns_of(boards)).t().tolist() == [plain.heights(board) for board in boards]


def games_on(boards: list[Board], **options: Any) -> tuple[Config, tetris.State, list[Oracle]]:
    """One game a board, each piece in turn, with its oracle."""
    config = Config(width=len(boards[0][0]), height=len(boards[0]), **options)
    players = []
    for number, board in enumerate(boards):
        player = Oracle(config, key=number)
        player.board = board
        player.pieces[0] = number % 7
        player._spawn()
        players.append(player)
    return config, state_of(tetris, players), players


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_afterstates_equal_plain_python(width: int, height: int) -> None:
    config, state, players = games_on(random_boards(width, height, 140, seed=2))
    after = tetris.afterstates(config, state)
    seen = 0
    for game, player in enumerate(players):
        expected = player.afterstates()
        assert after.legal[game].tolist() == [place.legal for place in expected] == player.legal()
        for action, place in enumerate(expected):
            if place.legal:
                columns = columns_of([place.board])[:, 0]
                assert torch.equal(torch.stack(after.columns)[:, game, action], columns)
                landing = plain.landing_height(place.drop, place.height)
                assert after.lines[game, action] == place.lines
                assert after.landing[game, action] == landing
                assert after.eroded[game, action] == place.eroded
                seen |= 1 << place.lines
    assert seen & 0b111 == 0b111, "boards on which nothing can be cleared test little"


@pytest.mark.parametrize(
    ("which", "landing", "eroded"),
    [
        *(("one", 3, 1), ("two", 1, 8), ("three", 2, 12), ("four", 3, 16), ("first and third", 3, 4)),
        *(("all but the second", 3, 9), ("in the middle of the stack", 3, 2), ("nothing falls by itself", 3, 1)),
    ],
)
def test_placements_counted_by_hand(which: str, landing: int, eroded: int) -> None:
    piece, orientation, x, lines, before, cleared = LINES[which]
    game = Game(before, piece, height=8)
    after = tetris.afterstates(game.config, game.state)
    action = action_of(piece, orientation, x, width=5)
    assert (after.lines[0, action], after.landing[0, action], after.eroded[0, action]) == (lines, landing, eroded)
    assert torch.equal(torch.stack(after.columns)[:, 0, action], columns_of([board_of(cleared, 8)])[:, 0])


REWARDS = {"reward_line": 1.1, "reward_death": -0.7, "reward_hole": -0.3, "reward_height": 0.1, "reward_piece": 0.013}


@pytest.mark.parametrize("view", ["afterstates", "boards"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_an_afterstate_is_the_board_a_step_leads_to(width: int, height: int, view: str) -> None:
    """For every action of many games; its first feature is the reward, without what the next piece may bring."""
    boards = random_boards(width, height, 210, seed=3)
    config, state, _ = games_on(boards, view=view, previews=2, **REWARDS)
    after, obs, legal = tetris.afterstates(config, state), tetris.observe(config, state), tetris.legal(config, state)
    assert torch.equal(after.legal, legal)
    assert legal.any(0).all()
    survived = 0
    for action in range(tetris.spec(config).num_actions):
        new, reward, terminated, events = tetris.step(config, state, torch.full((len(boards),), action))
        ok = legal[:, action]
        assert torch.equal(torch.stack(after.columns)[:, ok, action].t(), new.columns[ok])
        assert torch.equal(after.lines[ok, action], events.score[ok])
        alive = ok & ~terminated
        assert torch.equal(obs[alive, action, 0], reward[alive])
        assert terminated[~ok].all()
        assert torch.equal(new.columns[~ok], state.columns[~ok])
        assert torch.equal(new.pieces[ok, :-1], state.pieces[ok, 1:])
        survived += int(alive.sum())
    assert survived > len(boards)


@pytest.mark.parametrize("view", ["afterstates", "boards"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_one_afterstate_is_its_row_of_the_observation(width: int, height: int, view: str) -> None:
    """For every action of many games, legal or not."""
    config, state, _ = games_on(random_boards(width, height, 70, seed=5), view=view, **REWARDS)
    obs = tetris.observe(config, state)
    for action in range(tetris.spec(config).num_actions):
        assert torch.equal(tetris.observe_afterstate(config, state, torch.full((70,), action)), obs[:, action])


@pytest.mark.parametrize("previews", [0, 1, 2])
def test_the_view_of_afterstates(previews: int) -> None:
    """Named features in the order of FEATURES, then the heights, then the next pieces, each as one of seven."""
    config, state, players = games_on(
        random_boards(7, 14, 70, seed=4), **REWARDS, view="afterstates", previews=previews
    )
    obs, spec = tetris.observe(config, state), tetris.spec(config)
    assert (spec.afterstates, spec.masked) == (True, True)
    assert obs.shape == (70, *spec.obs_shape) == (70, 4 * 7 - 6, len(FEATURES) + 7 + 7 * previews)
    assert obs.dtype == spec.obs_dtype == torch.float32
    for game, player in enumerate(players):
        for action, row in enumerate(player.observe()):
            assert not row or obs[game, action].tolist() == row
    # The first of the games by hand: its I lies flat in the first column, and what comes next is seen in each row.
    board = players[0].afterstates()[0].board
    assert players[0].afterstates()[0].legal
    named = dict(zip(FEATURES, obs[0, 0].tolist(), strict=False))
    assert named["holes"] == plain.holes(board)
    assert named["bumpiness"] == plain.bumpiness(board)
    heights, coming = obs[0, 0, len(FEATURES) :].split([7, 7 * previews])
    assert heights.tolist() == plain.heights(board)
    assert coming.nonzero().flatten().tolist() == [7 * k + piece for k, piece in enumerate(players[0].pieces[1:])]


@pytest.mark.parametrize("previews", [0, 1, 2])
@pytest.mark.parametrize(("width", "height"), [(7, 14), (5, 25)])
def test_the_view_of_boards(width: int, height: int, previews: int) -> None:
    """The reward, the cells of the board after the placement from its top row down, and the next pieces."""
    boards = random_boards(width, height, 70, seed=6)
    config, state, players = games_on(boards, **REWARDS, view="boards", previews=previews)
    obs, spec = tetris.observe(config, state), tetris.spec(config)
    assert (spec.afterstates, spec.masked, spec.afterstate_board) == (True, True, (height, width))
    assert obs.shape == (70, *spec.obs_shape) == (70, 4 * width - 6, 1 + height * width + 7 * previews)
    assert obs.dtype == spec.obs_dtype == torch.float32
    for game, player in enumerate(players):
        for action, row in enumerate(player.observe()):
            assert not row or obs[game, action].tolist() == row
    # After a step, the cells are those of the board that is seen next.
    legal = tetris.legal(config, state)
    action, playable = legal.to(torch.int64).argmax(1), legal.any(1)
    assert playable.sum() > 50
    after, *_ = tetris.step(config, state, action)
    cells = tetris.observe_afterstate(config, state, action)[:, 1 : 1 + height * width].view(-1, height, width)
    planes = tetris.observe(Config(width=width, height=height, previews=previews), after)
    assert torch.equal(cells[playable], planes[playable, 0].to(torch.float32))


def test_one_board_by_hand() -> None:
    """An O fills the lowest row, which goes; its upper half is left beside what lay in the second row."""
    game = Game("#....\n###..", "O", height=6)
    config = dataclasses.replace(game.config, view="boards", previews=0)
    row = tetris.observe_afterstate(config, game.state, torch.tensor([action_of("O", 0, 3, width=5)]))
    assert row[0, 0] == config.reward_line
    assert row[0, 1:].view(6, 5).tolist() == board_of("#..##", 6)[::-1]
