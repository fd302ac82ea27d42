"""Host memory: limits of the process and of its container are seen, and what does not fit is refused before it is taken."""

from __future__ import annotations

import json
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from redline.collect import row_staging
from redline.engine import hardware, host_memory
from redline.engine.out_of_memory import is_out_of_memory

SOURCE = Path(__file__).parents[2] / "src"
GB = 1 << 30


def write(folder: Path, **files: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file system of groups, and a machine with 64 GB, 40 of them free."""
    monkeypatch.setattr(host_memory, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "_OWN", tmp_path / "own")
    machine = psutil.virtual_memory()._replace(total=64 * GB, available=40 * GB)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: machine)
    return tmp_path


@pytest.mark.fault("E3")
def test_limits_of_a_container_with_cgroups_2(groups: Path) -> None:
    (groups / "own").write_text("0::/pod/job\n")
    write(groups / "cgroup" / "pod", memory__max=8 * GB, memory__current=5 * GB, memory__stat=f"inactive_file {2 * GB}")
    write(groups / "cgroup" / "pod" / "job", memory__max="max", memory__current=GB, memory__stat="inactive_file 0")
    assert host_memory.total_bytes() == 8 * GB
    assert host_memory.free_bytes() == 5 * GB  # file caches can be dropped
    assert hardware.free_bytes(torch.device("cpu")) == 5 * GB
    assert hardware.detect(torch.device("cpu")).memory_gb == 8


@pytest.mark.fault("E3")
def test_limits_of_a_container_with_cgroups_1(groups: Path) -> None:
    (groups / "own").write_text("9:cpu,cpuacct:/a\n4:memory:/docker/x\n")
    files = {"memory__usage_in_bytes": 3 * GB, "memory__stat": f"cache 7\ntotal_inactive_file {GB}"}
    write(
        groups / "cgroup" / "memory", memory__limit_in_bytes=4 * GB, **files
    )  # all that a container sees of its group
    assert host_memory.total_bytes() == 4 * GB
    assert host_memory.free_bytes() == 2 * GB
    write(groups / "cgroup" / "memory", memory__limit_in_bytes=9223372036854771712, **files)
    assert host_memory.total_bytes() == 64 * GB


@pytest.mark.fault("E3")
@pytest.mark.parametrize("text", ["", "garbage", "0::/gone\n", "0::/../../..\n"])
def test_groups_that_cannot_be_read_are_no_limit(text: str, groups: Path) -> None:
    (groups / "own").write_text(text)
    assert host_memory.total_bytes() == 64 * GB
    assert host_memory.free_bytes() == 40 * GB


LIMITED = """
import json, resource, sys
import redline
from redline.core.errors import UserError
from redline.engine import host_memory

which = getattr(resource, sys.argv[1])
from redline.run import train  # all libraries are loaded before the limit
free = 1 << 30
used = host_memory.psutil.Process().memory_info()
used = used.vms if sys.argv[1] == "RLIMIT_AS" else used.data
resource.setrlimit(which, (used + free, resource.RLIM_INFINITY))
record = {"free": host_memory.free_bytes(), "refused": []}
common = {"device": "cpu", "compile": False, "num_envs": 16, "steps": 64, "eval_episodes": 0, "threads": 1}
for options in (
    {"algo": "dqn", "replay_capacity": 400_000_000},
    {"algo": "ppo", "algo_options": {"hidden": (60_000, 60_000), "net": "mlp"}},
):
    try:
        redline.train("snake", run_dir=sys.argv[2], **common | options)
    except UserError as error:
        record["refused"].append(str(error))
record["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(record))
"""


@pytest.mark.fault("E3")
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process(limit: str, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIMITED, limit, str(tmp_path / "run")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    record = json.loads(done.stdout)
    assert 0 < record["free"] <= GB
    replay, weights = record["refused"]
    assert "GB on cpu" in replay
    assert "replay_capacity: use a smaller one" in replay
    assert "The weights of this network need about" in weights
    assert record["peak"] < 2 * GB


@pytest.mark.fault("E2")
def test_every_way_to_run_out_of_host_memory_is_recognised() -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    errors = []
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + GB // 4, limit[1]))
        for take in (
            lambda: torch.zeros(GB),
            lambda: np.zeros(GB),
            lambda: bytearray(GB),
            lambda: torch.ones(1 << 29) + 1,
        ):
            try:
                take()
            except Exception as error:
                errors.append(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert len(errors) == 4
    assert all(map(is_out_of_memory, errors)), errors
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(28, "No space left on device"))


@pytest.mark.fault("E4")
def test_rows_are_staged_in_ordinary_memory_where_none_can_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(row_staging, "_page_locked", refuse)
    messages: list[str] = []
    arrays = row_staging._host_arrays({"obs": ((2, 3), np.uint8), "reward": ((2,), np.float32)}, True, messages.append)
    assert {name: (x.shape, x.dtype) for name, x in arrays.items()} == {
        "obs": ((2, 3), np.uint8),
        "reward": ((2,), np.float32),
    }
    assert messages == [
        "Rows of actors are staged in ordinary memory, which is slower: RuntimeError: CUDA error: out of memory."
    ]


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are Linux's")
def test_large_tables_ask_for_huge_pages() -> None:
    table = torch.empty(16 << 20, dtype=torch.uint8)
    host_memory.use_huge_pages(table)
    middle = table.data_ptr() + table.nbytes // 2
    asked = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if not word.endswith(":"):
            first, last = (int(address, 16) for address in word.split("-"))
        elif word == "VmFlags:" and first <= middle < last:
            asked = "hg" in line.split()
    assert asked


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_tables_smaller_than_a_huge_page_stay_as_they_are(size: int) -> None:
    table = torch.full((size,), 7, dtype=torch.uint8)
    host_memory.use_huge_pages(table)
    assert (table == 7).all()
