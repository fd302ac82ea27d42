"""Redline's games as Gymnasium environments."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from redline import games
from redline.core.errors import UserError
from redline.core.records import leaves
from redline.envs import gymnasium_adapter, make, make_rules, registration
from redline.envs.single_game import OracleGame, TensorGame, single_game

SNAKE = "redline/Snake-v0"
SMALL = {"width": 5, "height": 4}
UP, RIGHT, DOWN, LEFT = range(4)


@pytest.fixture(autouse=True)
def _registered_and_strict() -> Iterator[None]:
    registration.register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def env_id(game_name: str) -> str:
    return f"redline/{game_name.title().replace('_', '')}-v0"


def sample(space: Any, infos: dict[str, Any]) -> Any:
    """An action of one environment or an array of many, legal where the infos tell what is."""
    mask = infos.get("action_mask")
    return space.sample(mask if mask is None or mask.ndim == 1 else tuple(mask))


def test_every_game_is_registered_once(game_name: str) -> None:
    registration.register()
    registration.register()
    spec = gymnasium.spec(env_id(game_name))
    assert spec.kwargs == {"game": game_name}
    assert sum(known.startswith("redline/") for known in gymnasium.registry) == len(games.names())


def test_gymnasium_finds_no_fault(variant: Any) -> None:
    """The checker with warnings as errors: all render modes, determinism, spaces, data that is never reused."""
    env: Any = gymnasium.make(env_id(variant.game), render_mode="rgb_array", **variant.options).unwrapped
    warnings.filterwarnings("ignore", r"(?s).*Box observation space (min|max)imum value is -?infinity")
    check_env(env)
    env.close()


def test_spaces_are_the_spec(variant: Any) -> None:
    env = gymnasium.make(env_id(variant.game), **variant.options)
    spec = make(variant.game, **variant.options).spec
    space: Any = env.observation_space
    assert space.shape == spec.obs_shape
    assert (space.low.min(), space.high.max()) == (spec.obs_low, spec.obs_high)
    assert torch.from_numpy(env.reset()[0]).dtype == spec.obs_dtype
    assert env.action_space == gymnasium.spaces.Discrete(spec.num_actions)


def test_single_env_plays_env_0(variant: Any) -> None:
    """Step by step what redline.make plays: the final observation at the end, and by reset the environment's next episode."""
    env = gymnasium.make(env_id(variant.game), time_limit=20, **variant.options)
    ours = make(variant.game, time_limit=20, **variant.options)
    obs, info = env.reset(seed=8)
    assert (info["score"], info["won"]) == (0, False)
    assert ("action_mask" in info) == ours.spec.masked
    np.testing.assert_array_equal(obs, ours.reset(seed=8)[0].numpy())
    env.action_space.seed(0)
    episodes = 0
    while episodes < 3:
        action = int(sample(env.action_space, info))
        obs, reward, terminated, truncated, info = env.step(action)
        step = ours.step(torch.tensor([action]))
        np.testing.assert_array_equal(obs, step.final_obs[0].numpy())
        assert (reward, terminated, truncated) == (step.reward.item(), step.terminated.item(), step.truncated.item())
        assert (info["score"], info["won"]) == (step.episode.score.item(), step.won.item())
        assert ("episode_stats" in info) == (terminated or truncated)
        if terminated or truncated:
            stats = {
                "r": step.episode.episode_return.item(),
                "l": step.episode.length.item(),
                "score": step.episode.score.item(),
            }
            assert info["episode_stats"] == stats
            obs, info = env.reset()
            np.testing.assert_array_equal(obs, step.obs[0].numpy())
            episodes += 1


