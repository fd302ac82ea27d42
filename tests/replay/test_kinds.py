"""Conformance of every registered replay kind, through the contract alone: no test here knows where a kind stores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from list_replay import RULES, TRUNCATED, ListReplay, play, states
from torch import Tensor

from redline import replay
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Batch, leaves
from redline.envs import batch, make_rules
from redline.replay.contract import Location, Replay, ReplayRequest

NUM_ENVS, ROWS, GAMMA, BATCHES = 3, 12, 0.5, 2
MODES = {"uniform": (1, None), "n-step": (3, None), "prioritized": (2, 0.6)}  # n_step, alpha
ROWS_WRITTEN = {"empty": 0, "partial": 5, "full": ROWS, "wrapped": 29}


@pytest.fixture(params=replay.names())
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=ROWS_WRITTEN)
def filling(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(kind: str, mode: str, folder: Path, **options: Any) -> Replay:
    n_step, alpha = MODES[mode]
    request = ReplayRequest(
        rules=RULES,
        state=states([0] * NUM_ENVS),
        capacity=ROWS * NUM_ENVS,
        n_step=n_step,
        gamma=GAMMA,
        alpha=alpha,
        key=random.seed_key(7),
        batch_size=8,
        batches_per_iteration=BATCHES,
        folder=folder,
        notify=pytest.fail,
    )
    request = replace(request, **options)
    return replay.load(kind).make(request)


class Training:
    """Writes one row per iteration and samples as training does; errors grow with the place, so priorities differ."""

    def __init__(self, memory: Replay, written: int = 0) -> None:
        self.memory, self.written = memory, written
        self.samples: list[tuple[int, Batch]] = []  # rows written when it was sampled

    def write(self, state: Any, action: Tensor, step: Any) -> None:
        self.memory.before_iteration()
        self.memory.write(state, action, step)
        self.written += 1
        if self.written > self.memory.n_step + self.memory.lead:
            for number in range(BATCHES):
                count = torch.tensor(self.written * BATCHES + number)
                sample = self.memory.sample(random.fold(random.seed_key(9), count), 8, 0.5, count)
                self.samples.append((self.written, sample))
                if sample.place is not None:
                    self.memory.update_priorities(sample.place, (sample.place % 13 + 1) / 8.0)
        self.memory.after_iteration()


def naive_of(mode: str) -> ListReplay:
    return ListReplay(NUM_ENVS, ROWS, MODES[mode][0], GAMMA, finals=ROWS)


def endings(rows: int, pattern: int = 0) -> list[list[int]]:
    return [[(0, 0, 0, 1, 0, 2, 0)[(row * (env + 2) + pattern) % 7] for env in range(NUM_ENVS)] for row in range(rows)]


def check_samples(samples: list[tuple[int, Batch]], naive: ListReplay, lead: int) -> int:
    """Compare every sample with the window its observation names; return how many bootstrap from a truncation."""
    where = {t.stamp: (row, env) for env, played in enumerate(naive.played) for row, t in enumerate(played)}
    truncations = 0
    for written, sample in samples:
        drawn_at = written - lead
        for number, stamp in enumerate(sample.obs[:, 0].tolist()):
            row, env = where[stamp]
            assert max(0, drawn_at - naive.rows) <= row < drawn_at - naive.n_step + 1, "not in memory when it was drawn"
            window = naive.window(row, env)
            for name in ("obs", "action", "reward", "discount"):
                assert getattr(sample, name)[number].tolist() == window[name], (name, row, env)
            ends = [naive.played[env][r].ended for r in range(row, row + naive.n_step)]
            truncated = next((ending for ending in ends if ending), 0) == TRUNCATED
            if sample.weight[number] == 0:
                assert truncated, "only the final state of a truncation may be lost"
            elif window["discount"]:
                assert sample.next_obs[number].tolist() == window["next_obs"], (row, env)
                truncations += truncated
            if sample.place is not None:
                assert sample.place[number] == row * NUM_ENVS + env
    return truncations


def saved(memory: Replay) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in memory.tensors().items()}


def load_into(memory: Replay, tensors: dict[str, Tensor]) -> bool:
    adapted = memory.adapt(tensors)
    for name, tensor in memory.tensors().items():
        tensor.copy_(adapted[name])
    return memory.loaded()


def same(ours: list[tuple[int, Batch]], theirs: list[tuple[int, Batch]]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(x, leaves(b)[name]) for (_, a), (_, b) in pairs for name, x in leaves(a).items())


@pytest.mark.fault("F8")
def test_samples_are_the_windows_that_were_written(kind: str, mode: str, tmp_path: Path) -> None:
    memory, naive = make(kind, mode, tmp_path), naive_of(mode)
    training = Training(memory)
    play(training, naive, endings(60))
    assert len(training.samples) == BATCHES * (60 - memory.n_step - memory.lead)
    assert check_samples(training.samples, naive, memory.lead) > 20
    memory.close()


def test_samples_have_the_shapes_and_types_of_the_contract(kind: str, mode: str, tmp_path: Path) -> None:
    memory, naive = make(kind, mode, tmp_path), naive_of(mode)
    training = Training(memory)
    play(training, naive, endings(30))
    _, sample = training.samples[-1]
    assert sample.obs.shape == sample.next_obs.shape == (8, 8)
    assert all(x.shape == (8,) for x in (sample.action, sample.reward, sample.discount, sample.weight))
    assert sample.action.dtype == torch.int64
    assert {sample.reward.dtype, sample.discount.dtype, sample.weight.dtype} == {torch.float32}
    assert sample.next_legal is None
    if MODES[mode][1] is None:
        assert sample.place is None
        assert set(sample.weight.tolist()) <= {0.0, 1.0}
    else:
        assert sample.place is not None
        assert (sample.place.shape, sample.place.dtype) == ((8,), torch.int64)
        assert sample.weight.max() == 1.0
    memory.close()


def test_keys_and_numbers_decide_the_samples(kind: str, mode: str, tmp_path: Path) -> None:
    """The same run draws the same samples; every batch of it differs from the others."""
    runs = []
    for name in "ab":
        memory, naive = make(kind, mode, tmp_path / name), naive_of(mode)
        training = Training(memory)
        play(training, naive, endings(30))
        runs.append(training.samples)
        memory.close()
    assert same(*runs)
    drawn = [tuple(sample.obs[:, 0].tolist()) for written, sample in runs[0] if written > 20]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.fault("F9")
def test_a_loaded_memory_continues_like_an_uninterrupted_one(
    kind: str, mode: str, filling: str, tmp_path: Path
) -> None:
    """Saved, loaded, saved and loaded again: contents and all later samples equal those of the straight run."""
    written, before, after = ROWS_WRITTEN[filling], endings(ROWS_WRITTEN[filling]), endings(15, 3)
    straight, first = make(kind, mode, tmp_path / "a"), make(kind, mode, tmp_path / "b")
    for memory in (straight, first):
        play(Training(memory), naive_of(mode), before)
    tensors = saved(first)
    for _ in range(2):
        first.close()
        first = make(kind, mode, tmp_path / "b")
        assert load_into(first, tensors)
        loaded = saved(first)
        assert all(torch.equal(x, loaded[name]) for name, x in tensors.items() if name != "histories")
        tensors = loaded
    ours, theirs = Training(straight, written), Training(first, written)
    for training in (ours, theirs):
        play(training, naive_of(mode), after)
    assert len(ours.samples) >= BATCHES * (15 - straight.n_step - straight.lead)
    assert same(ours.samples, theirs.samples)
    for memory in (straight, first):
        memory.close()


@pytest.mark.fault("F9")
def test_loading_replaces_the_contents(kind: str, mode: str, tmp_path: Path) -> None:
    """A memory that is cleared and filled again forgets the old rows; loading a checkpoint brings them back, or says not."""
    memory, naive = make(kind, mode, tmp_path, notify=lambda _: None), naive_of(mode)
    play(Training(memory), naive, endings(30))
    tensors = saved(memory)
    future = Training(memory, 30)
    play(future, naive_of(mode), endings(20, 2))
    if not load_into(memory, tensors):  # the rows in its file were overwritten
        assert int(memory.tensors()["written"]) == 0
        memory.close()
        return
    again = Training(memory, 30)
    play(again, naive_of(mode), endings(20, 2))
    if "records" in tensors or memory.lead == 0:  # the checkpoint holds the contents: nothing can be missing
        assert same(future.samples, again.samples)
    memory.close()


@pytest.mark.parametrize("filling", ["partial", "wrapped"])
def test_a_cleared_memory_is_as_good_as_new(kind: str, mode: str, filling: str, tmp_path: Path) -> None:
    memory, naive = make(kind, mode, tmp_path), naive_of(mode)
    play(Training(memory), naive_of(mode), endings(ROWS_WRITTEN[filling]))
    memory.clear()
    training = Training(memory)
    play(training, naive, endings(20, 2))
    assert training.samples
    check_samples(training.samples, naive, memory.lead)
    memory.close()


@pytest.mark.fault("F8")
@pytest.mark.parametrize("filling", ["empty", "wrapped"])
def test_after_an_interruption_no_sample_crosses_it(kind: str, mode: str, filling: str, tmp_path: Path) -> None:
    """All environments restart: the newest row becomes a truncation, or the memory is empty and says so."""
    memory, naive = make(kind, mode, tmp_path), naive_of(mode)
    rows = ROWS_WRITTEN[filling]
    play(Training(memory), naive, endings(rows))
    if not memory.interrupt():
        naive, rows = naive_of(mode), 0
    for played in naive.played:
        played[-1:] = [t._replace(ended=t.ended or TRUNCATED) for t in played[-1:]]
    training = Training(memory, rows)
    play(training, naive, endings(20, 4), first=5000)  # numbers that the first part does not have
    assert len(training.samples) >= BATCHES * (20 - memory.n_step - memory.lead)
    check_samples(training.samples, naive, memory.lead)
    memory.close()


def test_too_little_capacity_is_refused_before_anything_is_made(kind: str, mode: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"replay_capacity is 7; 3 environments with \d-step returns need at least \d+"):
        make(kind, mode, tmp_path / "new", capacity=7)
    assert not (tmp_path / "new").exists()


def test_hidden_fields_are_not_stored(kind: str, tmp_path: Path) -> None:
    memory, naive = make(kind, "uniform", tmp_path), naive_of("uniform")
    training = Training(memory)
    play(training, naive, endings(10))
    assert not any("secret" in name for name in memory.tensors())
    assert all((sample.obs[:, -1] == 0).all() for _, sample in training.samples)
    memory.close()


@pytest.mark.parametrize("alpha", [None, 0.5], ids=["uniform", "prioritized"])
def test_estimates_are_close_to_what_is_allocated(kind: str, alpha: float | None, tmp_path: Path) -> None:
    rules = make_rules("snake", {"width": 6, "height": 6})
    state = batch.reset(rules, batch.env_keys(0, torch.arange(64))).game
    state_bytes = sum(x[0].nbytes for name, x in state._asdict().items() if name not in rules.game.HIDDEN)
    memory = make(kind, "uniform", tmp_path, rules=rules, state=state, capacity=64 * 500, n_step=3, alpha=alpha)
    total = sum(x.nbytes for x in memory.tensors().values()) + sum(file.stat().st_size for file in tmp_path.iterdir())
    memory.close()
    estimate = replay.load(kind).memory_bytes(64 * 500, state_bytes, alpha is not None)
    assert sum(estimate[:3]) == pytest.approx(total, rel=0.15)
    assert estimate[replay.load(kind).location] == max(estimate)
    assert {file.name for file in tmp_path.iterdir()} == set(replay.load(kind).files)


# The registry


def test_every_kind_is_described_in_a_line(kind: str) -> None:
    assert replay.failures() == {}
    assert 20 < len(replay.load(kind).description) < 100
    assert replay.DEFAULT in replay.names()


def test_alternatives_are_farther_from_the_device(kind: str) -> None:
    others = replay.alternatives(kind)
    assert all(replay.load(other).location > replay.load(kind).location for other in others)
    assert bool(others) == (replay.load(kind).location < Location.DISK)


OUTSIDE = '''"""A kind from outside."""
from redline.replay.contract import Location, TransitionBytes
from redline.replay.device import DeviceReplay
make = DeviceReplay
LOCATION = Location.DEVICE
def bytes_per_transition(state_bytes):
    return TransitionBytes(device=state_bytes)
'''


def test_a_module_in_the_current_folder_is_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_replay.py").write_text(OUTSIDE)
    (tmp_path / "broken_replay.py").write_text(OUTSIDE.replace("Location.DEVICE", "'nearby'"))
    monkeypatch.chdir(tmp_path)
    found = replay.load("outside_replay")
    assert (found.description, found.memory_bytes(10, 7, False).device) == ("A kind from outside.", 70)
    replay.check("outside_replay")
    with pytest.raises(UserError, match=r"'broken_replay' needs LOCATION, a Location; it is 'nearby'"):
        replay.load("broken_replay")
    with pytest.raises(UserError, match=r"no replay kind 'devise'; did you mean 'device'\?"):
        replay.check("devise")
