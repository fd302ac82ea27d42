"""Every command of README and docs runs: with its own options, and budgets and sizes small enough for a test."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import redline
from redline import algos, cli, games, oracles, recipes
from redline.cli.command import own_options
from redline.cli.parse import parse
from test_docs import PAGES, ROOT, blocks

SMALL = {"device": "cpu", "compile": False, "eval_episodes": 0, "threads": 1}
SMALL_RUN = SMALL | {"steps": 256, "num_envs": 8}
# Options that are added to a command, and so replace its own: sizes and budgets, never what it shows.
BUDGETS = {
    "train": "--steps 256 --device cpu --no-compile --eval-episodes 0 --threads 1",
    "eval": "--episodes 2 --max-steps 64 --device cpu",
    "profile": "--seconds 0.4 --probes 0 --num-envs 8 --device cpu --no-compile",
    "tune": "--seconds 2 --device cpu --no-compile",
    "bench": "--seconds 0.02 --repeats 1 --device cpu --no-compile",
}
# The same, for options that only some trainings give.
SIZES = {"--num-envs": "8", "--batch-size": "16", "--actors": "1", "--ring-rows": "64", "--train-every": "4"}
RECORDINGS = {"--gif", "--mp4", "--html", "--terminal"}  # without one of them `redline watch` serves a page
NEEDS = {"mario": "gym_super_mario_bros", "gym:ALE": "ale_py", "--mp4": "imageio_ffmpeg"}
# Commands that take long and run in tests of their own, with every word that the documentation gives them.
ELSEWHERE = {"export": "tests/tools/test_export.py", "check twenty48": "tests/examples/test_twenty48.py"}


def shell_lines() -> list[str]:
    """Return the lines of all shell blocks, without comments, each once."""
    texts = [text.replace("\\\n", " ") for page in PAGES for text in blocks(page, "bash")]
    lines = [re.split(r"(?:^|\s)# ", line)[0].strip() for text in texts for line in text.splitlines()]
    return list(dict.fromkeys(line for line in lines if line))


def redline_words(line: str) -> list[str]:
    """Return the words after `redline` in a line that runs it, also by torchrun or in a loop; else none."""
    command = re.search(r"(?:^|^until |^torchrun .* -m )redline ([^;]*)", line)
    return shlex.split(command[1]) if command else []


COMMANDS = [line for line in shell_lines() if redline_words(line)]


def runs_elsewhere(line: str) -> str:
    """Return the file of the test that runs a command, or an empty string."""
    return next((file for start, file in ELSEWHERE.items() if line.startswith(f"redline {start}")), "")


@pytest.mark.parametrize("line", [*filter(runs_elsewhere, COMMANDS)])
def test_the_command_runs_elsewhere(line: str) -> None:
    name, *words = redline_words(line)
    parse(name, cli.COMMANDS.load(name), words)
    source = (ROOT / runs_elsewhere(line)).read_text(encoding="utf-8")
    assert [word for word in words if not word.startswith("runs/") and f'"{word}"' not in source] == []


def test_other_lines_name_what_exists() -> None:
    """Lines that run something else: targets of make, extras of pip, tests."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for line in shell_lines():
        if redline_words(line) or line.startswith("git clone "):
            continue
        program, *rest = shlex.split(line)
        if program == "make":
            assert re.search(rf"^{rest[0]}:", makefile, re.MULTILINE), line
        elif program == "cd":
            assert (ROOT / rest[0]).is_dir(), line
        elif program == "pip":
            assert re.fullmatch(r"redline\[(\w+)\]", rest[-1])[1] in extras, line  # type: ignore[index]
        elif program == "pytest":
            file, _, name = rest[-1].partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), line
        else:
            raise AssertionError(f"no test runs `{line}`")


