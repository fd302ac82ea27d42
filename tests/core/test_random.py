"""The random numbers are good enough to draw from and the same everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redline import oracles
from redline.core import random
from redline.envs.batch import env_keys

WORDS = st.integers(0, 2**32 - 1)


def test_mix_avalanche() -> None:
    x = random.mix(torch.arange(1 << 15, dtype=torch.int64) * 2654435761 & random.MASK)
    for flipped in range(32):
        changed = random.mix(x) ^ random.mix(x ^ (1 << flipped))
        progress = torch.stack([(changed >> out & 1).float().mean() for out in range(32)])
        assert (progress - 0.5).abs().max() < 0.02, (
            f"input bit {flipped} changes some output bit too seldom or too often"
        )


def test_mix_is_a_bijection_on_a_million_inputs() -> None:
    assert random.mix(torch.arange(1 << 20)).unique().numel() == 1 << 20


@given(WORDS)
def test_mix_of_int_and_tensor_agree(x: int) -> None:
    assert random.mix(torch.tensor(x)).item() == random.mix(x)
    assert 0 <= random.mix(x) < 2**32


@given(WORDS, st.integers(-(2**31), 2**31 - 1))
def test_bits_of_oracle_and_tensor_agree(key: int, counter: int) -> None:
    tensor_key = torch.tensor(key).to(torch.int32)
    assert random.bits(tensor_key, counter).item() == oracles.bits(key, counter)
    assert random.bits(tensor_key, torch.tensor(counter, dtype=torch.int32)).item() == oracles.bits(key, counter)
    assert random.fold(tensor_key, counter).item() % 2**32 == oracles.bits(key, counter)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_env_keys_of_oracle_and_tensor_agree(seed: int, env_index: int) -> None:
    assert env_keys(seed, torch.tensor([env_index])).item() % 2**32 == oracles.env_key(seed, env_index)


@pytest.mark.parametrize("bound", [2, 3, 7, 97, 100, 1023])
def test_below_is_uniform(bound: int, looks_uniform: Callable[[torch.Tensor], bool]) -> None:
    draws = random.below(random.bits(random.seed_key(bound), torch.arange(bound * 500)), bound)
    counts = torch.bincount(draws, minlength=bound)
    assert counts.numel() == bound
    assert looks_uniform(counts)


def test_below_keeps_inside_its_bound() -> None:
    ends = torch.tensor([0, random.MASK])
    for bound in (1, 2, 3, 1000, 2**31):
        assert random.below(ends, bound).tolist() == [0, bound - 1]
        assert random.below(ends, torch.tensor(bound)).tolist() == [0, bound - 1]


def test_uniform() -> None:
    x = random.uniform(random.bits(random.seed_key(0), torch.arange(1 << 16)))
    assert x.dtype == torch.float32
    assert abs(x.mean().item() - 0.5) < 0.005
    assert abs(x.var().item() - 1 / 12) < 0.002
    assert random.uniform(torch.tensor([0, random.MASK])).tolist() == [0.0, 1 - 2**-24]


def test_every_bit_of_a_seed_is_read() -> None:
    seeds = [0, *(1 << bit for bit in range(64)), 2**64 - 1]
    keys = [random.seed_key(seed).item() for seed in seeds]
    assert len(set(keys)) == len(seeds)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1].item()


def test_neighbouring_streams_are_uncorrelated() -> None:
    """Neighbours by environment, by seed, by episode, and one draw later: 2**18 pairs each, standard deviation 0.002."""
    counters = torch.arange(64)

    def draws(keys: torch.Tensor) -> torch.Tensor:  # (environments, counters)
        return random.uniform(random.bits(keys.unsqueeze(1), counters))

    keys = env_keys(7, torch.arange(4097))
    here = draws(keys[:-1])
    assert abs(correlation(here, draws(keys[1:]))) < 0.01
    assert abs(correlation(here[:, :-1], draws(keys[1:])[:, 1:])) < 0.01
    assert abs(correlation(here, draws(env_keys(8, torch.arange(4096))))) < 0.01
    assert abs(correlation(draws(random.fold(keys, 0)), draws(random.fold(keys, 1)))) < 0.01
    assert abs(correlation(here[:, :-1], here[:, 1:])) < 0.01
