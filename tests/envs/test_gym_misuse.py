"""Environments that are old, wrapped, wrong or missing, and calls out of order: made to work, or refused with a reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import toys
from gymnasium import spaces
from gymnasium.wrappers import Autoreset

from redline import cli
from redline.collect.episode_stats import CPUEpisodeStats
from redline.core.errors import InvalidStep, UserError
from redline.envs import gym_make, make_rules
from redline.envs.gym_envs import GymEnvs
from redline.envs.gym_game import GymConfig, GymGame
from redline.run import evaluate
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings


def envs_of(name: str, count: int = 2, **options: Any) -> GymEnvs:
    return GymEnvs(GymGame(f"gym:{name}"), GymConfig(**options), count)


def play(envs: GymEnvs, *actions: int) -> None:
    for action in actions:
        envs.step(np.full(len(envs.envs), action))


def register(name: str, made: Callable[[], Any], **more: Any) -> str:
    """Known for the length of the tests; each under a name of its own."""
    gymnasium.register(name, made, **more)
    return name


# Old interfaces.


class Old(gymnasium.Env[Any, Any]):
    """As written for Gym 0.21: sees (step, luck); ends after four steps, every second time cut short."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Box(-1e9, 1e9, (2,), np.float32), spaces.Discrete(2)
        self.luck, self.games, self.rng = 0.0, 0, np.random.default_rng()

    def seed(self, seed: int | None = None) -> list[int | None]:
        self.rng = np.random.default_rng(seed)
        return [seed]

    def reset(self) -> Any:  # type: ignore[override]
        self.time, self.luck, self.games = 0, float(self.rng.integers(1000)), self.games + 1
        return np.array([0, self.luck], np.float32)

    def step(self, action: int) -> Any:
        self.time += 1
        over = self.time == 4
        info = {"TimeLimit.truncated": self.games % 2 == 0} if over else {}
        return np.array([self.time, self.luck], np.float32), 1.0 + action, over, info


class HalfOld(Old):
    """As written for Gym 0.25: `reset` takes the seed, and gives no `info`."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        del options
        if seed is not None:
            self.seed(seed)
        return super().reset()


class NewReset(Old):
    """Half converted: only `step` is old."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        del options
        if seed is not None:
            self.seed(seed)
        return super().reset(), {}


class NewStep(Old):
    """Half converted: only `reset` is old."""

    def step(self, action: int) -> Any:
        obs, reward, over, info = super().step(action)
        cut = info.get("TimeLimit.truncated", False)
        return obs, reward, over and not cut, over and cut, info


OLD = [Old, HalfOld, NewReset, NewStep]
for _kind in OLD:
    register(f"Toy{_kind.__name__}-v0", _kind)
    register(f"Toy{_kind.__name__}Limited-v0", _kind, max_episode_steps=3)
    register(f"Toy{_kind.__name__}Bare-v0", _kind, order_enforce=False, disable_env_checker=True)


@pytest.mark.fault("G2")
@pytest.mark.parametrize("kind", OLD)
@pytest.mark.parametrize("end", ["", "Bare"])
def test_old_interfaces_are_understood(kind: type[Old], end: str) -> None:
    envs = envs_of(f"Toy{kind.__name__}{end}-v0")
    envs.reset(3)
    ends = []
    for step in range(1, 9):
        play(envs, 1)
        assert (envs.final_obs[:, 0] == (step - 1) % 4 + 1).all()
        assert (envs.reward == 2).all()
        ends.append((envs.terminated.all(), envs.truncated.all()))
    no = (False, False)
    assert ends == [no] * 3 + [(True, False)] + [no] * 3 + [(False, True)]
    lucks = envs.obs[:, 1].tolist()
    assert lucks[0] != lucks[1]
    again = envs_of(f"Toy{kind.__name__}{end}-v0")
    again.reset(3)
    play(again, *[1] * 8)
    assert again.obs[:, 1].tolist() == lucks, "seeds reach it"


@pytest.mark.parametrize("kind", OLD)
def test_old_interfaces_have_their_time_limit(kind: type[Old]) -> None:
    envs = envs_of(f"Toy{kind.__name__}Limited-v0")
    envs.reset(0)
    play(envs, 0, 0)
    assert not envs.episode_over.any()
    play(envs, 0)
    assert envs.truncated.all()


def test_new_interfaces_are_left_alone() -> None:
    env: Any = gym_make.open_env("CartPole-v1")
    while isinstance(env, gymnasium.Wrapper):
        assert not isinstance(env, gym_make._OldApi)
        env = env.env


