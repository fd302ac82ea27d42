"""Pack a run for examples/agents: `python bench/pack_agent.py RUN FOLDER --command ... --hardware ... [OPTIONS]`.

FOLDER becomes a run folder of at most 2 MB with the files that `redline watch`, `eval` and `export` need, and a model card with
the command that trained it and its score in held-out games. Weights are stored in float32; if that is too large, --int8 and
--rank make them smaller. The agent is then evaluated before and after, on the same games, and refused if it became worse.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from redline.run.agent import Agent, load_agent
from redline.tools.model_card import model_card
from redline.tools.pack import folder_bytes, pack

LIMIT = 2_000_000  # bytes of a folder in examples/agents


def describe(arguments: argparse.Namespace, before: dict[str, Any] | None, after: dict[str, Any]) -> str:
    """Return a line of the model card about how the weights are stored."""
    if before is None:
        return "float32"
    low_rank = f", the largest matrix as a product of rank {arguments.rank}" if arguments.rank else ""
    kept = f"the trained weights score {before['score_mean']:.2f} in the same games, these {after['score_mean']:.2f}"
    return f"int8 with a scale for each row{low_rank}, restored to float32 when loaded; {kept}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--command", required=True, help="that trained the agent, for the model card")
    parser.add_argument("--hardware", required=True, help="it was trained on, for the model card")
    parser.add_argument("--episodes", type=int, default=1000, help="held-out games of the evaluation")
    parser.add_argument("--max-steps", type=int, default=0, help="of the evaluation, where games are very long")
    parser.add_argument("--int8", action="store_true", help="store large tensors in int8")
    parser.add_argument("--rank", type=int, default=0, help="store the largest matrix as a product of this rank")
    parser.add_argument("--checkpoint", default="newest", help="newest, best or a step")
    parser.add_argument("--trust", action="store_true", help="load the modules that a packed run names")
    arguments = parser.parse_args()

    def evaluate(agent: Agent) -> dict[str, Any]:
        return agent.evaluate(arguments.episodes, max_steps=arguments.max_steps) | {"seed": 0}

    packed = pack(
        arguments.run, arguments.folder, arguments.int8, arguments.rank, arguments.checkpoint, arguments.trust
    )
    after, before = evaluate(packed), None
    if arguments.int8 or arguments.rank:
        before = evaluate(load_agent(arguments.run, "cpu", arguments.trust, arguments.checkpoint))
        print(f"score {before['score_mean']:.2f} before, {after['score_mean']:.2f} after")
        if after["score_mean"] < before["score_low"]:
            shutil.rmtree(arguments.folder)
            raise SystemExit(
                f"Packed like this, the agent scores less than {before['score_low']:.2f}; nothing was kept."
            )
    record = {"run": str(arguments.folder), "command": arguments.command, "evaluation": after}
    record |= {"hardware": arguments.hardware, "weights": describe(arguments, before, after)}
    (arguments.folder / "README.md").write_text(model_card(packed, record), encoding="utf-8")
    size = folder_bytes(arguments.folder)
    print(f"{arguments.folder}: {size:,} bytes, score {after['score_mean']:.2f}, won {after['win_rate']:.2%}")
    if size > LIMIT:
        raise SystemExit(f"{arguments.folder} has more than {LIMIT:,} bytes; add --int8, or --int8 --rank.")


if __name__ == "__main__":
    main()
