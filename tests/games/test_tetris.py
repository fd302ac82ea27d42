"""Tetris' rules on boards drawn by hand: placements, lines, endings; its pieces, its start and its options."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch
from tetris_drawn import PIECES, Game, action_of, board_of, clean, side_by_side
from torch import Tensor

from redline import oracles
from redline.core import random
from redline.core.errors import UserError
from redline.envs import make, make_rules
from redline.envs.batch import env_keys
from redline.games import _tetris_planes, tetris
from redline.games.tetris import Config
from redline.oracles.tetris import Oracle

# No row can be filled here, and two cells under an overhang on the right cannot be reached.
BUMPY = """
    ....#
    .....
    #....
    #.#.#
"""
PLACEMENTS = {  # piece and orientation: from the leftmost column to the rightmost; o is the piece
    "I 0": """
        .....  .oooo
        ....#  ....#
        oooo.  .....
        #....  #....
        #.#.#  #.#.#
    """,
    "I 1": """
        .....  .....  .....  .....  ....o
        .....  .....  .....  .....  ....o
        o....  .....  .....  .....  ....o
        o....  .....  ..o..  .....  ....o
        o...#  .o..#  ..o.#  ...o#  ....#
        o....  .o...  ..o..  ...o.  .....
        #....  #o...  #.o..  #..o.  #....
        #.#.#  #o#.#  #.#.#  #.#o#  #.#.#
    """,
    "O 0": """
        .....  .....  .....  ...oo
        .....  .....  .....  ...oo
        oo..#  ....#  ....#  ....#
        oo...  .oo..  ..oo.  .....
        #....  #oo..  #.oo.  #....
        #.#.#  #.#.#  #.#.#  #.#.#
    """,
    "T 0": """
        .....  .....  ...o.
        .....  .....  ..ooo
        .o..#  ....#  ....#
        ooo..  ..o..  .....
        #....  #ooo.  #....
        #.#.#  #.#.#  #.#.#
    """,
    "T 1": """
        .....  .....  .....  ...o.
        o....  .....  .....  ...oo
        oo..#  ....#  ..o.#  ...o#
        o....  .o...  ..oo.  .....
        #....  #oo..  #.o..  #....
        #.#.#  #o#.#  #.#.#  #.#.#
    """,
    "T 2": """
        .....  .....  ..ooo
        ....#  ....#  ...o#
        ooo..  .ooo.  .....
        #o...  #.o..  #....
        #.#.#  #.#.#  #.#.#
    """,
    "T 3": """
        .....  .....  .....  ....o
        .....  .....  .....  ...oo
        .....  .....  .....  ....o
        .o..#  ..o.#  ....#  ....#
        oo...  .oo..  ...o.  .....
        #o...  #.o..  #.oo.  #....
        #.#.#  #.#.#  #.#o#  #.#.#
    """,
    "S 0": """
        .....  .....  ...oo
        .oo.#  ....#  ..oo#
        oo...  ..oo.  .....
        #....  #oo..  #....
        #.#.#  #.#.#  #.#.#
    """,
    "S 1": """
        .....  .....  .....  ...o.
        .....  .....  .....  ...oo
        .....  .....  .....  ....o
        o...#  .o..#  ....#  ....#
        oo...  .oo..  ..o..  .....
        #o...  #.o..  #.oo.  #....
        #.#.#  #.#.#  #.#o#  #.#.#
    """,
    "Z 0": """
        .....  .....  ..oo.
        .....  .....  ...oo
        ....#  ....#  ....#
        oo...  .oo..  .....
        #oo..  #.oo.  #....
        #.#.#  #.#.#  #.#.#
    """,
    "Z 1": """
        .....  .....  .....  ....o
        .o...  .....  .....  ...oo
        oo..#  ....#  ...o#  ...o#
        o....  ..o..  ..oo.  .....
        #....  #oo..  #.o..  #....
        #.#.#  #o#.#  #.#.#  #.#.#
    """,
    "J 0": """
        .....  .....  ..o..
        .....  .....  ..ooo
        o...#  ....#  ....#
        ooo..  .o...  .....
        #....  #ooo.  #....
        #.#.#  #.#.#  #.#.#
    """,
    "J 1": """
        oo...  .....  .....  ...oo
        o...#  ....#  ..oo#  ...o#
        o....  .oo..  ..o..  ...o.
        #....  #o...  #.o..  #....
        #.#.#  #o#.#  #.#.#  #.#.#
    """,
    "J 2": """
        .....  .....  ..ooo
        .....  .....  ....o
        ....#  ....#  ....#
        ooo..  .....  .....
        #.o..  #ooo.  #....
        #.#.#  #.#o#  #.#.#
    """,
    "J 3": """
        .....  .....  .....  ....o
        .....  .....  .....  ....o
        .o...  .....  .....  ...oo
        .o..#  ..o.#  ...o#  ....#
        oo...  ..o..  ...o.  .....
        #....  #oo..  #.oo.  #....
        #.#.#  #.#.#  #.#.#  #.#.#
    """,
    "L 0": """
        .....  .....  ....o
        .....  .....  ..ooo
        ..o.#  ....#  ....#
        ooo..  ...o.  .....
        #....  #ooo.  #....
        #.#.#  #.#.#  #.#.#
    """,
    "L 1": """
        .....  .....  .....  ...o.
        .....  .....  .....  ...o.
        o....  .....  .....  ...oo
        o...#  .o..#  ..o.#  ....#
        oo...  .o...  ..o..  .....
        #....  #oo..  #.oo.  #....
        #.#.#  #.#.#  #.#.#  #.#.#
    """,
    "L 2": """
        .....  .....  ..ooo
        ooo.#  ....#  ..o.#
        o....  .....  .....
        #....  #ooo.  #....
        #.#.#  #o#.#  #.#.#
    """,
    "L 3": """
        .....  .....  .....  ...oo
        .....  .....  .....  ....o
        .....  .....  .....  ....o
        ....#  .oo.#  ....#  ....#
        oo...  ..o..  ..oo.  .....
        #o...  #.o..  #..o.  #....
        #o#.#  #.#.#  #.#o#  #.#.#
    """,
}


@pytest.mark.parametrize("which", PLACEMENTS)
def test_every_placement(which: str) -> None:
    piece, orientation = which[0], int(which[2])
    expected = side_by_side(PLACEMENTS[which], height=8)
    for x, board in enumerate(expected):
        game = Game(BUMPY, piece + "O", height=8)
        outcome = game.place(orientation, x)
        assert game.board == board, f"{which} in column {x}"
        assert outcome == (0, False, 0)
        assert game.current == "O"
        assert game.state.drawn.item() == 3  # two at the start, one for the place that came free


def test_every_placement_has_its_number() -> None:
    """Orientation by orientation, column by column; what is beyond a piece's list is no placement."""
    assert list(PLACEMENTS) == [f"{p} {o}" for p in PIECES for o in range({"O": 1, "I": 2, "S": 2, "Z": 2}.get(p, 4))]
    for piece in PIECES:
        boards = [
            board
            for which, picture in PLACEMENTS.items()
            if which[0] == piece
            for board in side_by_side(picture, height=8)
        ]
        game = Game(BUMPY, piece, height=8)
        assert len(game.player.legal()) == tetris.spec(game.config).num_actions == 14
        assert tetris.legal(game.config, game.state)[0].tolist() == [n < len(boards) for n in range(14)]
        for action, board in enumerate(boards):
            after = tetris.step(game.config, game.state, torch.tensor([action]))[0]
            assert [[c >> row & 1 for c in after.columns[0].tolist()] for row in range(8)] == board


