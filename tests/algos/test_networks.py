"""Networks: shapes, padding, scaling, the choice by Spec, and weights that depend on the seed alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from redline import games
from redline.algos import networks
from redline.algos.bodies import CNN
from redline.algos.conv import Conv
from redline.algos.dense import Head, Scale
from redline.algos.rectified import linear_relu
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Spec


def spec_of(shape: tuple[int, ...], num_actions: int = 4, scale: float = 0.5) -> Spec:
    return Spec(shape, torch.uint8, (scale,) * shape[0], 9, num_actions, "points")


def build(spec: Spec, kind: Any, hidden: tuple[int, ...], dueling: bool, seed: int, **more: Any) -> Any:
    return networks.build(spec, networks.NetworkConfig(net=kind, hidden=hidden, **more), seed, dueling=dueling)


def observations(spec: Spec, count: int = 5) -> Tensor:
    cells = count * math.prod(spec.obs_shape)
    return (
        random.below(random.bits(random.seed_key(1), torch.arange(cells)), 10)
        .to(spec.obs_dtype)
        .view(-1, *spec.obs_shape)
    )


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("mlp", (3, 10, 10)),
        ("mlp", (7,)),
        ("mlp", (2, 3)),
        ("cnn", (3, 10, 10)),
        ("cnn", (2, 5, 9)),
        ("cnn", (1, 4, 4)),
        ("resnet", (3, 10, 10)),
        ("resnet", (4, 36, 40)),
        ("resnet", (9, 4, 5)),
        ("columns", (4, 14, 7)),
        ("columns", (1, 9, 4)),
    ],
)
def test_a_value_for_each_action(kind: str, shape: tuple[int, ...], dueling: bool) -> None:
    spec = spec_of(shape, num_actions=3)
    net = build(spec, kind, (16, 24), dueling, seed=1)
    values = net(observations(spec))
    assert (values.shape, values.dtype) == ((5, 3), torch.float32)
    assert values.std(0).min() > 0, "the observation does not reach the output"
    assert values.abs().max() < 1, "first values should be small"


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "resnet", "columns"])
def test_a_batch_equals_its_singles(kind: str, layer_norm: bool) -> None:
    spec = spec_of((3, 6, 5))
    net, obs = build(spec, kind, (16,), True, seed=1, layer_norm=layer_norm), observations(spec)
    singles = torch.cat([net(obs[i : i + 1]) for i in range(len(obs))])
    torch.testing.assert_close(net(obs), singles, rtol=1e-5, atol=1e-6)


def test_mlp_against_plain_products() -> None:
    """The same numbers by hand: scaled, flattened, padded with zeros, linear and rectified twice, four outputs kept."""
    spec = spec_of((3, 2, 2))
    net, obs = build(spec, "mlp", (16, 8), False, seed=3), observations(spec)
    x = torch.cat([obs.flatten(1).float() * 0.5, torch.zeros(5, 4)], 1)
    for layer in net.dense.layers:
        x = (x @ layer.weight.T + layer.bias).clamp(min=0)
    expected = (x @ net.dense.head.out.weight.T + net.dense.head.out.bias)[:, :4]
    torch.testing.assert_close(net(obs), expected)


def filters_of(conv: Any, channels: int) -> Tensor:
    """The weights (out, channels, 3, 3), however they are kept."""
    if conv.product is None:
        found: Tensor = conv.conv.weight[:, :channels]
        return found
    return conv.product.weight[:, : 9 * channels].unflatten(1, (3, 3, channels)).permute(0, 3, 1, 2)


def test_cnn_against_plain_convolutions() -> None:
    spec = spec_of((2, 5, 6))
    net, obs = build(spec, "cnn", (99, 8), False, seed=3), observations(spec)
    first, second = net.convs
    x = F.relu(F.conv2d(obs.float() * 0.5, filters_of(first, 2), first.product.bias, padding=1))
    x = F.relu(F.conv2d(x, second.conv.weight, second.conv.bias, stride=2, padding=1))
    assert x.shape == (5, 64, 3, 3)
    x = F.relu(net.dense.layers[0](x.permute(0, 2, 3, 1).flatten(1)))
    assert x.shape == (5, 8), "a CNN takes the last of the widths"
    torch.testing.assert_close(net(obs), net.dense.head.out(x)[:, :4], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_columns_act_with_weights_in_half_precision(layer_norm: bool) -> None:
    """As copies of a network do that play for PPO and PQN; their last product is float32 all the same."""
    spec = spec_of((2, 5, 6))
    net, obs = build(spec, "columns", (16,), False, seed=3, layer_norm=layer_norm), observations(spec)
    values = net(obs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        halved = net.to(torch.bfloat16)(obs)
    assert halved.dtype == torch.float32
    assert not torch.equal(halved, halved.to(torch.bfloat16).to(torch.float32))
    torch.testing.assert_close(halved, values, rtol=0.1, atol=0.01)


def along_columns(net: Any, boards: Tensor) -> Tensor:
    """The convolutions of a ColumnNet by torch's own: (B, H, W) -> (B, W * channels), walls of ones beside the board."""
    x = boards
    for conv in net.convs:
        filters = conv.weight[:, : 3 * x.shape[1]].unflatten(1, (3, -1)).transpose(1, 2)
        x = F.relu(F.conv1d(F.pad(x, (1, 1), value=1.0), filters, conv.bias))
    return x.transpose(1, 2).flatten(1)


