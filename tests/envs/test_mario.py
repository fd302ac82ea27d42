"""Super Mario Bros.: what is earned, how far it is, who has won; with a stand-in for the package's 7.4, and with itself."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import old_mario
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from PIL import Image

from redline import cli, recipes
from redline.collect.episode_stats import CPUEpisodeStats
from redline.core.errors import UserError
from redline.core.native import find_compiler
from redline.core.records import Hardware
from redline.envs import CPU_ENVS, images, load_game, make, make_rules, nes
from redline.envs import mario as adapter
from redline.envs.frames import Frames
from redline.envs.gym_envs import GymEnvs
from redline.envs.mario import MarioConfig, MarioEnv
from redline.run import evaluate
from redline.run.compare import over_runs
from redline.run.ranks import merge_episode_stats
from redline.run.resolve import resolve
from redline.run.resume import check_run_folder
from redline.run.run_folder import write_config
from redline.run.settings import Settings
from redline.tools import watch

CPU = torch.device("cpu")
NOTHING, RIGHT, RIGHT_JUMP, RUN, RUN_JUMP, JUMP, LEFT = range(7)
real = pytest.mark.skipif(
    importlib.util.find_spec("gym_super_mario_bros") is None, reason="gym-super-mario-bros is not installed"
)
# Level 1-1 won: actions of four frames each, and how often.
WAY = (
    "2x18 4x7 3x7 4x5 2x4 3x7 4x4 1x4 2x8 1x3 3x5 4x3 3x5 1x8 4x17 3x6 4x9 3x8 2x6 3x8 2x13 3x5 4x3 3x8 4x3 2x5 3x5 4x4 "
    "3x3 4x8 1x10 2x10 3x8 1x4 4x5 1x6 2x15 3x3 4x12 1x9 4x7 3x8 4x3 3x5 2x7 3x20 4x10 3x5 4x8 3x6 4x5 3x8 4x9 3x15 4x3"
)


@pytest.fixture
def old() -> Iterator[None]:
    with old_mario.installed():
        yield


def envs_of(count: int = 1, time_limit: int = 0, **options: Any) -> GymEnvs:
    return GymEnvs(load_game("mario"), MarioConfig(**options), count, time_limit)


def play(envs: GymEnvs, *actions: int) -> None:
    for action in actions:
        envs.step(np.full(len(envs.envs), action))


@pytest.mark.usefixtures("old")
def test_mario_is_watched_by_its_screen(tmp_path: Path) -> None:
    rules = make_rules("mario", {"size": 8, "frame_skip": 4, "grey": True, "stack": 2})
    assert watch.why_not_drawn(rules) == ""

    def run_right(obs: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        assert obs.shape == (1, 2, 8, 8)
        return torch.tensor([RUN])

    result = watch.record_gif(rules, run_right, 0, tmp_path / "mario.gif")
    assert (result.won, result.outcome) == (False, "game over")  # the pit
    assert result.score >= old_mario.PIT.start
    with Image.open(tmp_path / "mario.gif") as picture:
        assert picture.size == (512, 480)  # the screen, not what the network sees
        assert picture.n_frames == result.length + 1
    start = next(watch.play(rules, run_right, 0))
    assert start.picture.shape == (240, 256, 3)
    assert (start.picture == 40).all()  # the stand-in paints where Mario is


@pytest.mark.fault("G2")
def test_the_stand_in_is_as_broken_as_what_it_stands_for() -> None:
    """In a fresh copy of the module: the adapter repairs the one that other tests import."""
    spec = importlib.util.spec_from_file_location("fresh_old_mario", old_mario.__file__)
    assert spec
    assert spec.loader
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    with pytest.raises(OverflowError):
        assert fresh.ROM().prg_rom_stop
    game = object.__new__(fresh.SuperMarioBrosEnv)
    game.ram = np.ones(0x800, np.uint8)
    with pytest.raises(OverflowError):
        assert game._x_position


def test_it_is_imported_without_a_word(old: None, capsys: pytest.CaptureFixture[str]) -> None:
    del old
    MarioEnv([(1, 1)]).close()
    assert capsys.readouterr() == ("", "")


def test_a_reward_is_the_way_the_clock_and_the_end(old: None) -> None:
    del old
    env = MarioEnv([(1, 1)])
    _, info = env.reset(seed=0)
    assert info == {"x": 40, "furthest_x": 40, "clock": 400, "won": False}
    obs, reward, terminated, truncated, info = env.step(RUN)
    assert (obs.shape, obs.dtype) == ((240, 256, 3), np.uint8)
    assert (reward, terminated, truncated, info["x"]) == (pytest.approx(3 / 15), False, False, 43)
    assert env.step(LEFT)[1] == pytest.approx(-1 / 15), "the way back costs what the way there earned"
    rewards = [env.step(NOTHING)[1] for _ in range(22)]
    assert rewards == [0.0] * 21 + [pytest.approx(-1 / 15)], "24 frames are a count of the clock"
    while not terminated:
        _, reward, terminated, truncated, info = env.step(RIGHT)
    assert reward == pytest.approx((1 - 15) / 15)
    assert (info["x"], info["won"], truncated) == (300, False, False)
    env.close()


@pytest.mark.parametrize("state", [1, 2])
def test_a_jump_is_rewarded_when_mario_lands(old: None, state: int) -> None:
    del old
    env = MarioEnv([(1, 1)])
    env.reset(seed=0)
    env.emulator.memory[0x1D] = state  # Mario jumps or falls
    assert [env.step(RUN)[1] for _ in range(4)] == [0.0] * 4
    env.emulator.memory[0x1D] = 0
    assert env.step(RUN)[1] == pytest.approx(5 * 3 / 15)
    env.emulator.memory[0x1D] = state
    env.emulator.memory[0x704] = 1  # he swims
    assert env.step(RUN)[1] == pytest.approx(3 / 15)
    env.emulator.memory[0x704] = terminated = 0
    rewards = []
    while not terminated:
        _, reward, terminated, _, info = env.step(RUN)
        rewards.append(reward)
    assert not info["won"]
    assert max(rewards) == 0.0, "nothing for a jump into a chasm"
    assert min(rewards) == rewards[-1] == pytest.approx(-1)
    env.close()


def test_positions_beyond_a_byte_are_whole_numbers(old: None) -> None:
    """Page times 256 plus place: bytes would overflow at 256, and a step back over a page is -1, not 65535."""
    del old
    env = MarioEnv([(1, 1)])
    env.reset()
    seen = [env.step(RIGHT_JUMP)[4]["x"] for _ in range(500)]
    assert seen == list(range(41, 541))
    while env.step(LEFT)[4]["x"] > 510:
        pass
    steps = [env.step(action) for action in (RIGHT, RIGHT, LEFT, LEFT)]
    assert [info["x"] for *_, info in steps] == [511, 512, 511, 510]
    assert [round(15 * reward) for _, reward, *_ in steps] == [1, 1, -1, -1]
    assert steps[-1][4]["furthest_x"] == 540
    env.close()


def test_the_score_is_how_far_it_went_and_the_flag_wins(old: None) -> None:
    del old
    envs, episode_stats = envs_of(2, frame_skip=4), CPUEpisodeStats()
    envs.reset(0)
    play(envs, *[RUN_JUMP] * 10, *[LEFT] * 5)
    assert envs.score.tolist() == [160, 160], "the way back does not count"
    assert envs.episode_return[0] == pytest.approx((120 - 20 - 2) / 15)
    while not envs.episode_over.any():
        play(envs, RUN_JUMP)
        episode_stats.add(vars(envs))
    assert envs.won.all()
    assert envs.terminated.all()
    assert (envs.score == 641).all(), "the flag is at 640"
    play(envs, NOTHING)
    assert not envs.won.any()
    assert envs.score.tolist() == [40, 40]
    while not envs.episode_over.any():
        play(envs, RUN)
        episode_stats.add(vars(envs))
    assert envs.lost.all()
    assert not envs.won.any()
    found = episode_stats.read()
    assert (found["episodes"], found["win_rate"], found["score_max"], found["truncated"]) == (4, 0.5, 641, 0)
    envs.close()


def test_a_step_is_worth_about_one(old: None) -> None:
    """With four frames a step, as is suggested: the learner's settings are made for that."""
    del old
    envs = envs_of(frame_skip=4)
    envs.reset(0)
    rewards = []
    for action in [RUN_JUMP] * 60 + [RUN] * 80:
        play(envs, action)
        rewards.append(float(envs.reward[0]))
    assert max(rewards) == pytest.approx((4 * 3 + 150) / 15, abs=0.3), "the flag"
    assert -1.1 < min(rewards) < -0.3
    assert 0.5 < np.median(rewards) <= 1


