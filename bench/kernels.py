"""Where the time of an iteration goes on a GPU, kernel by kernel: `python bench/kernels.py [--only NAME] [--out FILE]`.

For each learner of bench/learners.py, and for Snake played at random, one iteration of the captured graph is traced. Kernels
are summed by name; what the compiler fused is told by the name that it gave. The table shows the milliseconds of each kernel
in an iteration, how often it was launched, and its share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from learners import LEARNERS, make_session
from redline.engine import fast
from redline.envs import make_rules
from redline.tools.bench import EnvLoop, describe_machine, rate

GAMES = {"snake-65536": ("snake", 65536), "snake-1048576": ("snake", 1048576), "tetris-65536": ("tetris", 65536)}
WARM_UP = 8  # iterations: compilation and graph capture


def cases(name: str) -> tuple[Callable[[], None], int, Callable[[], None]]:
    """Return one iteration of a case, its environment steps, and what closes it."""
    if name in LEARNERS:
        session = make_session(name)
        return lambda: session.iterate(1), session.steps_per_iteration, session.close
    env, games = GAMES[name]
    device = torch.device("cuda")
    played = EnvLoop(make_rules(env, {}), games, device, fast.Compiler(True, print, device), graph=True)
    return played.call, games, lambda: None


def kernels(iterate: Callable[[], None]) -> Iterator[tuple[str, float, int]]:
    """Yield name, milliseconds and launches in one iteration of every kernel, the most expensive first."""
    repeats = 5
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            iterate()
        torch.cuda.synchronize()
    events = [event for event in trace.key_averages() if event.self_device_time_total > 0]
    for event in sorted(events, key=lambda event: -event.self_device_time_total):
        yield event.key, event.self_device_time_total / 1000 / repeats, event.count // repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*LEARNERS, *GAMES], action="append")
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--top", type=int, default=14)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    record: dict[str, Any] = {**describe_machine("cuda"), "cases": {}}
    for name in arguments.only or [*LEARNERS, *GAMES]:
        iterate, steps, close = cases(name)
        speed = steps * rate(iterate, arguments.seconds, torch.device("cuda"), warm_up=WARM_UP)
        found = list(kernels(iterate))
        close()
        total = sum(time for _, time, _ in found)
        print(f"\n{name}: {speed / 1e6:.1f} M env-steps/s, {1000 * steps / speed:.3f} ms, kernels {total:.3f} ms")
        for kernel, time, count in found[: arguments.top]:
            print(f"  {time:8.4f} ms {100 * time / total:5.1f} % {count:5}  {kernel[:130]}")
        record["cases"][name] = {
            "env_steps_per_second": speed,
            "env_steps": steps,
            "kernels_ms": total,
            "kernels": [{"name": kernel[:160], "ms": time, "launches": count} for kernel, time, count in found[:40]],
        }
        if arguments.out:
            with open(arguments.out, "w") as file:
                json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