LINES = {
    "one": (
        "I", 1, 4, 1, """
        ####.
        """, """
        ....#
        ....#
        ....#
        """,
    ),
    "two": (
        "O", 0, 2, 2, """
        #....
        ##..#
        ##..#
        """, """
        #....
        """,
    ),
    "three": (
        "J", 1, 0, 3, """
        ....#
        ..###
        .####
        .####
        """, """
        ....#
        """,
    ),
    "four": (
        "I", 1, 4, 4, """
        #..#.
        ##.#.
        ####.
        ####.
        ####.
        ####.
        """, """
        #..#.
        ##.#.
        """,
    ),
    "first and third": (
        "I", 1, 4, 2, """
        .###.
        ####.
        #.##.
        ####.
        """, """
        .####
        #.###
        """,
    ),
    "second and fourth": (
        "I", 1, 4, 2, """
        .#...
        ####.
        ##.#.
        ####.
        .###.
        """, """
        .#...
        ##.##
        .####
        """,
    ),
    "first and fourth": (
        "I", 1, 0, 2, """
        .####
        .##.#
        .#.##
        .####
        """, """
        ###.#
        ##.##
        """,
    ),
    "all but the second": (
        "I", 1, 2, 3, """
        #....
        ##.##
        ##.##
        #..##
        ##.##
        """, """
        #....
        #.###
        """,
    ),
    "nothing falls by itself": (
        "I", 1, 4, 1, """
        #....
        .....
        ####.
        """, """
        ....#
        #...#
        ....#
        """,
    ),
    "in the middle of the stack": (
        "S", 0, 1, 1, """
        #....
        #...#
        #..##
        .#.#.
        """, """
        #....
        #.###
        .#.#.
        """,
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", LINES)
def test_full_rows_are_removed(which: str) -> None:
    piece, orientation, x, lines, before, after = LINES[which]
    game = Game(before, piece, height=8, reward_line=10.0)
    assert game.place(orientation, x) == (10.0 * lines, False, lines)
    assert game.board == board_of(after, height=8)


@pytest.mark.parametrize(
    ("height", "dtype"), [(6, torch.int32), (24, torch.int32), (25, torch.int64), (32, torch.int64)]
)
def test_a_full_board_can_be_cleared(height: int, dtype: torch.dtype) -> None:
    """From the top row, the highest bit of a column, down to the floor."""
    game = Game("###.\n" * height, "I")
    assert game.state.columns.dtype == dtype
    assert game.state.columns[0].tolist() == [2**height - 1] * 3 + [0]
    for left in range(height - 4, -1, -4):
        game.give("I")
        assert game.place(1, 3).lines == 4
        assert game.board == board_of("###.\n" * left or "....", height)


def test_the_widest_board() -> None:
    game = Game("................", "III", height=6, start_height=0)
    assert tetris.spec(game.config).num_actions == 4 * 16 - 6
    assert sum(game.player.legal()) == 13 + 16
    game.place(0, 0)
    game.place(0, 12)
    game.place(0, 8)
    assert game.board == board_of("####....########", height=6)
    game.give("III")
    assert game.place(0, 4).lines == 1
    assert game.board == board_of("................", height=6)


# Placing the O on the two middle columns leaves heights 3, 6, 6 and 3, or 2 with the cell marked x gone.
NEARLY_OVER = """
    .##.
    ##.x
    .###
    #.##
"""


@pytest.mark.parametrize("following", PIECES)
@pytest.mark.parametrize("low", [False, True])
def test_the_game_is_over_when_the_next_piece_fits_nowhere(following: str, low: bool) -> None:
    """Only an I, upright in the last column, can still be placed, its top in the top row; one cell more and it is over."""
    game = Game(NEARLY_OVER.replace("x", "." if low else "#"), "O" + following, height=6, reward_piece=0.5)
    over = not (low and following == "I")
    assert game.place(0, 1) == (-0.5 if over else 0.5, over, 0)
    assert game.board == board_of(
        ".##.\n.##." + NEARLY_OVER.replace("x", "." if low else "#").replace("    ", ""), height=6
    )
    only = [action_of("I", 1, 3, width=4)] if not over else []
    assert [n for n, ok in enumerate(tetris.legal(game.config, game.state)[0].tolist()) if ok] == only


def test_a_placement_may_reach_the_top_row_and_no_higher() -> None:
    """The piece may not stick out even where the rows it fills would bring it down."""
    game = Game("""
        ....
        ....
        ###.
        ###.
        ###.
        ###.
    """, "L")  # fmt: skip
    legal = tetris.legal(game.config, game.state)[0].tolist()
    # Flat on top (two high) and upside down; on its side, three high, only where it reaches down into the well.
    fits = {(0, 0), (0, 1), (2, 0), (2, 1), (3, 2)}
    assert {n for n, ok in enumerate(legal) if ok} == {action_of("L", o, x, width=4) for o, x in fits}
    game = Game("""
        ....
        ....
        ###.
        .###
        ##.#
        #.##
    """, "I")  # fmt: skip
    assert [n for n, ok in enumerate(tetris.legal(game.config, game.state)[0].tolist()) if ok] == [0]


WORTH = {"reward_line": 3.0, "reward_death": -7.0, "reward_hole": 5.0, "reward_height": 11.0, "reward_piece": 13.0}


@pytest.mark.parametrize(
    ("piece", "action"), [("I", 0), ("I", 1), ("I", 5), ("I", 9), ("O", 3), ("T", 2), ("L", 0), ("T", 10), ("T", -1)]
)
def test_an_illegal_placement_ends_the_game_and_changes_nothing(piece: str, action: int) -> None:
    """Beyond the top row, or a number that stands for no placement of this piece."""
    game = Game("""
        .##.
        .##.
        .##.
        ##..
        .###
        #.##
    """, piece + "ZJ", **WORTH)  # fmt: skip
    before = game.state
    assert game.step(action) == (-7.0, True, 0)
    for field, was, now in zip(before._fields, before, game.state, strict=True):
        assert torch.equal(was, now), field


@pytest.mark.parametrize("action", [-1, 10, 1000])
def test_a_number_beyond_all_lists_is_no_placement(action: int) -> None:
    game = Game("....", "TO", height=6)
    assert game.step(action) == (-1.0, True, 0)
    assert game.board == board_of("....", height=6)


def test_a_ceiling_is_the_top_for_pieces_and_not_for_the_view() -> None:
    """Six of nine rows may be used: the I may stand in the last column only; then there is no room left for it."""
    game = Game(NEARLY_OVER.replace("x", "."), "OIS", height=9, ceiling=6)
    assert game.place(0, 1) == (0, False, 0)
    assert [n for n, ok in enumerate(game.player.legal()) if ok] == [action_of("I", 1, 3, width=4)]
    assert [row[6:10] for row in game.planes().splitlines()] == [
        *["...."] * 3,
        "####",
        *["...."] * 5,
    ]  # it starts there
    assert [row[18:] for row in game.planes().splitlines()][:2] == [".##.", "##.."]  # what is next is shown at the top
    assert game.place(1, 3).terminated
    higher = Game(NEARLY_OVER.replace("x", "."), "OIS", height=9, ceiling=7)
    higher.place(0, 1)
    assert sum(higher.player.legal()) == 3  # flat on top, upright in the first column and in the last


def test_rewards() -> None:
    """The holes are counted after the full rows are gone, the height is that of the highest column."""
    before = """
        ....#
        .####
        .####
        .#.##
        .##.#
    """
    game = Game(before, "I", height=7, **WORTH)
    outcome = game.place(1, 0)  # rows 0 to 3: the third and the fourth are full
    assert game.board == board_of("""
        ....#
        ##.##
        ###.#
    """, height=7)  # fmt: skip
    assert outcome == (2 * 3.0 - 1 * 5.0 - 2 * 11.0 + 13.0, False, 2)  # of two holes one is open to the sky now
    game = Game(before, "O", height=7, **WORTH)
    outcome = game.place(0, 0)  # over four empty cells, one row higher than the stack
    assert outcome == (4 * 5.0 + 1 * 11.0 + 13.0, False, 0)


def test_planes() -> None:
    game = Game("""
        .....
        .....
        .....
        .....
        ....#
        .....
        #....
        #.#.#
    """, "TSI")  # fmt: skip
    assert tetris.observe(game.config, game.state).dtype == torch.uint8
    assert game.planes() == clean("""
        .....  ..#..  .....  ..##.
        .....  .###.  .....  .##..
        .....  .....  .....  .....
        .....  .....  .....  ####.
        ....#  .....  .....  .....
        .....  .....  ..#..  .....
        #....  .....  .###.  .....
        #.#.#  .....  .....  .....
    """)
    assert game.shown() == clean("""
        ..o..
        .ooo.
        .....
        .....
        ....#
        ..-..
        #---.
        #.#.#
    """)


def test_what_sticks_out_is_not_shown() -> None:
    """The I at its start lies over a column of full height: seen there, but its landing is above the board."""
    game = Game("""
        .#..
        .##.
        .##.
        ##..
        .###
        #.##
    """, "I")  # fmt: skip
    assert game.planes() == clean("""
        .#..  ####  ....  ....
        .##.  ....  ....  ....
        .##.  ....  ....  ....
        ##..  ....  ....  ....
        .###  ....  ....  ....
        #.##  ....  ....  ....
    """)


def test_the_observation_of_a_7x14_board() -> None:
    config = Config(width=7, height=14)
    spec = tetris.spec(config)
    assert (spec.obs_shape, spec.obs_dtype, spec.obs_high) == ((4, 14, 7), torch.uint8, 1)
    obs = tetris.observe(config, tetris.init(config, env_keys(0, torch.arange(5))))
    assert (obs.shape, obs.dtype) == ((5, 4, 14, 7), torch.uint8)


def pieces_drawn(generator: str, envs: int, count: int, first: int = 0) -> Tensor:
    """(N, count): the pieces each environment gets, in order."""
    config = Config(pieces=generator, width=16, height=32)  # type: ignore[arg-type]
    state = tetris.init(config, env_keys(3, torch.arange(envs)))
    found = []
    for t in range(count):
        found.append(state.pieces[:, 0].long())
        action = any_legal(tetris.legal(config, state), t + first)
        state, _, terminated, _ = tetris.step(config, state, action)
        assert not terminated.any()
    return torch.stack(found, 1)


def test_a_bag_holds_every_piece_once(looks_uniform: Callable[[Tensor], bool]) -> None:
    pieces = pieces_drawn("bag7", envs=4200, count=21)
    assert torch.equal(pieces.view(-1, 7).sort(1).values, torch.arange(7).expand(4200 * 3, -1))
    for place in range(21):
        assert looks_uniform(torch.bincount(pieces[:, place], minlength=7)), f"piece {place}"
    pairs = torch.bincount(pieces[:, 2] * 7 + pieces[:, 3], minlength=49)
    assert looks_uniform(pairs[pairs > 0])
    assert (pairs > 0).sum() == 42
    assert looks_uniform(
        torch.bincount(pieces[:, 6] * 7 + pieces[:, 7], minlength=49)
    )  # a new bag owes the old nothing


def test_uniform_pieces_are_uniform_and_independent(looks_uniform: Callable[[Tensor], bool]) -> None:
    pieces = pieces_drawn("uniform", envs=4900, count=9)
    for place in range(9):
        assert looks_uniform(torch.bincount(pieces[:, place], minlength=7)), f"piece {place}"
    for place in range(8):
        assert looks_uniform(torch.bincount(pieces[:, place] * 7 + pieces[:, place + 1], minlength=49))


@pytest.mark.parametrize("generator", ["bag7", "uniform"])
def test_pieces_do_not_depend_on_the_placements(generator: str) -> None:
    assert torch.equal(pieces_drawn(generator, 50, 15), pieces_drawn(generator, 50, 15, first=100))


@pytest.mark.parametrize("previews", [0, 1, 2])
def test_what_is_next_comes_next(previews: int) -> None:
    config = Config(previews=previews)
    state = tetris.init(config, env_keys(0, torch.arange(20)))
    assert torch.equal(state.drawn, torch.full((20,), 1 + previews, dtype=torch.int32))
    for _ in range(6):
        assert state.pieces.shape == (20, 1 + previews)
        after, _, _, _ = tetris.step(config, state, torch.zeros(20, dtype=torch.int64))
        assert torch.equal(after.pieces[:, :previews], state.pieces[:, 1:])
        assert torch.equal(after.drawn, state.drawn + 1)
        state = after


def test_start_height(looks_uniform: Callable[[Tensor], bool]) -> None:
    """As many rows as drawn, none of them full, each of the others as likely as any."""
    config = Config(width=4, height=9, start_height=5)
    envs = 6 * 15 * 60
    state = tetris.init(config, env_keys(8, torch.arange(envs)))
    bit = torch.arange(9).view(1, 9, 1)
    rows = ((state.columns.unsqueeze(1) >> bit & 1) * (1 << torch.arange(4))).sum(2)  # (N, 9): row as a number
    assert (rows[:, 5:] == 0).all()
    assert looks_uniform(torch.bincount(rows[:, 0][rows[:, 1] > 0].long(), minlength=15))
    used = rows[:, 4][rows[:, 4] > 0].long()  # the fifth row is there in a sixth of the games
    assert looks_uniform(torch.bincount(used, minlength=15)[1:])
    assert abs(used.numel() / envs - 1 / 6 * 14 / 15) < 0.02
    height = 9 - (rows.flip(1) > 0).to(torch.int8).argmax(1)
    assert (rows < 15).all()
    assert set(height.tolist()) >= {1, 2, 3, 4, 5}


def test_a_new_game_starts_on_an_empty_board() -> None:
    assert (tetris.init(Config(), env_keys(8, torch.arange(50))).columns == 0).all()


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        *(("width", value) for value in (-1, 0, 3, 17)),
        *(("height", value) for value in (0, 5, 33)),
        *(("previews", value) for value in (-1, 3)),
        *(("gravity", value) for value in (-1, 0)),
        *(("start_height", value) for value in (-1, 17)),
        *(("ceiling", value) for value in (-1, 5, 21)),
        ("actions", "mouse"),
        ("pieces", "bag14"),
        ("view", "sideways"),
    ],
)
def test_wrong_options_are_named(option: str, wrong: Any) -> None:
    with pytest.raises(UserError, match=rf"^env\.{option} is '?{wrong}'?; "):
        make_rules("tetris", {option: wrong})


