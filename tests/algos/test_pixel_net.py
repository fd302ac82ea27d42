"""The network for images: its arithmetic against plain convolutions, its scale, its precisions, and accumulated gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from probes import anywhere, paid_by_action, probe
from torch import Tensor, nn
from torch.nn import functional as F

from redline.algos import dqn, networks, on_policy, ppo, pqn
from redline.algos.bodies import CNN
from redline.algos.conv import PixelConv, PixelNorm
from redline.algos.dense import Head
from redline.algos.distribution import Categorical, Quantile
from redline.algos.noisy import NoisyLinear
from redline.collect.device_collector import DeviceCollector
from redline.core.errors import UserError
from redline.core.records import Batch, Spec
from redline.engine.runtime import Runtime
from redline.envs import batch
from redline.envs.batch import Rules, env_keys

CPU = torch.device("cpu")
SMALL = networks.NetworkConfig("pixels", (16,), (4, 8))


def spec_of(shape: tuple[int, ...] = (3, 44, 40), actions: int = 3) -> Spec:
    return Spec(shape, torch.uint8, tuple(1 / (200 + 30 * plane) for plane in range(shape[0])), 255, actions, "points")


def images(count: int = 5, shape: tuple[int, ...] = (3, 44, 40), seed: int = 1) -> Tensor:
    """Noise of every brightness: some are nearly black."""
    seeded = torch.Generator().manual_seed(seed)
    bright = torch.linspace(0.05, 1.0, count).view(-1, 1, 1, 1)
    return (torch.randint(0, 256, (count, *shape), generator=seeded) * bright).to(torch.uint8)


def louder(net: nn.Module) -> Any:
    """First values are small; these tell networks apart."""
    seeded = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, Head):
                module.out.weight.copy_(0.3 * torch.randn(module.out.weight.shape, generator=seeded))
            if isinstance(module, PixelNorm):
                module.weight.add_(0.2 * torch.randn(module.weight.shape, generator=seeded))
                module.bias.add_(0.2 * torch.randn(module.bias.shape, generator=seeded))
    return net


def filters_of(conv: PixelConv) -> Tensor:
    """The weights (out, C, kernel, kernel)."""
    reach, side = conv.kernel_blocks, conv.stride
    blocks = conv.weight.view(len(conv.weight), reach, reach, side, side, -1)
    return blocks.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


# ---- Shapes


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(
    ("shape", "channels", "features"),
    [
        ((4, 84, 84), (32, 64), 64 * 7 * 7),
        ((4, 84, 84), (16, 32, 48), 48 * 7 * 7),
        ((1, 36, 36), (4,), 4),
        ((3, 39, 70), (4, 8), 8 * 5),
        ((4, 84, 84), (8, 8, 8, 5), 5 * 5 * 5),
    ],
)
def test_a_value_for_each_action(
    shape: tuple[int, ...], channels: tuple[int, ...], features: int, dueling: bool
) -> None:
    spec = spec_of(shape)
    net: Any = networks.build(spec, networks.NetworkConfig("pixels", (99, 16), channels), 1, dueling=dueling)
    assert net.dense.layers[0].in_features == features
    values = net(images(5, shape))
    assert (values.shape, values.dtype) == ((5, 3), torch.float32)
    assert values.std(0).min() > 0, "the observation does not reach the output"
    assert values.abs().max() < 1, "first values should be small"


def test_the_default_is_that_of_mnih() -> None:
    net: Any = networks.build(spec_of((4, 84, 84)), networks.NetworkConfig("pixels"), 0)
    assert [filters_of(conv).shape for conv in net.convs] == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
    assert [conv.bias for conv in net.convs] == [None] * 3
    assert not any("conv" in name and "bias" in name for name in net.state_dict())


@pytest.mark.parametrize(
    ("shape", "channels", "least"), [((4, 35, 84), (4,), 36), ((4, 84, 7), (4,), 36), ((4, 64, 64), (4,) * 6, 84)]
)
def test_images_that_are_used_up_are_refused(shape: tuple[int, ...], channels: tuple[int, ...], least: int) -> None:
    config = networks.NetworkConfig("pixels", (8,), channels)
    size = f"{shape[1]}x{shape[2]}"
    with pytest.raises(
        UserError,
        match=rf"^net is pixels, but . convolutions leave nothing of images of {size}; expected {least}x{least}",
    ):
        networks.build(spec_of(shape), config, 0)
    networks.build(spec_of((4, least, least)), config, 0)
    with pytest.raises(UserError, match="are not planes"):
        networks.build(spec_of((4,)), config, 0)


def test_boards_are_left_to_other_networks() -> None:
    for shape, kind in (((3, 10, 10), networks.MLP), ((4, 84, 84), CNN)):
        assert type(networks.build(spec_of(shape), networks.NetworkConfig("auto", (8,), (4,)), 0)) is kind


# ---- Numbers


def test_it_is_plain_convolutions_and_group_norms() -> None:
    net, obs = louder(networks.build(spec_of(), SMALL, 3)), images()
    x = obs.float() * torch.tensor(spec_of().obs_scale).view(-1, 1, 1)
    for conv, norm, stride in zip(net.convs, net.norms, (4, 2, 1), strict=True):
        x = F.relu(F.group_norm(F.conv2d(x, filters_of(conv), stride=stride), 1, norm.weight, norm.bias))
    expected = net.dense(x.permute(0, 2, 3, 1).flatten(1))
    torch.testing.assert_close(net(obs), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(net(obs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "stride", "size"), [(8, 4, (20, 23)), (4, 2, (9, 8)), (3, 1, (5, 3)), (4, 4, (9, 4))]
)
def test_a_convolution_is_one_whichever_way_it_is_computed(kernel: int, stride: int, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    conv, x = PixelConv(5, 7, kernel, stride), torch.randn(4, *size, 5, requires_grad=True)
    expected = F.conv2d(x.permute(0, 3, 1, 2), filters_of(conv), stride=stride).permute(0, 2, 3, 1)
    assert expected.shape[1:3] == (conv.output_size(size[0]), conv.output_size(size[1]))
    ways = [way(conv.space_to_depth(x), conv.weight) for way in (conv.as_conv, conv.as_im2col)]
    seen = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, [conv.weight, x], seen)
    for way in ways:
        torch.testing.assert_close(way, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.autograd.grad(way, [conv.weight, x], seen), gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("channels", "kernel", "size"), [(4, 8, (84, 84)), (1, 8, (8, 8)), (3, 4, (43, 40)), (2, 12, (14, 20))]
)
def test_of_bytes_it_is_the_same(channels: int, kernel: int, size: tuple[int, int]) -> None:
    conv, scale = PixelConv(channels, 5, kernel, 4), torch.rand(channels) / 255
    planes = torch.randint(0, 256, (3, channels, *size), dtype=torch.uint8)
    if channels == 1:  # one plane that was the last axis of an image
        planes = torch.from_numpy(np.moveaxis(planes[:, 0, :, :, None].numpy(), 3, 1))
    assert conv.accepts_uint8(planes)
    plain = planes.float().permute(0, 2, 3, 1).contiguous()
    found = []
    for make in (lambda: conv(plain, scale), lambda: conv.forward_uint8(planes, scale)):
        out = make()
        conv.weight.grad = None
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        with torch.no_grad():
            found.append((out.detach(), conv.weight.grad, make()))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_is_no_bytes_or_has_odd_rows_is_computed_as_ever() -> None:
    planes = torch.zeros(1, 4, 84, 84, dtype=torch.uint8)
    assert not PixelConv(4, 5, 4, 2).accepts_uint8(planes)
    assert not PixelConv(4, 5, 8, 4).accepts_uint8(planes.float())
    assert not PixelConv(4, 5, 8, 4).accepts_uint8(planes[:, :, :, :82])
    assert not PixelConv(4, 5, 8, 4).accepts_uint8(torch.zeros(85 * 84, dtype=torch.uint8)[1:7057].view(1, 1, 84, 84))
    with torch.autocast("cpu", torch.bfloat16):
        assert not PixelConv(4, 5, 8, 4).accepts_uint8(planes)


@pytest.mark.parametrize("playing", [False, True])
def test_a_batch_equals_its_singles(playing: bool) -> None:
    net, obs = louder(networks.build(spec_of(), SMALL, 1, dueling=True)), images()
    with torch.set_grad_enabled(not playing):
        singles = torch.cat([net(one.unsqueeze(0)) for one in obs])
        torch.testing.assert_close(net(obs), singles, rtol=1e-5, atol=1e-5)
        darker = torch.cat([obs[:2], torch.zeros_like(obs[2:])])
        torch.testing.assert_close(net(darker)[:2], singles[:2], rtol=1e-5, atol=1e-5)


def test_channels_lie_together_all_the_way() -> None:
    net: Any = networks.build(spec_of(), SMALL, 1)
    seen: list[bool] = []
    for module in (*net.convs, *net.norms):
        module.register_forward_hook(
            lambda _, inputs, out: seen.append(inputs[0].is_contiguous() and out.is_contiguous())
        )
    net(images())
    with torch.no_grad():
        net(images())
    assert seen == [True] * 10, "the first convolution is asked of bytes"
    net(images().float())
    assert seen == [True] * 16


def test_first_weights_keep_the_scale_of_what_is_seen() -> None:
    """He's: the mean square of what a convolution and a ReLU give is about that of what they were given."""
    spec = spec_of((4, 84, 84))
    net: Any = networks.build(spec, networks.NetworkConfig("pixels", (8,), (64, 128)), 0)
    x = (images(8, (4, 84, 84)).float() * net.scale.view(-1, 1, 1)).permute(0, 2, 3, 1)
    for conv, fan_in in zip(net.convs, (8 * 8 * 4, 4 * 4 * 64, 3 * 3 * 128), strict=True):
        assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=0.05)
        after = F.relu(conv(x))
        assert after.square().mean().item() == pytest.approx(x.square().mean().item(), rel=0.3)
        x = after


