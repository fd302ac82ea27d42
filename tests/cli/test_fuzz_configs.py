"""Fuzzing: command lines, TOML configs and the config.json of run folders give a plan or one clear sentence.

Mutations are seeded, so a failure repeats. REDLINE_FUZZ=10000 plays that many cases of each kind instead of a few.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import redline
from redline import cli
from redline.cli.command import COMMANDS, own_options
from redline.run import agent as agent_module
from redline.run import resume

CASES = int(os.environ.get("REDLINE_FUZZ", "150"))
SECONDS = 20  # no case takes a tenth of a second on an idle machine

NUMBERS = [
    "0", "1", "-1", "2", "3", "7", "64", "-0", "1e3", "1e400", "-1e400", "1e-400", "nan", "inf", "-inf", "0x10",
    "1_0", "20M", "1.5k",
    "1e18", "9223372036854775807", "9223372036854775808", "1e308", "0.0", "0.5", "1.0000001", "-0.5", "1,2", "1,,",
    ",", "[]", "()",
    "64x3", "64,64", "٣", "½", "+5", "00", "1e9G", "--1", "9" * 5000,
]  # fmt: skip
WORDS = [
    "", " ", "auto", "none", "None", "true", "false", "True", "snake", "tetris", "mario", "mario:9-9",
    "gym:CartPole-v1",
    "gym:", "gym:Nothing-v0", "cpu", "cuda", "cuda:99", "mps", "dqn", "ppo", "pqn", "device", "memmap", "bf16", "fp16",
    "\x00", "\n", "é", "漢字", "💥", "a b", "../x", "x" * 5000, "%s%n", "{}", "$(id)", "'", '"', "\\", "--", "-", "=",
    "==",
    ".", "..", "a.b.c", "\ud800", "\x1b[2J", "null",
]  # fmt: skip


class Accepted(BaseException):
    """Everything was accepted: what follows would train or play."""


def accept(*_: Any, **__: Any) -> None:
    raise Accepted


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a module that leaves a file behind when it is imported. Nothing trains or plays."""
    (tmp_path / "payload.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "payload", raising=False)  # of another test
    monkeypatch.setattr(resume, "open_session", accept)
    monkeypatch.setattr(agent_module.Agent, "evaluate", accept)
    return tmp_path


@contextlib.contextmanager
def time_limit(case: object) -> Iterator[None]:
    def hung(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"hangs: {case!r}")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(words: list[str], case: object, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command and return how it ended; fails for a traceback, another exit code or a refusal of many lines."""
    with time_limit(case):
        try:
            cli.main(words)
        except Accepted:
            capsys.readouterr()
            return "accepted"
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error} for {case!r}") from error
    err = capsys.readouterr().err
    if code == 0:
        return "done"
    assert code in (2, 74), f"exit code {code} for {case!r}: {err}"
    refusals = [line for line in err.splitlines() if line.startswith("redline: ")]
    assert len(refusals) == 1, f"{err!r} for {case!r}"
    assert "Traceback" not in err
    return f"refused with {code}"


def play(make: Callable[[random.Random], Any], run: Callable[[Any], str]) -> Counter[str]:
    """Run CASES cases and return how often each outcome came."""
    counts: Counter[str] = Counter()
    for number in range(CASES):
        counts[run(make(random.Random(number)))] += 1
    print(f"{CASES} cases:", dict(counts), file=sys.__stderr__)
    return counts


# ---- the command line


def value(rng: random.Random) -> str:
    if rng.random() < 0.1:
        return "".join(chr(rng.randrange(1, 0x250)) for _ in range(rng.randrange(12)))
    return rng.choice(NUMBERS if rng.random() < 0.6 else WORDS)


def command_line(rng: random.Random) -> list[str]:
    command = rng.choice([*["train"] * 6, *COMMANDS.names(), "trian", ""])
    words = [command]
    names = list(own_options(COMMANDS.load(command))) if command in COMMANDS.names() else ["steps"]
    names += [
        "env.width", "env.start", "env.reward_food", "env.kwargs.x", "dqn.hidden", "dqn.gamma", "ppo.rollout_steps",
        "ppo.clip_range", "env.x", "x.y",
    ]  # fmt: skip
    if rng.random() < 0.9:
        words.append(rng.choice(["snake", "tetris", "gym:CartPole-v1", value(rng)]) if rng.random() < 0.3 else "snake")
    for _ in range(rng.randrange(5)):
        name = rng.choice(names)
        if rng.random() < 0.2:
            name = mangled(rng, name)
        flag = "--" + (name.replace("_", "-") if rng.random() < 0.5 else name)
        given = value(rng)
        words += [f"{flag}={given}"] if rng.random() < 0.4 else [flag] if rng.random() < 0.2 else [flag, given]
    if rng.random() < 0.1:
        rng.shuffle(words)
    return words


def mangled(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(["", "-", "_", ".", "=", "é", "\x00", "no_"]) + text[at + rng.randrange(2) :]


@pytest.mark.fault("H1", "H2")
def test_command_lines(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COMMANDS.names():
        if name not in ("train", "eval", "watch"):
            command = COMMANDS.load(name)
            monkeypatch.setitem(vars(command), "run", accept)

    def run(words: list[str]) -> str:
        how = outcome(words, words, capsys)
        for path in folder.iterdir():  # run folders that an accepted command made
            if path.is_dir():
                shutil.rmtree(path)
        return how

    counts = play(command_line, run)
    assert counts["refused with 2"] > CASES / 4
    assert counts["accepted"] > CASES / 20


# ---- TOML


TOML = """\
steps = "20M"
num-envs = 64
compile = false
minutes = 1.5
seed = 3
device = "cpu"
checkpoint-minutes = 0.5

[env]
width = 6
start = "random"
reward_food = 2.0

[dqn]
hidden = [32, 16]
dueling = true
learning_rate = 1e-3
"""
TOML_VALUES = [
    "0", "-1", "1e400", "nan", "inf", "-inf", "9223372036854775808", "99999999999999999999999", "[]", "[[]]",
    "[1, 'a']", "{}",
    "{a = 1}", "{a = {b = {c = 1}}}", "true", "''", "'x'", "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "0xff",
    "0b11", "'\\u0000'",
    '"\\ud800"', "[true, false]", "['64', '64']", "[1.5]", "[-1]", "[0]", "1_000", "'20M'", "'auto'", "'none'",
]  # fmt: skip


def toml(rng: random.Random) -> bytes:
    lines = TOML.splitlines()
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(lines))
        key = lines[at].partition(" = ")[0]
        lines[at] = rng.choice(
            [
                f"{key} = {rng.choice(TOML_VALUES)}",
                f"{mangled(rng, key)} = {lines[at].partition(' = ')[2]}",
                f"[{mangled(rng, key)}]",
                "",
                lines[rng.randrange(len(lines))],
                f"{key}.{key} = {rng.choice(TOML_VALUES)}",
            ]
        )
    data = bytearray("\n".join(lines).encode(errors="surrogatepass"))
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


@pytest.mark.fault("H1")
def test_toml_configs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "my.toml"

    def run(content: bytes) -> str:
        path.write_bytes(content)
        how = outcome(["train", "snake", "--config", str(path), "--run-dir", "run"], content, capsys)
        shutil.rmtree(folder / "run", ignore_errors=True)
        return how

    counts = play(toml, run)
    assert counts["refused with 2"] > CASES / 4
    assert counts["accepted"] > CASES / 20


@pytest.mark.fault("H1")
@pytest.mark.parametrize("content", [b"a = " + b"[" * 20_000, b"a." * 5_000 + b"b = 1", b"\xff\xfe", b"=" * 10**6])
def test_toml_made_to_exhaust(content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my.toml").write_bytes(content)
    assert outcome(["train", "snake", "--config", "my.toml"], content[:40], capsys) == "refused with 2"


# ---- config.json of a run folder


JSON_VALUES: list[Any] = [
    None, True, False, 0, -1, 3, 0.5, -0.5, 1e308, 10**30, float("nan"), float("inf"), "", "x", "auto", [], [1], [[]],
    [60000, 60000], [1] * 1000, 10**400, {}, {"a": 1}, {"a": {"b": [None]}}, "gym:payload:X-v0", "payload",
    "gym:CartPole-v1", "../../etc/passwd",
    "os:system", "payload.x", "dqn", "pqn", "tetris", "x" * 10_000, "\x00", "\ud800", "-1", "nan", "20M",
]  # fmt: skip


def config(rng: random.Random, original: dict[str, Any]) -> tuple[bytes, list[str]]:
    """Return a changed config.json and the changes."""
    changes = []
    content = copy.deepcopy(original)
    for _ in range(rng.randrange(1, 4)):
        record = content
        if rng.random() < 0.6:
            record = content.get(rng.choice(["env_options", "algo_options"]))  # type: ignore[assignment]
        if not isinstance(record, dict) or not record:
            continue
        key = rng.choice(list(record))
        match rng.randrange(6):
            case 0:
                del record[key]
                changes.append(f"no {key}")
            case 1:
                record[other := mangled(rng, key)] = record.pop(key)
                changes.append(f"{other!r} for {key}")
            case _:
                record[key] = rng.choice(JSON_VALUES)
                changes.append(f"{key} {record[key]!r:.200}")
    data = bytearray(json.dumps(content).encode(errors="surrogatepass"))
    for _ in range(rng.choice([0, 0, 0, 1, 5])):
        at = rng.randrange(len(data))
        data[at] = rng.randrange(256)
        changes.append(f"byte {at}: {bytes(data[max(0, at - 20) : at + 20])!r}")
    if rng.random() < 0.05:
        del data[rng.randrange(len(data)) :]
        changes.append(f"truncated to {len(data)}")
    return bytes(data), changes


@pytest.mark.fault("A12", "H1")
@pytest.mark.parametrize("algo", ["dqn", "ppo"])
def test_configs_of_run_folders(algo: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loading the agent and continuing the run: refused or accepted, and nothing that the file names is imported."""
    options = {"hidden": (8,), "net": "mlp"}
    run_dir = folder / "run"
    trained(run_dir, algo, options)
    path = run_dir / "config.json"
    original = json.loads(path.read_text())

    def run(case: tuple[bytes, list[str]]) -> str:
        content, changes = case
        path.write_bytes(content)
        loaded = outcome(["eval", "run", "--device", "cpu"], changes, capsys)
        words = f"train snake --algo {algo} --run-dir run --device cpu --steps 1M --num-envs 16 --batch-size 16 --no-compile"
        words += f" --{algo}.hidden 8 --{algo}.net mlp"
        continued = outcome(words.split(), changes, capsys)
        assert not (folder / "imported").exists(), changes
        return f"{loaded}, {continued}"

    counts = play(lambda rng: config(rng, original), run)
    assert "payload" not in sys.modules
    assert sum(count for how, count in counts.items() if how.startswith("refused")) > CASES / 4
    assert counts["accepted, accepted"] > CASES / 50


def trained(run_dir: Path, algo: str, options: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "open_session", OPEN_SESSION)
        redline.train(
            "snake", algo=algo, run_dir=str(run_dir), num_envs=16, steps=512, batch_size=16, compile=False,
            device="cpu",
            eval_episodes=0, algo_options=options,
        )  # fmt: skip


OPEN_SESSION = resume.open_session