def test_columns_against_plain_convolutions() -> None:
    """Every plane's rows are the channels of a column; three columns are seen at once."""
    spec = spec_of((2, 5, 6))
    net, obs = build(spec, "columns", (99, 8), False, seed=3, channels=(24, 16)), observations(spec)
    x = F.relu(net.net.dense.layers[0](along_columns(net.net, (obs.float() * 0.5).flatten(1, 2))))
    assert x.shape == (5, 8), "the last of the widths, as after other convolutions"
    torch.testing.assert_close(net(obs), net.net.dense.head.out(x)[:, :4], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("features", [31, 38])
def test_columns_of_afterstates_against_plain_convolutions(features: int) -> None:
    """Reward and next pieces join the features of the board."""
    scale = (1.0,) * features
    spec = Spec((3, features), torch.float32, scale, 9, 3, "points", afterstates=True, afterstate_board=(5, 6))
    config = networks.NetworkConfig(net="columns", hidden=(8,), channels=(16,))
    net: Any = networks.build(spec, config, seed=3, gamma=0.5)
    obs = torch.randn(4, 3, features, generator=torch.Generator().manual_seed(1))
    rows, columns = obs.flatten(0, 1), net.row.net
    x = along_columns(columns, rows[:, 1:31].view(-1, 5, 6))
    x = torch.cat([x, rows[:, :1], rows[:, 31:]], 1)
    x = F.relu(columns.dense.layers[0](F.pad(x, (0, -x.shape[1] % 8))))
    value = (columns.dense.head.out(x)[:, 0]).view(4, 3)
    torch.testing.assert_close(net(obs), obs[:, :, 0] + 0.5 * value, rtol=1e-4, atol=1e-6)
    action = torch.tensor([0, 2, 1, 1])
    torch.testing.assert_close(net.chosen(obs, action), net(obs)[torch.arange(4), action])


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize(
    ("channels", "stride", "board"),
    [
        (3, 1, (5, 6)),
        (3, 1, (0, 0)),
        (5, 2, (0, 0)),
        (20, 1, (5, 6)),
        (3, 1, (70, 71)),
        (14, 1, (5, 6)),
        (14, 1, (9, 9)),
    ],
)
def test_a_convolution_is_one_whichever_way_it_is_computed(
    channels: int, stride: int, board: tuple[int, int], padding: bool
) -> None:
    conv = Conv(channels, 7, stride, board, padding)
    boards = torch.randn(4, *(board if 0 < math.prod(board) < 100 else (5, 6)), channels)
    few = 0 < math.prod(board) < 100 and channels < 20
    assert (conv.product is not None) == few
    assert (conv.placement is not None) == (few and math.prod(board) * channels <= 512)
    bias = (conv.product or conv.conv).bias
    plain = F.conv2d(boards.permute(0, 3, 1, 2), filters_of(conv, channels), bias, stride=stride, padding=int(padding))
    expected = plain.permute(0, 2, 3, 1)
    torch.testing.assert_close(conv(boards), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(conv(boards, relu=True), F.relu(expected), rtol=1e-4, atol=1e-5)
    if conv.placement is None:
        return
    # As a GPU does it: values, and the gradient of the weights.
    torch.testing.assert_close(conv.as_dense(boards), expected, rtol=1e-4, atol=1e-5)
    weights = [conv.product.weight, conv.product.bias]
    ways = [torch.autograd.grad(f(boards).square().sum(), weights) for f in (conv.as_dense, conv.as_im2col)]
    torch.testing.assert_close(*ways, rtol=1e-4, atol=1e-3)


def test_without_a_border_boards_shrink_until_none_is_left() -> None:
    spec = spec_of((3, 10, 10))
    net = build(spec, "cnn", (8,), False, 0, channels=(4, 5), stride=1, padding=False)
    assert net.dense.layers[0].in_features == 5 * 6 * 6
    assert net(observations(spec)).shape == (5, 4)
    strided = build(spec, "cnn", (8,), False, 0, channels=(4, 5), stride=2, padding=False)
    assert strided(observations(spec)).shape == (5, 4)
    with pytest.raises(UserError, match="5 convolutions leave nothing of a board of 10x10"):
        build(spec, "cnn", (8,), False, 0, channels=(4,) * 6, stride=1, padding=False)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("hidden", [(16,), (16, 12, 8)])
def test_twins_are_two_networks(hidden: tuple[int, ...], layer_norm: bool) -> None:
    """The same as two MLPs with their weights."""
    spec = spec_of((3, 2, 2), num_actions=3)
    config = networks.NetworkConfig("mlp", hidden, layer_norm=layer_norm)
    both = networks.build_actor_critic(spec, config, seed=1, separate=True)
    twins = both.body[1]
    with torch.no_grad():
        for module in twins.modules():
            if isinstance(module, nn.Linear):
                module.weight.add_(0.1 * torch.randn(module.weight.shape) * getattr(module, "mask", 1.0))
                module.bias.normal_(std=0.1)
    outs = []
    for number in range(2):
        alone = networks.MLP(spec, config)
        with torch.no_grad():
            alone.dense.layers[0].weight.copy_(twins.first.weight.chunk(2)[number])
            alone.dense.layers[0].bias.copy_(twins.first.bias.chunk(2)[number])
            for mine, pair in zip(
                [*alone.dense.layers[1:], alone.dense.head.out], [*twins.layers, twins.head], strict=True
            ):
                own = pair.weight.chunk(2)[number].chunk(2, 1)[number]
                mine.weight[: len(own)] = own
                mine.bias[: len(own)] = pair.bias.chunk(2)[number]
        outs.append(alone(observations(spec)))
    logits, value = both(observations(spec))
    torch.testing.assert_close(logits, outs[0])
    torch.testing.assert_close(value, outs[1][:, 0])
    with torch.no_grad():
        torch.testing.assert_close(both(observations(spec)), (logits, value))


def halves(pair: Any) -> list[Tensor]:
    """The weights of the two layers; what lies beside them must be zeros."""
    (one, beside), (below, other) = (rows.chunk(2, 1) for rows in pair.weight.detach().chunk(2))
    assert not beside.any()
    assert not below.any()
    return [one, other]


def test_twins_begin_as_other_networks_do() -> None:
    spec = spec_of((64,))
    net = networks.build_actor_critic(spec, networks.NetworkConfig("mlp", (256, 128)), seed=1, separate=True).body[1]
    assert net.first.weight.std().item() == pytest.approx(math.sqrt(2 / 64), rel=0.05)
    for half in halves(net.layers[0]):
        assert half.std().item() == pytest.approx(math.sqrt(2 / 256), rel=0.05)
    for half in halves(net.head):
        assert half.std().item() == pytest.approx(0.01, rel=0.2)
    straight = networks.build_actor_critic(
        spec, networks.NetworkConfig("mlp", (16, 16), init="orthogonal"), seed=1, separate=True
    )
    for half in straight.body[1].first.weight.detach().chunk(2):
        torch.testing.assert_close(half @ half.T, 2 * torch.eye(16), rtol=1e-4, atol=1e-4)
    for half in halves(straight.body[1].layers[0]):
        torch.testing.assert_close(half @ half.T, 2 * torch.eye(16), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inputs", "padded"), [(300, 304), (8, 8), (1, 8), (9, 16)])
def test_inputs_and_outputs_are_padded_to_rows_of_eight(inputs: int, padded: int) -> None:
    spec = spec_of((inputs,), num_actions=5)
    net = build(spec, "mlp", (16,), False, seed=0)
    assert net.dense.layers[0].in_features == padded
    assert net.dense.head.out.out_features == 8
    assert build(spec_of((4,), num_actions=8), "mlp", (16,), True, seed=0).dense.head.out.out_features == 16
    padding = net.dense.layers[0].weight.detach()[:, inputs:]
    changed = net(observations(spec))
    with torch.no_grad():
        padding.fill_(1e6)
    assert torch.equal(net(observations(spec)), changed), "padded inputs must be zeros"


def test_dueling_advantages_have_no_mean() -> None:
    """value + advantage - mean advantage, by hand; the mean over actions is the state's value."""
    head = Head(2, num_actions=3, dueling=True)
    with torch.no_grad():
        head.out.weight.zero_()
        head.out.bias.copy_(torch.tensor([10.0, 1.0, 2.0, 6.0, 500.0, 500.0, 500.0, 500.0]))
    assert head(torch.zeros(1, 2)).tolist() == [[8.0, 9.0, 13.0]]
    torch.manual_seed(0)
    features, random_head = torch.randn(64, 7), Head(7, num_actions=5, dueling=True)
    values, state_value = random_head(features), random_head.out(features)[:, 0]
    torch.testing.assert_close(values.mean(1), state_value)
    assert values.std(1).min() > 1e-3


def test_scale_is_applied_by_channel() -> None:
    spec = Spec((2, 1, 2), torch.uint8, (0.1, 2.0), 9, 4, "points")
    scaled = Scale(spec)(torch.tensor([[[[1, 2]], [[3, 4]]]], dtype=torch.uint8))
    torch.testing.assert_close(scaled, torch.tensor([[[[0.1, 0.2]], [[6.0, 8.0]]]]))
    assert "scale" not in Scale(spec).state_dict()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Scale(spec)(torch.ones(1, 2, 1, 2, dtype=torch.int16)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["mlp", "cnn", "columns"])
def test_reduced_precision_gives_float32_values(kind: str) -> None:
    spec = spec_of((3, 6, 6))
    net, obs = build(spec, kind, (16,), False, seed=0), observations(spec)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = net(obs)
    assert values.dtype == torch.float32
    assert not torch.equal(values, net(obs)), "nothing was rounded: the products ran in float32"
    torch.testing.assert_close(values, net(obs), rtol=0.1, atol=0.01)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((3, 10, 10), networks.MLP),  # 300 inputs
        ((2, 16, 16), networks.MLP),  # 512
        ((3, 13, 14), CNN),  # 546
        ((600,), networks.MLP),  # flat: nothing to slide over
        ((30, 30), networks.MLP),
    ],
)
def test_auto_chooses_by_the_spec(shape: tuple[int, ...], kind: type[nn.Module]) -> None:
    net = build(spec_of(shape), "auto", (16,), False, seed=0)
    assert type(net) is kind
    assert net(observations(spec_of(shape))).shape == (5, 4)


def test_every_game_has_a_net(variant: object) -> None:
    game = games.load(variant.game)  # type: ignore[attr-defined]
    config = game.Config(**variant.options)  # type: ignore[attr-defined]
    spec = game.spec(config)
    state = game.init(config, torch.arange(3, dtype=torch.int32))
    assert build(spec, "auto", (16,), False, seed=0)(game.observe(config, state)).shape == (3, spec.num_actions)


@pytest.mark.parametrize("kind", ["mlp", "cnn", "columns"])
def test_weights_depend_on_the_seed_alone(kind: str) -> None:
    def weights(seed: int, noise: int) -> dict[str, Tensor]:
        torch.manual_seed(noise)
        torch.rand(noise)
        return build(spec_of((2, 6, 6)), kind, (16, 8), False, seed).state_dict()

    first, again, other = weights(5, noise=1), weights(5, noise=2), weights(6, noise=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name in first:
        assert name.endswith("bias") or not torch.equal(first[name], other[name])
        assert not name.endswith("bias") or (first[name] == 0).all()


def test_building_leaves_the_global_random_numbers_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    build(spec_of((2, 6, 6)), "cnn", (16,), False, seed=5)
    assert torch.equal(torch.rand(4), expected)


def test_building_seeds_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` would seed every GPU too, and only the CPU's numbers are put back."""
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", asked.append)
    build(spec_of((7,)), "mlp", (16,), False, seed=5)
    assert asked == []


# ---- Normalisation, strides, first weights


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_normalised_layers_do_not_see_how_large_their_input_is(kind: str) -> None:
    spec = spec_of((3, 6, 5))
    net, obs = build(spec, kind, (16, 8), False, seed=1, layer_norm=True), observations(spec)
    larger = build(spec_of((3, 6, 5), scale=50.0), kind, (16, 8), False, seed=1, layer_norm=True)
    torch.testing.assert_close(larger(obs), net(obs), rtol=1e-3, atol=1e-5)
    plain, louder = (
        build(spec, kind, (16, 8), False, seed=1),
        build(spec_of((3, 6, 5), scale=50.0), kind, (16, 8), False, 1),
    )
    assert louder(obs).abs().mean() > 50 * plain(obs).abs().mean()


def test_normalised_mlp_against_its_formula() -> None:
    spec = spec_of((8,))
    net, obs = build(spec, "mlp", (6,), False, seed=3, layer_norm=True), observations(spec)
    x = obs.float() * 0.5 @ net.dense.layers[0].weight.T + net.dense.layers[0].bias
    x = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    expected = F.relu(x) @ net.dense.head.out.weight.T + net.dense.head.out.bias
    torch.testing.assert_close(net(obs), expected[:, :4])


@pytest.mark.parametrize(("stride", "cells"), [(1, 100), (2, 25), (3, 16)])
def test_strides_shrink_the_board(stride: int, cells: int) -> None:
    net = build(spec_of((3, 10, 10)), "cnn", (8,), False, 0, channels=(4, 5), stride=stride)
    assert net.dense.layers[0].in_features == 5 * cells


def test_a_residual_block_begins_as_if_it_were_not_there() -> None:
    spec = spec_of((3, 6, 6))
    net, obs = build(spec, "resnet", (8,), False, 0, channels=(4,)), observations(spec)
    x = F.conv2d(obs.float() * 0.5, filters_of(net.convs[0], 3), net.convs[0].product.bias, padding=1)
    expected = net.dense(F.relu(x).permute(0, 2, 3, 1).flatten(1))
    torch.testing.assert_close(net(obs), expected)
    with torch.no_grad():
        net.blocks[0][0].convs[1].conv.weight.normal_()
    assert not torch.allclose(net(obs), expected)


@pytest.mark.parametrize("kind", ["cnn", "resnet"])
def test_first_weights_count_the_channels_there_are(kind: str) -> None:
    """He's deviation for 3 channels of 3x3 cells, not for the columns that are padded."""
    for size in (10, 33):
        net = build(spec_of((3, size, size)), kind, (8,), False, 0, channels=(256,))
        assert filters_of(net.convs[0], 3).std().item() == pytest.approx(math.sqrt(2 / 27), rel=0.05)


def test_orthogonal_weights_are() -> None:
    weight = build(spec_of((16,)), "mlp", (16,), False, 0, init="orthogonal").dense.layers[0].weight
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(16), rtol=1e-4, atol=1e-4)


def test_convolutions_of_flat_observations_are_refused() -> None:
    with pytest.raises(UserError, match="are not planes"):
        build(spec_of((7,)), "cnn", (16,), False, 0)


@pytest.mark.parametrize(("field", "value"), [("channels", ()), ("channels", (0,)), ("stride", 0), ("net", "cn")])
def test_impossible_shapes_are_errors(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{field} is"):
        networks.NetworkConfig(**{field: value})


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 20), st.sampled_from([torch.float32, torch.float64]))
def test_a_layer_with_its_relu_in_one_kernel_equals_the_plain_one(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows + 100 * inputs + 10_000 * outputs)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    x, weight, bias, direction = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    arguments = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    expected, found = F.relu(F.linear(*arguments)), linear_relu(*arguments)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, arguments, direction),
        torch.autograd.grad(expected, arguments, direction),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
