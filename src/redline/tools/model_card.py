"""Model cards for exported or packed agents: Markdown with the front matter that the Hugging Face Hub reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from redline.run.agent import Agent
from redline.run.progress import quantity
from redline.run.trust import outside_code
from redline.tools.wording import checkpoint_name, per_game_over


def model_card(agent: Agent, exported: dict[str, Any]) -> str:
    """Return the card of an agent. exported: the result of its export; without a `file`, it was packed to `run`."""
    config, evaluation = agent.config, exported.get("evaluation")
    name = f"{config['algo'].upper()} on {config['env']}"
    lines = ["---", *_front_matter(name, config, evaluation), "---", "", f"# {name}", ""]
    lines += [f"Trained with Redline for {quantity(agent.env_steps)} steps."]
    lines += ["", "| | |", "|---|---|", *_facts(agent, exported), ""]
    lines += ["## Files", "", *_files(exported), ""] if "file" in exported else []
    lines += ["## Use", "", *_usage(exported, outside_code(config)), "", "## Settings", ""]
    settings = {
        key: config[key] for key in ("env", "env_options", "algo", "algo_options", "num_envs", "seed", "precision")
    }
    lines += ["```json", json.dumps(settings, indent=2), "```", ""]
    return "\n".join(lines)


def _front_matter(name: str, config: dict[str, Any], evaluation: dict[str, Any] | None) -> list[str]:
    lines = ["library_name: redline", "tags:", "- reinforcement-learning", "- deep-reinforcement-learning"]
    lines += [f"- {json.dumps(config['algo'])}", f"- {json.dumps(config['env'])}"]
    if evaluation is None:
        return lines
    score = f"{evaluation['score_mean']:.2f} +/- {evaluation['score_ci95']:.2f}"
    return [
        *lines,
        "model-index:",
        f"- name: {json.dumps(name)}",
        "  results:",
        "  - task: {type: reinforcement-learning, name: reinforcement-learning}",
        f"    dataset: {{type: {json.dumps(config['env'])}, name: {json.dumps(config['env'])}}}",
        "    metrics:",
        f"    - {{type: mean_score, value: {json.dumps(score)}, verified: false}}",
    ]


def _facts(agent: Agent, exported: dict[str, Any]) -> list[str]:
    config, evaluation = agent.config, exported.get("evaluation")
    rows = {"command": f"`{exported['command']}`"} if "command" in exported else {}
    rows |= {"environment": config["env"], "algorithm": config["algo"], "seed of training": config["seed"]}
    rows |= {"checkpoint": checkpoint_name({"env_steps": agent.env_steps, "checkpoint": agent.checkpoint})}
    rows |= {"trained on": f"{exported.get('hardware', config['device'])}, {config['precision']}"}
    result = _read(agent.path / "result.json")
    if "seconds" in result:
        before = f" ({result['preparation_seconds']:,.0f} s before training)" if "preparation_seconds" in result else ""
        rows["wall-clock"] = f"{result['seconds']:,.0f} s{before}, {quantity(result['env_steps_per_second'])} steps/s"
    if evaluation:
        name = agent.rules.game.spec(agent.rules.config).score_name
        interval = (
            f"{evaluation['score_low']:.2f} to {evaluation['score_high']:.2f}" if evaluation["score_low"] else "-"
        )
        games = f"{evaluation['episodes']:,} held-out games, greedy, seed {evaluation['seed']}"
        rows[f"mean {name}"] = f"{evaluation['score_mean']:.2f} (95 % interval {interval}; {games})"
        if evaluation["finished"] < evaluation["episodes"]:  # unfinished games count with their score so far
            rows[f"{name} per game over"] = per_game_over(evaluation)
        if evaluation.get("win_rate"):
            low, high = 100 * evaluation["win_rate_low"], 100 * evaluation["win_rate_high"]
            rows["games won"] = f"{100 * evaluation['win_rate']:.2f} % (95 % interval {low:.2f} to {high:.2f} %)"
    if "weights" in exported:
        rows["weights"] = exported["weights"]
    return [f"| {key} | {value} |" for key, value in rows.items()]


def _files(exported: dict[str, Any]) -> list[str]:
    checked = f"chooses as the agent does in {exported['checked']:,} states"
    lines = [f"- `{Path(exported['file']).name}`: {exported['bytes'] / 1e3:,.0f} kB, {checked}."]
    if "int8" in exported:
        int8 = exported["int8"]
        speeds = ", ".join(f"{ratio:.2f} times as fast in batches of {size}" for size, ratio in int8["speedup"].items())
        score = f"score {int8['score_mean']:.2f} against {int8['fp32_score_mean']:.2f} in {int8['episodes']:,} games"
        lines.append(f"- `{Path(int8['file']).name}`: int8, {int8['bytes'] / 1e3:,.0f} kB, {score}; {speeds}.")
    return lines


def _usage(exported: dict[str, Any], outside: list[str]) -> list[str]:
    if "file" not in exported:
        run, trust = exported["run"], " --trust" * bool(outside)
        reason = ["", f"`--trust` allows loading {' and '.join(outside)}."] if outside else []
        return ["```bash", f"redline watch {run}{trust}", f"redline eval {run}{trust} --device cpu", "```", *reason]
    name = Path(exported["file"]).name
    if exported["format"] == "onnx":
        code = [
            "import numpy as np",
            "import onnxruntime",
            "",
            f'session = onnxruntime.InferenceSession("{name}")',
            f"obs = np.zeros({(1, *exported['obs_shape'])}, np.{exported['obs_dtype']})",
            f"legal = np.ones((1, {exported['num_actions']}), bool)  # actions that are allowed",
            'action, scores = session.run(None, {"obs": obs, "legal": legal})',
        ]
    else:
        code = [
            "import torch",
            "",
            f'agent = torch.export.load("{name}").module()',
            f"obs = torch.zeros({(1, *exported['obs_shape'])}, dtype=torch.{exported['obs_dtype']})",
            f"legal = torch.ones(1, {exported['num_actions']}, dtype=torch.bool)  # actions that are allowed",
            "action, scores = agent(obs, legal)",
        ]
    return ["```python", *code, "```"]


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