def test_who_gets_no_further_is_cut_short(old: None) -> None:
    del old
    envs = envs_of(patience=100)
    envs.reset(0)
    play(envs, *[RUN] * 50, *[LEFT, RIGHT] * 49, LEFT)
    assert not envs.episode_over.any()
    play(envs, NOTHING)
    assert envs.truncated.all()
    assert not envs.terminated.any()
    assert not envs.won.any()
    patient = envs_of(patience=0)
    patient.reset(0)
    for _ in range(400 * 24):
        assert not patient.episode_over.any()
        play(patient, NOTHING)
    assert patient.terminated.all(), "the level's own clock kills"
    assert not patient.won.any()


def test_another_room_is_no_way(old: None) -> None:
    """Through a pipe x leaps, there and back: that earns nothing, and patience begins anew."""
    del old
    env = MarioEnv([(1, 1)], patience=50)
    env.reset()
    for _ in range(40):
        env.step(RUN)
    emulator: Any = env.emulator
    emulator._write(60, 398)
    assert env.step(RIGHT)[1] == pytest.approx(0, abs=0.11)  # a count of the clock, or two
    cuts = [env.step(RIGHT_JUMP)[3] for _ in range(60)]
    assert not any(cuts), "further in this room"
    emulator._write(500, 395)
    *_, info = env.step(NOTHING)
    assert info["furthest_x"] == 500
    env.close()


