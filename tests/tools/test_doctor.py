"""What the doctor says is what training would do."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from redline.core.errors import UserError
from redline.core.records import Hardware
from redline.engine import hardware
from redline.run.config import Settings, resolve
from redline.tools.doctor import examine, report


def test_the_settings_are_those_of_training() -> None:
    found, plan = examine("snake", "auto", "cpu"), resolve(Settings("snake", device="cpu"))
    assert (found["env"], found["algo"], found["torch"]) == ("snake", "dqn", torch.__version__)
    assert {name: choice["why"] for name, choice in found["settings"].items()} == plan.reasons
    values = {name: choice["value"] for name, choice in found["settings"].items()}
    assert values["num_envs"] == plan.num_envs
    assert values["batch_size"] == plan.algo_config.batch_size
    assert values["precision"] == plan.precision
    assert (values["compile"], values["graph"]) == (plan.compile, plan.graph)
    assert None not in values.values()
    assert found["hardware"]["cores"] >= 1
    assert json.loads(json.dumps(found))["settings"].keys() == plan.reasons.keys()


def test_the_report_gives_every_setting_with_its_reason() -> None:
    found = examine("snake", "dqn", "cpu")
    text = report(found)
    for name, choice in found["settings"].items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"  {name} "))
        assert line.removeprefix(f"  {name} ").lstrip().startswith(f"{choice['value']} ")
        assert line.endswith(choice["why"])
    assert f"Device: cpu, {found['hardware']['name']}" in text


@pytest.mark.parametrize("compiler", ["g++", ""])
def test_a_gpu_and_a_missing_compiler_are_told(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Hardware("cuda:0", "Fast 9000", 8, 80.0, bf16=True, compiler=compiler, capability=(9, 0))
    monkeypatch.setattr(hardware, "pick_device", lambda _: torch.device("cuda:0"))
    monkeypatch.setattr(hardware, "detect", lambda _: machine)
    found = examine("snake", "dqn", "auto")
    assert found["settings"]["graph"]["value"] is True
    text = report({**found, "cuda": "12.8"})
    assert "CUDA 12.8" in text
    assert "Device: cuda:0, Fast 9000, 80 GB; 8 CPU cores" in text
    assert ("C++ compiler: g++" in text) == bool(compiler)
    assert ("none found" in text) == (not compiler)


@pytest.mark.parametrize(("wrong", "sentence"), [({"env": "snak"}, "did you mean 'snake'"), ({"algo": "dq"}, "'dqn'")])
def test_wrong_names(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        examine(**{"env": "snake", "algo": "dqn", "device": "cpu"} | wrong)
