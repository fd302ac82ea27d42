"""Predict the speed-up from more ranks with a cost model, checked against ranks on this machine.

    python bench/scaling.py --out scaling.json                                             a GPU: 1 and 2 ranks on it
    python bench/scaling.py --device cpu --num-envs 512 --ranks 1,2,4 --out scaling.json   gloo on a CPU

In the model, an iteration of W ranks takes

    time of one rank's share, alone on the machine   measured: N / W environments, batch / W
    + gradient steps x time of an all-reduce         measured between W ranks here; on other links 2 (W - 1) steps, each
                                                     with a latency and 1 / W of the bytes
    x contention                                     ranks per core on a CPU, ranks per GPU on a GPU

On a CPU all times are CPU times of a rank, as other programs may be running: they exclude waiting for other ranks, and
throughput is that of otherwise idle cores.

The global batch is the same throughout (strong scaling). In the predictions, every GPU has the environments and batch of one
GPU here (weak scaling), and latency and bandwidth are taken from LINKS, which are assumed, not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from redline.engine import distributed
from redline.engine.distributed import SINGLE, Ranks
from redline.engine.launch import Launch, launched
from redline.run.plan import Plan, share_of
from redline.run.resolve import resolve
from redline.run.run_folder import to_stderr, write_json
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools.bench import describe_machine

WARM_UP = 8  # iterations, for compilation, capture, and filling a small replay memory
ROUNDS = 12  # the fastest of this many counts, as other programs come and go


class Link(NamedTuple):
    """Speed of communication between ranks: assumed values, from data sheets and typical nccl-tests results."""

    latency: float  # seconds for one step of a ring
    bandwidth: float  # bytes per second that one rank sends


LINKS = {
    "NVLink": Link(3e-6, 350e9),
    "PCIe 5": Link(6e-6, 40e9),
    "InfiniBand 400 Gb/s": Link(10e-6, 45e9),
    "Ethernet 100 Gb/s": Link(30e-6, 10e9),
    "Ethernet 25 Gb/s": Link(30e-6, 2.5e9),
}
# Ranks per machine, machines, the link within a machine and the link between machines.
CLUSTERS = (
    (2, 1, "NVLink", ""),
    (4, 1, "NVLink", ""),
    (8, 1, "NVLink", ""),
    (8, 1, "PCIe 5", ""),
    (8, 4, "NVLink", "InfiniBand 400 Gb/s"),
    (8, 4, "NVLink", "Ethernet 100 Gb/s"),
    (1, 4, "", "Ethernet 25 Gb/s"),
)


def all_reduce_seconds(size: int, ranks: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes: 2 (W - 1) steps, each with 1 / W of the bytes."""
    steps = 2 * (ranks - 1)
    return steps * (link.latency + size / ranks / link.bandwidth)