def test_chance_is_in_sticky_actions_and_first_frames(old: None) -> None:
    del old

    def track(seed: int, **options: Any) -> list[list[float]]:
        envs, rng = envs_of(3, frame_skip=4, **options), np.random.default_rng(7)
        envs.reset(seed)
        found = []
        for _ in range(40):
            envs.step(np.full(3, rng.choice([RIGHT_JUMP, RUN_JUMP, NOTHING])))
            found.append(envs.score.tolist() + envs.reward.tolist())
        envs.close()
        return found

    plain = np.array(track(0))
    assert (plain[:, :1] == plain[:, :3]).all(), "the emulator knows no chance"
    assert track(0) == track(1)
    for options in ({"sticky": 0.25}, {"noops": 23}):
        first = track(0, **options)
        assert first == track(0, **options)
        assert first != track(1, **options)
        envs = np.array(first)
        assert not (envs[:, 3] == envs[:, 4]).all() or not (envs[:, 4] == envs[:, 5]).all(), "environments differ"


def test_who_is_run_over_while_waiting_begins_again(old: None, monkeypatch: pytest.MonkeyPatch) -> None:
    del old
    env = MarioEnv([(1, 1)], noops=1000)
    monkeypatch.setattr(old_mario, "PIT", range(40, 41))
    for seed in range(3):
        _, info = env.reset(seed=seed)
        assert info["clock"] == 400
        env.emulator.memory[0x0E] = 0
    env.close()


