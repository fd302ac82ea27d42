"""Switches of speed: options that change how a run computes, not what it learns, and the few that change both."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from redline import replay
from redline.algos import networks
from redline.algos.conv import Conv, PixelBatchNorm, PixelConv
from redline.algos.network_config import NetworkConfig
from redline.algos.optimizer import Optimizer
from redline.collect.actor_collector import ActorCollector
from redline.core.errors import UserError
from redline.core.records import Events, Spec
from redline.engine import fast, hardware
from redline.engine.runtime import Runtime
from redline.envs import Rules
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.run.train import train

SMALL: dict[str, Any] = {
    "ppo": {"hidden": (16,), "rollout_steps": 8},
    "pqn": {"hidden": (16,), "rollout_steps": 8},
    "dqn": {"hidden": (16,), "learning_starts": 64, "batch_size": 16, "replay_capacity": 16 * 64},
}


def settings_of(algo: str = "dqn", **options: Any) -> Settings:
    algo_options = SMALL[algo] | options.pop("algo_options", {})
    base = {"env": "snake", "num_envs": 16, "device": "cpu", "compile": False, "curriculum": False, "seed": 3}
    base |= {"env_options": {"width": 5, "height": 5}, "time_limit": 20}
    return Settings(**base | options, algo=algo, algo_options=algo_options)


def trained(settings: Settings) -> dict[str, Tensor]:
    """The model after some updates."""
    session = Session(resolve(settings), pytest.fail)
    session.iterate(24 // session.learner.rollout_steps)
    assert session.updates
    model = {name: x.clone() for name, x in session.tensors()["model"].items()}
    session.close()
    return model


@pytest.mark.parametrize("algo", SMALL)
@pytest.mark.parametrize("switch", [{"inference_mode": True, "pin_memory": False}, {"fused_optimizer": False}])
def test_a_switch_of_speed_changes_no_number(algo: str, switch: dict[str, Any]) -> None:
    expected, found = trained(settings_of(algo)), trained(settings_of(algo, **switch))
    for name, x in expected.items():
        exact = 0.0 if "fused_optimizer" not in switch else 1e-5  # the gradient's norm is summed in another order
        torch.testing.assert_close(found[name], x, rtol=exact, atol=exact)


def test_an_optimizer_by_layers_scales_and_skips_as_the_fused_one() -> None:
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        runtime = Runtime(torch.device("cpu"), torch.float16, fused_optimizer=fused)
        optimizer = Optimizer(net, 1e-2, 0.5, runtime)
        for number in range(6):
            loss = net(torch.ones(5, 4)).square().sum() * (torch.inf if number == 3 else 1.0)
            optimizer.step(optimizer.gradient(loss))
        assert optimizer.skipped == 1
        assert optimizer.scale == 2.0**14
        results.append(torch.cat([optimizer.flat, optimizer.mean, optimizer.square]))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("kind", replay.names())
def test_train_every_plays_so_many_steps_per_update(kind: str, tmp_path: Path) -> None:
    algo_options = {"train_every": 4, "updates": 2}
    plan = resolve(settings_of(algo_options=algo_options, replay=kind, run_dir=str(tmp_path)))
    session = Session(plan, pytest.fail)
    session.iterate(12)
    before = session.updates
    session.iterate(40)
    assert session.updates - before == 2 * 10
    assert session.env_steps == 52 * 16
    assert plan.algo.samples_per_step(plan.algo_config, 16, 1) == 2 * 16 / (4 * 16)
    session.close()


def test_train_every_means_the_rollout_of_learners_without_replay() -> None:
    assert resolve(Settings("snake", algo="dqn", device="cpu", train_every=4)).algo_config.train_every == 4
    plan = resolve(Settings("snake", algo="pqn", device="cpu", train_every=16))
    assert plan.algo_config.rollout_steps == 16
    with pytest.raises(UserError, match=r"dqn\.train_every is 0; expected at least 1\."):
        resolve(Settings("snake", algo="dqn", device="cpu", train_every=0))


def test_log_seconds_changes_the_number_of_records_only(tmp_path: Path) -> None:
    settings = settings_of("ppo", steps=16 * 8 * 8, eval_episodes=0)
    counts = []
    for seconds in (1e-4, 1e4):
        run = train(dataclasses.replace(settings, run_dir=str(tmp_path / str(seconds)), log_seconds=seconds))
        counts.append(len((run.path / "metrics.jsonl").read_text().splitlines()))
        assert run.result["env_steps"] == settings.steps
    assert counts[0] == 8
    assert counts[1] < 5
    with pytest.raises(UserError, match="log_seconds is 0; expected a number above 0"):
        resolve(dataclasses.replace(settings, log_seconds=0))


def test_compile_modes() -> None:
    plain = fast.Compiler(True, pytest.fail)
    tuned = fast.Compiler(True, pytest.fail, mode="max-autotune")
    assert plain.options.items() <= tuned.options.items()
    assert tuned.options["max_autotune"] is True
    assert not tuned.options.get("triton.cudagraphs"), "graphs are captured by Graph"
    with pytest.raises(UserError, match=r"compile_mode is 'fast'; expected default, max-autotune\."):
        fast.Compiler(True, pytest.fail, mode="fast")


def test_interop_threads_that_cannot_be_set_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(count: int) -> None:
        raise RuntimeError(f"Error: cannot set number of interop threads to {count}\nmore")

    monkeypatch.setattr(torch, "set_num_interop_threads", refuse)
    messages: list[str] = []
    Session(resolve(settings_of(interop_threads=77)), messages.append).close()
    assert len(messages) == 1
    assert "inter-op threads: Error: cannot set number of interop threads to 77." in messages[0]
    assert hardware.set_interop_threads(torch.get_num_interop_threads()) == ""


# ---- actors


def actor_settings(**options: Any) -> Settings:
    return Settings("gym:CartPole-v1", algo="ppo", device="cpu", actors=1, num_envs=4, compile=False, **options)


def test_sizes_of_rings_and_of_what_is_moved_at_once() -> None:
    session = Session(resolve(actor_settings(ring_rows=9, staged_rows=5)), pytest.fail)
    collector = session.collector
    assert isinstance(collector, ActorCollector)
    assert collector.shared.rings[0].capacity == 9
    assert collector.staging.min_rows == 5
    session.iterate(1)  # a rollout of more rows than a ring holds
    session.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ring_rows": 3}, "ring_rows is 3; expected at least 4, or 0 for automatic."),
        ({"staged_rows": -1}, "staged_rows is -1; expected at least 0."),
        ({"ring_rows": 8, "staged_rows": 8}, "staged_rows is 8; expected fewer than the 8 rows of a ring"),
    ],
)
def test_sizes_that_cannot_be(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        Session(resolve(actor_settings(**options)), pytest.fail)
    assert sentence in str(error.value)


def test_rings_need_actors() -> None:
    with pytest.raises(UserError, match="ring_rows is set, but there are no actors"):
        resolve(settings_of(ring_rows=8))


# ---- networks

IMAGES = Spec((4, 36, 36), torch.uint8, (1 / 255,) * 4, 1, 3, "points")


@pytest.mark.parametrize("net", ["pixels", "cnn", "resnet"])
def test_the_memory_layout_changes_no_number(net: Any) -> None:
    outputs = []
    for channels_last in (True, False):
        config = NetworkConfig(net=net, channels=(8, 8), hidden=(16,), channels_last=channels_last)
        network = networks.build(IMAGES, config, seed=1)
        layers = [module for module in network.modules() if isinstance(module, Conv | PixelConv)]
        assert layers
        assert {layer.channels_last for layer in layers} == {channels_last}
        obs = torch.arange(2 * 4 * 36 * 36).view(2, 4, 36, 36).remainder(251).to(torch.uint8)
        with torch.no_grad():
            outputs.append(network(obs))
    torch.testing.assert_close(outputs[0], outputs[1])


def test_batch_norm_learns_statistics_where_gradients_are_computed() -> None:
    torch.manual_seed(0)
    norm, x = PixelBatchNorm(3), 5 + 2 * torch.randn(64, 4, 4, 3)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), x.relu(), rtol=1e-4, atol=1e-4)
    assert torch.equal(norm.running_mean, torch.zeros(3))
    for _ in range(100):
        out = norm(x)
    torch.testing.assert_close(norm.running_mean, x.mean((0, 1, 2)), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), out, rtol=1e-2, atol=1e-2)
    reference = torch.nn.functional.batch_norm(x.permute(0, 3, 1, 2), None, None, training=True).relu()
    torch.testing.assert_close(out, reference.permute(0, 2, 3, 1))


def test_batch_norm_is_for_pixels() -> None:
    with pytest.raises(UserError, match="batch_norm is on, but net is cnn; use net pixels, or layer_norm"):
        networks.build(IMAGES, NetworkConfig(net="cnn", batch_norm=True), seed=0)


class Lights(NamedTuple):
    """N screens with one lit column each."""

    column: Tensor  # (N,) int8
    key: Tensor  # (N,) int32


def lights() -> Rules:
    """Three actions move the lit column of an image of 36x36 pixels; its number is the reward."""

    def step(config: Any, state: Lights, action: Tensor) -> tuple[Lights, Tensor, Tensor, Events]:
        del config
        column = ((state.column + action - 1) % 36).to(torch.int8)
        never = torch.zeros_like(column, dtype=torch.bool)
        return Lights(column, state.key), column / 36, never, Events(column.to(torch.int32), never, never)

    def observe(config: Any, state: Lights) -> Tensor:
        del config
        lit = torch.arange(36) == state.column.view(-1, 1, 1, 1)
        return (255 * lit.expand(-1, 1, 36, 36)).to(torch.uint8)

    spec = Spec((1, 36, 36), torch.uint8, (1 / 255,), 1, 3, "points")
    functions = {"init": lambda _, key: Lights((key % 36).to(torch.int8), key), "step": step, "observe": observe}
    game = SimpleNamespace(State=Lights, HIDDEN=("key",), ON_CPU=False, name="lights", spec=lambda _: spec, **functions)
    return Rules(game, None, time_limit=9)  # type: ignore[arg-type]


@pytest.mark.parametrize(("algo", "precision"), [("ppo", "fp32"), ("ppo", "bf16"), ("dqn", "fp32")])
def test_networks_that_act_share_the_statistics_and_checkpoints_hold_them(algo: str, precision: str) -> None:
    options = {"net": "pixels", "channels": (4, 4, 4), "hidden": (8,), "batch_norm": True}
    options |= {"ema_decay": 0.9} if algo == "ppo" else {"learning_starts": 16, "n_step": 1}
    plan = resolve(settings_of(algo, num_envs=4, algo_options=options, precision=precision))
    plan = dataclasses.replace(plan, rules=lights())
    session = Session(plan, pytest.fail)
    learner: Any = session.learner
    session.iterate(10)
    copies = (learner.behaviour_network, learner.ema_network) if algo == "ppo" else (learner.target,)
    own = {name: x for name, x in learner.acting_network.named_buffers() if "running" in name}
    assert own
    assert all(float(x.abs().sum()) > 0 for x in own.values())
    for network in copies:
        shared = dict(network.named_buffers())
        assert all(shared[name] is x for name, x in own.items())
    groups = {group: {name: x.clone() for name, x in named.items()} for group, named in session.tensors().items()}
    assert sum("running_mean" in name for name in groups["model"]) == 2 * 3
    other_seed = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, seed=9))
    again = Session(other_seed, pytest.fail)
    again.load(groups, session.counters())
    for one in (session, again):
        one.iterate(3)
    for name, x in session.tensors()["model"].items():
        assert torch.equal(again.tensors()["model"][name], x), name
