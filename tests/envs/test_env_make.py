"""`make` says what was wrong, what was expected, what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redline import games
from redline.core.errors import UserError
from redline.envs import make


@pytest.mark.fault("G1", "G8")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("snek", {}, "There is no game 'snek'; did you mean 'snake'? Games: "),
        ("zzzzz", {}, "There is no game 'zzzzz'. Games: "),
        ("snake", {"widht": 7}, "snake has no option 'widht'; did you mean 'width'? Options: "),
        ("snake", {"q": 7}, "snake has no option 'q'. Options: "),
        ("snake", {"width": 3}, "env.width is 3; a Snake board has 4 to 40 columns and rows."),
        ("snake", {"height": 41}, "env.height is 41; a Snake board has 4 to 40 columns and rows."),
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


@pytest.mark.fault("G4")
@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (torch.tensor([0, 1]), r"step expects actions of shape \(3,\), got \(2,\)"),
        (torch.tensor([0.0, 1.0, 2.0]), "step expects integer actions, got float32"),
        (torch.tensor([True, False, True]), "step expects integer actions, got bool"),
        (torch.tensor([0, 1, 9]), "Action 9 of environment 2 is out of range; expected 0 to 3"),
        (torch.tensor([0, -1, 9]), "Action -1 of environment 1 is out of range; expected 0 to 3"),
    ],
)
def test_wrong_actions_are_refused_and_change_nothing(actions: torch.Tensor, message: str) -> None:
    env = make("snake", 3)
    before = env.reset()
    with pytest.raises(UserError, match=message):
        env.step(actions)
    assert torch.equal(env.observe(), before)


def test_validation_can_be_switched_off() -> None:
    env = make("snake", 2, validate=False)
    env.reset()
    env.step(torch.tensor([1, 9]))
    assert make("snake").validate
    assert not make("snake", device="meta").validate  # a GPU would have to be waited for


@pytest.mark.fault("G4")
def test_actions_may_be_of_any_integer_dtype() -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        env = make("snake", 2)
        env.reset()
        assert not env.step(torch.tensor([0, 2], dtype=dtype)).terminated.any()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:99", r"device is 'cuda:99', but torch .* sees .* here; use device='cpu'"),
        ("gpu", "device is 'gpu'; expected cpu, cuda, cuda:1 or mps"),
    ],
)
def test_a_device_that_is_not_there_is_named(device: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make("snake", device=device)


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"device is 'cuda', but torch .* sees no such GPU here; use device='cpu'"):
        make("snake", device="cuda")


def test_a_module_is_a_game() -> None:
    from redline.games import snake

    assert torch.equal(make(snake, 2, seed=3).reset(), make("snake", 2, seed=3).reset())


@pytest.mark.fault("G1")
def test_an_id_of_gymnasium_suggests_its_prefix() -> None:
    with pytest.raises(UserError, match=r"There is no game 'CartPole-v1'; did you mean 'gym:CartPole-v1'\?"):
        make("CartPole-v1")