def test_illegal_actions_are_refused_and_change_nothing(variant: Any) -> None:
    options = {"on_illegal": "raise", **variant.options}
    envs: Any = gymnasium.make_vec(env_id(variant.game), num_envs=3, **options)
    env: Any = gymnasium.make(env_id(variant.game), **options)
    (obs, infos), (one_obs, info) = envs.reset(seed=[4, 5, 6]), env.reset(seed=6)
    ours = make(variant.game, **variant.options)
    ours.reset(seed=6)
    if not ours.spec.masked:
        assert "action_mask" not in infos
        return
    refused = 0
    for _ in range(8):
        mask, actions = info["action_mask"], sample(envs.action_space, infos)
        assert (mask.dtype, mask.shape) == (np.int8, (ours.spec.num_actions,))
        np.testing.assert_array_equal(mask, ours.legal()[0].numpy())
        np.testing.assert_array_equal(mask, infos["action_mask"][2])
        for illegal in np.flatnonzero(mask == 0)[:2]:
            told = rf"Action {illegal} is illegal{{}}: {mask.sum()} of the {len(mask)} actions are legal"
            with pytest.raises(InvalidAction, match=told.format("")):
                env.step(illegal)
            with pytest.raises(InvalidAction, match=told.format(" in environment 2")):
                envs.step(np.array([*actions[:2], illegal]))
            refused += 1
        one_obs, _, _, _, info = env.step(actions[2])
        obs, _, _, _, infos = envs.step(actions)
        np.testing.assert_array_equal(one_obs, ours.step(torch.tensor([actions[2]])).obs[0].numpy())
        np.testing.assert_array_equal(one_obs, obs[2])
    assert refused > 3


def test_an_illegal_action_is_played_by_the_rules(variant: Any) -> None:
    """One environment, a vector of them and redline.make agree on what it does."""
    env: Any = gymnasium.make(env_id(variant.game), **variant.options)
    ours = make(variant.game, **variant.options)
    if not ours.spec.masked:
        env.reset(seed=6)
        assert env.unwrapped.action_masks().all()
        return
    envs: Any = gymnasium.make_vec(env_id(variant.game), num_envs=1, **variant.options)
    seed = next(seed for seed in range(99) if not env.reset(seed=seed)[1]["action_mask"].all())
    _, info = env.reset(seed=seed)
    envs.reset(seed=seed)
    ours.reset(seed=seed)
    np.testing.assert_array_equal(env.unwrapped.action_masks(), info["action_mask"] == 1)
    np.testing.assert_array_equal(envs.action_masks(), ours.legal().numpy())
    illegal = int(np.flatnonzero(info["action_mask"] == 0)[0])
    one, many, step = env.step(illegal), envs.step(np.array([illegal])), ours.step(torch.tensor([illegal]))
    for x, y, z in zip(one[1:4], many[1:4], (step.reward, step.terminated, step.truncated), strict=True):
        assert x == y[0] == z.item()
    np.testing.assert_array_equal(one[0], step.final_obs[0].numpy())
    np.testing.assert_array_equal(one[0], many[4]["final_obs"][0] if one[2] or one[3] else many[0][0])


def test_on_illegal_is_one_of_two() -> None:
    with pytest.raises(UserError, match="on_illegal is 'ignore'; expected play"):
        gymnasium.make(SNAKE, on_illegal="ignore")


def test_the_oracle_plays_single_games_bit_by_bit(any_variant: Any) -> None:
    """Every field of State, observations, masks, rewards and statistics equal those of the tensor game."""
    rules = make_rules(any_variant.game, any_variant.options, time_limit=25)
    fast, slow = single_game(rules, torch.device("cpu")), TensorGame(rules, torch.device("cpu"))
    if rules.game.spec(rules.config).afterstates:
        assert isinstance(fast, TensorGame)
        return
    assert isinstance(fast, OracleGame)
    draws, ended = np.random.default_rng(0), 0
    for player in (fast, slow):
        player.reset(2**40 + 7)
    for _ in range(80):
        legal, expected = fast.legal(), slow.legal()
        assert (legal is None) == (expected is None)
        if legal is not None:
            np.testing.assert_array_equal(legal, expected)
        np.testing.assert_array_equal(fast.observe(), slow.observe())
        assert fast.observe().dtype == slow.observe().dtype
        for name, values in leaves(slow.state()).items():
            assert torch.equal(leaves(fast.state())[name], values), name
        choices = np.arange(rules.game.spec(rules.config).num_actions) if legal is None else np.flatnonzero(legal)
        action = int(draws.choice(choices)) if len(choices) else 0
        step = fast.step(action)
        assert step == slow.step(action)
        if step.terminated or step.truncated:
            ended += 1
            np.testing.assert_array_equal(fast.observe(), slow.observe())
        if step.terminated or step.truncated or draws.random() < 0.02:
            fast.next_episode()
            slow.next_episode()
    assert ended