def test_commands_in_sentences_exist() -> None:
    """Commands between backticks, often shortened: the command and its general options have these names."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    mentions = [line.split() for line in set(re.findall(r"`redline ([a-z][^`\n]*)`", text))]
    assert len(mentions) > 20
    for name, *words in mentions:
        known = {"--help", *(f"--{option.replace('_', '-')}" for option in own_options(cli.COMMANDS.load(name)))}
        assert {word for word in words if word.startswith("--") and "." not in word} <= known, f"{name} {words}"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the runs, modules and files that commands of the documentation name."""
    folder = tmp_path_factory.mktemp("docs")
    guides = ROOT / "docs" / "guides"
    (folder / "my_package").mkdir()
    shutil.copy(ROOT / "examples/twenty48/twenty48.py", folder / "my_package")
    for example in ("twenty48", "hindsight"):
        shutil.copytree(ROOT / "examples" / example, folder, dirs_exist_ok=True)
    shutil.copytree(ROOT / "examples/agents", folder / "examples/agents")
    (folder / "my_envs.py").write_text(blocks(guides / "gymnasium.md", "python")[0])
    (folder / "catch.py").write_text(blocks(guides / "adding-a-game.md", "python")[0])
    for place in (folder, folder / "my_package"):
        (place / "reinforce.py").write_text(blocks(guides / "adding-an-algorithm.md", "python")[0])
    (folder / "my-run.toml").write_text(blocks(guides / "training.md", "toml")[0])
    (folder / "tuned-snake.toml").write_text("num-envs = 8\n")
    (folder / "phases.json").write_text(blocks(guides / "training.md", "json")[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        redline.train("snake", run_dir="runs/snake-ppo", **SMALL_RUN | {"eval_every": 128, "eval_episodes": 1})
        for name in ("a", "b", "c", "library"):
            shutil.copytree("runs/snake-ppo", f"runs/{name}")
        redline.train("tetris", run_dir="runs/tetris-ppo", **SMALL_RUN)
        redline.train("catch", run_dir="runs/catch-ppo", **SMALL_RUN)
        if importlib.util.find_spec(NEEDS["mario"]):
            redline.train("mario", run_dir="runs/mario-ppo", steps=32, num_envs=1, actors=0, **SMALL)
        yield folder
    for module in [
        name for name in sys.modules if re.match(r"my_package|my_envs|catch|reinforce|twenty48|hindsight|skyline", name)
    ]:
        sys.modules.pop(module)
    for registry in (games.registry, algos.registry, oracles.registry, recipes):
        registry.refresh()


def shortened(words: list[str], run_dir: Path) -> list[str]:
    """Return a command's words with small budgets and sizes added."""
    name = words[0]
    extra = shlex.split(BUDGETS.get(name, ""))
    if name == "train":
        extra += ["--run-dir", str(run_dir)]
        for option in SIZES.keys() & set(words):
            extra += [option, SIZES[option]]
        if not words[1].startswith(("gym:", "mario")):
            extra += ["--num-envs", "8"]
        elif "--actors" not in words:  # images take long to learn from
            extra += shlex.split("--actors 0 --num-envs 2 --train-every 8 --batch-size 16 --steps 32")
        if "--config" in words:
            extra += ["--batch-size", "16"]
        if "dqn" in words:
            extra += ["--replay-capacity", "2000"]
        if "--eval-every" in words:
            extra += shlex.split("--eval-every 128 --eval-episodes 1 --time-limit 20")
    if name == "watch" and RECORDINGS & set(words):
        extra += ["--max-steps", "4", "--fps", "50"]
    if name == "bench":  # one table, one switch: all of them take minutes
        extra += ["--only", "log", "--num-envs", "8"] if "switches" in words else ["env", "--games", "4"]
    return words + extra


@pytest.mark.parametrize("line", [*itertools.filterfalse(runs_elsewhere, COMMANDS)])
def test_the_command_runs(line: str, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for word, module in NEEDS.items():
        if word in line and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    monkeypatch.chdir(workspace)
    served: list[str] = []

    def serve(page: Any, host: str, port: int | None, say: Any) -> None:
        say(f"http://{host}:{port or 0}")
        served.append(type(page).__name__)

    monkeypatch.setattr("redline.web.serve.serve", serve)  # which would serve until Ctrl-C
    words = shortened(redline_words(line), tmp_path / "run")
    if "--compare" in words and not Path("my-machine.json").exists():
        cli.run(shortened(["bench", "--out", "my-machine.json"], tmp_path))
    assert cli.run(words) in ((0, 1) if "--compare" in words else (0,))  # a busy machine is slower than it was
    if words[0] == "train" and "--print-config" not in words:
        assert (tmp_path / "run" / "result.json").exists()
    files = [word for before, word in itertools.pairwise(words) if before in ("--gif", "--mp4", "--html", "--out")]
    assert all(Path(file).exists() for file in files)
    assert bool(served) == (words[0] == "play" or (words[0] == "watch" and not RECORDINGS & set(words)))
