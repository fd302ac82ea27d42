"""Break down an iteration on a GPU by kernel: `python bench/kernels.py [--only NAME] [--out FILE]`.

For each learner of bench/learners.py, for DQN on Tetris and for games alone, one iteration of the captured graph is traced.
Kernels are summed by name; the compiler's names show which operations it fused. The table shows each kernel's milliseconds per
iteration, number of launches, and share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from learners import LEARNERS, make_session
from redline import recipes
from redline.engine import fast
from redline.envs import make_rules
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools.bench import EnvLoop, describe_machine, rate
from tetris import Greedy

GAMES = {"snake-65536": ("snake", 65536), "snake-1048576": ("snake", 1048576), "tetris-65536": ("tetris", 65536)}
GREEDY = "tetris-greedy-65536"  # a linear controller, greedy over all afterstates
AFTERSTATES = "tetris-dqn-16384"  # DQN on afterstates, with default settings except for the sizes
CASES = (*LEARNERS, *GAMES, GREEDY, AFTERSTATES)
WARM_UP = 8  # iterations, for compilation and graph capture


def cases(name: str) -> tuple[Callable[[], None], int, Callable[[], None]]:
    """Return a function that runs one iteration of a case, its environment steps, and a function that closes the case."""
    if name in LEARNERS:
        session = make_session(name)
        return lambda: session.iterate(1), session.steps_per_iteration, session.close
    if name == AFTERSTATES:
        session = afterstates_session(16384)
        return lambda: session.iterate(1), session.steps_per_iteration, session.close
    env, games = GAMES.get(name, ("tetris", 65536))
    device = torch.device("cuda")
    rules = make_rules(env, {})
    compiler = fast.Compiler(True, print, device, recipes.compiler_options(rules.game))
    if name == GREEDY:
        return Greedy(rules, "DT-10", games, device, compiler, graph=True).call, games, lambda: None
    return EnvLoop(rules, games, device, compiler, graph=True).call, games, lambda: None


def afterstates_session(games: int) -> Session:
    """Return a session of DQN on Tetris afterstates, with one sample learned per step played."""
    options = {"batch_size": games, "n_step": 1, "learning_starts": 0, "replay_capacity": 64 * games, "updates": 1}
    settings = Settings(
        env="tetris",
        algo="dqn",
        num_envs=games,
        device="cuda",
        compile=True,
        graph=True,
        curriculum=False,
        algo_options=options,
    )
    return Session(resolve(settings), print)


def kernels(iterate: Callable[[], None]) -> Iterator[tuple[str, float, int]]:
    """Yield every kernel's name, milliseconds and launches in one iteration, the most expensive first."""
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
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--top", type=int, default=14)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    record: dict[str, Any] = {**describe_machine("cuda"), "cases": {}}
    for name in arguments.only or CASES:
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
