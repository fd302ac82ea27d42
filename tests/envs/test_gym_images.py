"""Images and actions as they are commonly treated: skipped, brightened, grey, small, stacked, sticky; lives."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import toys
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core.errors import UserError
from redline.core.records import Spec
from redline.envs import images, make_rules
from redline.envs.frames import Frames
from redline.envs.gym_envs import GymEnvs
from redline.envs.gym_game import GymConfig, GymGame, stacked
from redline.run import evaluate
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

CPU = torch.device("cpu")


def frames_of(env: Any = None, **options: Any) -> Frames:
    plain = {"skip": 1, "brightest": False, "grey": False, "size": 0, "sticky": 0.0}
    return Frames(env or toys.Film(), **plain | options)


class Noise(gymnasium.Env[Any, Any]):
    """Images of random colours, the second of every three in wider integers than announced."""

    observation_space = spaces.Box(0, 255, (30, 41, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self.steps = 0
        return self.image(), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        image = self.image() + np.uint8(action)
        return (image.astype(np.int32) if self.steps % 3 == 2 else image), 0.0, False, False, {}

    def image(self) -> Any:
        return self.np_random.integers(0, 256, (30, 41, 3), dtype=np.uint8)


def spec_of(options: dict[str, Any]) -> Spec:
    rules = make_rules("gym:CartPole-v1", options)
    return rules.game.spec(rules.config)


def value(step: int) -> int:
    return 10 * step + 100 * (step % 2)


def test_actions_are_repeated_and_rewards_added_up() -> None:
    env = frames_of(skip=3)
    env.reset(seed=0)
    obs, reward, over, _, _ = env.step(1)
    assert (obs[0, 0, 0], reward, over) == (value(3), 4.5, False)
    env.step(1)
    obs, reward, over, _, _ = env.step(1)
    assert (obs[0, 0, 0], reward, over) == (value(7), 1.5, True), "an episode that ends is repeated no further"


@pytest.mark.parametrize(("skip", "seen"), [(2, value(1)), (3, value(3)), (1, value(1))])
def test_of_two_images_the_brighter_is_seen(skip: int, seen: int) -> None:
    env = frames_of(skip=skip, brightest=True)
    assert env.reset(seed=0)[0].max() == 0
    assert (env.step(0)[0] == seen).all()


def test_the_last_action_is_drawn_into_the_image() -> None:
    env = frames_of(grey=True, size=20, show_action=True)
    width = 20 // env.action_space.n
    first, _ = env.reset(seed=0)
    assert first.shape == env.observation_space.shape == (20, 20, 1)
    assert (first[:2] == 0).all(), "nothing was pressed yet"
    for action in range(env.action_space.n):
        obs, *_ = env.step(action)
        shown = np.zeros((2, 20, 1), np.uint8)
        shown[:, action * width : (action + 1) * width] = 255
        assert (obs[:2] == shown).all()
        assert (obs[2:] == value(action + 1)).all(), "the rest is the image"
    assert (env.reset()[0][:2] == 0).all()


def test_the_action_shown_is_the_one_that_was_taken() -> None:
    """Of a sticky action: the buttons that are pressed, not those that were chosen."""
    env = Frames(toys.Film(10**9), 1, False, False, 0, 0.5, show_action=True)
    env.reset(seed=0)
    shown = []
    for step in range(50):
        obs, *_ = env.step(step % 2)
        shown.append(int(obs[0, :, 0].argmax()) // (obs.shape[1] // env.action_space.n))
        assert shown[-1] == env.last_action
    assert shown != [step % 2 for step in range(50)]


def test_the_image_of_the_environment_stays_as_it_is() -> None:
    image = np.full((10, 10, 3), 7, np.uint8)
    env = Frames(toys.Seen(spaces.Box(0, 255, image.shape, np.uint8)), 1, False, False, 0, 0.0, show_action=True)
    shown = env._preprocess(image, None)
    assert (shown[0] == 0).all()
    assert (image == 7).all()


def test_an_action_can_be_drawn_into_images_only() -> None:
    with pytest.raises(UserError, match=r"env\.show_action is set, but the observation of shape .* is no image"):
        spec_of({"show_action": True})
    narrow = toys.Seen(spaces.Box(0, 255, (8, 1, 3), np.uint8))
    with pytest.raises(UserError, match="images 1 pixels wide"):
        Frames(narrow, 1, False, False, 0, 0.0, show_action=True)


def test_grey_weighs_colours_as_eyes_do() -> None:
    env = frames_of(grey=True)
    image = np.zeros((8, 6, 3), np.uint8)
    image[0, 0] = (255, 0, 0)
    image[0, 1] = (0, 255, 0)
    image[0, 2] = (0, 0, 255)
    image[0, 3] = 255
    grey = env._preprocess(image, None)
    assert grey.shape == (8, 6, 1) == env.observation_space.shape
    assert grey[0, :4, 0].tolist() == pytest.approx([255 * 0.299, 255 * 0.587, 255 * 0.114, 255], abs=1.5)


@pytest.mark.skipif(images.library() is None, reason="there is no C++ compiler")
@given(
    height=st.integers(1, 250),
    width=st.integers(1, 260),
    size=st.integers(1, 100),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**32 - 1),
    view=st.sampled_from(["plain", "reversed", "every second", "padded"]),
)
@settings(max_examples=200, deadline=None)
def test_the_library_makes_the_images_that_numpy_makes(
    height: int, width: int, size: int, channels: int, seed: int, view: str
) -> None:
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
    if view == "reversed":
        image = image[::-1, ::-1, ::-1]
    elif view == "every second":
        image = rng.integers(0, 256, (2 * height, 2 * width, channels), dtype=np.uint8)[::2, ::2]
    elif view == "padded":
        image = rng.integers(0, 256, (height, width, channels + 1), dtype=np.uint8)[:, :, ::-1][:, :, 1:]
    weights = [images.weights(cells, size) for cells in (height, width)]
    grey = images.grey(image) if channels == 3 else image[:, :, 0]
    expected = images.resized(grey, *weights)[:, :, None]
    assert np.array_equal(images.Shrink(height, width, size)(image), expected)


@pytest.mark.skipif(images.library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("brightest", [False, True])
@pytest.mark.parametrize("grey", [False, True])
def test_without_a_library_frames_are_the_same(grey: bool, brightest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> list[Any]:
        env = frames_of(Noise(), skip=3, brightest=brightest, grey=grey, size=20)
        return [env.reset(seed=0)[0], *(env.step(0)[0] for _ in range(3))]

    with_library = shown()
    monkeypatch.setattr(images, "library", lambda: None)
    for found, expected in zip(shown(), with_library, strict=True):
        assert found.shape == (20, 20, 1 if grey else 3)
        assert np.array_equal(found, expected)


def test_what_is_not_an_announced_image_is_refused() -> None:
    for image in (np.zeros((30, 41, 3)), np.zeros((30, 40, 3), np.uint8), np.zeros((30, 41, 4), np.uint8)):
        with pytest.raises(ValueError, match="the image is"):
            images.Shrink(30, 41, 20)(image)


class Hidden(toys.Film):
    """Shows nothing in hidden frames, unless the episode ends."""

    frame_hidden = False

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.steps: list[bool] = []

    def step(self, action: int) -> Any:
        self.steps.append(self.frame_hidden)
        obs, reward, over, *rest = super().step(action)
        return (None if self.frame_hidden and not over else obs), reward, over, *rest


def test_frames_that_are_skipped_may_be_hidden() -> None:
    env, film = Hidden(9), toys.Film(9)
    frames, plain = frames_of(env, skip=4), frames_of(film, skip=4)
    for each in (frames, plain):
        each.reset(seed=0)
    for _ in range(3):
        (obs, *rest), (expected, *others) = frames.step(1), plain.step(1)
        assert np.array_equal(obs, expected)
        assert rest == others
    assert rest[1], "the last action was cut short"
    assert env.steps == [True, True, True, False] * 2 + [True]
    assert not hasattr(film, "frame_hidden")


def test_no_frame_is_hidden_where_two_are_compared() -> None:
    env = Hidden(9)
    frames = frames_of(env, skip=4, brightest=True)
    frames.reset(seed=0)
    frames.step(1)
    assert env.steps == [False] * 4


@pytest.mark.parametrize(("cells", "size"), [(210, 84), (160, 84), (6, 3), (5, 5), (4, 7)])
def test_sizes_are_changed_by_averages(cells: int, size: int) -> None:
    """Every new cell is a mean, and the whole keeps its mean."""
    shares = images.averages(cells, size)
    assert shares.shape == (size, cells)
    assert shares.sum(1) == pytest.approx(np.ones(size), abs=1e-5)
    assert shares.sum(0) == pytest.approx(np.full(cells, size / cells), rel=1e-4)
    if cells == 2 * size:
        assert np.array_equal(shares[1], [0, 0, 0.5, 0.5, 0, 0])


def test_an_image_of_one_colour_stays_that() -> None:
    env = frames_of(size=4, grey=True)
    env.reset(seed=0)
    obs = env.step(0)[0]
    assert obs.shape == (4, 4, 1)
    assert (obs == value(1)).all()


def test_sticky_actions_stick_as_often_as_they_should() -> None:
    env = Frames(toys.Film(10**9), 1, False, False, 0, 0.25)
    env.reset(seed=3)
    rng = np.random.default_rng(1)
    wanted = [int(rng.integers(3)) for _ in range(4000)]
    taken = [env.step(action)[4]["action"] for action in wanted]
    changes = [(taken[t - 1], wanted[t], taken[t]) for t in range(1, 4000) if taken[t - 1] != wanted[t]]
    stuck = sum(before == now for before, _, now in changes) / len(changes)
    assert stuck == pytest.approx(0.25, abs=0.03)
    assert all(now in (before, asked) for before, asked, now in changes)
    again = Frames(toys.Film(10**9), 1, False, False, 0, 0.25)
    again.reset(seed=3)
    assert [again.step(action)[4]["action"] for action in wanted] == taken


def test_each_repetition_may_stick_anew() -> None:
    """Of four repetitions the later ones play what was asked for more and more likely: an action that stuck can come loose."""

    class Told(toys.Film):
        def step(self, action: int) -> Any:
            taken.append(action)
            return super().step(action)

    taken: list[int] = []
    env = Frames(Told(10**9), 4, False, False, 0, 0.25)
    env.reset(seed=1)
    env.step(0)
    taken.clear()
    for number in range(3000):
        env.step((number + 1) % 2)
    asked = np.array([(number + 1) % 2 for number in range(3000)])
    shares = (np.array(taken).reshape(3000, 4) == asked[:, None]).mean(0)
    # With a chance of 1/4 to keep what was played: 1 - 1/4, 1 - 1/16, and so on, and a little more from what came before.
    assert shares == pytest.approx([0.75, 0.9375, 0.984, 0.996], abs=0.03)


def test_sticking_does_not_follow_the_environments_own_chance() -> None:
    env = Frames(toys.Film(10**9), 1, False, False, 0, 0.5)
    env.reset(seed=5)
    own = env.unwrapped.np_random.random(200)
    taken = [env.step(number % 3)[4]["action"] for number in range(200)]
    stuck = np.array([taken[t] != t % 3 for t in range(1, 200)])
    assert 0.3 < (stuck == (own[:199] < 0.5)).mean() < 0.7


def test_an_image_that_is_overwritten_was_seen_before() -> None:
    class Reused(toys.Film):
        image = np.zeros((8, 6, 3), np.uint8)

        def _seen(self) -> Any:
            self.image[:] = 200 if self.time == 1 else 0
            return self.image

    env = Frames(Reused(), 2, True, False, 0, 0.0)
    env.reset(seed=0)
    assert (env.step(0)[0] == 200).all()


def test_images_without_channels_get_one() -> None:
    env = Frames(toys.Seen(spaces.Box(0, 255, (10, 8), np.uint8)), 1, False, True, 5, 0.0)
    assert env.reset(seed=0)[0].shape == (5, 5, 1) == env.observation_space.shape


def test_a_lost_life_is_an_end_to_the_learner_alone() -> None:
    envs = GymEnvs(GymGame("gym:ToyFilm-v0"), GymConfig(life_loss=True), 2)
    envs.reset(0)
    ends, overs, lengths = [], [], []
    for _ in range(8):
        envs.step(np.zeros(2, np.int64))
        ends.append(bool(envs.terminated.all()))
        overs.append(bool(envs.episode_over.all()))
        lengths.append(int(envs.length[0]))
    assert ends == [False, False, False, True, False, False, True, False]
    assert overs == [False] * 6 + [True, False]
    assert lengths == [1, 2, 3, 4, 5, 6, 7, 1]
    assert envs.score[0] == 1.5
    plain = GymEnvs(GymGame("gym:ToyFilm-v0"), GymConfig(), 1)
    plain.reset(0)
    for _ in range(4):
        plain.step(np.zeros(1, np.int64))
    assert not plain.terminated.any()


@pytest.mark.parametrize(
    ("algo", "life_loss"), [("ppo", False), ("ppo", True), ("dqn", False), ("dqn", True), ("pqn", False)]
)
def test_stacks_are_of_one_episode(algo: str, life_loss: bool) -> None:
    """What learners see: the last three frames, the first one repeated where an episode is younger than that."""
    options = {"stack": 3, "grey": True, "size": 2, "life_loss": life_loss}
    small: dict[str, Any] = {"hidden": (8,), "net": "mlp"}
    small |= {"learning_starts": 10**6, "n_step": 1} if algo == "dqn" else {"rollout_steps": 16, "batch_size": 32}
    plan = resolve(Settings("gym:ToyFilm-v0", algo, num_envs=2, device="cpu", env_options=options, algo_options=small))
    assert plan.rules.game.spec(plan.rules.config).obs_shape == (3, 2, 2)
    session = Session(plan, pytest.fail)

    def expected(time: int) -> list[int]:
        first = 4 if life_loss and time >= 4 else 0
        return [value(max(t, first)) for t in (time - 2, time - 1, time)]

    if algo == "dqn":
        session.iterate(40)
        batch = session.learner.memory.sample(torch.tensor(1, dtype=torch.int32), 300)
        times = {value(t): t for t in range(8)}
        for obs, following, discount in zip(
            batch.obs.tolist(), batch.next_obs.tolist(), batch.discount.tolist(), strict=True
        ):
            time = times[obs[2][0][0]]
            assert [plane[0][0] for plane in obs] == expected(time)
            if discount:
                assert [plane[0][0] for plane in following] == expected(time + 1)
            else:
                assert time == 6 or (life_loss and time == 3)
        return
    session._play()
    seen = session.learner.rollout.obs.view(16, 2, 3, 2, 2)[:, 0, :, 0, 0].tolist()
    assert seen == [expected(t % 7) for t in range(16)]
    finals = session.learner.rollout.bootstrap_states.obs.view(-1, 2, 3, 1, 2, 2)[-1, 0, :, 0, 0, 0].tolist()
    assert finals == expected(2), "where the rollout stopped"


def test_evaluation_stacks_as_training_does() -> None:
    rules = make_rules("gym:ToyFilm-v0", {"stack": 2})
    seen: list[list[int]] = []

    def policy(obs: torch.Tensor, legal: Any) -> torch.Tensor:
        assert legal is None
        seen.append([int(obs[0, 0, 0, 0]), int(obs[0, 3, 0, 0])])
        return torch.zeros(len(obs), dtype=torch.int64)

    evaluate.evaluate(rules, policy, 32, CPU)  # two games in each slot
    assert seen == [[value(max(t - 1, 0)), value(t)] for t in range(7)] * 2


@pytest.mark.parametrize("stack", [1, 2])
def test_images_can_be_black_and_white(stack: int) -> None:
    """What is played and what is learned from; brightness is kept until it is looked at."""
    options = {"binary": 120, "stack": stack, "grey": True}
    small: dict[str, Any] = {"hidden": (8,), "net": "mlp", "rollout_steps": 8, "batch_size": 16}
    settings = Settings("gym:ToyFilm-v0", "ppo", num_envs=2, device="cpu", env_options=options, algo_options=small)
    session = Session(resolve(settings), pytest.fail)
    spec = session.plan.rules.game.spec(session.plan.rules.config)
    assert (spec.obs_high, set(spec.obs_scale)) == (1.0, {1.0})
    session._play()
    newest = session.learner.rollout.obs.view(8, 2, *spec.obs_shape)[:, 0, -1, 0, 0].tolist()
    assert newest == [int(value(t % 7) >= 120) for t in range(8)]
    assert 0 < sum(newest) < 8

    def policy(obs: torch.Tensor, legal: Any) -> torch.Tensor:
        assert legal is None
        assert set(obs.unique().tolist()) <= {0, 1}
        return torch.zeros(len(obs), dtype=torch.int64)

    evaluate.evaluate(session.plan.rules, policy, 2, CPU)


def test_large_images_are_made_small_unless_told_otherwise() -> None:
    plan = resolve(Settings("gym:ToyScreen-v0", device="cpu"))
    config = plan.rules.config
    assert (config.grey, config.size, config.stack, config.frame_skip, config.frame_max) == (True, 84, 4, 4, True)
    assert plan.rules.game.spec(config).obs_shape == (4, 84, 84)
    assert "env.size" in plan.reasons
    own = resolve(Settings("gym:ToyScreen-v0", device="cpu", env_options={"size": 42, "grey": False, "frame_skip": 1}))
    assert own.rules.game.spec(own.rules.config).obs_shape == (12, 42, 42)
    assert resolve(Settings("gym:ToyFilm-v0", device="cpu")).rules.config == GymConfig(obs_scale=(1 / 128,))
    assert plan.algo_config.net == "pixels"
    weights = sum(x.numel() for x in Session(plan, pytest.fail).learner.net.parameters())
    assert weights < 2_000_000


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ToyStacked-v0", {"grey": False, "size": 0, "stack": 1, "frame_skip": 4, "frame_max": True}),
        ("ToySkipping-v0", {"grey": True, "size": 84, "frame_skip": 1, "frame_max": False}),
        ("ToyNotSkipping-v0", {"grey": True, "frame_skip": 4, "frame_max": True}),
    ],
)
def test_images_are_treated_as_they_come(name: str, expected: dict[str, Any]) -> None:
    config = resolve(Settings(f"gym:{name}", device="cpu")).rules.config
    assert {key: getattr(config, key) for key in expected} == expected
    asked = resolve(Settings(f"gym:{name}", device="cpu", env_options={"frame_skip": "2"})).rules.config
    assert (asked.frame_skip, asked.frame_max) == (2, True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"frame_skip": 0}, r"env\.frame_skip is 0; expected at least 1"),
        ({"stack": 0}, r"env\.stack is 0; expected at least 1"),
        ({"sticky": 1.0}, r"env\.sticky is 1.0; expected a number from 0 to below 1"),
        ({"size": 84}, r"env\.size is set, but the observation .* is no image"),
        ({"grey": True}, r"env\.grey is set"),
        ({"binary": 128}, r"env\.binary is set, but the observation .* is no image"),
        ({"binary": 256}, r"env\.binary is 256; expected 1 to 255"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        spec_of(options)


def test_images_of_other_channels_cannot_be_grey() -> None:
    with pytest.raises(UserError, match="4 channels"):
        Frames(toys.Seen(spaces.Box(0, 255, (8, 8, 4), np.uint8)), 1, False, True, 0, 0.0)


def test_the_first_frame_of_an_episode_fills_its_stack() -> None:
    stack, newest = torch.randn(5, 3, 2, 4), torch.randn(5, 2, 4)
    for start in ([False] * 5, [True, False, False, True, False], [True] * 5):
        out = stacked(stack, newest, torch.tensor(start))
        for env, begins in enumerate(start):
            expected = newest[env].expand(3, 2, 4) if begins else torch.cat([stack[env, 1:], newest[env][None]])
            assert torch.equal(out[env], expected)


def test_vectors_can_be_stacked_too() -> None:
    spec = spec_of({"stack": 2})
    assert (spec.obs_shape, len(spec.obs_scale)) == ((8,), 8)