def test_a_game_without_an_oracle_is_played_by_its_tensors() -> None:
    import toy_game

    assert isinstance(single_game(make_rules(toy_game), torch.device("cpu")), TensorGame)


def test_reset_never_replays() -> None:
    """In the middle of an episode, and twice in a row: always the next episode of the environment. A seed starts over."""
    env = gymnasium.make(SNAKE)
    first, _ = env.reset(seed=8)
    env.step(UP)
    second, _ = env.reset()
    third, _ = env.reset()
    assert not np.array_equal(second, first)
    assert not np.array_equal(third, second)
    ours = make("snake", time_limit=1)
    ours.reset(seed=8)
    for obs in (second, third):
        np.testing.assert_array_equal(obs, ours.step(torch.tensor([UP])).obs[0].numpy())
    np.testing.assert_array_equal(env.reset(seed=8)[0], first)
    assert not np.array_equal(env.reset(seed=9)[0], first)


def test_environments_without_a_seed_differ() -> None:
    starts = {gymnasium.make(SNAKE).reset()[0].tobytes() for _ in range(6)}
    assert len(starts) > 1


@pytest.mark.fault("G4", "G6")
def test_wrong_calls_of_one() -> None:
    env = gymnasium.make(SNAKE).unwrapped
    with pytest.raises(ResetNeeded, match="before the first reset"):
        env.step(UP)
    with pytest.raises(ResetNeeded, match="before the first reset"):
        env.render()
    env.reset(seed=0)
    for wrong in (4, -1, 1.0, None, "up", np.array([1]), np.float32(1)):
        with pytest.raises(InvalidAction, match="expects an integer action from 0 to 3, got "):
            env.step(wrong)  # type: ignore[arg-type]
    for fine in (UP, np.int64(UP), np.array(UP), np.uint8(UP)):
        assert not env.step(fine)[2]  # type: ignore[arg-type]
    while not env.step(UP)[2]:
        pass
    with pytest.raises(ResetNeeded, match="after the episode ended; call reset"):
        env.step(UP)
    env.reset()
    env.step(UP)


def test_options_reach_the_game_and_wrong_ones_are_named() -> None:
    env = gymnasium.make(SNAKE, view="centred", time_limit=3, starvation=2, **SMALL)
    assert env.observation_space.shape == (3, 9, 9)
    env.reset(seed=0)
    assert env.step(0)[3] is False
    assert env.step(0)[3] is True
    with pytest.raises(UserError, match="did you mean 'width'"):
        gymnasium.make(SNAKE, widht=7)
    with pytest.raises(UserError, match=r"4 to 40"):
        gymnasium.make_vec(SNAKE, num_envs=2, width=2)
    with pytest.raises(UserError, match="num_envs is 0"):
        gymnasium.make_vec(SNAKE, num_envs=0)
    with pytest.raises(UserError, match="render_mode is 'video'; expected rgb_array or ansi"):
        gymnasium_adapter.GameEnv("snake", render_mode="video")


def test_render_shows_the_last_board_until_reset() -> None:
    env = gymnasium.make(SNAKE, render_mode="ansi", **SMALL)
    env.reset(seed=3)
    assert env.render() == ". . . . .\n. . . . .\n. b b h .\n. . . f .\n"
    env.step(RIGHT)
    _, _, terminated, _, _ = env.step(RIGHT)
    assert terminated
    assert env.render() == ". . . . .\n. . . . .\n. . b b h\n. . . f .\n"
    env.reset()
    assert env.render().splitlines()[2] == ". b b h ."  # type: ignore[union-attr]


