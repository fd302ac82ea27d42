"""Make docs/benchmarks.md from bench/results/*.json: `python bench/make_benchmarks_page.py [--check]`.

Every result file has an extractor below, named in EXTRACTORS, which turns it into rows. Files from `redline bench --out`,
bench/tune.py, bench/precision.py and bench/soak.py are named bench-*, tune-*, precision-* and soak-*.json and share one
extractor each; those from bench/agents.py are named agents-*.json, and bench/plot_agents.py draws their curves. A row takes its
commit, date and hardware from its record, or from the file. `--check` writes nothing and fails if the page is out of date.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"

AGENTS, LEARNING, GYMNASIUM, SPEED, PEERS, REPLAY, COLLECTING, STARTING, EXPORTING, FAULTS = (
    "Agents, seed by seed",
    "What agents learn",
    "Gymnasium environments with default settings",
    "Speed of games and learners",
    "Beside other libraries",
    "Replay",
    "Collecting from CPU environments",
    "Starting",
    "Exported agents",
    "Faults survived",
)
INTRODUCTION = {
    AGENTS: "Made by `bench/agents.py`: each seed trains alone by the command given and plays held-out games greedily. The "
    "interquartile mean over the seeds, its 95 % bootstrap interval, and how many seeds reach the bar, where one was set "
    "before the first run. Times are those of the training command, start and compilation "
    "included; CPU seconds are what counts where other work shared the machine. "
    "The curves are of games in training, which explore. Agents that are part of the repository are linked.",
    LEARNING: "Evaluated on held-out seeds, greedily unless a row says otherwise.",
    GYMNASIUM: "`redline train gym:ID` beside Stable-Baselines3 with rl-zoo's settings (its defaults for Taxi and FrozenLake), "
    "which trains for as many CPU seconds as Redline's longest run (`bench/gym_envs.py`). Measured on cores shared with other "
    "work, hence in CPU seconds of the process, start included; three minutes of one idle core are 180.",
    SPEED: "Environment steps per second, after compilation, with observations and auto-reset.",
    PEERS: "The same machine and the same run for both sides.",
    REPLAY: "Transitions per second that are sampled and delivered to the device, and training with each kind of memory. "
    "The two memmap sampling rates come from a benchmark that sampled from a nearly empty file; they must be measured again.",
    COLLECTING: "Frames per second, four frames a step in Super Mario Bros., with PPO.",
    STARTING: "From the command to the first gradient step.",
    EXPORTING: "ONNX in int8 against fp32 on one thread of the CPU (`bench/export.py`): the fastest of "
    "calls made in turn, median and range of several rounds.",
    FAULTS: "Runs killed at random moments and continued (`bench/kills.py`); damaged files (`bench/damage.py`); "
    "CartPole with PPO and two actors while `make soak` injects faults: kills, preemptions, a full disk, damaged "
    "checkpoints, NaN weights, hung environments. A fault is recovered once training has passed the step it had reached.",
}
Record = Mapping[str, Any]


class Row(NamedTuple):
    """One line of a table."""

    section: str
    what: str
    result: str
    record: Record = {}  # where commit, date and hardware are looked up first; then in the file  # noqa: RUF012
    picture: str = ""  # in docs/images, shown below the table


def quantity(value: float) -> str:
    """Return a number with three significant digits and a suffix: 1.34 G, 19.9 M, 162 k."""
    for factor, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= factor:
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def rate(value: float) -> str:
    """Return a fraction as a percentage, with two decimals if it is close to 100 %."""
    return f"{100 * value:.{2 if 0.99 <= value < 1 else 1}f} %"


def span(values: list[float], text: Callable[[float], str]) -> str:
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"


# ---- learning


AGENT_UNITS = {
    "win_rate": "won",
    "lowest_win_rate": "won of the level that is won least",
    "score_mean": "mean score",
    "score_censored": "score per game over",
}


def score(value: float) -> str:
    """Return a score with as many decimals as tell agents apart: none from 1,000 on, two below 10."""
    decimals = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{decimals}f}"


def agents(file: Record) -> Iterator[Row]:
    """Return a row for each agent in a file written by bench/agents.py."""
    for name, row in file["rows"].items():
        runs = [run for run in row["runs"] if "error" not in run]
        if not runs:
            continue
        figure = row["figure"]
        unit = AGENT_UNITS[figure]
        is_rate = figure.endswith("win_rate")
        text = rate if is_rate else score
        seeds, failed = row["summary"], len(row["runs"]) - len(runs)
        card = f"examples/agents/{name}/README.md"
        same = (ROOT / card).exists() and row["command"] in (ROOT / card).read_text(encoding="utf-8")
        kept = f", [agent](../{card})" if same else ""
        count = (
            f"{len(runs)} seeds, {row['games']:,} games each" if len(runs) > 1 else f"one seed, {row['games']:,} games"
        )
        what = f"{row['title']}: `{row['command']}`, {count}{kept}"
        result = f"{text(seeds['iqm'])} {unit}"
        if len(runs) > 2:  # two seeds say nothing about others
            result += f" ({text(seeds['low'])} to {text(seeds['high'])})"
        if "reached" in seeds:
            bar = percent(row["bar"]) if is_rate else text(row["bar"])
            result += f"; {seeds['reached']} of {len(row['runs'])} reach {bar}"
        result += f"; {failed} failed" if failed else ""
        for level in runs[0].get("levels", ()):
            result += f"; {level} {span([run['levels'][level]['win_rate'] for run in runs], rate)}"
        wins = [run["steps_per_win"] for run in runs if run["steps_per_win"]]
        result += f"; {span(wins, lambda x: f'{x:,.0f}')} steps a win" if wins else ""
        result += f"; {quantity(statistics.mean(run['env_steps'] for run in runs))} env-steps"
        times = f"{span([run['wall_seconds'] for run in runs], lambda x: f'{x:.0f}')} s"
        if all(run["cpu_seconds"] for run in runs):
            times += f" ({span([run['cpu_seconds'] for run in runs], lambda x: f'{x:.0f}')} CPU seconds)"
        notes = dict.fromkeys(run["note"] for run in runs if run.get("note"))
        commits = ", ".join(dict.fromkeys(str(run["commit"]) for run in runs))
        record = {"commit": commits, "date": max(run["date"] for run in runs)}
        picture = f"learning-{name}.png" if any(run.get("curve") for run in runs) else ""
        yield Row(AGENTS, what, "; ".join([f"{result} in {times}", *notes]), record, picture)


def snake_6x6(file: Record) -> Iterator[Row]:
    for record, runs in (
        (file, [run["filled_of_2048"] for run in file["runs"]]),
        (file["again"], file["again"]["filled_of_2048"]),
    ):
        commit = record.get("commit", file["runs"][0]["tree"])
        what = "Snake 6x6 with PPO, 5 minutes, three seeds: boards filled of 2,048 games"
        yield Row(LEARNING, what, span(runs, percent), {"commit": commit})


def snake_10x10(file: Record) -> Iterator[Row]:
    seeds = file["five_seeds"]["runs"]
    yield Row(
        LEARNING,
        "Snake 10x10 with PPO, CNN 3x64 + 512, 3.5 minutes, five seeds: boards filled of 4,096 games",
        f"{span([run['filled_of_4096'] for run in seeds], percent)}, "
        f"{span([run['steps_per_filled_game'] for run in seeds], lambda x: f'{x:.0f}')} steps each, "
        f"at most {file['five_seeds']['longest_wall_seconds']} s",
        {"commit": ", ".join(dict.fromkeys(run["tree"] for run in seeds))},
    )
    for run in file["runs"]:
        net = run["net"].replace("practice", "backplay")
        algo = "" if net.startswith("PQN") else "PPO, "
        result = f"{percent(run['filled_of_4096'])}, {run['steps_per_filled_game']:.0f} steps each"
        record = {"commit": run["tree"]} | ({"date": run["date"]} if "date" in run else {})
        yield Row(LEARNING, f"Snake 10x10 with {algo}{net}, one seed: boards filled of 4,096 games", result, record)


def snake_20x20(file: Record) -> Iterator[Row]:
    result = f"{percent(file['filled_of_1024'])}, {file['foods_mean']:.0f} foods of 397 on average"
    yield Row(LEARNING, "Snake 20x20 with PPO, 8 minutes, one seed: boards filled of 1,024 games", result)


def make_train(file: Record) -> Iterator[Row]:
    result = f"{file['score_mean']:.1f} ± {file['score_ci95']:.1f} foods, {file['whole_command_seconds']:.0f} s in all"
    yield Row(LEARNING, "`make train`: Snake 10x10 with PPO, 3 minutes, mean of 256 games", result)
    again = file["again"]
    foods = [run["score_mean"] for run in again["runs"]]
    result = f"{span(foods, lambda x: f'{x:.1f}')} foods, {statistics.mean(foods):.1f} on average"
    what = f"the same, one thread, {len(foods)} runs of {len({run['seed'] for run in again['runs']})} seeds"
    yield Row(LEARNING, what, result, {"commit": again["commit"], "date": again["date"]})


def trained(file: Record) -> Iterator[Row]:
    algo, minutes = file["algo"].upper(), file["settings"]["minutes"]
    what = f"Snake 10x10 with {algo}, {minutes:g} minutes, mean of {file['eval_episodes']:,} games"
    yield Row(LEARNING, what, f"{file['score_mean']:.1f} ± {file['score_ci95']:.1f} foods")
    speed = f"{quantity(file['env_steps_per_second'])} env-steps/s, {quantity(file['samples_per_second'])} gradient samples/s"
    what = (
        f"{algo} on Snake 10x10 over {minutes:g} minutes, compilation included, {file['settings']['num_envs']:,} games"
    )
    yield Row(SPEED, what, speed)
    yield Row(STARTING, f"compiled {algo}, Snake 10x10", f"{file['seconds_to_first_update']:.0f} s")


def started(file: Record) -> Iterator[Row]:
    caches = file.get("caches") or ("warm" if file["seconds"] < 10 else "cold")
    what = f"compiled {file['algo'].upper()}, Snake 10x10, {caches} cache"
    yield Row(STARTING, what, f"{file['seconds_to_first_update']:.0f} s")


def gymnasium_envs(file: Record) -> Iterator[Row]:
    for env in dict.fromkeys(run["env"] for run in file["runs"]):
        runs = [run for run in file["runs"] if run["env"] == env]
        for system, algo in dict.fromkeys((run["system"], run["algo"]) for run in runs):
            same = [run for run in runs if (run["system"], run["algo"]) == (system, algo)]
            solved = sum(run["score"] >= run["solved_from"] for run in same)
            by = "`redline train`" if system == "redline" else "Stable-Baselines3"
            what = f"{env.rpartition(':')[2]} by {by} ({algo.upper()}), one thread: mean of 100 games"
            steps = sum(run["steps"] for run in same) / len(same)
            result = f"{span([run['score'] for run in same], lambda x: f'{x:.4g}')}; solved (from {same[0]['solved_from']:g}) "
            result += f"by {solved} of {len(same)} seeds; {quantity(steps)} steps, "
            result += f"{span([run['cpu_seconds'] for run in same], lambda x: f'{x:.0f}')} CPU seconds"
            yield Row(GYMNASIUM, what, result)


def starts(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/start.py wrote."""
    load = max(file["load_average"])
    busy = f", load average {load:.0f}" if load > 1.5 else ""
    for row in file["rows"]:
        tree = "" if row["tree"] == "this" else ", the tree compared with"
        what = f"{row['algo'].upper()}, {file['env'].capitalize()} 10x10, {row['caches']} caches{tree}{busy}"
        compiled = f"; compiled after {row['compiled_seconds']:.0f} s" if "compiled_seconds" in row else ""
        processor = f"{row['processor_seconds']:.1f} s of processor time"
        yield Row(STARTING, what, f"{row['seconds']:.1f} s ({processor}){compiled}")


