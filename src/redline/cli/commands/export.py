"""`redline export RUN`: write an agent to a file that runs without Redline, with a model card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.cli import streams
from redline.cli.command import Command, Request, check_least, options_of, show_progress
from redline.core.errors import UserError
from redline.run.run_folder import read_config

if TYPE_CHECKING:
    from redline.run.agent import Agent
    from redline.tools.export import Samples

_FORMATS = ("onnx", "torch")


@dataclass(frozen=True)
class ExportOptions:
    """Options of `redline export`."""

    format: str = "onnx"  # onnx, or torch for a program of torch.export
    out: str | None = None  # folder for the files; by default `export` in the run folder
    int8: bool = False  # also write an int8 version, if its score in --episodes games is at most 5 % lower
    episodes: int = 1000  # held-out games for the scores of --int8 and of the model card; 0: none
    seed: int = 0  # which set of held-out games
    checkpoint: str = "newest"  # newest, best (by --eval-every) or the step of a checkpoint
    trust: bool = False  # import the modules that a run of somebody else names as environment or algorithm

    def __post_init__(self) -> None:
        check_least(self, episodes=0, seed=0)
        if self.format not in _FORMATS:
            raise UserError(f"format is '{self.format}'; expected one of {', '.join(_FORMATS)}.")
        if self.int8 and self.format != "onnx":
            raise UserError("int8 is set, but only ONNX files are quantised; use --format onnx.")
        if self.int8 and not self.episodes:
            raise UserError("int8 is set, but episodes is 0: without games nobody knows what it costs.")


def run(request: Request) -> int:
    """Export a run's agent, check the file against the agent, and write a model card next to it."""
    options, folder = request.build(ExportOptions), Path(request.arguments[0])
    read_config(folder)
    out = Path(options.out) if options.out else folder / "export"
    with show_progress(f"export · {folder}") as screen:
        from redline.run.agent import load_agent
        from redline.tools import export
        from redline.tools.model_card import model_card

        agent = load_agent(folder, "cpu", options.trust, options.checkpoint)
        spec = agent.rules.game.spec(agent.rules.config)
        out.mkdir(parents=True, exist_ok=True)
        screen.start_activity("Collecting states of played games")
        samples = export.collect_samples(agent)
        screen.start_activity("Exporting")
        record = export.export(agent, out / export.FORMATS[options.format], options.format, samples)
        record |= {"run": str(folder), "env_steps": agent.env_steps, "checkpoint": agent.checkpoint}
        record |= {"obs_shape": list(spec.obs_shape), "num_actions": spec.num_actions}
        record["obs_dtype"] = str(spec.obs_dtype).removeprefix("torch.")

        def play(title: str, run: Any) -> dict[str, Any]:
            screen.start_activity(title)
            count = options.episodes
            return export.score(agent, run, count, options.seed, lambda done: screen.count(done, count, "games"))

        if options.format == "onnx" and options.episodes:
            record["evaluation"] = play("Playing with the file", export.onnx_runner(out / export.FORMATS["onnx"]))
            record["evaluation"]["seed"] = options.seed
        if options.int8:
            record["int8"] = _quantize(agent, out, samples, record, play)
    (out / "README.md").write_text(model_card(agent, record), encoding="utf-8")
    record["card"] = str(out / "README.md")
    if request.json:
        request.print_json(record)
    else:
        streams.write(_summary(record))
    return 0


def _quantize(
    agent: Agent, out: Path, samples: Samples, record: dict[str, Any], play: Callable[[str, Any], dict[str, Any]]
) -> dict[str, Any]:
    """Write the int8 version and return its score, size and speed; raise UserError if its score is too low."""
    from redline.tools import export

    plain, small = Path(record["file"]), out / "agent-int8.onnx"
    export.quantize(plain, small, samples)
    before, run = record["evaluation"], export.onnx_runner(small)
    after = play("Playing with the int8 file", run)
    lost = export.relative_loss(before, after)
    if lost > export.ALLOWED_LOSS:
        small.unlink()
        name = agent.rules.game.spec(agent.rules.config).score_name
        raise UserError(
            f"In int8 the mean {name} falls from {before['score_mean']:.2f} to {after['score_mean']:.2f}, by "
            f"{100 * lost:.1f} %; at most {100 * export.ALLOWED_LOSS:.0f} % are allowed, so that the int8 file was removed. "
            f"{plain} is complete."
        )
    seconds = export.latencies([plain, small], samples)
    return {
        "file": str(small),
        "bytes": export.file_size(small),
        "episodes": after["episodes"],
        "score_mean": after["score_mean"],
        "score_low": after["score_low"],
        "score_high": after["score_high"],
        "fp32_score_mean": before["score_mean"],
        "seconds": {size: int8 for size, (_, int8) in seconds.items()},
        "fp32_seconds": {size: fp32 for size, (fp32, _) in seconds.items()},
        "speedup": {size: fp32 / int8 for size, (fp32, int8) in seconds.items()},
    }


def _summary(record: dict[str, Any]) -> str:
    from redline.tools.wording import checkpoint_name

    lines = [f"{record['file']}  {record['bytes'] / 1e3:,.0f} kB, chooses as the agent in {record['checked']:,} states"]
    lines.append(f"  checkpoint {checkpoint_name(record)}")
    if "evaluation" in record:
        evaluation = record["evaluation"]
        lines.append(f"  score {evaluation['score_mean']:.2f} in {evaluation['episodes']:,} games")
    if "int8" in record:
        int8 = record["int8"]
        speeds = ", ".join(f"{x:.2f}x in batches of {size}" for size, x in int8["speedup"].items())
        lines.append(f"{int8['file']}  {int8['bytes'] / 1e3:,.0f} kB")
        lines.append(f"  score {int8['score_mean']:.2f} in {int8['episodes']:,} games; speed {speeds}")
    return "\n".join([*lines, f"{record['card']}  model card", ""])


COMMAND = Command(
    "write an agent as ONNX or torch program, also in int8", run, "RUN", options_of(ExportOptions), position=5
)