def test_what_is_normalised_has_mean_0_and_deviation_1_in_every_image() -> None:
    norm, x = PixelNorm(6), 7 + 3 * torch.randn(9, 5, 4, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        norm.bias.fill_(100.0)  # nothing is negative
        found = (norm(x) - 100).flatten(1)
    torch.testing.assert_close(found.mean(1), torch.zeros(9), rtol=0, atol=1e-4)
    torch.testing.assert_close(found.std(1, correction=0), torch.ones(9), rtol=1e-3, atol=0)
    assert torch.equal(PixelNorm(6)(torch.full((2, 5, 4, 6), 3.0)), torch.zeros(2, 5, 4, 6))


def test_a_black_image_is_no_trouble() -> None:
    net: Any = networks.build(spec_of(), SMALL, 1)
    values = net(torch.zeros(2, 3, 44, 40, dtype=torch.uint8))
    gradients = torch.autograd.grad(values.sum(), list(net.parameters()))
    assert all(torch.isfinite(g).all() for g in (values, *gradients))


# ---- Gradients, precisions, compilation


def test_every_weight_has_the_gradient_of_plain_operations() -> None:
    """The ReLU writes over what it is given: the gradients must not have needed that."""
    net, obs = louder(networks.build(spec_of(), SMALL, 3)), images()
    found = torch.autograd.grad(net(obs).square().sum(), list(net.parameters()))
    x = obs.float() * torch.tensor(spec_of().obs_scale).view(-1, 1, 1)
    for conv, norm, stride in zip(net.convs, net.norms, (4, 2, 1), strict=True):
        x = F.conv2d(x, filters_of(conv), stride=stride)
        x = F.relu(F.group_norm(x, 1, norm.weight, norm.bias))
    loss = net.dense(x.permute(0, 2, 3, 1).flatten(1)).square().sum()
    expected = torch.autograd.grad(loss, list(net.parameters()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())
        assert theirs.abs().max() > 0


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_compiled_it_is_the_same(precision: torch.dtype | None) -> None:
    net, obs = louder(networks.build_actor_critic(spec_of(), SMALL, 3)), images()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=False)

    def outcome(forward: Any) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", precision, enabled=precision is not None):
            logits, value = forward(obs)
        loss = logits.log_softmax(1)[:, 0].mean() + value.square().mean()
        return logits, value, *torch.autograd.grad(loss, list(net.parameters()))

    with torch.no_grad():
        torch.testing.assert_close(compiled(obs), net(obs))
    for mine, theirs in zip(outcome(compiled), outcome(net), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * max(1, theirs.abs().max().item()))


@pytest.mark.parametrize("separate", [False, True])
def test_the_player_in_bfloat16_is_close_and_follows(separate: bool) -> None:
    net, obs = louder(networks.build_actor_critic(spec_of(), SMALL, 3, separate=separate)), images(16)
    player = on_policy.in_precision(net, torch.bfloat16)
    dtypes = {type(module): module.weight.dtype for module in player.modules() if hasattr(module, "weight")}
    assert dtypes[PixelConv] == torch.bfloat16
    assert dtypes[PixelNorm] == torch.float32

    def played() -> tuple[Tensor, Tensor]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits, value = player(obs)
        assert (logits.dtype, value.dtype) == (torch.float32, torch.float32)
        return logits, value

    for mine, theirs in zip(played(), net(obs), strict=True):
        assert not torch.equal(mine, theirs), "nothing was rounded: the products ran in float32"
        assert (mine - theirs).abs().max() < 0.05 * theirs.std()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        torch._foreach_copy_(list(player.parameters()), list(net.parameters()))
    logits, value = played()
    assert torch.equal(logits.softmax(1), torch.full((16, 3), 1 / 3))
    assert torch.equal(value, torch.zeros(16))


@pytest.mark.parametrize(
    "kind", [None, Categorical(5, -1.0, 1.0), Quantile(5)], ids=["mean", "categorical", "quantile"]
)
def test_switches_of_value_networks(kind: Any) -> None:
    for dueling in (False, True):
        net = networks.build(spec_of(), SMALL, 1, dueling=dueling, kind=kind, sigma=0.5)
        noisy = {name for name, module in net.named_modules() if isinstance(module, NoisyLinear)}
        assert {name.removeprefix("body.") for name in noisy} == {"dense.layers.0", "dense.head.out"}
        values, action = net(images()), torch.tensor([0, 1, 2, 0, 1])
        assert torch.equal(net.chosen(images(), action), values[torch.arange(5), action])
        assert values.shape == (5, 3)


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (networks.build(spec_of(), SMALL, seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], other[name]) == ("norm" in name or "bias" in name) for name in first)