@pytest.mark.parametrize(
    "right",
    [{"width": 4, "height": 6}, {"width": 16, "height": 32}, {"start_height": 16}, {"height": 6, "start_height": 2}],
)
def test_the_limits_themselves_are_fine(right: dict[str, int]) -> None:
    env = make("tetris", num_envs=3, **right)  # type: ignore[arg-type]
    assert env.reset().shape == (3, 4, right.get("height", 20), right.get("width", 10))
    assert env.legal().any(1).all()


def test_options_that_need_others() -> None:
    for view in ("afterstates", "boards"):
        with pytest.raises(UserError, match=rf"env\.view.*{view}.*placement"):
            Config(view=view, actions="keys")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"env\.hold.*keys"):
        Config(hold=True)
    Config(hold=True, actions="keys")
    Config(view="afterstates")
    with pytest.raises(UserError, match=r"env\.start_height is 7"):
        Config(start_height=7, ceiling=10)
    Config(start_height=6, ceiling=10)


def test_gymnasium_refuses_an_illegal_placement() -> None:
    """The last number stands for a placement of T, J and L only. The game goes on after a refusal."""
    env = gymnasium.make("redline/Tetris-v0", on_illegal="raise")
    refused = 0
    for seed in range(12):
        env.reset(seed=seed)
        piece = Oracle(Config(), oracles.episode_key(seed, 0, 0)).pieces[0]
        if PIECES[piece] in "TJL":
            _, _, terminated, _, _ = env.step(33)
        else:
            refused += 1
            with pytest.raises(gymnasium.error.InvalidAction, match=r"\b33\b"):
                env.step(33)
            _, _, terminated, _, _ = env.step(0)
        assert not terminated
    assert 0 < refused < 12


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"start_height": 8}, "4c37c2ddd9945203"),
        ({"actions": "keys", "hold": True, "pieces": "uniform", "previews": 2, "height": 12}, "1201daa3bdfc08a7"),
    ],
    ids=["placement", "keys"],
)
def test_rules_have_not_changed_without_a_new_version(options: dict[str, Any], expected: str) -> None:
    """The digest of a long trajectory. When the rules change on purpose, raise VERSION and put the new digest here."""
    env = make("tetris", num_envs=64, seed=123, **options)
    env.reset()
    digest = hashlib.sha256()
    for t in range(100):
        step = env.step(any_legal(env.legal(), t))
        for x in (step.obs, step.final_obs, step.reward, step.terminated, step.truncated, step.episode.score):
            digest.update(x.numpy().tobytes())
    assert (tetris.VERSION, digest.hexdigest()[:16]) == (1, expected)


