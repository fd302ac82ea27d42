"""A2C, an algorithm outside the package: it learns, trains by command from its folder, and the guide's code runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "a2c"
GUIDE = ROOT / "docs" / "guides" / "adding-an-algorithm.md"


def test_it_trains_by_its_name_from_its_folder(tmp_path: Path) -> None:
    small = ("--steps", "4k", "--num-envs", "64", "--no-compile", "--device", "cpu", "--eval-episodes", "8")
    options = ("--a2c.hidden", "16", "--a2c.rollout_steps", "4", "--run-dir", str(tmp_path / "run"), "--json")
    done = forked.run("train", "snake", "--algo", "a2c", *small, *options, cwd=FOLDER)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["algo"] == "a2c"
    assert result["updates"] > 10
    assert result["settings"]["algo_options"]["batch_size"] == 256
    words = ("eval", str(tmp_path / "run"), "--episodes", "4", "--sample", "--device", "cpu", "--json")
    sampled = forked.run(*words, cwd=FOLDER)
    assert sampled.returncode == 0, sampled.stderr


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (("--a2c.gama", "0.9"), "a2c.gama"),
        (("--a2c.batch_size", "7"), "a2c.batch_size is set"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(option: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    words = ("train", "snake", "--algo", "a2c", *option, "--run-dir", str(tmp_path / "run"))
    done = forked.run(*words, cwd=FOLDER)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "replacement", "sentence"),
    [
        (
            "        self.rollout_steps = config.rollout_steps\n",
            "",
            "Learner.rollout_steps of a2c is missing; expected a whole number above 0, the steps every environment plays",
        ),
        (
            "            return select_actions(self.config, self.net, policy_input)\n",
            "            return select_actions(self.config, self.net, policy_input)[0]\n",
            "select_actions of a2c returned Tensor; expected the pair actions (N,) int64 and a tuple of the POLICY_OUTPUTS",
        ),
        (
            "        self.acted += 1\n",
            "",
            "record_actions of a2c leaves Learner.acted at 0, so that every step would draw the same random numbers; add",
        ),
        (
            ', "rng": counters}',
            "}",
            "state_dict of a2c has no group rng, so that a resumed run would repeat its random",
        ),
    ],
)
def test_a_mistake_in_the_learner_is_one_sentence(line: str, replacement: str, sentence: str, tmp_path: Path) -> None:
    text = (FOLDER / "a2c.py").read_text(encoding="utf-8")
    assert line in text
    (tmp_path / "a2c.py").write_text(text.replace(line, replacement), encoding="utf-8")
    small = ("--steps", "1k", "--num-envs", "8", "--no-compile", "--device", "cpu", "--eval-episodes", "0")
    done = forked.run("train", "snake", "--algo", "a2c", *small, cwd=tmp_path)
    assert done.returncode == 2
    assert f"redline: {sentence}" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_code_of_the_guide_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    assert blocks
    for block in blocks:
        done = forked.run_code(block, cwd=ROOT)
        assert done.returncode == 0, done.stderr


def test_the_guide_names_every_member() -> None:
    from redline.algos import algorithm
    from redline.algos.learner import Learner

    text = GUIDE.read_text(encoding="utf-8")
    members = {*algorithm._REQUIRED, *algorithm._OPTIONAL}
    members |= {name for name in vars(Learner) if not name.startswith("_")} | set(Learner.__annotations__)
    assert {name for name in members if f"`{name}" not in text and f"`{name}()" not in text} == set()
