"""Compare frames per second with actions chosen in the actors, or centrally on the learner's device.

python bench/inference.py --env mario --out inference-mario.json [--seconds 8] [--set env.sticky=0.25]

Settings are the defaults. Takes about a minute for one environment on 16 cores and a GPU, including compilation.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from redline.run.resolve import resolve
from redline.run.settings import Settings
from redline.tools.bench import describe_machine
from redline.tools.bench_collect import measure_envs, train

FIGURES = ("actor_busy", "learner_wait", "policy_lag", "queue")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="mario")
    parser.add_argument("--algo", default="ppo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--num-envs", type=int)
    parser.add_argument("--actors", type=int)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="option of the environment or algorithm"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pairs = dict(pair.split("=", 1) for pair in options.set)
    settings = Settings(
        env=options.env,
        algo=options.algo,
        device=options.device,
        num_envs=options.num_envs,
        actors=options.actors,
        env_options={name.removeprefix("env."): x for name, x in pairs.items() if name.startswith("env.")},
        algo_options={name: x for name, x in pairs.items() if not name.startswith("env.")},
    )
    plan = resolve(settings)
    actors = max(plan.actors, 1)
    settings = replace(settings, actors=actors)
    alone = measure_envs(replace(plan, actors=actors), actors, min(options.seconds, 4.0), 1, preprocessed=True)["value"]
    record: dict[str, Any] = describe_machine(str(plan.device)) | {
        "env": options.env,
        "algo": options.algo,
        "num_envs": plan.num_envs,
        "num_actors": actors,
        "default": plan.inference,
        "environments_alone": alone,
        "inference": {},
    }
    for inference in ("actors", "central"):
        measured = train(replace(settings, inference=inference), options.seconds, 1)
        figures = {name: measured[name] for name in FIGURES if name in measured}
        record["inference"][inference] = {"frames_per_second": measured["frames"]["value"], **figures}
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{options.env}, {options.algo}, {plan.num_envs} environments, {actors} actors, {plan.device}")
    print(f"{'environments alone, preprocessed':34}{alone:>10,.0f} frames/s")
    for inference in ("actors", "central"):
        row = record["inference"][inference]
        rest = ", ".join(f"{name} {row[name]:.2f}" for name in FIGURES if name in row)
        print(f"{'actions chosen: ' + inference:34}{row['frames_per_second']:>10,.0f} frames/s  {rest}")


if __name__ == "__main__":
    main()