def cartpole(file: Record) -> Iterator[Row]:
    for algo in dict.fromkeys(run["algo"] for run in file["runs"]):
        runs = [run for run in file["runs"] if run["algo"] == algo]
        result = f"return {span([run['return_mean_of_256'] for run in runs], lambda x: f'{x:.0f}')}"
        seconds = span([run["wall_seconds"] for run in runs], lambda x: f"{x:.0f}")
        yield Row(
            LEARNING, f"CartPole-v1 with {algo.upper()}, three seeds, 256 games each", f"{result}, {seconds} s in all"
        )


def mario(file: Record) -> Iterator[Row]:
    for evaluation in file["evaluations"]:
        actions = "greedy" if evaluation["actions"] == "greedy" else "actions sampled"
        what = f"Super Mario Bros. 1-1 with PPO, sticky actions, 17 minutes, {actions}, seed {evaluation['seed']} of evaluation"
        result = f"flag in {evaluation['flags_of_100']} of 100 games, furthest x {evaluation['furthest_x']:,.0f}"
        yield Row(LEARNING, what, result)


def tetris_learning(file: Record) -> Iterator[Row]:
    for name, run in file["runs"].items():
        evaluation = next(
            (value for key, value in run.items() if key.startswith("eval") and isinstance(value, dict)), run
        )
        if evaluation["finished"] == evaluation.get("episodes", evaluation.get("eval_episodes")):
            result = f"{evaluation['score_mean']:,.0f} ± {evaluation['score_ci95']:,.0f} lines"
        else:
            result = (
                f"{evaluation['score_censored']:,.0f} lines per game over ({evaluation['game_overs']:,} game overs)"
            )
        yield Row(LEARNING, f"Tetris {name}, PPO", result)


