"""Damage checkpoints and replay files in thousands of ways and open them, to verify that all damage is detected.

    python bench/damage.py --flips 200 --fuzzed 10000 --out damage.json

Flips change one bit at a random offset of a random file of a checkpoint, or of a replay file. Fuzzing truncates, extends,
overwrites, shuffles and rewrites. Half of the fuzzed checkpoints get matching digests again, as an attacker would do, so that
their content is checked and not only their digests. The expected outcome is a StorageError or UserError within ten seconds, or
exactly the saved content; unpickling is forbidden. Resealed checkpoints that load are also loaded into a session.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import redline
from redline.core.errors import StorageError, UserError
from redline.replay.block_file import BlockFile
from redline.run import manifest, resume
from redline.run.checkpoint import Checkpoint, Checkpoints
from redline.run.resolve import resolve
from redline.run.run_folder import write_json
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools.bench import describe_machine

SHAPE: dict[str, Any] = {"blocks": 24, "block_bytes": 8192, "schema": {"game": "snake", "fields": {"step": [2]}}}
WORDS = (b"{", b"}", b"[" * 200, b"]", b'"', b"null", b"-1", b"1e999", b"NaN", b"\x80\x04", b"../x", b"true", b"9" * 40)
SECONDS = 10  # for one file


class WrongSuccess(Exception):
    """Damage was not detected."""


def flip(data: bytes, rng: random.Random) -> bytes:
    """Return the data with one bit changed."""
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def fuzz(data: bytes, rng: random.Random) -> bytes:
    """Return the data with one to three kinds of damage."""
    for _ in range(rng.randint(1, 3)):
        data = fuzz_once(data, rng)
    return data


def fuzz_once(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((1, 2, 8, 64, 4096)))
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: flip(data, rng) if data else data,
        lambda: data[:start],
        lambda: data + rng.randbytes(rng.choice((1, 8, 5000))),
        lambda: data[:start] + rng.randbytes(end - start) + data[end:],
        lambda: data[:start] + bytes(end - start) + data[end:],
        lambda: data[:start] + data[end:],
        lambda: data[:start] + rng.choice(WORDS) + data[start:],
        lambda: data[end:] + data[:end],
        lambda: rng.randbytes(rng.randint(0, 300)),
    )
    return rng.choice(ways)()


class DamagedCheckpoints:
    """A checkpoint of a small run, restored before each damage."""

    def __init__(self, root: Path) -> None:
        algo = {"hidden": (8,), "net": "mlp", "learning_starts": 64, "replay_capacity": 640}
        options: dict[str, Any] = {"num_envs": 8, "batch_size": 8, "compile": False, "device": "cpu", "steps": 160}
        options |= {"algo": "dqn", "algo_options": algo, "eval_episodes": 0, "run_dir": str(root / "run")}
        redline.train("snake", **options)
        self.session = Session(resolve(Settings("snake", **options)), lambda _: None)
        (self.good,) = (root / "run" / "checkpoints").glob("ckpt-*")
        self.bad = root / self.good.name
        self.names = sorted(path.name for path in self.good.iterdir())
        self.expected = self._load(self.good)

    def close(self) -> None:
        self.session.close()

    def damage(self, change: Callable[[bytes, random.Random], bytes], rng: random.Random, sealed: bool) -> bool:
        """Damage one file and load the checkpoint; return whether the damage was detected."""
        shutil.rmtree(self.bad, ignore_errors=True)
        shutil.copytree(self.good, self.bad)
        path = self.bad / rng.choice([name for name in self.names if not sealed or name != "manifest.json"])
        before = path.read_bytes()
        path.write_bytes(change(before, rng))
        if path.read_bytes() == before:
            return True  # nothing was damaged
        if sealed:
            self._seal(path)
        try:
            checkpoint = self._load(self.bad)
            if sealed:
                self.session.load(checkpoint.tensors, checkpoint.state["session"])
                return False
        except UserError:  # StorageError is a subclass
            return True
        if not _same(checkpoint, self.expected):
            raise WrongSuccess(path.name)
        return False

    def _load(self, path: Path) -> Checkpoint:
        return Checkpoints(path.parent, check=resume.check_state).load_path(path)

    def _seal(self, path: Path) -> None:
        entry = {"bytes": path.stat().st_size, "sha256": manifest.hashlib.sha256(path.read_bytes()).hexdigest()}
        record = json.loads((self.bad / "manifest.json").read_text())
        record["files"][path.name] = entry
        record["digest"] = manifest.digest({key: value for key, value in record.items() if key != "digest"})
        (self.bad / "manifest.json").write_text(json.dumps(record))


class DamagedReplayFiles:
    """A replay file with all blocks written, restored before each damage."""

    def __init__(self, root: Path) -> None:
        self.path = root / "replay.bin"
        with BlockFile.create(self.path, **SHAPE) as file:
            for block in range(SHAPE["blocks"]):
                file.begin(block)
                file.data[block] = torch.randint(0, 256, (SHAPE["block_bytes"],), dtype=torch.uint8)
                file.commit(block, block + 1)
            self.blocks = file.data.clone()
        self.whole = self.path.read_bytes()

    def close(self) -> None:
        pass

    def damage(self, change: Callable[[bytes, random.Random], bytes], rng: random.Random, sealed: bool) -> bool:
        del sealed
        data = change(self.whole, rng)
        if data == self.whole:
            return True
        self.path.write_bytes(data)
        try:
            with BlockFile.open(self.path, **SHAPE) as file:
                for block, generation in enumerate(file.generations):
                    if generation not in (0, block + 1):
                        raise WrongSuccess(f"generation {generation} of block {block}")
                    if generation and not torch.equal(file.data[block], self.blocks[block]):
                        raise WrongSuccess(f"block {block}")
                return bool(file.damaged)
        except StorageError:
            return True


def _same(one: Checkpoint, other: Checkpoint) -> bool:
    pairs = [(other.tensors[group][name], x) for group, named in one.tensors.items() for name, x in named.items()]
    counts = [sum(map(len, checkpoint.tensors.values())) for checkpoint in (one, other)]
    return one.state == other.state and counts[0] == counts[1] and all(torch.equal(a, b) for a, b in pairs)


def measure(kind: str, flips: int, fuzzed: int, seed: int) -> dict[str, Any]:
    """Damage files of one kind; return the numbers of detected flips and of refused fuzzed files."""
    torch.set_num_threads(1)
    rng, outcomes = random.Random(f"{kind}{seed}"), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        make = DamagedCheckpoints if kind == "checkpoints" else DamagedReplayFiles
        with closing(make(Path(folder))) as files:
            signal.signal(signal.SIGALRM, _too_long)
            original = pickle.loads, pickle.load, torch.load
            pickle.loads = pickle.load = torch.load = _forbidden
            try:
                for number in range(flips + fuzzed):
                    change = flip if number < flips else fuzz
                    signal.alarm(SECONDS)
                    try:
                        noticed = files.damage(change, rng, number >= flips and rng.random() < 0.5)
                        outcome = "noticed" if noticed else "loaded"
                    except Exception as error:
                        outcome = f"{type(error).__name__}: {error}"[:200]
                    signal.alarm(0)
                    outcomes[f"{change.__name__}: {outcome}"] += 1
            finally:
                pickle.loads, pickle.load, torch.load = original
    wrong = {name: n for name, n in outcomes.items() if name.partition(": ")[2] not in ("noticed", "loaded")}
    return {
        "kind": kind,
        "flips": flips,
        "flips_detected": outcomes["flip: noticed"],
        "fuzzed": fuzzed,
        "fuzzed_refused": outcomes["fuzz: noticed"],
        "fuzzed_loaded": outcomes[
            "fuzz: loaded"
        ],  # a change that no reader sees, or valid content with matching new digests
        "wrong": wrong,
    }


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"longer than {SECONDS} s")


def _forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("unpickled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=200, help="of each kind")
    parser.add_argument("--fuzzed", type=int, default=10_000, help="of each kind")
    parser.add_argument("--kinds", default="checkpoints,replay files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for kind in arguments.kinds.split(","):
        rows.append(measure(kind, arguments.flips, arguments.fuzzed, arguments.seed))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if arguments.out:
        write_json(arguments.out, describe_machine("cpu") | {"rows": rows})
    sys.exit(any(row["wrong"] or row["flips_detected"] < row["flips"] for row in rows))


if __name__ == "__main__":
    main()