def any_legal(legal: Tensor, t: int) -> Tensor:
    """One of the legal actions (N, A) of each environment, by chance."""
    rank = random.below(random.bits(random.seed_key(t), torch.arange(legal.shape[0])), legal.sum(1))
    return (legal.cumsum(1) <= rank.unsqueeze(1)).sum(1)


@pytest.mark.parametrize("size", [(10, 20), (7, 14), (5, 8), (16, 6), (4, 7), (15, 32), (8, 6)], ids=str)
def test_planes_of_joined_rows(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU writes several cells at a time is what is written here cell by cell."""
    rules = make_rules("tetris", {"width": size[0], "height": size[1], "start_height": size[1] - 4, "previews": 2})
    state = rules.game.init(rules.config, env_keys(3, torch.arange(64)))
    wide = _tetris_planes.grouping(rules.config, torch.device("cuda"))
    assert wide == GROUPING[size]
    monkeypatch.setattr(_tetris_planes, "grouping", lambda *_: wide)
    joined = tetris.observe(rules.config, state)
    monkeypatch.setattr(_tetris_planes, "grouping", lambda *_: (1, 1))
    assert torch.equal(joined, tetris.observe(rules.config, state))
    assert joined[:, 0].any()


GROUPING = {  # board -> cells at a time, rows joined for it
    **{(10, 20): (8, 4), (7, 14): (2, 2), (5, 8): (8, 8), (16, 6): (8, 1)},
    **{(4, 7): (4, 1), (15, 32): (4, 4), (8, 6): (8, 1)},
}