def tetris_controllers(file: Record) -> Iterator[Row]:
    for board, controllers in file["boards"].items():
        for name, played in controllers.items():
            result = f"{played['score_censored']:,.0f} lines per game over ({played['game_overs']:,} game overs)"
            yield Row(LEARNING, f"Tetris {board.replace('-', ' ')}, published controller {name}, no preview", result)


def prioritized(file: Record) -> Iterator[Row]:
    for kind, scores in file["greedy_score_1024_games"].items():
        steps = span(file["env_steps_until_mean_score_19"][kind], quantity)
        result = f"{span(scores, lambda x: f'{x:.1f}')} foods, {steps} env-steps to a mean of 19"
        yield Row(LEARNING, f"Snake 10x10 with DQN, 12 M env-steps, {kind} replay, five seeds", result)


def prioritized_gain(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/prioritized_gain.py wrote: uniform replay, then prioritized."""
    for kind in (False, True):
        runs = [run for run in file["runs"] if run["prioritized"] is kind]
        scores = [run["score_mean"] for run in runs]
        reached = [run["steps_to_score"] for run in runs if run["steps_to_score"]]
        result = f"{statistics.mean(scores):.1f} {file['unit']} ({span(scores, lambda x: f'{x:.1f}')}); "
        result += (
            f"{file['score']} {file['unit']} in training from {span(reached, quantity)} steps on, " if reached else ""
        )
        result += f"{span([run['cpu_seconds'] for run in runs], lambda x: f'{x:.0f}')} CPU seconds"
        steps, samples = (quantity(runs[0][key]) for key in ("env_steps", "samples_trained"))
        what = f"{file['title']}, {steps} steps, {samples} samples, "
        what += f"{'prioritized' if kind else 'uniform'} replay, {len(runs)} seeds, {file['episodes']} games each"
        yield Row(LEARNING, what, result)


# ---- speed


def env_table(file: Record) -> Iterator[Row]:
    yield Row(SPEED, "Snake 10x10 in plain Python, one game", f"{quantity(file['env']['plain_python'])} steps/s")
    for row in file["env"]["rows"]:
        yield Row(
            SPEED,
            f"Snake 10x10 alone, {row['games']:,} game{'s' if row['games'] > 1 else ''}",
            f"{quantity(row['graphed'])} steps/s",
        )


def train_table(file: Record) -> Iterator[Row]:
    for row in file["train"]["rows"]:
        what = f"DQN with replay, MLP 256x2, one gradient sample per step, {row['games']:,} games"
        yield Row(SPEED, what, f"{quantity(row['graphed'])} env-steps/s")


def learners(file: Record) -> Iterator[Row]:
    for name, speed in file["speed_env_steps_per_second"].items():
        what = name.replace("ppo", "PPO").replace("pqn", "PQN").replace("no border", "no padding")
        yield Row(SPEED, f"{what}, Snake 10x10", f"{quantity(speed['rate'])} env-steps/s", speed)
    for run in file["snake_10x10"]:
        result = f"{percent(run['filled_of_4096'])}, {run['steps_per_filled_game']} steps each, {run['wall_seconds']} s"
        what = run["what"].removeprefix("ppo, ")
        yield Row(LEARNING, f"Snake 10x10 with PPO, settings tried: {what}; boards filled of 4,096 games", result, run)


def tetris_speed(file: Record) -> Iterator[Row]:
    for name, figure in file["figures"].items():
        key = next(key for key in figure if key.endswith("_per_second"))
        values = figure[key] if isinstance(figure[key], list) else [figure[key]]
        what = name.replace(", before words", ", bits not yet packed into words").replace("ppo", "PPO")
        yield Row(
            SPEED,
            what[0].upper() + what[1:],
            f"{span(values, quantity)} {key.split('_per')[0].replace('_', '-')}/s",
            figure,
        )


def tetris_greedy(file: Record) -> Iterator[Row]:
    for name, controller in file["controllers"].items():
        for boards, speed in controller["placements_per_second"].items():
            what = f"Tetris 10x20 greedy over all placements, nine features, {name}, {int(boards):,} boards"
            yield Row(SPEED, what, f"{quantity(speed)} placements/s")


def verified(file: Record) -> Iterator[Row]:
    """Return figures that were measured again on an idle machine, with new seeds."""
    snake, tetris, dqn = file["snake_10x10"], file["tetris_10x10"], file["snake_dqn"]
    what = f"`{snake['command']}`, {snake['wall_seconds']} s in all: boards filled of {snake['unseen_games']:,} games"
    yield Row(LEARNING, what, f"{percent(snake['filled'])}, {snake['steps_per_filled_game']} steps each")
    what = f"Tetris 10x10, {tetris['what']}, {tetris['train_seconds']} s, mean of {tetris['unseen_games']:,} games"
    yield Row(LEARNING, what, f"{tetris['lines_mean']:,} ± {tetris['lines_ci95']} lines")
    what = f"`{dqn['command']}`, {dqn['minutes']} minutes, beside {dqn['beside']}"
    yield Row(LEARNING, what, f"{dqn['foods_mean']} foods, boards filled: {percent(dqn['filled_of_1024'])} of 1,024")
    for name, speed in file["env_steps_per_second"].items():
        yield Row(SPEED, f"measured again: {name}", f"{quantity(speed)} env-steps/s")
    yield Row(
        STARTING, f"measured again: `{snake['command']}`, cold cache", f"{snake['seconds_to_first_update_cold']} s"
    )


def learner_speeds(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/learners.py wrote."""
    for name, speed in file["env_steps_per_second"].items():
        yield Row(SPEED, f"`bench/learners.py` {name}", f"{quantity(speed)} steps/s")


def learners_redesign(file: Record) -> Iterator[Row]:
    """Return the learner speeds of two trees, measured in one run."""
    before = file["env_steps_per_second_before"]
    for name, speed in file["env_steps_per_second"].items():
        what = f"`bench/learners.py` {name}; commit {file['commit_before']} in the same run: {quantity(before[name])}"
        yield Row(SPEED, what, f"{quantity(speed)} env-steps/s")


# ---- comparisons, replay, collecting


def peers(file: Record) -> Iterator[Row]:
    best = max(file["sb3"].values(), key=lambda speed: speed["env_steps_per_second"])
    for name, speed in file["sb3"].items():
        what = f"SB3's DQN on plain-Python Snake, MLP 256x3, 8 environments in its {name}"
        yield Row(PEERS, what, _both(speed))
    for key, what in (
        ("redline_defaults", "Redline's DQN with the default network (MLP 64x2)"),
        ("redline_sb3_net", "Redline's DQN with SB3's network (MLP 256x3)"),
    ):
        speed = file[key]
        times = [speed[unit] / best[unit] for unit in ("env_steps_per_second", "samples_per_second")]
        yield Row(PEERS, what, f"{_both(speed)} ({times[0]:.2g} and {times[1]:.2g} times SB3's better one)")


def _both(speed: Record) -> str:
    return f"{quantity(speed['env_steps_per_second'])} env-steps/s, {quantity(speed['samples_per_second'])} gradient samples/s"


def processor_time(file: Record) -> Iterator[Row]:
    for name, speeds in file["dqn_samples_per_cpu_second"].items():
        what = f"{name.replace('redline', 'Redline')}: DQN, MLP 256x3, per second of one core's processor time"
        yield Row(PEERS, what, f"{span(speeds, quantity)} gradient samples")
    for when, libraries in file["replay_ms"].items():
        what = f"Replay, (4, 14, 7) uint8 frames, batch 2,048, 100,000 transitions, processor time of one core, {when}"
        yield Row(
            PEERS,
            what,
            ", ".join(f"{name.replace('redline', 'Redline')} {ms:.2f} ms" for name, ms in libraries.items()),
        )


def replay_peers(file: Record) -> Iterator[Row]:
    for size, libraries in file["samples_per_second"].items():
        for name, speeds in libraries.items():
            what = f"{name.replace('redline', 'Redline')}: (4, 14, 7) uint8 frames, uniform, batch 2,048, {size}"
            yield Row(PEERS, what, f"{span(speeds, quantity)} samples/s")


def replay(file: Record) -> Iterator[Row]:
    for entry in file["samples_per_second"]:
        yield Row(REPLAY, entry["what"].replace("by way of", "through"), f"{quantity(entry['value'])} samples/s", entry)
    for entry in file["training"]:
        what = f"DQN, 16,384 games, MLP 256x2, one gradient sample per step: {entry['replay'].replace('by way of', 'through')}"
        yield Row(REPLAY, what, f"{quantity(entry['env_steps_per_second'])} env-steps/s", entry)


def collecting(file: Record) -> Iterator[Row]:
    emulator = "nes-py compiled by a profile of the game" if "emulator.sh" in file["command"] else "nes-py as installed"
    yield from _collect(file["collect"], f"Mario, {emulator}", file)


def emulators(file: Record) -> Iterator[Row]:
    ours, theirs = file["milliseconds"]["redline"], file["milliseconds"]["nes-py"]
    kinds = {
        "frame_ms": "a frame of the emulator",
        "hidden_frame_ms": "a frame nobody looks at",
        "step_ms": "a step of four frames, grey, 84x84",
    }
    for key, what in kinds.items():
        result = f"{ours[key]:.2f} ms, with nes-py as installed and NumPy {theirs[key]:.2f} ms: {file['ratios'][key]:.1f} times"
        yield Row(COLLECTING, f"Mario 1-1: {what}", result, file)


def _collect(figures: Record, env: str, record: Record) -> Iterator[Row]:
    names = {
        "bare": "environments alone, one process per core",
        "central_1": "one actor, actions chosen centrally",
        "actors_1": "one actor that chooses its own actions",
        "central_2": "two actors, actions chosen centrally",
        "actors_2": "two actors that choose their own actions",
        "in_step": "in step, one process",
        "gymnasium": "the same learner over Gymnasium's AsyncVectorEnv",
        "sb3": "SB3's PPO over SubprocVecEnv",
    }
    for key, what in names.items():
        if key in figures:
            speed = figures[key]["frames"] if isinstance(figures[key], dict) else figures[key]
            result = with_spread(speed, "frames/s") if isinstance(speed, dict) else f"{quantity(speed)} frames/s"
            yield Row(COLLECTING, f"{env}: {what}", result, record)


def rings(file: Record) -> Iterator[Row]:
    speeds = file["transitions_per_second"]
    for key, what in (("rings", "Redline's rings in shared memory"), ("queue", "one multiprocessing.Queue")):
        yield Row(
            COLLECTING, f"CartPole's transitions from two processes: {what}", f"{quantity(speeds[key])} transitions/s"
        )
    yield from _collect(file["cartpole"], "CartPole", file["cartpole"])


def with_spread(figure: Record, unit: str) -> str:
    """Return a figure of `redline bench`: median, range of the repeats, and device use if it was measured."""
    text = f"{quantity(figure['value'])} {unit} ({span([figure['low'], figure['high']], quantity)})"
    use = [
        f"{kind} {figure[key]:.0f} %" for kind, key in (("GPU", "gpu_percent"), ("CPU", "cpu_percent")) if key in figure
    ]
    memory = [f"{figure['peak_bytes'] / 2**30:.2g} GB"] if "peak_bytes" in figure else []
    return ", ".join([text, *use, *memory])


def bench_tables(file: Record) -> Iterator[Row]:
    """Return the rows of a file that `redline bench --out` wrote."""
    for kind in ("env", "train"):
        table = file.get(kind, {"rows": ()})
        for row in table["rows"]:
            way, figure = [(way, figure) for way, figure in row.items() if isinstance(figure, dict)][-1]
            learner = "alone" if kind == "env" else f"with {table['algo'].upper()}"
            what = f"`redline bench {kind}`: {table['env']} {learner}, {way}, {row['games']:,} games"
            yield Row(SPEED, what, with_spread(figure, "env-steps/s"))
    for row in file.get("replay", {"rows": ()})["rows"]:
        sampling = "prioritized" if row["prioritized"] else "uniform"
        held = f"{row['stored']}, {row['where']}, {quantity(file['replay']['capacity'])} transitions"
        for size, figure in row.items():
            if isinstance(figure, dict):
                what = f"`redline bench replay`: {held}, {sampling}, batch {int(size):,}"
                yield Row(REPLAY, what, with_spread(figure, "samples/s"))
    if "collect" in file:
        yield from _collect(file["collect"], file["collect"]["env"], file)
    table = file.get("switches", {"rows": ()})
    for row in table["rows"]:
        if "ratio" in row:
            change = f"{row['switch']}, {row['off']} to {row['on']}"
            what = f"`redline bench switches {table['env']}`, {table['algo'].upper()}: {change}"
            yield Row(SPEED, what, f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f}) times")