def test_practice_begins_before_the_last_loss(old: None) -> None:
    del old
    env = MarioEnv([(4, 2)])

    def until_it_ends(action: int) -> tuple[int, bool]:
        frames, terminated, info = 0, False, {"won": False}
        while not terminated:
            _, _, terminated, _, info = env.step(action)
            frames += 1
        return frames, bool(info["won"])

    env.reset(seed=0, options={"snapshots": 100})
    assert until_it_ends(RIGHT) == (260, False)
    for _ in range(2):
        obs, info = env.reset(options={"snapshots": 100, "backplay": True})
        assert info == {"x": 240, "furthest_x": 240, "clock": 400 - 200 // 24, "won": False, "backplay": True}
        assert (obs == 240).all()
        assert env.step(RIGHT)[1] == pytest.approx(1 / 15)
        assert until_it_ends(RIGHT) == (59, False)
    _, info = env.reset(options={"snapshots": 40})
    assert info == {"x": 40, "furthest_x": 40, "clock": 400, "won": False}, "a whole game"
    assert env.emulator.level == (4, 2)
    assert until_it_ends(RIGHT) == (260, False)
    assert env.reset(options={"snapshots": 40, "backplay": True})[1]["x"] == 280
    assert until_it_ends(RIGHT) == (20, False)
    assert env.reset(options={"snapshots": 40, "backplay": True})[1]["x"] == 40, "from there it could not be helped"
    assert until_it_ends(RUN_JUMP)[1]
    assert env.reset(options={"snapshots": 40, "backplay": True})[1]["x"] == 40, "nothing was lost"
    env.close()


def test_practice_is_cut_short_and_not_counted(old: None) -> None:
    del old
    envs = GymEnvs(load_game("mario"), MarioConfig(frame_skip=4), 1, 0, backplay=0.999, backplay_steps=20)
    envs.reset(0)
    play(envs, *[RIGHT] * 65)
    assert (envs.episode_over[0], envs.terminated[0], envs.score[0], envs.length[0]) == (True, True, 300, 65)
    assert envs.obs.shape == (1, 3, 240, 256)
    assert envs.obs[0, 0, 0, 0] == 200
    play(envs, *[RIGHT] * 25)
    assert (envs.episode_over[0], envs.terminated[0], envs.truncated[0]) == (False, True, False)
    play(envs, *[NOTHING] * 79)
    assert not (envs.terminated | envs.truncated | envs.episode_over).any()
    assert envs.length[0] == 79
    play(envs, NOTHING)
    assert (envs.episode_over[0], envs.terminated[0], envs.truncated[0]) == (False, False, True)
    envs.backplay = 0.001
    play(envs, *[RIGHT] * 25, *[RIGHT] * 65)
    assert (envs.episode_over[0], envs.score[0], envs.length[0]) == (True, 300, 65), "whole games count as ever"
    envs.close()


def test_only_what_was_lost_is_practised(old: None) -> None:
    del old
    envs = GymEnvs(load_game("mario"), MarioConfig(frame_skip=4), 1, 50, backplay=0.999, backplay_steps=4)
    envs.reset(0)
    play(envs, *[RIGHT] * 50)
    assert (envs.episode_over[0], envs.truncated[0], envs.left[0]) == (True, True, 0)
    assert envs.envs[0].unwrapped.snapshot is None
    envs.close()


def test_practice_can_be_asked_for(old: None) -> None:
    del old
    assert resolve(Settings("mario", device="cpu", backplay=0.7)).backplay == 0.7
    with pytest.raises(UserError, match=r"backplay is 0\.5, but gym:CartPole-v1 cannot restore"):
        resolve(Settings("gym:CartPole-v1", device="cpu", backplay=0.5))


@pytest.mark.fault("C12")
def test_close_is_final_and_may_be_said_twice(old: None) -> None:
    del old
    env = MarioEnv([(1, 1)])
    env.reset()
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.step(0)
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()


def test_it_is_an_environment_of_gymnasium(old: None) -> None:
    del old
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        game: Any = load_game("mario")
        check_env(game.make(MarioConfig(frame_skip=4, grey=True, size=84, sticky=0.25, noops=9)))


@pytest.mark.parametrize(("name", "level"), [("mario", (1, 1)), ("mario:1-2", (1, 2)), ("mario:8-4", (8, 4))])
def test_names_are_levels(old: None, name: str, level: tuple[int, int]) -> None:
    del old
    game: Any = load_game(name)
    assert game.ON_CPU
    assert game.make(MarioConfig()).unwrapped.emulator.target == level
    plan = resolve(Settings(name, device="cpu"))
    assert str(plan.run_dir) == f"runs/{name.replace(':', '-')}-ppo"


@pytest.mark.parametrize(
    "name", ["mario:9-9", "mario:0-1", "mario:1-5", "mario:x", "mario:", "mario:1-1-1", "mario:11"]
)
def test_other_levels_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"There is no level '{name}'; .*mario:1-1 to mario:8-4"):
        load_game(name)


def test_environments_are_dealt_the_levels_in_turn(old: None) -> None:
    del old
    game: Any = load_game("mario:1-1,1-2,8-4")
    assert game.levels == ("1-1", "1-2", "8-4")
    envs = GymEnvs(game, MarioConfig(), 3, first=2)
    targets = [env.unwrapped.emulator.target for env in envs.envs]  # type: ignore[attr-defined]
    assert targets == [(8, 4), (1, 1), (1, 2)]
    envs.reset(0)
    envs.replace(1, 5)
    assert envs.envs[1].unwrapped.emulator.target == (1, 1), "made anew, it plays the same level"  # type: ignore[attr-defined]
    envs.close()
    plan = resolve(Settings("mario:1-1,1-2,8-4", device="cpu"))
    assert str(plan.run_dir) == "runs/mario-1-1-1-2-8-4-ppo"
    with pytest.raises(UserError, match="num_envs is 2; expected at least one for each of the 3 levels"):
        resolve(Settings("mario:1-1,1-2,8-4", device="cpu", num_envs=2, batch_size=32))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mario:1-1,1-9", "There is no level 'mario:1-9'; .*, or several, as in mario:1-1,1-2"),
        ("mario:1-1,", "There is no level 'mario:'"),
        ("mario:1-1, 1-2", "There is no level 'mario: 1-2'"),
        ("mario:1-2,1-1,1-2", "mario:1-2,1-1,1-2 names level 1-2 2 times; name every level once"),
    ],
)
def test_lists_with_other_levels_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_game(name)


