"""Packed weights: int8 and factors are restored; parts that do not match are refused."""

from __future__ import annotations

import pytest
import torch

from redline.run.packed_weights import LEFT, RIGHT, to_int8, unpack


def test_int8_is_restored_to_half_a_step_of_each_row() -> None:
    weight = torch.randn(5, 3, 4, generator=torch.manual_seed(0)) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 2.0]).view(
        5, 1, 1
    )
    stored = to_int8("body.w", weight) | {"body.b": torch.ones(3)}
    assert {name: x.dtype for name, x in stored.items()} == {
        "body.w#int8": torch.int8,
        "body.w#scale": torch.float32,
        "body.b": torch.float32,
    }
    restored = unpack(stored)
    assert restored.keys() == {"body.w", "body.b"}
    step = weight.flatten(1).abs().amax(1) / 127
    assert ((restored["body.w"] - weight).flatten(1).abs().amax(1) <= 0.5001 * step).all()


def test_factors_in_int8_are_multiplied() -> None:
    left, right = torch.eye(3, 2), torch.tensor([[127.0, -2.0], [1.0, 127.0]])
    stored = to_int8("w" + LEFT, left) | to_int8("w" + RIGHT, right)
    assert torch.allclose(unpack(stored)["w"], left @ right, atol=1e-4)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"w#int8": torch.ones(2, 2, dtype=torch.int8)}, "comes without w#scale"),
        ({"w#int8": torch.ones(2, 2, dtype=torch.int8), "w#scale": torch.ones(3)}, "no scale for each"),
        ({"w#int8": torch.tensor(1, dtype=torch.int8), "w#scale": torch.tensor(1.0)}, "no scale for each"),
        ({"w": torch.ones(1), "w#left": torch.ones(1, 1), "w#right": torch.ones(1, 1)}, "stored twice"),
        ({"w#left": torch.ones(2, 2), "w#right": torch.ones(3, 2)}, "does not fit"),
        ({"w#left": torch.ones(1 << 14, 1), "w#right": torch.ones(1, 1 << 14)}, "larger than any"),
    ],
)
def test_parts_that_do_not_match_are_refused(stored: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack(stored)


def test_odd_types_are_read_as_numbers() -> None:
    stored = {"w#left": torch.ones(2, 1, dtype=torch.int64), "w#right": torch.ones(1, 2, dtype=torch.bool)}
    assert torch.equal(unpack(stored)["w"], torch.ones(2, 2))


def test_weights_of_training_stay_as_they_are() -> None:
    weights = {"online.body.weight": torch.ones(2, 2), "mean": torch.zeros(())}
    assert unpack(weights) == weights
