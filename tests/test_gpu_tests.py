"""The GPU tests themselves, run eagerly with the CPU on both sides: no GPU test reads a member that is gone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor


@pytest.fixture
def gpu_tests(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return a function that loads a module of tests/gpu with the CPU as its device."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parent / "gpu" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"{name}_on_cpu", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if hasattr(module, "DEVICE"):
            monkeypatch.setattr(module, "DEVICE", "cpu")
        return module

    return load


def test_ppo(gpu_tests: Callable[[str], ModuleType]) -> None:
    gpu_tests("test_gpu_ppo").test_plays_what_the_cpu_plays("planes", "eager")


def test_pqn(gpu_tests: Callable[[str], ModuleType]) -> None:
    gpu_tests("test_gpu_pqn").test_plays_what_the_cpu_plays("eager")


def test_replay(gpu_tests: Callable[[str], ModuleType], tmp_path: Path) -> None:
    gpu_tests("test_gpu_replay").test_draws_and_stores_what_the_cpu_does("device", True, "eager", tmp_path)


def test_samples_from_host_memory(gpu_tests: Callable[[str], ModuleType], tmp_path: Path) -> None:
    gpu_tests("test_gpu_replay").test_samples_from_host_memory_are_those_of_the_cpu("pinned", False, tmp_path)


def test_training(gpu_tests: Callable[[str], ModuleType], looks_uniform: Callable[[Tensor], bool]) -> None:
    module = gpu_tests("test_gpu_training")
    trained = module.train(module.session_of("cpu", module.WAYS["eager"]))
    module.test_plays_what_the_cpu_plays(trained, trained)
    module.test_the_fast_paths_are_taken(trained)
    module.test_random_actions_are_random(trained, looks_uniform)