@pytest.mark.fault("G2")
def test_an_old_environment_is_learned_from() -> None:
    small = {"rollout_steps": 16, "batch_size": 32, "hidden": (8,)}
    plan = resolve(Settings("gym:ToyOld-v0", "ppo", num_envs=2, device="cpu", algo_options=small))
    session = Session(plan, pytest.fail)
    session._play()
    session.close()
    assert session.learner.rollout.truncated.view(16, 2)[:, 0].tolist() == [step % 8 == 7 for step in range(16)]


class OfOldGym:
    """No environment of Gymnasium at all."""

    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(2)
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012


register("ToyForeign-v0", OfOldGym)
register("ToyVector-v0", lambda: gymnasium.make_vec("CartPole-v1", 2))
register("ToyAutoreset-v0", lambda: Autoreset(toys.Count()))
register("ToyBroken-v0", lambda: toys.Count(nothing=1))  # type: ignore[call-arg]


@pytest.mark.fault("G3")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("ToyForeign-v0", "cannot be made: .* neither vector environments nor those of old Gym"),
        ("ToyVector-v0", "cannot be made: .*VectorEnv.* takes single environments of Gymnasium, neither vector"),
        ("ToyAutoreset-v0", "starts its next episode by itself .*Autoreset.*; register it without"),
        ("ToyBroken-v0", "cannot be made: .*nothing"),
        ("CartPol-v1", "did you mean.*CartPole|CartPole"),
        ("CartPole-v99", "CartPole-v1|v99"),
    ],
)
def test_what_cannot_be_stepped_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as found:
        resolve(Settings(f"gym:{name}", device="cpu"))
    assert str(found.value).startswith(f"gym:{name} ")


@pytest.mark.fault("G1")
def test_atari_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gym_make._probe.cache_clear()
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "gym:ALE/Pong-v5"])
    assert end.value.code == 2
    assert "gym:ALE/Pong-v5 needs a package" in (err := capsys.readouterr().err)
    assert "pip install 'redline[atari]'" in err


# Observations that are not what was announced.


class Wrong(toys.Seen):
    """Shows `shown` from its third step on, before that what it announces."""

    def __init__(self, seen: spaces.Space[Any], shown: Any, reward: float = 0.0) -> None:
        super().__init__(seen)
        self.shown, self.reward = shown, reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.time = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        obs, _, *rest = super().step(action)
        return (self.shown, self.reward, *rest) if self.time > 2 else (obs, 0.0, *rest)  # type: ignore[return-value]


FLOATS, IMAGE = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(0, 255, (6, 5, 3), np.uint8)
WRONG: dict[str, tuple[Any, Any, float, str]] = {
    "Long": (
        FLOATS,
        np.zeros(4, np.float32),
        0,
        r"float32 of shape \(4,\), but its observation_space is float32 of shape \(3,\)",
    ),
    "Short": (FLOATS, np.zeros(1, np.float32), 0, r"of shape \(1,\), but .* of shape \(3,\)"),
    "Turned": (IMAGE, np.zeros((3, 6, 5), np.uint8), 0, r"uint8 of shape \(3, 6, 5\), but .* \(6, 5, 3\)"),
    "Share": (IMAGE, np.full((6, 5, 3), 0.5), 0, "float64 of shape .*, but its observation_space is uint8"),
    "Bright": (
        IMAGE,
        np.full((6, 5, 3), 256),
        0,
        "int64 of shape .* from 256 to 256, but its observation_space is uint8",
    ),
    "Words": (FLOATS, np.array(["a", "b", "c"]), 0, "but its observation_space is float32"),
    "Nan": (FLOATS, np.array([0, np.nan, 0], np.float32), 0, r"nan as its observation\[1\] in step 3 of"),
    "NanReward": (FLOATS, np.zeros(3, np.float32), np.nan, "reward nan in step 3 of an episode"),
}
for _name, (_space, _shown, _reward, _) in WRONG.items():
    register(f"ToyWrong{_name}-v0", lambda space=_space, shown=_shown, reward=_reward: Wrong(space, shown, reward))


@pytest.mark.fault("D1", "D2", "G5")
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_observations_must_be_what_was_announced(name: str) -> None:
    envs = envs_of(f"ToyWrong{name}-v0")
    envs.reset(0)
    play(envs, 0, 0)
    with pytest.raises(UserError, match=WRONG[name][3]) as found:
        play(envs, 0)
    assert str(found.value).startswith(f"gym:ToyWrong{name}-v0 ")


