"""Training and evaluation with CPU environments: what reaches learners, what they learn, runs in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys  # noqa: F401  (registers them)

from redline import algos
from redline.core.errors import UserError
from redline.envs import make_rules
from redline.run import agent, device_choice, evaluate, final_evaluation
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.run.train import train
from redline.tools import watch

CPU = torch.device("cpu")
SMALL: dict[str, dict[str, Any]] = {
    "dqn": {"hidden": (32,), "learning_starts": 64, "batch_size": 32, "replay_capacity": 4000, "epsilon_steps": 500},
    "ppo": {"hidden": (32,), "rollout_steps": 16, "batch_size": 64, "learning_rate": 1e-2},
    "pqn": {
        "hidden": (32,),
        "rollout_steps": 16,
        "batch_size": 64,
        "learning_rate": 3e-3,
        "q_lambda": 0.3,
        "gamma": 0.5,
    },
}


def session_of(env: str, algo: str, envs: int = 2, seed: int = 0, **options: Any) -> Session:
    small = SMALL[algo] | options
    settings = Settings(env, algo, num_envs=envs, seed=seed, device="cpu", steps=100_000, algo_options=small)
    return Session(resolve(settings), pytest.fail)


def test_a_rollout_holds_what_was_played() -> None:
    """Rows in order; a cut episode is worth its final state's value, and the next row is the next episode's."""
    session = session_of("gym:ToyCount-v0", "ppo", rollout_steps=8, batch_size=16, gamma=0.5)
    session._play()
    learner = session.learner
    obs, reward = learner.rollout.obs.view(8, 2, 3), learner.rollout.reward.view(8, 2)
    times = [t % 3 for t in range(8)]
    assert obs[:, 0, 1].tolist() == times
    assert obs[:, 0, 0].tolist() == [t // 3 for t in range(8)]
    action = learner.rollout.action.view(8, 2)
    for t in range(8):
        assert reward[t].tolist() == [(times[t] + 1) * (10.0 if a == 0 else 1.0) for a in action[t].tolist()]
    assert learner.rollout.done.view(8, 2)[:, 0].tolist() == [t % 3 == 2 for t in range(8)]
    assert learner.rollout.truncated.view(8, 2)[:, 0].tolist() == [t == 5 for t in range(8)]
    # Finals: the one cut (episode 1 after its third step), then where the rollout stopped (episode 2 after two).
    finals = learner.rollout.bootstrap_states.obs.view(-1, 2, 3)
    assert finals[0, :, :2].tolist() == [[1, 3]] * 2
    assert finals[-1, :, :2].tolist() == [[2, 2]] * 2


def test_a_memory_holds_what_was_played() -> None:
    session = session_of("gym:ToyCount-v0", "dqn", learning_starts=10**6, n_step=2, gamma=0.5)
    session.iterate(40)
    batch = session.learner.memory.sample(torch.tensor(3, dtype=torch.int32), 500)
    for row in range(500):
        episode, time, luck = batch.obs[row].tolist()
        steps = min(2, 3 - int(time))
        ends = time + steps == 3
        cut = ends and episode % 2 == 1
        assert batch.weight[row] == 1
        assert batch.discount[row] == (0.0 if ends and not cut else 0.5**steps)
        if batch.discount[row] > 0:
            assert batch.next_obs[row].tolist() == [episode, time + steps, luck]


@pytest.mark.parametrize("shown", [True, False])
def test_a_greedy_agent_must_see_what_is_pressed(shown: bool) -> None:
    """A button counts again once it was released: whoever does not see it held presses it for ever, or never."""
    learner = SMALL["ppo"] | {"net": "mlp", "gamma": 0.5}
    small: Any = {"num_envs": 8, "device": "cpu", "steps": 8 * 16 * 40, "algo_options": learner}
    settings = Settings("gym:ToyButton-v0", "ppo", env_options={"show_action": shown}, **small)
    session = Session(resolve(settings), pytest.fail)
    session.iterate(40)
    greedy = final_evaluation.greedy_policy(session.plan, session)
    scores = evaluate.evaluate(session.plan.rules, greedy, 2, CPU).scores
    session.close()
    assert (scores == 10).all() if shown else (scores <= 1).all()


@pytest.mark.parametrize("algo", algos.names())
def test_every_algorithm_learns(algo: str) -> None:
    more = {"n_step": 1} if algo == "dqn" else {}
    session = session_of("gym:ToyMatch-v0", algo, envs=8, **more)
    for _ in range(40):
        session.iterate(20 if algo == "dqn" else 4)
        session.progress = min(session.progress + 0.05, 1.0)
        played = session.collector.episode_stats.read()
        if played.get("score", 0) > 7:
            break
    net = session.plan.algo.policy_network(session.learner.spec, session.plan.algo_config, session.tensors()["model"])
    found = evaluate.evaluate(session.plan.rules, evaluate.greedy(net, CPU), 20, CPU)
    assert found.scores.mean() > 7.5
    session.close()


def test_what_plays_by_chance_does_not() -> None:
    """The bar above is one that only learning reaches."""

    def blind(obs: torch.Tensor, legal: Any) -> torch.Tensor:
        assert legal is None
        return torch.zeros(len(obs), dtype=torch.int64)

    found = evaluate.evaluate(make_rules("gym:ToyMatch-v0"), blind, 50, CPU)
    assert 1 < found.scores.mean() < 5


def test_evaluation_plays_a_quota_of_whole_episodes() -> None:
    rules = make_rules("gym:ToyCount-v0")

    def second(obs: torch.Tensor, legal: Any) -> torch.Tensor:
        assert legal is None
        return torch.ones(len(obs), dtype=torch.int64)

    heard: list[int] = []
    found = evaluate.evaluate(rules, second, 37, CPU, progress=heard.append)
    assert (found.scores == 6).all()
    assert (found.lengths == 3).all()
    assert len(found.scores) == 37
    assert heard[-1] == 37
    assert found.finished.all()
    assert 0 < found.game_over.sum() < 37  # every second one was cut short
    assert found.summary()["win_rate"] == 0
    budget = evaluate.evaluate(rules, second, 4, CPU, max_steps=28)  # 7 steps each: two episodes and a step
    assert budget.lengths.tolist() == [3, 3, 1] * 4
    assert budget.finished.tolist() == [True, True, False] * 4
    assert budget.stopped_by == "max_steps"
    endless = make_rules("gym:ToyEndless-v0")
    cut = evaluate.evaluate(endless, second, 40, CPU, slot_steps=2)  # each game, whichever slot plays it
    assert cut.lengths.tolist() == [2] * 40
    assert not cut.finished.any()
    assert not cut.game_over.any()
    evaluate.evaluate(rules, second, 4, CPU, max_steps=300, progress=heard.append)
    assert heard[-1] == 300


@pytest.mark.parametrize("algo", algos.names())
def test_a_run_is_trained_continued_and_evaluated(
    algo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def go(steps: int) -> Any:
        settings = Settings(
            "gym:ToyCount-v0", algo, num_envs=4, steps=steps, device="cpu", run_dir=str(tmp_path / "r"), eval_episodes=8,
            algo_options=SMALL[algo],
        )  # fmt: skip
        return train(settings)

    first = go(640)
    assert first.result["env_steps"] == 640
    assert first.result["finished"] == 8
    second = go(1280)
    assert second.result["env_steps"] == 1280
    loaded = agent.load_agent(tmp_path / "r", "cpu")
    record = loaded.evaluate(10)
    assert record["episodes"] == 10
    assert record["length_mean"] == 3
    with pytest.raises(UserError, match="no render mode rgb_array"):  # its constructor takes no render_mode
        next(watch.play(loaded.rules, loaded.policy, 0))
    capsys.readouterr()


def test_no_sample_spans_a_continuation() -> None:
    """What was remembered last has no successor: it bootstraps from what followed then, and nothing reaches beyond."""
    first = session_of("gym:ToyCount-v0", "dqn", learning_starts=10**6, n_step=3, gamma=0.5)
    first.iterate(20)  # stops within an episode: step 2 of episode 6
    groups = {name: {k: v.clone() for k, v in group.items()} for name, group in first.tensors().items()}
    second = session_of("gym:ToyCount-v0", "dqn", learning_starts=10**6, n_step=3, gamma=0.5)
    second.load(groups, first.counters())
    assert second.remembered == 20
    luck = set(first.learner.memory.states["obs"][:40, 2].tolist())
    second.iterate(20)
    batch = second.learner.memory.sample(torch.tensor(3, dtype=torch.int32), 4000)
    seen = {tuple(row) for row in batch.obs[:, :2].tolist()}
    assert (6.0, 1.0) in seen
    for row in range(4000):
        obs, following = batch.obs[row].tolist(), batch.next_obs[row].tolist()
        discount, weight = batch.discount[row].item(), batch.weight[row].item()
        if weight and discount:
            assert following[2] == obs[2], "another episode"
            if obs[:2] == [6.0, 1.0] and obs[2] in luck and following[1] == 2:
                assert discount == 0.5, "one step, then the end of what is known"
    assert not np.isin(second.collector.envs.obs[:, 2], list(luck)).all()


def test_short_episodes_are_all_learned_from() -> None:
    """A limit of five steps is known: a rollout keeps every final State, and so does a memory."""
    session = session_of("gym:ToyLimited-v0", "ppo", rollout_steps=40, batch_size=80)
    session._play()
    assert session.learner.rollout.truncated.sum() == 16
    assert int(session.learner.rollout.truncations.max()) <= session.learner.rollout.max_truncations
    memory = session_of("gym:ToyLimited-v0", "dqn", learning_starts=10**6).learner.memory
    assert memory.finals.slots > memory.ring.rows // 5


@pytest.mark.parametrize("replay", ["device", "pinned"])
def test_a_memory_of_the_host_is_lost_and_that_is_said(replay: str) -> None:
    def made() -> tuple[Session, list[str]]:
        said: list[str] = []
        settings = Settings(
            "gym:ToyCount-v0", "dqn", num_envs=2, device="cpu", replay=replay, algo_options=SMALL["dqn"], steps=10**6
        )
        return Session(resolve(settings), said.append), said

    first, _ = made()
    first.iterate(60)
    groups = {name: {k: v.clone() for k, v in group.items()} for name, group in first.tensors().items()}
    second, said = made()
    second.load(groups, first.counters())
    assert second.remembered == (60 if replay == "device" else 0)
    assert any("memory of this run is lost" in text for text in said) == (replay == "pinned")
    second.iterate(60)
    for session in (first, second):
        session.close()


def test_scores_below_zero_have_their_interval_the_right_way_round() -> None:
    scores = torch.full((10,), -200.0, dtype=torch.float64)
    yes = torch.ones(10, dtype=torch.bool)
    found = evaluate.Evaluation(scores, scores.abs(), ~yes, yes, yes).summary()
    assert found["score_censored_low"] < found["score_censored"] == -200 < found["score_censored_high"]


@pytest.mark.parametrize("options", [{"stack": 2}, {}])
def test_devices_can_be_measured(options: dict[str, Any]) -> None:
    plan = resolve(Settings("gym:CartPole-v1", device="cpu", env_options=options))
    assert device_choice.samples_per_second(plan) > 0


def test_a_curriculum_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "phases.json"
    file.write_text('[{"name": "a", "from": 0, "to": 1, "env": {"sticky": 0.5}}]')
    with pytest.raises(UserError, match="cannot change while it is played"):
        resolve(Settings("gym:CartPole-v1", device="cpu", curriculum_file=str(file)))


def test_what_is_asked_for_and_what_is_suggested_go_together() -> None:
    plan = resolve(Settings("gym:CartPole-v1", "ppo", device="cpu", algo_options={"rollout_steps": 100}))
    assert plan.num_envs * 100 % plan.algo_config.batch_size == 0
    assert resolve(Settings("gym:CartPole-v1", "ppo", device="cpu")).algo_config.batch_size == 128


def test_settings_follow_from_the_kind_of_environment() -> None:
    plan = resolve(Settings("gym:CartPole-v1", device="cpu"))
    assert plan.settings.algo == "ppo"
    assert not plan.compile
    assert plan.num_envs >= 16
    assert str(plan.run_dir) == "runs/gym-CartPole-v1-ppo"
    assert str(resolve(Settings("gym:toys:ToyCount-v0", device="cpu")).run_dir) == "runs/gym-toys-ToyCount-v0-ppo"
    assert plan.algo_config.rollout_steps == 128
    assert resolve(Settings("gym:CartPole-v1", "dqn", device="cpu")).algo_config.gamma == 0.99
    assert resolve(Settings("gym:CartPole-v1", device="cpu", compile=True)).compile
