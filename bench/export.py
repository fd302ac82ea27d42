"""Compare int8 with fp32 in ONNX on this CPU: score, speed, choices. `python bench/export.py RUN[@CHECKPOINT]... --out FILE`.

Each RUN is exported by `redline export --int8`, which plays 1,000 held-out games with both files. Speed is the ratio of the
fastest calls, made in turn, in several rounds. A convolutional network as large as the Snake recipe's for a large GPU is also
measured, with random weights: its speed does not depend on them, and it has no score.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from redline import cli
from redline.run.agent import Agent, build_agent, load_agent
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools import export

ROUNDS = 9
CNN = {"net": "cnn", "channels": (64, 64, 64), "stride": 1, "hidden": (512,)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--episodes", default="1000")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory() as name:
        for number, word in enumerate(options.runs):
            run, _, checkpoint = word.partition("@")
            folder, checkpoint = Path(name) / str(number), checkpoint or "newest"
            words = ["export", run, "--checkpoint", checkpoint, "--int8", "--episodes", options.episodes]
            record = exported([*words, "--out", str(folder), "--json"])
            agent = load_agent(Path(run), "cpu", checkpoint=checkpoint)
            records.append(describe(agent) | scores(record) | speeds(agent, folder))
            print(json.dumps(records[-1]), flush=True)
        folder = Path(name) / "cnn"
        folder.mkdir()
        agent = untrained_cnn()
        samples = export.collect_samples(agent)
        export.export(agent, folder / "agent.onnx", "onnx", samples)
        export.quantize(folder / "agent.onnx", folder / "agent-int8.onnx", samples)
        records.append(describe(agent) | {"score": None} | speeds(agent, folder))
        print(json.dumps(records[-1]), flush=True)
    options.out.write_text(json.dumps({"networks": records}, indent=1) + "\n", encoding="utf-8")


def exported(words: list[str]) -> dict[str, Any]:
    """Run the command and return its JSON."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main(words)
    record: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return record


def describe(agent: Agent) -> dict[str, Any]:
    options, weights = agent.env_options, sum(weight.numel() for weight in agent.net.parameters())
    board = f"{options['width']}x{options['height']}"
    kind = "cnn" if any(isinstance(layer, torch.nn.Conv2d) for layer in agent.net.modules()) else "mlp"
    return {"env": agent.config["env"], "board": board, "view": options["view"], "net": kind, "weights": weights}


def scores(record: dict[str, Any]) -> dict[str, Any]:
    names = ("score_mean", "score_low", "score_high", "episodes")
    fp32, int8 = ({name: figures[name] for name in names} for figures in (record["evaluation"], record["int8"]))
    return {"env_steps": record["env_steps"], "score": {"fp32": fp32, "int8": int8}}


def speeds(agent: Agent, folder: Path) -> dict[str, Any]:
    """Return the files' sizes, the share of equal choices, and milliseconds and ratios of every round, by batch size."""
    files = [folder / "agent.onnx", folder / "agent-int8.onnx"]
    samples = export.collect_samples(agent)
    fp32, int8 = (export.onnx_runner(file)(*samples)[0] for file in files)
    rounds = [export.latencies(files, samples) for _ in range(ROUNDS)]
    return {
        "bytes": [export.file_size(file) for file in files],
        "same_actions": float((fp32 == int8).float().mean()),
        "fp32_ms": {size: sorted(1e3 * one[size][0] for one in rounds) for size in rounds[0]},
        "int8_ms": {size: sorted(1e3 * one[size][1] for one in rounds) for size in rounds[0]},
        "speedup": {size: sorted(one[size][0] / one[size][1] for one in rounds) for size in rounds[0]},
    }


def untrained_cnn() -> Agent:
    """Return a Snake agent with random weights and the network that the recipe chooses for a large GPU."""
    settings = Settings(
        "snake", "ppo", num_envs=8, device="cpu", compile=False, threads=1, env_options={"view": "wrapped"}
    )
    settings.algo_options.update(CNN)
    with closing(Session(resolve(settings), print)) as session:
        model = {name: weights.clone() for name, weights in session.tensors()["model"].items()}
        plan = session.plan
    config = {"env": "snake", "algo": "ppo", "algo_options": vars(plan.algo_config)}
    return build_agent(Path("unused"), config, plan.rules, model, 0, torch.device("cpu"))


if __name__ == "__main__":
    main()