RIGHT_ENOUGH: dict[str, tuple[Any, Any]] = {
    "Double": (FLOATS, np.array([0.25, -1, 1], np.float64)),
    "List": (FLOATS, [0.5, 0.5, 0.5]),
    "Whole": (FLOATS, np.array([1, 0, -1])),
    "Beyond": (FLOATS, np.array([2, 0, -3], np.float32)),
    "LongBytes": (IMAGE, np.full((6, 5, 3), 255)),
}
for _name, (_space, _shown) in RIGHT_ENOUGH.items():
    register(f"Toy{_name}-v0", lambda space=_space, shown=_shown: Wrong(space, shown))


@pytest.mark.fault("G5")
@pytest.mark.parametrize("name", RIGHT_ENOUGH)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_numbers_of_another_kind_are_converted(name: str) -> None:
    space, shown = RIGHT_ENOUGH[name]
    envs = envs_of(f"Toy{name}-v0")
    envs.reset(0)
    play(envs, 0, 0, 0)
    expected = np.asarray(shown, space.dtype)
    assert np.array_equal(envs.obs[1], np.moveaxis(expected, 2, 0) if space is IMAGE else expected)
    assert envs.obs.dtype == space.dtype


@pytest.mark.fault("G5")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_treated_images_are_checked_before() -> None:
    envs = envs_of("ToyWrongTurned-v0", grey=True, size=4)
    envs.reset(0)
    play(envs, 0, 0)
    with pytest.raises(UserError, match=r"observation of uint8 of shape \(3, 6, 5\)"):
        play(envs, 0)


# Observations of several entries.

BOTH = spaces.Dict({"lidar": spaces.Box(-1, 1, (2,), np.float32), "pose": spaces.Tuple([FLOATS, spaces.Discrete(3)])})
GOOD_LIDAR, GOOD_POSE = np.zeros(2, np.float32), (np.zeros(3, np.float32), 1)
ENTRIES: dict[str, tuple[Any, str]] = {
    "EntryNan": (
        {"lidar": GOOD_LIDAR, "pose": (np.array([0, 0, np.nan], np.float32), 1)},
        r"returned nan as its observation\.pose\.0\[2\] in step 3",
    ),
    "EntryInfinite": (
        {"lidar": np.array([0, np.inf], np.float32), "pose": GOOD_POSE},
        r"inf as its observation\.lidar\[1\]",
    ),
    "EntryLong": (
        {"lidar": np.zeros(5, np.float32), "pose": GOOD_POSE},
        r"returned float32 of shape \(5,\) as its observation\.lidar, but the space of that is Box\(",
    ),
    "EntryWord": (
        {"lidar": GOOD_LIDAR, "pose": (GOOD_POSE[0], "one")},
        r"'one' \(str\) as its observation\.pose\.1, but",
    ),
    "EntryMissing": ({"pose": GOOD_POSE}, r"None \(NoneType\) as its observation\.lidar, but"),
    "EntryNone": (None, r"None \(NoneType\) as its observation, but the space of that is Dict"),
}
for _name, (_shown, _) in ENTRIES.items():
    register(f"Toy{_name}-v0", lambda shown=_shown: Wrong(BOTH, shown), disable_env_checker=True)


@pytest.mark.fault("D1", "G5")
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_entry_that_is_wrong_is_named(name: str) -> None:
    envs = envs_of(f"Toy{name}-v0")
    envs.reset(0)
    play(envs, 0, 0)
    with pytest.raises(InvalidStep, match=ENTRIES[name][1]) as found:
        play(envs, 0)
    assert str(found.value).startswith(f"gym:Toy{name}-v0 (environment 0) returned ")


class Odd(toys.Count):
    """Its third step returns something that is not a step."""

    def __init__(self, what: str) -> None:
        super().__init__(100)
        self.what = what

    def step(self, action: int) -> Any:
        obs, reward, *endings, info = super().step(action)
        if self.time < 3:
            return obs, reward, *endings, info
        values = {"reward": (obs, [1.0, 2.0], *endings, info), "info": (obs, reward, *endings, None), "none": None}
        values["actions"] = obs, reward, *endings, info
        if self.what == "actions":
            self.action_space = spaces.Discrete(5)
        return values[self.what]


ODD = {
    "reward": r"returned the reward \[1.0, 2.0\] \(list\); expected a number",
    "info": "returned info of type NoneType from step; expected a dict",
    "none": "returned 1 value from step; expected observation, reward",
}
for _name in (*ODD, "actions"):
    register(f"ToyOdd{_name}-v0", lambda what=_name: Odd(what), disable_env_checker=True)


