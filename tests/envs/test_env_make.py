"""`make` says what was wrong, what was expected, what to do."""

from __future__ import annotations

from typing import Any

import pytest

from redline import games
from redline.core.errors import UserError
from redline.envs import make


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("snek", {}, "There is no game 'snek'; did you mean 'snake'? Games: "),
        ("zzzzz", {}, "There is no game 'zzzzz'. Games: "),
        ("snake", {"widht": 7}, "snake has no option 'widht'; did you mean 'width'? Options: "),
        ("snake", {"q": 7}, "snake has no option 'q'. Options: "),
        ("snake", {"width": 3}, "env.width is 3; a Snake board has 4 to 32 columns and rows."),
        ("snake", {"height": 33}, "env.height is 33; a Snake board has 4 to 32 columns and rows."),
        ("snake", {"width": 7.5}, "env.width is 7.5; expected a whole number."),
        ("snake", {"width": "7"}, "env.width is '7'; expected a whole number."),
        ("snake", {"width": True}, "env.width is True; expected a whole number."),
        ("snake", {"reward_food": "much"}, "env.reward_food is 'much'; expected a number."),
        ("snake", {"start_length": 0}, "env.start_length is 0; a snake on a 10x10 board can start with 1 to 10 cells."),
        (
            "snake",
            {"width": 5, "start_length": 6},
            "env.start_length is 6; a snake on a 5x10 board can start with 1 to 5 cells",
        ),
        ("snake", {"start": "corner"}, "env.start is 'corner'; expected centre or random."),
        ("snake", {"view": "first person"}, "env.view is 'first person'; expected planes, centred or wrapped."),
        ("snake", {"starvation": -1}, "env.starvation is -1; expected 0 (automatic) to 30000 moves."),
        ("snake", {"num_envs": 0}, "num_envs is 0; expected at least 1 environment."),
        ("snake", {"time_limit": -1}, "time_limit is -1; expected 0 (none) or a number of steps."),
    ],
)
def test_what_cannot_be_made(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        make(name, **options)
    assert str(raised.value).startswith(message)
    assert raised.value.exit_code == 2


def test_options_reach_the_game() -> None:
    env = make("snake", 5, width=7, height=4, reward_food=2, time_limit=9, seed=3)
    assert env.reset().shape == (5, 3, 4, 7)
    assert (env.rules.config.reward_food, env.rules.time_limit, env.seed) == (2, 9, 3)


def test_every_game_is_made(game_name: str) -> None:
    env = make(game_name, num_envs=2)
    assert env.reset().shape == (2, *env.spec.obs_shape)
    assert game_name in games.names()
