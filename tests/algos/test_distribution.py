"""Distributions of returns: by hand, against plain loops over atoms, and what their losses are smallest for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redline.algos.distribution import Categorical, Quantile, project, quantile_huber

numbers = st.floats(-12.0, 12.0, width=32)


def projected(probabilities: list[float], reward: float, discount: float, low: float, high: float) -> list[float]:
    """One sample, atom by atom, as Bellemare et al. write it, in doubles."""
    count = len(probabilities)
    step = (high - low) / (count - 1)
    found = [0.0] * count
    for number, probability in enumerate(probabilities):
        place = (min(max(reward + discount * (low + number * step), low), high) - low) / step
        below = min(int(place), count - 1)
        above = min(below + 1, count - 1)
        found[below] += probability * (1.0 - (place - below))
        found[above] += probability * (place - below)
    return found


# ---- The projection


@pytest.mark.parametrize(
    ("reward", "discount", "expected"),
    [
        (0.0, 1.0, [0.1, 0.2, 0.3, 0.4, 0.0]),  # as it is
        (1.0, 1.0, [0.0, 0.1, 0.2, 0.3, 0.4]),  # each exactly on the next
        (0.5, 1.0, [0.05, 0.15, 0.25, 0.35, 0.2]),  # half way: both neighbours get a half
        (0.25, 0.0, [0.75, 0.25, 0.0, 0.0, 0.0]),  # the game is over: all of it at the reward
        (3.0, 0.0, [0.0, 0.0, 0.0, 1.0, 0.0]),  # … exactly on an atom
        (4.0, 0.0, [0.0, 0.0, 0.0, 0.0, 1.0]),  # … on the last
        (9.0, 0.9, [0.0, 0.0, 0.0, 0.0, 1.0]),  # above all returns: at the upper end
        (-9.0, 0.9, [1.0, 0.0, 0.0, 0.0, 0.0]),  # below
        (2.0, 1.0, [0.0, 0.0, 0.1, 0.2, 0.7]),  # the upper part only
        (-2.0, 1.0, [0.6, 0.4, 0.0, 0.0, 0.0]),
        (0.0, 0.5, [0.2, 0.6, 0.2, 0.0, 0.0]),  # at 0, 1/2, 1, 3/2
    ],
)
def test_projection_by_hand(reward: float, discount: float, expected: list[float]) -> None:
    """Of the returns 0, 1, 2, 3, 4."""
    probabilities = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0]])
    found = project(probabilities, torch.tensor([reward]), torch.tensor([discount]), 0.0, 4.0)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)


samples = st.lists(st.tuples(numbers, st.floats(0.0, 1.0, width=32)), min_size=1, max_size=4)


@given(samples, st.integers(2, 12), st.floats(-8.0, 0.0), st.floats(0.5, 9.0), st.integers(0, 2**31))
def test_projection_equals_a_loop_over_atoms(
    windows: list[tuple[float, float]], atoms: int, low: float, width: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    probabilities = (4 * torch.randn(len(windows), atoms, generator=generator)).softmax(1)
    reward, discount = (torch.tensor(column) for column in zip(*windows, strict=True))
    found = project(probabilities, reward, discount, low, low + width)
    for row, (one, its_discount) in enumerate(windows):
        expected = projected(probabilities[row].tolist(), one, its_discount, low, low + width)
        assert found[row].tolist() == pytest.approx(expected, abs=1e-4)
    assert found.min() >= 0
    torch.testing.assert_close(found.sum(1), torch.ones(len(windows)))  # no mass is lost or made


def test_projection_moves_the_mean_where_nothing_is_cut_off() -> None:
    kind = Categorical(21, -10.0, 10.0)
    probabilities = torch.randn(64, 21, generator=torch.Generator().manual_seed(1)).softmax(1)
    reward, discount = torch.linspace(-1, 1, 64), torch.linspace(0, 0.9, 64)
    support = torch.linspace(-10, 10, 21)
    moved = project(probabilities, reward, discount, -10.0, 10.0)
    torch.testing.assert_close(moved @ support, reward + discount * (probabilities @ support), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kind.expected(moved.log()), moved @ support, rtol=1e-4, atol=1e-4)


# ---- Categorical


def test_cross_entropy_by_hand_and_its_gradient() -> None:
    kind = Categorical(3, 0.0, 2.0)
    outputs = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]], requires_grad=True)
    following = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    losses = kind.losses(outputs, following, torch.tensor([0.5, 0.0]), torch.tensor([1.0, 1.0]))
    targets = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    weights = [math.exp(x) for x in (1, 2, 3)]
    second = -sum(p * math.log(w / sum(weights)) for p, w in zip((0.2, 0.3, 0.5), weights, strict=True))
    assert losses.tolist() == pytest.approx([math.log(3), second])
    (gradient,) = torch.autograd.grad(losses.sum(), outputs)
    torch.testing.assert_close(gradient, outputs.detach().softmax(1) - targets)


def test_categorical_means_and_mixtures() -> None:
    kind = Categorical(3, -1.0, 3.0)  # returns -1, 1, 3
    shares = torch.tensor([[[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]]])
    outputs = (shares + 1e-30).log()
    assert kind.expected(outputs)[0].tolist() == pytest.approx([0.5, 3.0])
    assert kind.mixed(outputs, torch.tensor([[0.5, 0.5]]))[0].tolist() == pytest.approx([0.25, 0.125, 0.625])
    assert kind.mixed(outputs, torch.tensor([[0, 1]]))[0].tolist() == pytest.approx([0.0, 0.0, 1.0])


# ---- Quantiles


def quantile_loss(quantiles: list[float], targets: list[float], delta: float) -> float:
    """One sample, pair by pair, in doubles."""
    total = 0.0
    for number, quantile in enumerate(quantiles):
        progress = (2 * number + 1) / (2 * len(quantiles))
        for target in targets:
            error = target - quantile
            huber = error**2 / 2 if abs(error) <= delta else delta * (abs(error) - delta / 2)
            total += (1 - progress if error < 0 else progress) * huber / delta / len(targets)
    return total


@given(
    st.lists(numbers, min_size=1, max_size=6),
    st.lists(numbers, min_size=1, max_size=6),
    st.floats(0.125, 4.0),
)
def test_quantile_loss_equals_a_loop_over_pairs(quantiles: list[float], targets: list[float], delta: float) -> None:
    twice = [torch.tensor([row, [x + 1 for x in row]]) for row in (quantiles, targets)]
    found = quantile_huber(*twice, delta)
    assert found[0].item() == pytest.approx(quantile_loss(quantiles, targets, delta), rel=1e-4, abs=1e-5)
    assert found[1].item() == pytest.approx(found[0].item(), rel=1e-3, abs=1e-3)  # a batch: rows do not mix


def test_quantile_loss_by_hand() -> None:
    """Quantiles 1/4 and 3/4 at 0 and 2, one target at 1: above the first, below the second; delta 1/2."""
    found = quantile_huber(torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0]]), 0.5)
    huber = 0.5 * (1 - 0.25) / 0.5
    assert found.item() == pytest.approx(0.25 * huber + 0.25 * huber)
    kind = Quantile(2, 0.5)
    same = kind.losses(
        torch.tensor([[0.0, 2.0]]), torch.tensor([[4.0, 4.0]]), torch.tensor([-1.0]), torch.tensor([0.5])
    )
    assert same.item() == pytest.approx(found.item())  # -1 + 4 / 2
    over = kind.losses(torch.tensor([[0.0, 2.0]]), torch.tensor([[4.0, 9.0]]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert over.item() == pytest.approx(found.item())  # the game is over: what follows does not matter


def test_quantile_means_and_mixtures() -> None:
    kind, outputs = Quantile(3), torch.tensor([[[1.0, 2.0, 6.0], [0.0, 0.0, 10.0]]])
    assert kind.expected(outputs)[0].tolist() == pytest.approx([3.0, 10 / 3])
    assert kind.mixed(outputs, torch.tensor([[0.5, 0.5]]))[0].tolist() == pytest.approx([0.5, 1.0, 8.0])
    assert kind.mixed(outputs, torch.tensor([[0, 1]]))[0].tolist() == [0.0, 0.0, 10.0]


def descend(quantiles: Tensor, targets: Tensor, delta: float) -> Tensor:
    for _ in range(600):
        quantiles = quantiles.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(quantile_huber(quantiles, targets, delta).sum(), quantiles)
        quantiles = quantiles - 0.02 * gradient
    return quantiles.detach()


def test_the_quantile_loss_is_smallest_at_the_quantiles() -> None:
    """Of 0 to 1, with errors counted linearly but for the smallest; a skewed set of targets has skewed quantiles."""
    even = torch.linspace(0, 1, 101).unsqueeze(0)
    for targets, expected in (
        (even, [0.125, 0.375, 0.625, 0.875]),
        (even**3, [x**3 for x in (1 / 8, 3 / 8, 5 / 8, 7 / 8)]),
    ):
        found = descend(torch.full((1, 4), 0.5), targets, 0.01)
        assert found[0].tolist() == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("kind", [Categorical(5, -1.0, 1.0), Quantile(5)])
def test_what_is_not_a_number_is_not_hidden(kind: Categorical | Quantile) -> None:
    """Else a step that must be skipped would be taken."""
    following = kind.mixed(torch.zeros(2, 3, 5), torch.full((2, 3), 1 / 3))
    found = kind.losses(torch.zeros(2, 5), following, torch.tensor([float("nan"), 0.0]), torch.tensor([0.5, 0.5]))
    assert torch.isnan(found).tolist() == [True, False]