def test_render_pictures() -> None:
    palette = dict(games.load("snake").PALETTE)
    one = gymnasium.make(SNAKE, render_mode="rgb_array", **SMALL)
    one.reset(seed=3)
    frame: Any = one.render()
    assert frame.dtype == np.uint8
    side = frame.shape[0] // 4
    assert frame.shape == (4 * side, 5 * side, 3)
    for row, column, name in ((0, 0, "floor"), (2, 2, "body"), (2, 3, "head"), (3, 3, "food")):
        cell = frame[row * side : (row + 1) * side, column * side : (column + 1) * side]
        assert (cell == palette[name]).all()
    many = gymnasium.make_vec(SNAKE, num_envs=3, render_mode="rgb_array", **SMALL)
    many.reset(seed=3)
    frames = many.render()
    assert frames is not None
    assert len(frames) == 3
    np.testing.assert_array_equal(frames[0], frame)
    assert gymnasium.make(SNAKE).unwrapped.render_mode is None


def test_statistics_wrappers_fit_around() -> None:
    """They refuse an environment that puts its own statistics under their key."""
    env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(SNAKE, **SMALL))
    env.reset(seed=0)
    while True:
        _, _, terminated, truncated, info = env.step(RIGHT)
        if terminated or truncated:
            break
    assert info["episode"]["r"] == info["episode_stats"]["r"]
    assert info["episode"]["l"] == info["episode_stats"]["l"]
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(gymnasium.make_vec(SNAKE, num_envs=2, **SMALL))
    envs.reset(seed=0)
    envs.step(np.array([RIGHT, RIGHT]))
    _, _, terminations, _, infos = envs.step(np.array([RIGHT, UP]))
    assert terminations.tolist() == [True, False]
    assert infos["episode"]["l"].tolist() == infos["final_info"]["episode_stats"]["l"].tolist() == [2, 0]