def test_scores_are_told_by_level(old: None) -> None:
    del old
    rules = make_rules("mario:1-1,1-2,1-3", {"frame_skip": 4})

    def policy(obs: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        """Win where the slot plays the second level, else run into the pit."""
        return torch.tensor([RUN_JUMP if slot % 3 == 1 else RUN for slot in range(len(obs))])

    evaluation = evaluate.evaluate(rules, policy, 20, CPU)
    found = evaluation.summary()
    levels = found["levels"]
    assert list(levels) == ["1-1", "1-2", "1-3"]
    assert [level["episodes"] for level in levels.values()] == [7, 7, 6]
    assert [level["win_rate"] for level in levels.values()] == [0, 1, 0]
    assert levels["1-2"]["score_mean"] == 640
    assert levels["1-1"]["score_mean"] in old_mario.PIT
    assert found["win_rate"] == 7 / 20
    both = over_runs([evaluation, evaluation])
    assert [level["episodes"] for level in both["levels"].values()] == [14, 14, 12]


def test_training_practises_the_level_that_is_lost(old: None) -> None:
    del old
    envs = GymEnvs(load_game("mario:1-1,1-2"), MarioConfig(frame_skip=4), 2, choose_levels=True)
    envs.reset(0)
    won = {0: RUN_JUMP, 1: RIGHT}  # the first level is always won, the second always lost
    ended: list[int] = []
    while len(ended) < 120:
        before = envs.playing.copy()
        envs.step(np.array([won[level] for level in before.tolist()]))
        np.testing.assert_array_equal(envs.level, before)
        for i in np.flatnonzero(envs.episode_over):
            assert envs.won[i] == (envs.level[i] == 0), "the flag or the pit of the level that was played"
            ended.append(int(envs.level[i]))
        targets = [env.unwrapped.emulator.target for env in envs.envs]  # type: ignore[attr-defined]
        assert targets == [((1, 1), (1, 2))[level] for level in envs.playing]
    late = ended[60:]
    assert 3 <= late.count(0) < late.count(1) / 2
    envs.close()


def test_backplay_stays_in_its_level(old: None) -> None:
    del old
    config = MarioConfig(frame_skip=4)
    envs = GymEnvs(load_game("mario:1-1,1-2"), config, 2, backplay=0.5, backplay_steps=8, choose_levels=True)
    envs.reset(0)
    practised = 0
    for _ in range(3_000):
        before = envs.playing.copy()
        envs.step(np.full(2, RIGHT))
        for i in np.flatnonzero(envs.ended & (envs.left > 0)):
            assert envs.playing[i] == before[i]
            practised += 1
    assert practised > 10
    envs.close()


def test_training_tells_scores_by_level() -> None:
    stats = CPUEpisodeStats(["1-1", "1-2"])
    zeros = np.zeros(4)
    step = {"episode_over": np.array([True, True, True, False]), "score": np.array([10.0, 20.0, 30.0, 99.0])}
    step |= {"length": zeros, "episode_return": zeros, "lost": zeros, "won": np.array([False, True, True, True])}
    step["level"] = np.array([0, 1, 0, 1])
    stats.add(step)
    found = stats.read()
    assert {name: figure for name, figure in found.items() if name.startswith("level/")} == {
        "level/1-1/episodes": 2,
        "level/1-1/score": 20,
        "level/1-1/win_rate": 0.5,
        "level/1-2/episodes": 1,
        "level/1-2/score": 20,
        "level/1-2/win_rate": 1,
    }
    assert found["episodes"] == 3
    assert stats.read() == {"episodes": 0}


def test_levels_are_told_over_ranks() -> None:
    first = {"episodes": 2, "score": 1.0, "score_max": 2, "level/1-1/episodes": 2, "level/1-1/score": 1.0}
    second = {"episodes": 2, "score": 4.0, "score_max": 9, "level/1-1/episodes": 1, "level/1-1/score": 7.0}
    second |= {"level/1-2/episodes": 1, "level/1-2/score": 1.0}
    ranks: Any = SimpleNamespace(active=True, gather=lambda own: [own, second, {"episodes": 0}])
    assert merge_episode_stats(ranks, first) == {
        "episodes": 4,
        "score": 2.5,
        "score_max": 9,
        "level/1-1/episodes": 3,
        "level/1-1/score": 3.0,
        "level/1-2/episodes": 1,
        "level/1-2/score": 1.0,
    }


@pytest.mark.parametrize("options", [{"noops": -1}, {"patience": -1}, {"frame_skip": 0}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"env\.{next(iter(options))} is"):
        make_rules("mario", options)


def test_what_suits_it(old: None) -> None:
    del old
    plan = resolve(Settings("mario", device="cpu"))
    config = plan.rules.config
    assert (config.frame_skip, config.grey, config.size, config.stack) == (4, True, 84, 4)
    assert (config.frame_max, config.reward_clip, config.patience, config.noops) == (False, False, 1200, 0)
    assert config.show_action
    spec = plan.rules.game.spec(config)
    assert (spec.obs_shape, spec.num_actions, spec.score_name) == ((4, 84, 84), 7, "furthest x")
    assert plan.algo_config.net == "pixels"
    assert (plan.algo_config.gamma, plan.algo_config.ema_decay, plan.backplay) == (0.95, 0.998, 0.5)
    own = resolve(Settings("mario", device="cpu", env_options={"sticky": "0.25", "frame_skip": "2", "noops": "30"}))
    assert (own.rules.config.sticky, own.rules.config.frame_skip, own.rules.config.noops) == (0.25, 2, 30)


def test_what_suits_it_where_many_cores_play(old: None) -> None:
    """What it was learned with: four games for each of fifteen actors, six gradient steps an epoch."""
    del old
    machine = Hardware("cuda:0", "test", cores=16, memory_gb=80.0, bf16=True, compiler="g++", capability=(9, 0))
    request = recipes.Request(load_game("mario"), machine, "ppo")
    chosen = [
        recipes.collect(request)[name].value
        for name in ("num_envs", "rollout_steps", "batch_size", "epochs", "learning_rate")
    ]
    assert chosen == [60, 64, 640, 5, 2.5e-4]


def test_evaluation_says_how_many_games_were_won(old: None) -> None:
    del old
    rules = make_rules("mario", {"frame_skip": 4})

    def policy(action: int) -> Any:
        return lambda obs, _: torch.full((len(obs),), action)

    won = evaluate.evaluate(rules, policy(RUN_JUMP), 20, CPU).summary()
    assert (won["win_rate"], won["score_mean"], won["finished"], won["steps_per_win"]) == (1, 640, 20, 50)
    lost = evaluate.evaluate(rules, policy(RUN), 20, CPU).summary()
    assert (lost["win_rate"], lost["game_overs"], lost["steps_per_win"]) == (0, 20, None)
    assert lost["score_mean"] in old_mario.PIT
    cut = evaluate.evaluate(rules, policy(RUN_JUMP), 4, CPU, slot_steps=10).summary()
    assert (cut["win_rate"], cut["finished"], cut["score_mean"]) == (0, 0, 160)
    some = evaluate.evaluate(rules, policy(RUN_JUMP), 2, CPU, max_steps=110).summary()  # a game and five steps each
    assert (some["episodes"], some["win_rate"], some["finished"]) == (4, 0.5, 2)


TINY = (
    "--num-envs 2 --actors 0 --ppo.rollout_steps 16 --ppo.net mlp --ppo.hidden 16 --batch-size 32 --env.size 21 "
    "--env.sticky 0.25 --device cpu --no-compile --eval-episodes 2"
)


def trained(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    with pytest.raises(SystemExit) as end:
        cli.main(f"train {line} {TINY} --json".split())
    out, err = capsys.readouterr()
    assert end.value.code == 0, err
    return json.loads(out.splitlines()[-1]), err


def test_it_is_trained_from_the_command_line(
    old: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del old
    monkeypatch.chdir(tmp_path)
    result, err = trained("mario:1-2 --steps 320 --env.patience 60", capsys)
    assert old_mario.NOTE not in err
    assert result["env_steps"] == 320
    assert result["run"] == "runs/mario-1-2-ppo"
    assert 0 <= result["win_rate"] <= 1
    lines = [json.loads(line) for line in Path("runs/mario-1-2-ppo/metrics.jsonl").read_text().splitlines()]
    assert any("win_rate" in line for line in lines)
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", "runs/mario-1-2-ppo", "--episodes", "3", "--device", "cpu"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "furthest x" in text
    assert "won " in text
    with pytest.raises(SystemExit):
        cli.main(f"train mario:1-2 {TINY} --steps 384 --env.patience 60".split())
    text = capsys.readouterr().out
    assert "won " in text
    assert "redline watch" in text


def test_a_run_from_before_actions_were_shown_is_continued_as_it_was(old: None, tmp_path: Path) -> None:
    del old
    hidden = resolve(Settings("mario", device="cpu", run_dir=str(tmp_path), env_options={"show_action": False}))
    config = hidden.describe()
    del config["env_options"]["show_action"]
    write_config(tmp_path, config)
    (tmp_path / "checkpoints" / "ckpt-1").mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"cannot be continued with these settings: env\.show_action was False, now True"
    ):
        check_run_folder(resolve(Settings("mario", device="cpu", run_dir=str(tmp_path))))
    assert check_run_folder(hidden) == []


@pytest.mark.fault("G1")
def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter._emulator.cache_clear()
    monkeypatch.setitem(sys.modules, "gym_super_mario_bros", None)
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "mario"])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "redline: mario needs the package gym-super-mario-bros, which is not installed; "
        "install it: pip install 'redline[mario]'.\n"
    )


