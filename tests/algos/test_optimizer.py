"""The optimizer against torch's own, and what must not change when a gradient is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from redline.algos import optimizer as optimizer_module
from redline.algos.optimizer import Optimizer, flatten
from redline.engine.runtime import Runtime

CPU = Runtime(torch.device("cpu"))
HALF = Runtime(torch.device("cpu"), amp_dtype=torch.float16)


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def gradients_of(net: nn.Module, scale: float, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(p.shape, generator=generator) * scale for p in net.parameters())


def snapshot(optimizer: Optimizer) -> dict[str, Tensor]:
    return {"flat": optimizer.flat.clone()} | {name: x.clone() for name, x in optimizer.tensors().items()}


@pytest.mark.parametrize("max_norm", [0.5, 10.0, 1e9], ids=["always-clipped", "sometimes", "never"])
@pytest.mark.parametrize("runtime", [CPU, HALF], ids=["fp32", "fp16-scaled"])
def test_fifty_steps_equal_torch_adam(max_norm: float, runtime: Runtime) -> None:
    ours, theirs = small_net(), small_net()
    optimizer = Optimizer(ours, 3e-3, max_norm, runtime)
    adam = torch.optim.Adam(theirs.parameters(), lr=3e-3, betas=(0.9, 0.999), eps=1e-5)
    clipped = 0
    for step in range(50):
        gradients = gradients_of(ours, scale=0.1 * (step % 7 + 1) ** 1.5, seed=step)
        for p, g in zip(theirs.parameters(), gradients, strict=True):
            p.grad = g.clone()
        clipped += int(clip_grad_norm_(theirs.parameters(), max_norm) > max_norm)
        adam.step()
        assert optimizer.step(tuple(g * optimizer.scale for g in gradients))
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert clipped == {0.5: 50, 1e9: 0}.get(max_norm, clipped)
    assert max_norm != 10.0 or 0 < clipped < 50
    assert (optimizer.steps, optimizer.skipped) == (50, 0)
    assert (next(ours.parameters()) - next(small_net().parameters())).abs().max() > 1e-2, "nothing moved"


def test_first_step_by_hand() -> None:
    """Adam's first step is the learning rate times g / (|g| + epsilon), whatever the size of g."""
    net = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 1.0]]))
    Optimizer(net, 0.1, 100.0, CPU).step((torch.tensor([[3.0, -4e-5]]),))
    torch.testing.assert_close(net.weight.detach(), torch.tensor([[0.9, 1 + 0.1 * 4 / 5]]), rtol=0, atol=1e-5)


def test_gradients_are_clipped_by_their_common_norm() -> None:
    """(3, 4) has norm 5: clipped to 1 it is (0.6, 0.8), and a tenth of that is the first mean."""
    net = nn.ParameterList([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))])
    optimizer = Optimizer(net, 0.1, 1.0, CPU)
    optimizer.step((torch.tensor([3.0]), torch.tensor([4.0])))
    torch.testing.assert_close(optimizer.mean, torch.tensor([0.06, 0.08]))
    torch.testing.assert_close(optimizer.square, torch.tensor([0.36e-3, 0.64e-3]))


@pytest.mark.fault("D3")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38], ids=str)
@pytest.mark.parametrize("runtime", [CPU, HALF], ids=["fp32", "fp16"])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float, runtime: Runtime) -> None:
    """3e38 is finite, but its norm is not. Moments, step count and weights stay bit for bit."""
    net = small_net()
    optimizer = Optimizer(net, 1e-2, 10.0, runtime)
    optimizer.step(gradients_of(net, 1.0, 0))
    before = snapshot(optimizer)
    bad = gradients_of(net, 1.0, 1)
    bad[2][1, 3] = poison
    bad[0][0, 0] = poison
    if poison == 3e38 and optimizer.scaled:
        optimizer.scale.fill_(1.0)  # else it is small once unscaled
        before["scale"].fill_(1.0)
    assert not optimizer.step(bad)
    after = snapshot(optimizer)
    for name in ("flat", "mean", "square", "steps"):
        assert torch.equal(before[name], after[name]), name
    assert (before["skipped"], after["skipped"]) == (0, 1)
    assert optimizer.step(gradients_of(net, 1.0, 2)), "the next one is taken"
    assert not torch.equal(optimizer.flat, before["flat"])


@pytest.mark.fault("D4")
def test_loss_scale_halves_on_overflow_and_grows_after_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "_GROWTH_INTERVAL", 3.0)
    net = small_net()
    optimizer = Optimizer(net, 1e-3, 10.0, HALF)
    good, bad = gradients_of(net, 1.0, 0), tuple(torch.full_like(p, torch.inf) for p in net.parameters())
    scales = []
    for gradients in (good, bad, good, good, good, good, good, good, bad, bad):
        optimizer.step(gradients)
        scales.append(optimizer.scale.item() / 2**15)
    #                good, bad, good good good (the third in a row doubles), good good good,  bad, bad
    assert scales == [1.0, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 1.0, 0.5]
    assert optimizer.skipped == 3
    for _ in range(40):
        optimizer.step(bad)
    assert optimizer.scale == 1.0, "the scale never falls below one"