@pytest.mark.fault("D2", "G5")
@pytest.mark.parametrize("name", ODD)
def test_steps_that_are_none_are_named(name: str) -> None:
    envs = envs_of(f"ToyOdd{name}-v0")
    envs.reset(0)
    play(envs, 0, 0)
    with pytest.raises(InvalidStep, match=ODD[name]):
        play(envs, 0)


@pytest.mark.fault("C14")
def test_spaces_must_not_change() -> None:
    envs = envs_of("ToyOddactions-v0")
    envs.reset(0)
    play(envs, 0, 0, 0)
    with pytest.raises(InvalidStep, match=r"changed its action_space from Discrete\(2, start=2\) to Discrete\(5\)"):
        envs.reset(0)


@pytest.mark.fault("G7")
def test_a_time_limit_is_advised_for_episodes_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.collect.sync_collector._ENDLESS", 40)
    messages: list[str] = []
    for env, limit in (("gym:ToyEndless-v0", 0), ("gym:ToyEndless-v0", 50), ("gym:ToyCount-v0", 0)):
        small = {"rollout_steps": 16, "batch_size": 32, "hidden": (8,)}
        settings = Settings(env, "ppo", num_envs=2, actors=0, device="cpu", time_limit=limit, algo_options=small)
        session = Session(resolve(settings), messages.append)
        for _ in range(6):
            session.iterate(1)
            session.collector.metrics()
        session.close()
    (message,) = messages
    assert message.startswith("An episode of gym:ToyEndless-v0 has lasted 48 steps.")
    assert "--time-limit" in message


# Out of order.


@pytest.mark.fault("C12", "G6")
def test_calls_out_of_order_are_errors() -> None:
    envs = envs_of("ToyCount-v0")
    with pytest.raises(RuntimeError, match="step of gym:ToyCount-v0 was called before reset; call reset first"):
        play(envs, 0)
    envs.reset(0)
    play(envs, 0)
    envs.close()
    with pytest.raises(RuntimeError, match="step of gym:ToyCount-v0 was called after close"):
        play(envs, 0)
    with pytest.raises(RuntimeError, match="reset of gym:ToyCount-v0 was called after close"):
        envs.reset(0)
    envs.close()


# Episodes of one step.


register("ToyBrief-v0", lambda: toys.Count(1))


@pytest.mark.fault("G7")
def test_episodes_of_one_step_are_counted() -> None:
    envs, episode_stats = envs_of("ToyBrief-v0", 3), CPUEpisodeStats()
    envs.reset(0)
    for step in range(6):
        play(envs, 1)
        episode_stats.add(vars(envs))
        assert envs.episode_over.all()
        assert (envs.length == 1).all()
        assert (envs.score == 1).all()
        assert (envs.terminated == (step % 2 == 0)).all()
        assert (envs.truncated == (step % 2 == 1)).all()
        assert (envs.final_obs[:, :2] == [step, 1]).all()
        assert (envs.obs[:, :2] == [step + 1, 0]).all()
    assert episode_stats.read() == {
        "episodes": 18, "score": 1, "score_max": 1, "length": 1, "reward": 1, "win_rate": 0, "truncated": 0.5,
    }  # fmt: skip
    assert episode_stats.read() == {"episodes": 0}
    one = evaluate.evaluate(
        make_rules("gym:ToyBrief-v0"), lambda obs, _: torch.ones(len(obs), dtype=torch.int64), 37, torch.device("cpu")
    )
    assert (one.lengths == 1).all()
    assert one.summary()["episodes"] == 37
    assert 0 < one.game_over.sum() < 37


@pytest.mark.fault("G7")
def test_episodes_of_one_step_are_learned_from() -> None:
    """Nothing leads from one to the next: every step ends, every second one is cut short and has a final sight."""
    small = {"rollout_steps": 8, "batch_size": 16, "hidden": (8,), "gamma": 0.5}
    plan = resolve(Settings("gym:ToyBrief-v0", "ppo", num_envs=2, device="cpu", algo_options=small))
    session = Session(plan, pytest.fail)
    session._play()
    learner = session.learner
    assert learner.rollout.done.view(8, 2).all()
    assert learner.rollout.truncated.view(8, 2)[:, 0].tolist() == [False, True] * 4
    session._update()
    assert all(torch.isfinite(x).all() for x in learner.net.parameters())
    session.close()
