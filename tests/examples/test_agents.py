"""The agents in examples/agents: small, described by their cards, and able to play on any machine."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from bench_scripts import load_script
from redline import cli
from redline.cli.parse import parse
from redline.run.agent import load_agent
from redline.run.run_folder import read_config
from redline.run.trust import outside_code
from redline.tools import watch
from redline.tools.pack import folder_bytes

ROOT = Path(__file__).resolve().parents[2]
AGENTS = sorted((ROOT / "examples" / "agents").iterdir())
NEEDS = {"mario": "gym_super_mario_bros", "gym:ALE": "ale_py", "gym:LunarLander": "Box2D", "gym:minigrid": "minigrid"}

every_agent = pytest.mark.parametrize("folder", AGENTS, ids=lambda folder: folder.name)


@every_agent
def test_it_is_small_and_described(folder: Path) -> None:
    exported = folder_bytes(folder / "export")  # by somebody who tried it
    assert folder_bytes(folder) - exported <= load_script("pack_agent").LIMIT
    card = (folder / "README.md").read_text(encoding="utf-8")
    command = re.search(r"^\| command \| `redline train ([^`]+)` \|$", card, re.MULTILINE)
    assert command
    parse("train", cli.COMMANDS.load("train"), shlex.split(command[1]))
    assert command[1].split()[0] == read_config(folder)["env"]
    assert re.search(r"^\| mean [a-z ]+ \| -?\d[^|]* held-out games", card, re.MULTILINE)
    trust = " --trust" if outside_code(read_config(folder)) else ""
    assert f"redline watch examples/agents/{folder.name}{trust}\n" in card


@every_agent
def test_it_plays_on_a_cpu(folder: Path) -> None:
    config = read_config(folder)
    env = config["env"]
    for start, module in NEEDS.items():
        if env.startswith(start):
            pytest.importorskip(module)
    agent = load_agent(folder, "cpu", trust=bool(outside_code(config)))
    assert agent.evaluate(4, max_steps=256)["total_score"] != 0
    if watch.why_not_drawn(agent.rules):  # a package that draws this environment is missing
        return
    frames = list(itertools.islice(watch.play(agent.rules, agent.policy, seed=0), 20))
    assert frames[-1].result.length > 0
    assert any((frame.picture != frames[0].picture).any() for frame in frames)