def tune(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/tune.py wrote."""
    for env, result in file["tune"].items():
        changed = {name: value for name, value in result["tuned"].items() if value != result["defaults"][name]}
        words = ", ".join(f"{name} {value}" for name, value in changed.items()) or "the defaults stay"
        what = f"`redline tune {env}`, {result['algo'].upper()}, {result['seconds']:.0f} s: {words}"
        yield Row(SPEED, what, f"{result['ratio']:.2f} times the defaults")


def precision(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/precision.py wrote."""
    steps = quantity(file["settings"]["steps"])
    for name, row in file["precisions"].items():
        speed = row["speed"].get("env_steps_per_second")
        if speed:
            yield Row(SPEED, f"Snake with PPO in {name}", f"{quantity(speed)} env-steps/s")
        if "score_mean" in row:
            yield Row(
                LEARNING,
                f"Snake with PPO in {name}, {steps} steps, {len(row.get('scores', ()))} seeds",
                f"{row['score_mean']:.2f} foods ({row['score_low']:.2f} to {row['score_high']:.2f})",
            )


def soak(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/soak.py wrote."""
    result, minutes = file["soak"], f"{file['minutes']:g} minutes"
    yield Row(
        FAULTS, f"{minutes}: faults recovered of those injected", f"{result['recovered']} of {result['injected']}"
    )
    yield Row(FAULTS, f"{minutes}: steps lost at most by one fault", f"{result['lost_steps_max']:,}")
    first, last = result["memory_first_third_mb"], result["memory_last_third_mb"]
    yield Row(FAULTS, f"{minutes}: memory of the learner, first and last third (medians)", f"{first} MB, {last} MB")
    if "score" in file:
        scores = (file[name]["score_mean"] for name in ("score", "quiet_score"))
        disturbed, quiet = (f"{score:.1f}" for score in scores)
        yield Row(FAULTS, f"{minutes}: score with faults, and without after as many steps", f"{disturbed}, {quiet}")


def sigterm(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/sigterm.py wrote."""
    what = f"SIGTERM with {quantity(file['transitions'])} transitions in replay memory"
    slowest = max(file["rows"], key=lambda row: row["seconds_to_durable"])
    durable, ended = slowest["seconds_to_durable"], slowest["seconds_to_exit"]
    size = f"{slowest['checkpoint_bytes'] / 1e9:.2f} GB"
    yield Row(FAULTS, f"{what}: durable checkpoint of {size}, end of the process", f"{durable:.1f} s, {ended:.1f} s")


def kills(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/kills.py wrote."""
    for row in file["rows"]:
        algo, _, memory = row["case"].partition("-")
        name = algo.upper() + (f", {memory} replay" if memory else "")
        what = f"Snake with {name}: killed runs with the final files of an uninterrupted one"
        kills = f"{row['kills']} kills, {row['kills_in_saves']} of them inside saves"
        yield Row(FAULTS, what, f"{row['equal']} of {row['runs']} ({kills})")


def damage(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/damage.py wrote."""
    for row in file["rows"]:
        what, wrong = row["kind"].capitalize(), sum(row["wrong"].values())
        yield Row(FAULTS, f"{what}: flipped bits detected", f"{row['flips_detected']} of {row['flips']}")
        result = f"{row['fuzzed_refused']:,} refused, {row['fuzzed_loaded']:,} loaded, "
        result += f"{wrong} crashes, hangs or wrong successes"
        sealed = ", half of them given matching digests" if row["kind"] == "checkpoints" else ""
        yield Row(FAULTS, f"{what}: {row['fuzzed']:,} fuzzed{sealed}", result)


def profile_overhead(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/profile_overhead.py wrote."""
    for row in file["rows"]:
        what = f"Profiling {row['env'].capitalize()} with {row['algo'].upper()}"
        yield Row(SPEED, f"{what}: slowdown by `redline.Profiler`", f"{row['profiled_percent']:.2f} %")
        yield Row(
            SPEED, f"{what}: slowdown by the measurements of `redline profile`", f"{row['counted_percent']:.2f} %"
        )
        if "stages_over_wall" in row:
            yield Row(SPEED, f"{what}: sum of the stages over wall-clock", f"{row['stages_over_wall']:.4f}")


def gpu_use(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/gpu_use.py wrote."""
    for row in file["rows"]:
        what = f"{row['env'].capitalize()} with {row['algo'].upper()}, as the bare command trains it"
        speed, gpu = quantity(row["env_steps_per_second"]), row["gpu"]
        yield Row(
            SPEED, what, f"{speed} env-steps/s, GPU {gpu['use_percent']:.1f} % busy at {gpu['power_watts']:.0f} W"
        )


def scaling(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/scaling.py wrote: measurements and the model's predictions."""
    for row in file["ranks"]:
        ranks = f"{row['ranks']} ranks ({row['backend']})" if row["ranks"] > 1 else "one process"
        by = "" if "cuda" in file["device"] else ", by CPU time"
        game = f"{file['env'].capitalize()} with {file['algo'].upper()}, {file['num_envs']:,} environments"
        what = f"{game}, {ranks}, uncompiled{by}"
        speed = f"{quantity(row['env_steps_per_second'])} env-steps/s"
        model = f", {row['speed_up']:.2f} times one process; the model says {file['iteration_ms'] / row['predicted_ms']:.2f}"
        yield Row(SPEED, what, speed + (model if row["ranks"] > 1 else ""))


def memory(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/memory_estimates.py wrote."""
    for row in file["rows"]:
        result = f"{row['ratio']:.2f} of the measured {row['measured_bytes'] / 1e9:.1f} GB"
        yield Row(SPEED, f"Memory estimated before training: {row['name']}", result)


def viewers(file: Record) -> Iterator[Row]:
    """Return the row of a file that bench/viewers.py wrote."""
    what = f"{file['env'].capitalize()} in training with {file['viewers']} viewers on its page, against none"
    spread = f"{100 * file['ratio_low']:.1f} to {100 * file['ratio_high']:.1f} %"
    yield Row(SPEED, what, f"{100 * file['ratio']:.1f} % of the throughput (pairs of windows: {spread})")


def open_page(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/page.py wrote."""
    if "first_frame" in file:
        times = file["first_frame_seconds"]
        spread = f"{min(times):.1f} to {max(times):.1f} s"
        yield Row(
            STARTING, "`redline watch` to the first game in the browser", f"{file['first_frame']:.1f} s ({spread})"
        )
    if readings := file.get("readings"):
        later = readings[len(readings) // 4 :]  # the first quarter fills histories and caches
        parts = {
            "training": "training_mb",
            "the page's server": "child_0_mb",
            "the player": "child_1_mb",
            "the tab": "heap_mb",
        }
        changes = (f"{name} {later[0][key]:.0f} to {later[-1][key]:.0f} MB" for name, key in parts.items())
        minutes = (later[-1]["seconds"] - later[0]["seconds"]) / 60
        yield Row(
            FAULTS, f"Memory over {minutes:.0f} minutes of a page left open on a run in training", ", ".join(changes)
        )


def kernels(file: Record) -> Iterator[Row]:
    """Return a row per case of a file that bench/kernels.py wrote."""
    for name, case in file["cases"].items():
        largest = max(case["kernels"], key=lambda kernel: kernel["ms"])
        iteration = 1000 * case["env_steps"] / case["env_steps_per_second"]
        share = f"{iteration:.3g} ms an iteration, the most expensive kernel {100 * largest['ms'] / case['kernels_ms']:.0f} %"
        yield Row(SPEED, f"Traced: {name}", f"{quantity(case['env_steps_per_second'])} steps/s ({share})", case)


def hindsight(file: Record) -> Iterator[Row]:
    """Return a row per size of skyline of a file that bench/hindsight_gain.py wrote."""
    for plain, hindsight in zip(file["rows"][::2], file["rows"][1::2], strict=True):
        what = f"Skyline of {plain['width']} columns, DQN with hindsight, against plain replay"
        means = (100 * statistics.mean(row["win_rates"]) for row in (hindsight, plain))
        ours, theirs = (f"{mean:.1f} %" for mean in means)
        seeds = len(plain["win_rates"])
        yield Row(
            LEARNING,
            f"{what}; {quantity(file['steps'])} steps, {seeds} seeds",
            f"{ours} of games won, against {theirs}",
        )


def growth(file: Record) -> Iterator[Row]:
    """Return a row per curve of a file that bench/growth.py wrote, its points in order."""
    units = {"games": "games", "boards": "cells", "capacity": "transitions", "width": "units", "actors": "actors"}
    rows = [row for row in file["rows"] if "error" not in row]
    for part, curve in dict.fromkeys((row["part"], row["curve"]) for row in rows):
        line = [row for row in rows if (row["part"], row["curve"]) == (part, curve)]
        figure = "value" if part == "actors" else "high"  # the median if other programs affect it, else the best
        xs, speeds = (f"{row['x']:,}" for row in line), (quantity(row["speed"][figure]) for row in line)
        what = f"Growth with {part}: {curve[0].upper()}{curve[1:]}, {', '.join(xs)} {units[part]}"
        kind = "samples" if part == "capacity" else "env-steps"
        commits = dict.fromkeys(row["commit"] for row in line)
        yield Row(SPEED, what, f"{', '.join(speeds)} {kind}/s", {"commit": ", ".join(commits)})


def tetris_boards(file: Record) -> Iterator[Row]:
    """Return a row per view and network of DQN on Tetris without hand-made features."""
    for run in file["runs"]:
        what = f"Tetris {file['board']}, {file['pieces']} pieces, DQN from {run['view']}, {run['net']}, "
        what += f"{file['minutes']} minutes on a shared GPU, one seed: lines per game over"
        result = f"{run['lines']:.0f} ({run['low']:.0f} to {run['high']:.0f}) after {quantity(run['env_steps'])} steps"
        yield Row(LEARNING, what, result)


def arithmetic(file: Record) -> Iterator[Row]:
    """Return a row per learner that was trained for equal steps before and after its arithmetic changed."""
    for learner in dict.fromkeys(row["learner"] for row in file["rows"]):
        runs = {
            when: [x["foods"] for x in file["rows"] if (x["learner"], x["arithmetic"]) == (learner, when)]
            for when in ("now", "before")
        }
        ours, before = (span(foods, lambda x: f"{x:.1f}") for foods in runs.values())
        what = f"Snake 10x10 with {learner}, foods of 512 games after the same steps, {len(runs['now'])} seeds"
        yield Row(LEARNING, what, f"{ours} with fused kernels, {before} before")


def inference(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/inference.py wrote."""
    names = {"actors": "actors that choose their own actions", "central": "actors, actions chosen centrally"}
    what = f"{file['env']} with {file['algo'].upper()}, {file['num_envs']} environments"
    alone = f"{quantity(file['environments_alone'])} frames/s"
    yield Row(COLLECTING, f"{what}: {file['num_actors']} processes, environments alone", alone)
    for where, label in names.items():
        frames = f"{quantity(file['inference'][where]['frames_per_second'])} frames/s"
        yield Row(COLLECTING, f"{what}: {file['num_actors']} {label}", frames)


def mario_ablation(file: Record) -> Iterator[Row]:
    """Return the rows of a file that bench/mario_ablation.py wrote."""
    options = file.get("options", [])
    level = file["level"]
    if "--env.size" in options:
        size = options[options.index("--env.size") + 1]
        level += f" at {size}x{size}"
    for row in file["rows"]:
        setting = "the recipe" if row["variant"] == "none" else f"earlier {row['variant']}"
        run = f"{quantity(row['env_steps'])} decisions, {setting}, seed {row['seed']}"
        result = f"flag in {percent(row['greedy_flags'])} of games, sampled {percent(row['sampled_flags'])}"
        result += f", furthest x {row['greedy_x']:,.0f}"
        if row.get("curve"):
            result += f", {row['curve'][-1]['furthest_x']:,.0f} at the end of training"
        yield Row(LEARNING, f"Super Mario Bros. {level} with PPO, {run}", result)


# Files with the same prefix share an extractor.
SHARED: dict[str, Callable[[Record], Iterator[Row]]] = {
    "agents-": agents,
    "arithmetic-": arithmetic,
    "tetris-boards-": tetris_boards,
    "bench-": bench_tables,
    "inference-": inference,
    "mario-ablation-": mario_ablation,
    "tune-": tune,
    "gpu-use-": gpu_use,
    "memory-": memory,
    "precision-": precision,
    "prioritized-": prioritized_gain,
    "profile-overhead-": profile_overhead,
    "sigterm-": sigterm,
    "damage-": damage,
    "kills-": kills,
    "scaling-": scaling,
    "soak-": soak,
    "start-": starts,
    "viewers-": viewers,
    "page-": open_page,
    "kernels-": kernels,
    "hindsight-": hindsight,
    "growth-": growth,
}


def exports(file: Record) -> Iterator[Row]:
    for net in file["networks"]:
        what = f"{net['env'].capitalize()} {net['board']}, {net['net'].upper()} of {quantity(net['weights'])} weights"
        speeds = (
            f"{sorted(ratios)[len(ratios) // 2]:.2f} times as fast in batches of {size} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
            for size, ratios in net["speedup"].items()
        )
        yield Row(EXPORTING, f"{what}: int8", ", ".join(speeds), net)
        plain, small = net["bytes"]
        sizes = f"{small / 1e3:.0f} instead of {plain / 1e3:.0f} kB"
        same = f"{percent(net['same_actions'])} equal choices in 1,000 states, {sizes}"
        if net["score"] is None:
            yield Row(EXPORTING, f"{what}, random weights: int8", same, net)
            continue
        fp32, int8 = net["score"]["fp32"], net["score"]["int8"]
        score = f"score {int8['score_mean']:.2f} instead of {fp32['score_mean']:.2f} in {int8['episodes']:,} games"
        yield Row(EXPORTING, f"{what}, {quantity(net['env_steps'])} steps: int8", f"{score}, {same}", net)


EXTRACTORS: dict[str, Callable[[Record], Iterator[Row]]] = {
    "cartpole-cpu": cartpole,
    "gymnasium-cpu": gymnasium_envs,
    "gymnasium-xeon": gymnasium_envs,
    "collect-mario-cpu": collecting,
    "collect-mario-profiled-cpu": collecting,
    "collect-rings-cpu": rings,
    "cpu-make-train": make_train,
    "cpu-peers": peers,
    "cpu-peers-xeon": peers,
    "cpu-processor-time": processor_time,
    "cpu-train": trained,
    "emulator-xeon": emulators,
    "export-cpu": exports,
    "gpu-default": trained,
    "gpu-env": env_table,
    "gpu-start-cold": started,
    "gpu-start-warm": started,
    "gpu-start-ppo-cold": started,
    "gpu-start-ppo-warm": started,
    "gpu-train": train_table,
    "learners-h200": learners,
    "learners-redesign-h200": learners_redesign,
    "learners-relu-h200": learner_speeds,
    "learners-fused-h200": learner_speeds,
    "mario-h200": mario,
    "replay-cpu": replay_peers,
    "replay-xeon": replay_peers,
    "replay-h200": replay,
    "replay-prioritized-cpu": prioritized,
    "snake-10x10-h200": snake_10x10,
    "snake-20x20-h200": snake_20x20,
    "snake-6x6-cpu": snake_6x6,
    "tetris-controllers-h200": tetris_controllers,
    "tetris-greedy-cpu": tetris_greedy,
    "tetris-learning-h200": tetris_learning,
    "tetris-speed-h200": tetris_speed,
    "verified-h200": verified,
}


def page(results: Path = RESULTS) -> str:
    """Return the text of docs/benchmarks.md."""
    tables: dict[str, list[str]] = {section: [] for section in INTRODUCTION}
    pictures: dict[str, list[str]] = {section: [] for section in INTRODUCTION}
    for path in sorted(results.glob("*.json")):
        shared = [extract for prefix, extract in SHARED.items() if path.stem.startswith(prefix)]
        extract = shared[0] if shared else EXTRACTORS.get(path.stem)
        if extract is None:
            raise SystemExit(f"{path} has no extractor; add one to EXTRACTORS in {Path(__file__).name}.")
        file = json.loads(path.read_text(encoding="utf-8"))
        for row in extract(file):
            values = (str(row.record.get(key, file.get(key, "-"))) for key in ("commit", "date"))
            commit, date = next(values), next(values)
            source = f"[{path.stem}](../bench/results/{path.name})"
            cells = (row.what, row.result, hardware(file), hashes(commit), date, source)
            tables[row.section].append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
            if row.picture:
                pictures[row.section] += ["", f"![Learning curves: {row.what.partition(':')[0]}](images/{row.picture})"]
    lines = [
        "# Benchmarks",
        "",
        "Made by `python bench/make_benchmarks_page.py` from the files in `bench/results`; do not edit by hand. Every row "
        "names the commit and the date of its measurement: speeds of older commits are not those of today's code. *near* "
        "marks a working tree close to that commit. Each file holds the command and more details, such as other work that "
        "ran on the machine.",
    ]
    for section, rows in tables.items():
        if not rows:
            continue
        head = ["| what | result | hardware | commit | date | source |", "|---|---|---|---|---|---|"]
        lines += ["", f"## {section}", "", INTRODUCTION[section], "", *head, *rows, *pictures[section]]
    return "\n".join(lines) + "\n"


def hashes(commit: str) -> str:
    """Return the hashes in a file's note on its commit; *near* if the tree was not exactly that commit."""
    found = re.findall(r"\b[0-9a-f]{7}\b", commit)
    exact = re.fullmatch(r"[0-9a-f]{7}(, ([0-9a-f]{7}|beside .*))*", commit)
    return ", ".join(found) if exact else f"near {' and '.join(found)}" if found else "not recorded"


def hardware(file: Record) -> str:
    """Return a short name of a file's machine: H200, or 2 CPU cores."""
    if "H200" in file["hardware"]:
        return "H200"
    cores = re.search(r"(\d+) CPU cores", file["hardware"])
    count = int(cores[1]) if cores else 2
    if count > 2:
        return f"{count} CPU cores"
    return f"{count} CPU core{'s' * (count > 1)} ({'Xeon' if 'Xeon' in file['hardware'] else 'Neoverse-N1'})"


def main() -> None:
    text = page()
    if "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{PAGE} is out of date; run python {Path(__file__).name}.")
        return
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