def test_vector_env_equals_sync_vector_env(variant: Any) -> None:
    """Same seeds and actions through Gymnasium's own vector of single environments: arrays and infos, key by key."""
    kwargs = {"time_limit": 12, **variant.options} | (SMALL if variant.game == "snake" else {"height": 6})
    ours = gymnasium.make_vec(env_id(variant.game), num_envs=3, **kwargs)
    theirs = SyncVectorEnv(
        [lambda: gymnasium.make(env_id(variant.game), **kwargs)] * 3, autoreset_mode=AutoresetMode.SAME_STEP
    )
    assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"]
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert ours.single_observation_space == theirs.single_observation_space
    seeds = [3, 1, 1]
    ours.action_space.seed(0)
    (obs, infos), (their_obs, their_infos) = ours.reset(seed=seeds), theirs.reset(seed=seeds)  # type: ignore[arg-type]
    np.testing.assert_array_equal(obs, their_obs)
    assert data_equivalence(infos, their_infos, exact=True)
    endings = 0
    for _ in range(30):
        actions = sample(ours.action_space, infos)
        step, their_step = ours.step(actions), theirs.step(actions)
        for x, y in zip(step[:4], their_step[:4], strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.dtype == y.dtype
        infos, their_infos = step[4], their_step[4]
        for found in (infos, their_infos):  # arrays of arrays, None where nothing ended: compared one by one
            found["final_obs"] = list(found.pop("final_obs", []))
        assert data_equivalence(infos, their_infos, exact=True), f"{infos}\n{their_infos}"
        endings += int((step[2] | step[3]).sum())
    assert endings > 5
    (obs, infos), (their_obs, their_infos) = ours.reset(), theirs.reset()
    np.testing.assert_array_equal(obs, their_obs)


ROUND = np.array([1, 1, 1, 2, 0, 2, 3, 3, 0, 1, 1, 2, 0, 3, 3, 3])  # on 4x4: from every cell to the next of a cycle


def test_a_win_is_told() -> None:
    """A snake that goes round and round fills the board: `won` belongs to the episode that ended, not to the next."""
    one = gymnasium.make(SNAKE, width=4, height=4)
    many = gymnasium.make_vec(SNAKE, num_envs=2, width=4, height=4)
    obs, all_obs = one.reset(seed=1)[0], many.reset(seed=1)[0]
    for _ in range(300):
        obs, reward, terminated, truncated, info = one.step(ROUND[obs[1].argmax()])
        all_obs, rewards, _, _, infos = many.step(ROUND[all_obs[:, 1].reshape(2, -1).argmax(1)])
        assert not infos["won"].any()
        if terminated:
            break
    assert (info["won"], truncated, info["score"], reward) == (True, False, 13, 6.0)
    assert info["episode_stats"]["r"] == 13 + 5
    assert infos["final_info"]["won"][0]
    assert infos["final_info"]["episode_stats"]["score"][0] == 13
    assert infos["score"][0] == 0
    assert rewards[0] == 6.0


def test_vector_env_of_one_seed_plays_its_envs() -> None:
    """As redline.make does; its first environment is what a single environment of that seed plays."""
    envs, ours = gymnasium.make_vec(SNAKE, num_envs=4, start="random"), make("snake", 4, start="random")
    obs, _ = envs.reset(seed=6)
    np.testing.assert_array_equal(obs, ours.reset(seed=6).numpy())
    np.testing.assert_array_equal(obs[0], gymnasium.make(SNAKE, start="random").reset(seed=6)[0])
    actions = np.array([UP, DOWN, LEFT, RIGHT])
    for _ in range(20):
        obs = envs.step(actions)[0]
        np.testing.assert_array_equal(obs, ours.step(torch.from_numpy(actions)).obs.numpy())


@pytest.mark.fault("G9")
def test_vector_env_resets_chosen_envs() -> None:
    envs = gymnasium.make_vec(SNAKE, num_envs=3)
    first, _ = envs.reset(seed=6)
    mask = np.array([False, True, False])
    obs, infos = envs.reset(options={"reset_mask": mask})
    np.testing.assert_array_equal(obs[~mask], first[~mask])
    assert not np.array_equal(obs[1], first[1])
    assert infos["_score"].tolist() == mask.tolist()
    obs, _ = envs.reset(seed=7, options={"reset_mask": mask})
    np.testing.assert_array_equal(obs[~mask], first[~mask])
    np.testing.assert_array_equal(obs[1], make("snake", 3).reset(seed=7)[1].numpy())


@pytest.mark.fault("G4", "G6")
def test_wrong_calls_of_many() -> None:
    envs = gymnasium.make_vec(SNAKE, num_envs=3)
    with pytest.raises(ResetNeeded, match="before the first reset"):
        envs.step(np.zeros(3, np.int64))
    with pytest.raises(UserError, match="first reset starts every environment"):
        envs.reset(options={"reset_mask": np.array([True, False, True])})
    envs.reset(seed=0)
    with pytest.raises(InvalidAction, match=r"shape \(3,\), got int64 of shape \(2,\)"):
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(InvalidAction, match=r"integer actions of shape \(3,\), got float64"):
        envs.step(np.zeros(3))
    with pytest.raises(InvalidAction, match="from 0 to 3, got 9"):
        envs.step(np.array([0, 9, 0]))
    with pytest.raises(UserError, match="a list of 3 integer seeds"):
        envs.reset(seed=[1, 2])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="must be a bool array"):
        envs.reset(options={"reset_mask": [True, False, True]})


def test_max_episode_steps_of_a_vector_is_its_time_limit() -> None:
    for limits in ({"max_episode_steps": 2}, {"time_limit": 2}, {"max_episode_steps": 2, "time_limit": 9}):
        envs = gymnasium.make_vec(SNAKE, num_envs=2, **limits)
        envs.reset(seed=0)
        assert not envs.step(np.array([UP, UP]))[3].any()
        assert envs.step(np.array([UP, UP]))[3].all()