def test_what_cannot_be_imported_says_why(old: None, monkeypatch: pytest.MonkeyPatch) -> None:
    del old
    monkeypatch.setitem(sys.modules, "nes_py._rom", None)
    with pytest.raises(UserError, match=r"which cannot be imported \(.*nes_py.*\); install it"):
        MarioEnv([(1, 1)])


def test_it_is_known_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["list"])
    out = capsys.readouterr().out
    assert re.search(r"gym:ID +Any Gymnasium environment", out)
    assert re.search(r"mario:W-S +Super Mario Bros., level 1-1", out)
    cli.run(["train", "mario", "--help"])
    out = capsys.readouterr().out
    assert re.search(r"--env.patience N .*?\[1200\]", out, re.DOTALL)  # lines wrap on a narrow terminal
    assert out.count("--env.sticky") == 1
    with pytest.raises(UserError, match=r"There is no game 'maro'; did you mean 'mario'\? Games: .*mario:W-S"):
        load_game("maro")
    with pytest.raises(UserError, match="mario is a CPU environment"):
        make("mario")
    assert set(CPU_ENVS) == {"gym", "mario"}


# With the emulator.


@real
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="nes-py 9 is another emulator")
@pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")
@pytest.mark.parametrize("level", [(1, 1), (2, 2), (8, 4)])
def test_levels_play_as_in_nes_py(level: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> None:
        raise OSError("there is no C++ compiler")

    adapter._emulator.cache_clear()
    ours = MarioEnv([level])
    with monkeypatch.context() as patch:
        patch.setattr(nes, "library", library)
        adapter._emulator.cache_clear()
        with pytest.warns(UserWarning, match=r"far slower than Redline's: there is no C\+\+ compiler; install g\+\+"):
            theirs = MarioEnv([level])
    adapter._emulator.cache_clear()
    assert ours.emulator.console is not None
    assert not hasattr(theirs.emulator, "console")
    rng, options, over, action = np.random.default_rng(sum(level)), {"snapshots": 40}, True, RIGHT
    for frame in range(400):
        if over:
            (obs, info), (expected, known) = (env.reset(seed=0, options=options) for env in (ours, theirs))
            options, over = {"snapshots": 40, "backplay": frame % 2 == 0}, False
        else:
            if frame % 8 == 0:
                action = int(rng.choice([RIGHT, RUN, RUN_JUMP, RIGHT_JUMP, LEFT]))
            (obs, reward, *ends, info), (expected, *others, known) = (env.step(action) for env in (ours, theirs))
            assert [reward, *ends] == others
            over = any(ends)
            for env in (ours, theirs) if ends[0] else ():
                with pytest.raises(ValueError, match="reset"):
                    env.step(action)
        assert np.array_equal(obs, expected), f"screen, frame {frame}"
        assert bytes(ours.emulator.ram) == bytes(theirs.emulator.ram), f"memory, frame {frame}"
        assert info == known
    ours.close()
    theirs.close()


@real
def test_frames_that_nobody_looks_at_change_nothing() -> None:
    game: Any = load_game("mario")
    envs = [game.make(MarioConfig(frame_skip=4, grey=True, size=84, sticky=0.25, noops=8)) for _ in range(2)]
    hiding, drawing = envs
    frames = drawing
    while not isinstance(frames, Frames):
        frames = frames.env
    assert frames.may_hide
    frames.may_hide = False
    rng, over, ends = np.random.default_rng(0), True, 0
    for number in range(300):
        if over:
            shown = [env.reset(seed=number) for env in envs]
            over = False
        else:
            action = int(rng.choice([RIGHT, RUN]))  # into the first enemy
            shown = [env.step(action) for env in envs]
            over = shown[0][2] or shown[0][3]
            ends += over
        assert np.array_equal(shown[0][0], shown[1][0]), f"observation {number}"
        assert shown[0][1:] == shown[1][1:]
    assert ends > 2
    assert np.array_equal(hiding.render(), drawing.render())
    hiding.close()
    drawing.close()


@real
def test_level_one_is_won() -> None:
    """400 actions that lead to the flag: x goes on without leaps, and the game is told to be won."""
    rules = make_rules("mario", {"frame_skip": 4})
    envs, episode_stats = GymEnvs(rules.game, rules.config, 1), CPUEpisodeStats()
    envs.reset(0)
    way = [int(action) for part in WAY.split() for action, times in [part.split("x")] for _ in range(int(times))]
    score, before = 40.0, 40.0
    for number, action in enumerate(way):
        assert not envs.episode_over.any(), f"ended after {number} actions at {score}"
        play(envs, action)
        episode_stats.add(vars(envs))
        before, score = score, float(envs.score[0])
        assert 0 <= score - before <= 12
        assert -1.3 <= envs.reward[0] <= 15, "a jump is rewarded as a whole, and none is longer than a screen"
    assert envs.won.all()
    assert envs.terminated.all()
    assert score > 3100
    assert episode_stats.read()["win_rate"] == 1
    assert envs.episode_return[0] == pytest.approx((score - 40) / 15 + 1, abs=7), "nearly all is the way and the prize"
    envs.close()


@real
def test_who_runs_into_the_first_enemy_dies() -> None:
    game: Any = load_game("mario")
    env = game.make(MarioConfig(frame_skip=4, grey=True, size=84, sticky=0.25))
    obs, _ = env.reset(seed=1)
    assert (obs.shape, obs.dtype, obs.max() > 100) == ((1, 84, 84), np.uint8, True)
    terminated = truncated = False
    while not (terminated or truncated):
        obs, reward, terminated, truncated, info = env.step(RIGHT)
    assert terminated
    assert not info["won"]
    assert 250 < info["furthest_x"] < 350
    assert -1 <= reward < -0.3
    again, _ = env.reset()
    first, _ = env.reset(seed=1)
    assert np.array_equal(again, first)
    emulator: Any = env.unwrapped.emulator
    emulator.ram[0x07F8:0x07FB] = bytes([0, 0, 1])
    for _ in range(20):
        *_, terminated, _, info = env.step(NOTHING)
        if terminated:
            break
    assert terminated, "the clock is at 0"
    assert not info["won"]
    env.close()


@real
@pytest.mark.parametrize(("name", "world", "stage"), [("mario:1-2", 1, 2), ("mario:4-4", 4, 4)])
def test_levels_are_where_they_should_be(name: str, world: int, stage: int) -> None:
    game: Any = load_game(name)
    env = game.make(MarioConfig())
    _, info = env.reset(seed=0)
    emulator = env.unwrapped.emulator
    assert (emulator.ram[0x075F] + 1, emulator.ram[0x075C] + 1) == (world, stage)
    assert info["x"] == 40
    assert info["clock"] in (300, 400)
    env.close()


@real
@pytest.mark.parametrize("level", [(1, 1), (1, 2), (4, 1)])
def test_the_emulator_goes_back(level: tuple[int, int]) -> None:
    env = MarioEnv([level])
    first, _ = env.reset(seed=0, options={"snapshots": 30})
    first, seen, told, over = first.copy(), [], [], False
    while not over:  # until it meets the first enemy
        obs, _, over, _, info = env.step(RIGHT)
        seen.append(obs.copy())
        told.append(info)
    frame = len(seen)
    last = frame // 30 * 30
    for _ in range(2):
        obs, info = env.reset(options={"snapshots": 30, "backplay": True})
        assert info == told[last - 1] | {"backplay": True}
        assert (obs == seen[last - 1]).all()
        for number in range(last, frame):
            obs, _, over, _, info = env.step(RIGHT)
            assert (obs == seen[number]).all()
            assert info == told[number]
        assert over
        if frame - last < 60:
            break
    obs, info = env.reset(options={"snapshots": 30})
    assert (obs == first).all()
    for number in range(60):
        assert (env.step(RIGHT)[0] == seen[number]).all(), "the same level"
    env.close()


@real
def test_the_emulator_is_an_environment_of_gymnasium() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        game: Any = load_game("mario")
        check_env(game.make(MarioConfig(frame_skip=4, grey=True, size=84, sticky=0.25)))


@real
def test_it_is_trained_with_the_emulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result, err = trained("mario --steps 128 --time-limit 40", capsys)
    assert "unmaintained" not in err
    assert result["env_steps"] == 128
    assert result["win_rate"] == 0
    assert result["score_mean"] >= 40


@real
def test_the_package_is_imported_without_a_word() -> None:
    code = "from redline.envs.mario import MarioEnv; env = MarioEnv([(1, 1)]); env.reset(); env.step(1); env.close()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ("", "")


# Images.


@pytest.mark.parametrize(("height", "width", "size"), [(240, 256, 84), (210, 160, 84), (9, 7, 12), (20, 20, 20)])
def test_images_are_made_small_as_slow_arithmetic_would(height: int, width: int, size: int) -> None:
    """Of bytes and whole shares, a few at a time; of all in floating point it would be the same but for a grey or two."""
    image = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    rows, columns = images.averages(height, size), images.averages(width, size)
    grey = (image @ np.array([77, 150, 29])) >> 8
    assert np.array_equal(images.grey(image), grey)
    assert np.array_equal(images.grey(image[:, :, ::-1][:, ::-1]), ((image @ np.array([29, 150, 77])) >> 8)[:, ::-1])
    found = images.resized(grey.astype(np.uint8), images._sparse(rows), images._sparse(columns))
    assert found.shape == (size, size)
    assert np.abs(found - rows @ grey @ columns.T).max() <= 2
    for value in (0, 1, 128, 255):
        flat = np.full((height, width), value, np.uint8)
        assert (images.resized(flat, images._sparse(rows), images._sparse(columns)) == value).all()