def exchange_seconds(size: int, local: int, machines: int, within: str, between: str) -> float:
    """Return the seconds of an all-reduce within the machines, plus one between them for each local rank's part."""
    seconds = all_reduce_seconds(size, local, LINKS[within]) if local > 1 else 0.0
    return seconds + (all_reduce_seconds(size // local, machines, LINKS[between]) if machines > 1 else 0.0)


# ---- measuring


def plan_of(arguments: argparse.Namespace, ranks: Ranks) -> Plan:
    """Return the plan of the whole run, over all ranks."""
    settings = Settings(
        arguments.env,
        arguments.algo,
        num_envs=arguments.num_envs,
        batch_size=arguments.batch_size,
        steps=10**12,
        device=str(ranks.device) if ranks.active else arguments.device,
        threads=1 if arguments.device == "cpu" else None,
        compile=arguments.compile,
        curriculum=False,
        run_dir=arguments.folder,
        resume="never",
    )
    return dataclasses.replace(resolve(settings), ranks=ranks)


def iteration_seconds(plan: Plan, seconds: float) -> tuple[float, dict[str, int]]:
    """Return the seconds of an iteration with an update, and the numbers that determine the cost of exchanges."""
    with closing(Session(plan, to_stderr)) as session:
        while not session.learner.ready(session.remembered):
            session.iterate(1)
        session.iterate(WARM_UP)
        count = max(1, int(plan.ranks.broadcast(seconds / ROUNDS / max(_time(session, 2) / 2, 1e-9))))
        taken = [_time(session, count) / count for _ in range(ROUNDS)]
        weights = sum(p.numel() for p in session.learner.acting_network.parameters())
        counts = {
            "gradient_bytes": 4 * (weights + len(session.learner.metrics)),
            "gradient_steps": session.learner.updates_per_iteration,
            "steps_per_iteration": session.steps_per_iteration,
        }
    return min(taken), counts


def _time(session: Session, count: int) -> float:
    clock = clock_of(session.plan.device)
    session.synchronize()
    started = clock()
    session.iterate(count)
    session.synchronize()
    return clock() - started


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock for measurements: CPU time of this process, or wall-clock time on a GPU."""
    return time.perf_counter if device.type == "cuda" else time.process_time


def exchanging_seconds(ranks: Ranks, size: int, seconds: float) -> float:
    """Return the seconds of one exchange of `size` bytes of gradients between otherwise idle ranks."""
    flat, clock, taken = torch.zeros(size // 4, device=ranks.device), clock_of(ranks.device), []
    ends = time.perf_counter() + seconds
    while ranks.broadcast(time.perf_counter() < ends or len(taken) < 5):
        started = clock()
        for _ in range(5):
            ranks.mean_(flat)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append((clock() - started) / 5)
    return min(taken)


def work(arguments: argparse.Namespace, launch: Launch) -> None:
    """Measure as one of several ranks; rank 0 writes the result to --out."""
    torch.set_num_threads(1)
    with closing(distributed.connect(launch, arguments.device, 300)) as ranks:
        taken, counts = iteration_seconds(plan_of(arguments, ranks), arguments.seconds)
        exchange = exchanging_seconds(ranks, counts["gradient_bytes"], min(arguments.seconds, 2.0))
        if ranks.leads:
            write_json(Path(arguments.out), {"iteration": taken, "exchange": exchange, "backend": ranks.backend})


def measure_ranks(arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Start ranks with torchrun and return rank 0's measurements."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/ranks.json"
        given = {name: value for name, value in vars(arguments).items() if name not in ("ranks", "out", "compile")}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
        options += ["--compile"] if arguments.compile else []
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run([*launcher, __file__, *options, "--out", out], env=environment, check=True)
        result: dict[str, Any] = json.loads(Path(out).read_text())
    return result


def nccl_overhead(arguments: argparse.Namespace) -> float:
    """Return the seconds of an iteration on a GPU whose graph contains a single-rank NCCL all-reduce."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(arguments.port)}
    with closing(distributed.connect(Launch(0, 1), arguments.device, 120)) as ranks:
        return iteration_seconds(plan_of(arguments, ranks), arguments.seconds)[0]


# ---- the table


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return measured and predicted iterations with several ranks here, and predictions for machines with more GPUs."""
    whole = plan_of(arguments, SINGLE)
    on_gpu = whole.device.type == "cuda"
    alone, counts = iteration_seconds(whole, arguments.seconds)
    result: dict[str, Any] = describe_machine(arguments.device) | {
        "env": arguments.env,
        "algo": whole.settings.algo,
        "num_envs": whole.num_envs,
        "batch_size": whole.algo_config.batch_size,
        "device": str(whole.device),
        "cores": whole.hardware.cores,
        **counts,
        "iteration_ms": 1e3 * alone,
        "ranks": [_row(1, alone, alone, alone, 0.0, "", counts, alone)],
    }
    if on_gpu:
        result["iteration_with_nccl_ms"] = 1e3 * nccl_overhead(arguments)
    for ranks in arguments.ranks:
        if ranks == 1:
            continue
        shared = dataclasses.replace(whole, ranks=Ranks(size=ranks))
        share = dataclasses.replace(share_of(shared), ranks=SINGLE)
        own, _ = iteration_seconds(share, arguments.seconds)
        measured = measure_ranks(arguments, ranks)
        contention = ranks if on_gpu else max(1.0, ranks / whole.hardware.cores)
        exchange, taken = measured["exchange"], measured["iteration"] * (1.0 if on_gpu else contention)
        predicted = own * contention + counts["gradient_steps"] * exchange * (1.0 if on_gpu else contention)
        row = _row(ranks, own, predicted, taken, exchange, measured["backend"], counts, alone)
        result["ranks"].append(row)
    result["predicted"] = [
        _predict(counts, alone, local, machines, within, between) for local, machines, within, between in CLUSTERS
    ]
    return result


def _row(
    ranks: int,
    share: float,
    predicted: float,
    measured: float,
    exchange: float,
    backend: str,
    counts: dict[str, int],
    alone: float,
) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "backend": backend,
        "share_ms": 1e3 * share,
        "exchange_ms": 1e3 * exchange,
        "predicted_ms": 1e3 * predicted,
        "measured_ms": 1e3 * measured,
        "env_steps_per_second": counts["steps_per_iteration"] / measured,
        "speed_up": alone / measured,
    }


def _predict(
    counts: dict[str, int], alone: float, local: int, machines: int, within: str, between: str
) -> dict[str, Any]:
    exchange = exchange_seconds(counts["gradient_bytes"], local, machines, within, between)
    iteration = alone + counts["gradient_steps"] * exchange
    gpus = local * machines
    return {
        "gpus": gpus,
        "machines": machines,
        "links": ", ".join(filter(None, (within, between))),
        "exchange_us": 1e6 * exchange,
        "efficiency": alone / iteration,
        "env_steps_per_second": gpus * counts["steps_per_iteration"] / iteration,
    }


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    print(
        f"{result['env']} {result['algo']}, {result['num_envs']:,} environments, batch {result['batch_size']:,} on "
        f"{result['hardware']}: {result['gradient_bytes'] / 1e3:,.0f} kB of gradients, {result['gradient_steps']} steps per "
        f"iteration of {result['iteration_ms']:.2f} ms"
    )
    if "iteration_with_nccl_ms" in result:
        print(f"with NCCL's all-reduce of one rank in the CUDA graph: {result['iteration_with_nccl_ms']:.2f} ms")
    print("ranks  backend  share ms  exchange ms  predicted ms  measured ms  env-steps/s  speed-up")
    for row in result["ranks"]:
        print(
            f"{row['ranks']:5}  {row['backend'] or '-':7}  {row['share_ms']:8.2f}  {row['exchange_ms']:11.3f}  "
            f"{row['predicted_ms']:12.2f}  {row['measured_ms']:11.2f}  {row['env_steps_per_second']:11,.0f}  "
            f"{row['speed_up']:8.2f}"
        )
    print("predicted, each GPU with the work of one here: GPUs, machines, exchange µs, efficiency, env-steps/s, links")
    for row in result["predicted"]:
        print(
            f"{row['gpus']:5}  {row['machines']:5}  {row['exchange_us']:9.1f}  {row['efficiency']:6.1%}  "
            f"{row['env_steps_per_second']:14,.0f}  {row['links']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="snake")
    parser.add_argument("--algo", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-envs", type=int, default=None)
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--compile", action="store_true", help="as in training; takes a minute for each size")
    parser.add_argument("--port", type=int, default=29531, help="for the single rank of NCCL")
    parser.add_argument("--folder", default=tempfile.gettempdir() + "/redline-scaling")
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    if launch := launched():
        work(arguments, launch)
        return
    result = measure(arguments)
    write_json(Path(arguments.out), result)
    show(result)


if __name__ == "__main__":
    main()
