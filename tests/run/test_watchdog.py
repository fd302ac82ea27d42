"""Commands that play without training end with a diagnosis when an environment hangs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import redline
from redline import cli

FAULTY = str(Path(__file__).parents[1] / "collect")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose environments may take a second a step."""
    folder = tmp_path_factory.mktemp("hangs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FAULTY)
        options = {"hidden": (8,), "rollout_steps": 16, "batch_size": 64}
        sizes = {"num_envs": 4, "actors": 0, "device": "cpu", "steps": 128, "eval_episodes": 0}
        redline.train(
            "gym:faulty:Faulty-v0",
            algo="ppo",
            algo_options=options,
            env_options={"timeout": 1.0},
            run_dir=str(folder),
            **sizes,
        )
    return folder


def in_fork(words: list[str], errors: Path) -> int:
    """Run a command in a process of its own; return its exit code. Standard error goes to the file."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            cli.main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.fault("C3")
@pytest.mark.parametrize("words", ["eval RUN --episodes 32", "watch RUN --gif FOLDER/game.gif", "watch RUN --terminal"])
def test_an_environment_that_hangs_ends_the_command(
    run: Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FAULTY)
    monkeypatch.setenv("FAULTY", "hang")
    monkeypatch.setenv("FAULTY_AT", "4")
    chosen = words.replace("RUN", str(run)).replace("FOLDER", str(tmp_path)).split()
    code = in_fork([*chosen, "--device", "cpu"], tmp_path / "errors")
    text = (tmp_path / "errors").read_text()
    assert code == 70, text
    assert "redline: gym:faulty:Faulty-v0 hung for more than 1 seconds (--env.timeout 1): environment 0." in text
    assert "time.sleep(1e6)" in text, "the line where it hangs"