def test_growth_interval_is_two_thousand_good_steps() -> None:
    net = nn.Linear(1, 1)
    optimizer = Optimizer(net, 1e-6, 10.0, HALF)
    optimizer.good.fill_(1998.0)
    for expected in (2**15, 2**16, 2**16):
        optimizer.step(gradients_of(net, 1.0, 0))
        assert optimizer.scale == expected


def test_float32_losses_are_not_scaled() -> None:
    net = small_net()
    optimizer = Optimizer(net, 1e-3, 10.0, CPU)
    optimizer.step(tuple(torch.full_like(p, torch.nan) for p in net.parameters()))
    optimizer.step(gradients_of(net, 1.0, 0))
    assert (optimizer.scale, optimizer.good) == (1.0, 0.0)


@pytest.mark.parametrize("runtime", [CPU, HALF], ids=["fp32", "fp16"])
def test_gradient_is_that_of_the_loss_times_the_scale(runtime: Runtime) -> None:
    net, plain = small_net(), small_net()
    optimizer, x = Optimizer(net, 1e-3, 10.0, runtime), torch.ones(4, 5)
    plain(x).square().mean().backward()
    for found, p in zip(optimizer.gradient(net(x).square().mean()), plain.parameters(), strict=True):
        torch.testing.assert_close(found / (2**15 if runtime is HALF else 1), p.grad)


def test_flatten_keeps_outputs_and_makes_views() -> None:
    net, untouched, x = small_net(), small_net(), torch.ones(2, 5)
    flat = flatten(net)
    assert flat.shape == (5 * 7 + 7 + 7 * 3 + 3,)
    assert torch.equal(net(x), untouched(x))
    assert torch.equal(flat, torch.cat([p.detach().flatten() for p in untouched.parameters()]))
    start = flat.data_ptr()
    for p in net.parameters():
        assert p.data_ptr() == start
        assert p.requires_grad
        start += p.numel() * p.element_size()
    flat.zero_()
    assert (net(x) == 0).all(), "the module does not see the vector"
    net[0].bias.data.fill_(2.0)
    assert flat[35:42].tolist() == [2.0] * 7, "the vector does not see the module"
    net.load_state_dict(untouched.state_dict())
    assert torch.equal(flat, torch.cat([p.detach().flatten() for p in untouched.parameters()]))


def test_tensors_carry_the_whole_state() -> None:
    """Saved after ten steps and loaded into a new one: the next ten are the same, bit for bit."""
    ours, theirs = small_net(), small_net(seed=1)
    first, second = Optimizer(ours, 1e-2, 1.0, HALF), Optimizer(theirs, 1e-2, 1.0, HALF)
    for step in range(10):
        first.step(gradients_of(ours, 2.0**15, step))
    theirs.load_state_dict(ours.state_dict())
    for name, tensor in second.tensors().items():
        tensor.copy_(first.tensors()[name])
    for step in range(10, 20):
        for optimizer in (first, second):
            optimizer.step(gradients_of(ours, 2.0**15, step))
        assert torch.equal(first.flat, second.flat)
    unnamed = {name for name, x in vars(first).items() if isinstance(x, Tensor)} - set(first.tensors())
    # Weights are in the model; the factor follows from the number of rollbacks, which the state of a run holds.
    assert unnamed == {"flat", "norm_sum", "rate_factor", "skipped_in_row"}, "a tensor that no checkpoint would hold"


def test_the_factor_scales_the_step_and_nothing_else() -> None:
    ours, theirs = small_net(), small_net()
    full, quarter = Optimizer(ours, 1e-2, 1.0, CPU), Optimizer(theirs, 1e-2, 1.0, CPU)
    quarter.rate_factor.fill_(0.25)
    start = full.flat.clone()
    for optimizer in (full, quarter):
        optimizer.step(gradients_of(ours, 1.0, 0))
    assert torch.allclose((quarter.flat - start) * 4, full.flat - start, atol=1e-7)
    assert torch.equal(full.mean, quarter.mean)
    assert quarter.read_metrics(1)["learning_rate"] == 1e-2 / 4


def test_skipped_steps_in_a_row_are_counted_until_one_is_finite() -> None:
    net = small_net()
    optimizer = Optimizer(net, 1e-2, 1.0, CPU)
    rows = []
    for finite in (False, False, True, False):
        gradients = gradients_of(net, 1.0, 0)
        optimizer.step(gradients if finite else tuple(g * float("nan") for g in gradients))
        rows.append(int(optimizer.skipped_in_row))
    assert rows == [1, 2, 0, 1]
    assert int(optimizer.skipped) == 3


def test_metrics_are_the_mean_norm_before_clipping_without_skipped_steps() -> None:
    net = small_net()
    optimizer = Optimizer(net, torch.tensor(0.25), 1.0, CPU)
    count = sum(p.numel() for p in net.parameters())
    for value in (3.0, 5.0, float("nan")):
        optimizer.step(tuple(torch.full_like(p, value) for p in net.parameters()))
    expected = {"grad_norm": (3.0 + 5.0) * count**0.5 / 3, "learning_rate": 0.25, "skipped_updates": 1}
    assert optimizer.read_metrics(3) == pytest.approx(expected)
    assert optimizer.read_metrics(3)["grad_norm"] == 0, "sums start again"