def test_it_learns_which_quarter_is_bright() -> None:
    spec = spec_of((1, 36, 36), actions=4)
    net: Any = networks.build(spec, SMALL, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    seeded = torch.Generator().manual_seed(1)

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        quarter = torch.randint(0, 4, (count,), generator=seeded)
        obs = torch.randint(0, 120, (count, 2, 18, 2, 18), generator=seeded)
        obs[torch.arange(count), quarter // 2, :, quarter % 2] += 60
        return obs.view(count, 1, 36, 36).to(torch.uint8), quarter

    def correct() -> float:
        obs, quarter = drawn(200)
        with torch.no_grad():
            return (net(obs).argmax(1) == quarter).double().mean().item()

    assert correct() < 0.6
    for _ in range(60):
        obs, quarter = drawn(64)
        optimizer.zero_grad()
        F.cross_entropy(net(obs), quarter).backward()
        optimizer.step()
    assert correct() > 0.97


# ---- Accumulated gradients


def filmed() -> Rules:
    """A probe whose place is seen as that many bright columns."""
    rules = probe(paid_by_action, anywhere)

    def observe(config: Any, state: Any) -> Tensor:
        del config
        lit = torch.arange(36) < 7 * (1 + state.place.view(-1, 1, 1, 1))
        return (lit * torch.arange(36).view(-1, 1) * 7).to(torch.uint8)

    game = SimpleNamespace(**vars(rules.game) | {"observe": observe, "spec": lambda _: spec_of((1, 36, 36), 2)})
    return Rules(game, None, 0)  # type: ignore[arg-type]


def gradients_of(algo: Any, accumulate: int) -> list[tuple[Tensor, ...]]:
    """What an update of 64 steps hands to the optimizer, 32 samples at a time, `accumulate` parts each."""
    rules, num_envs = filmed(), 16
    config = algo.Config(
        net="pixels", hidden=(16,), channels=(4, 8), rollout_steps=4, epochs=1, batch_size=32 // accumulate, gamma=0.9
    )
    start = batch.reset(rules, env_keys(3, torch.arange(num_envs)))
    learner = algo.Learner(rules, config, start.game, num_envs, 1, Runtime(CPU), accumulate)
    louder(learner.net)
    collector = DeviceCollector(rules, learner, start)
    for _ in range(learner.rollout_steps):
        collector.step()
    found: list[tuple[Tensor, ...]] = []
    learner._apply = found.append
    learner.update()
    return found


def assert_same_gradients(parts: list[tuple[Tensor, ...]], whole: list[tuple[Tensor, ...]]) -> None:
    for mine, theirs in zip(parts, whole, strict=True):
        flat, expected = (torch.cat([g.flatten() for g in gradients]) for gradients in (mine, theirs))
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(flat, expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize(
    "algo",
    [pqn, ppo],
)
def test_four_parts_have_the_gradient_of_the_whole(algo: Any) -> None:
    assert_same_gradients(gradients_of(algo, 4), gradients_of(algo, 1))


def test_four_parts_of_fixed_advantages_have_the_gradient_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppo, "normalize", lambda advantages, *_: advantages)
    assert_same_gradients(gradients_of(ppo, 4), gradients_of(ppo, 1))


class Seen(NamedTuple):
    """The State of a game that is never played."""

    view: Tensor  # (N, 1, 36, 36) uint8


@pytest.mark.parametrize("distribution", ["none", "quantile"])
def test_four_batches_of_replay_have_the_gradient_of_the_whole(distribution: Any) -> None:
    seeded = torch.Generator().manual_seed(1)
    whole = Batch(
        images(32, (1, 36, 36)),
        torch.randint(0, 2, (32,), generator=seeded),
        torch.randn(32, generator=seeded),
        images(32, (1, 36, 36), seed=2),
        torch.full((32,), 0.9),
        torch.ones(32),
    )

    def gradients(accumulate: int) -> list[tuple[Tensor, ...]]:
        size, spec = 32 // accumulate, spec_of((1, 36, 36), 2)
        game = SimpleNamespace(State=Seen, HIDDEN=(), spec=lambda _: spec, observe=lambda _, state: state.view)
        config = dqn.Config(
            "pixels", (16,), (4, 8), batch_size=size, replay_capacity=64, distribution=distribution, atoms=4
        )
        state = Seen(torch.zeros(4, 1, 36, 36, dtype=torch.uint8))
        learner = dqn.Learner(Rules(game, None, 0), config, state, 4, 1, Runtime(CPU), accumulate)  # type: ignore[arg-type]
        louder(learner.online)

        def sample(key: Tensor, count: int, beta: Tensor, part: Tensor) -> Batch:
            del key, beta
            rows = slice(int(part) * count, (int(part) + 1) * count)
            return Batch(*(field[rows] for field in whole[:6]))

        learner.memory = SimpleNamespace(sample=sample)  # type: ignore[assignment]
        found: list[tuple[Tensor, ...]] = []
        learner._apply = found.append
        learner.update()
        return found

    assert_same_gradients(gradients(4), gradients(1))
