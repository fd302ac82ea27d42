"""`redline tune ENV`: find the sizes, precision and compile mode with the best measured throughput, and write a TOML file.

Sizes and precisions are compared without compilation, which would take longer than everything else; then the winner and the
defaults run in turns, compiled as in training. The defaults win unless another candidate is measurably faster.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from redline.run.config_file import toml_value
from redline.run.plan import Plan
from redline.run.progress import quantity
from redline.run.resolve import resolve
from redline.run.settings import Settings
from redline.run.thread_choice import decide
from redline.tools.trial import ChildTrial
from redline.tools.tune_search import WORTH, Candidate, Row, Search, compare, largest_batch

# Fraction of the time spent on sizes if the finalists must then be compiled; short trials need less of it on a GPU.
_SEARCH_SHARE = {"cpu": 0.4, "cuda": 0.3}
_EAGER_SEARCH_SHARE = 0.6  # if they need not be compiled
_BATCH_SECONDS = 8.0  # maximum for finding the largest batch
_FINAL_SECONDS, _FINAL_SHARE = (
    5.0,
    0.15,
)  # reserved for measuring the finalists: minimum seconds, and maximum fraction of the time
_AUTOTUNE_SECONDS = 60.0  # minimum to compile with max-autotune
CAUTION = (
    "Faster is not always better: more environments and larger batches mean fewer updates in the same number of steps; "
    "compare scores before you rely on it."
)
_SIZES = ("batch_size", "rollout_steps", "updates", "train_every")


def tune(settings: Settings, seconds: float, path: Path, out: TextIO, bar: TextIO) -> dict[str, Any]:
    """Search for `seconds`, print a table to `out` and a progress bar to `bar`, and write the best settings to `path`."""
    started = time.perf_counter()
    plan = decide(dataclasses.replace(settings, resume="never"))
    # Everything that is not tuned is fixed to the defaults.
    base = dataclasses.replace(
        settings, algo=plan.settings.algo, device=str(plan.device), threads=plan.threads or None, curriculum=False
    )
    base = dataclasses.replace(base, actors=plan.actors if plan.rules.game.ON_CPU else None)
    rows: list[Row] = []
    print(_title(plan, seconds), file=out)
    print(f"  {'candidate':<28}{'':>10}{'env-steps/s':>13}{'ratio':>8}", file=out, flush=True)
    defaults = Candidate("defaults", {"compile": plan.compile})
    with _progress(bar, seconds) as advance, ExitStack() as stack:
        # The defaults compile during the search for sizes.
        opened = {defaults: ChildTrial(defaults.settings(base))} if plan.compile else {}
        for trial in opened.values():
            stack.callback(trial.close)

        def show(row: Row) -> None:
            rows.append(row)
            print(_line(row), file=out, flush=True)
            advance(time.perf_counter() - started, row.label)

        best, batch, iteration = _search(plan, base, started, seconds, show)
        # The finalists are measured at the end: five turns, or fewer if iterations are long.
        ready = started + seconds - max(_FINAL_SECONDS, min(5 * iteration, _FINAL_SHARE * seconds))
        finalists = _finalists(plan, defaults, best, ready - time.perf_counter())
        ratios = compare(finalists, base, opened, (ready, started + seconds), show) if len(finalists) > 1 else {}
        winner = max(ratios, key=lambda candidate: ratios[candidate], default=defaults)
        if ratios.get(winner, 0.0) < WORTH:
            winner = defaults
        ratio = ratios[winner] if winner is not defaults else 1.0
    tuned = resolve(winner.settings(base))
    record: dict[str, Any] = {
        "env": settings.env,
        "algo": base.algo,
        "device": base.device,
        "ratio": ratio,
        "defaults": _describe(plan),
        "tuned": _describe(tuned),
        "largest_batch": batch[0],
        "largest_batch_reason": batch[1],
        "seconds": time.perf_counter() - started,
        "config": str(path),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(_toml(settings, tuned, ratio), encoding="utf-8")
    print(f"Largest batch: {batch[0]:,} samples ({batch[1]}).", file=out)
    unfinished = len(finalists) > 1 and len(ratios) < 2
    print(_verdict(ratio, unfinished, time.perf_counter() - started, path, settings.env), file=out, flush=True)
    return record


def _search(
    plan: Plan, base: Settings, started: float, seconds: float, show: Callable[[Row], None]
) -> tuple[Candidate, tuple[int, str], float]:
    """Return the fastest candidate without compilation, the largest batch with the reason for its limit, and the seconds of
    the candidate's iteration."""
    share = _SEARCH_SHARE.get(plan.device.type, _EAGER_SEARCH_SHARE) if plan.compile else _EAGER_SEARCH_SHARE
    deadline = started + seconds * share
    with closing(Search(dataclasses.replace(base, compile=False), deadline, show)) as search:
        best = search.run()
        batch = largest_batch(search.trial.plan, time.perf_counter() + min(_BATCH_SECONDS, 0.08 * seconds))
        return best, batch, search.trial.iteration_seconds


def _finalists(plan: Plan, defaults: Candidate, best: Candidate, seconds: float) -> list[Candidate]:
    """Return the candidates to compare in training, the defaults first. seconds: left for compiling them."""
    finalists = [defaults]
    if best.fields or best.algo_options:
        finalists.append(dataclasses.replace(best, label="best sizes", fields={**best.fields, "compile": plan.compile}))
    few_cores = plan.hardware.tier == "cpu-few"  # compilation would slow the other trials down
    if plan.settings.compile is None and not plan.compile and plan.hardware.compiler and not few_cores:
        finalists.append(dataclasses.replace(best, label="compiled", fields={**best.fields, "compile": True}))
    if plan.compile and plan.device.type == "cuda" and seconds > _AUTOTUNE_SECONDS:
        modes = {"compile": True, "compile_mode": "max-autotune"}
        finalists.append(dataclasses.replace(best, label="max-autotune", fields={**best.fields, **modes}))
    return finalists


def _describe(plan: Plan) -> dict[str, Any]:
    """Return the values of the tuned settings."""
    values = {"num_envs": plan.num_envs, "precision": plan.precision, "compile": plan.compile}
    values["compile_mode"] = plan.settings.compile_mode
    return values | {name: getattr(plan.algo_config, name) for name in _SIZES if hasattr(plan.algo_config, name)}


def _toml(settings: Settings, tuned: Plan, ratio: float) -> str:
    """Return the tuned and the requested settings as the text of a file for `redline train --config`."""
    values = _describe(tuned)
    general = {"algo": tuned.settings.algo, "device": str(tuned.device)}
    general |= {name: value for name, value in values.items() if name not in _SIZES}
    env_options = {name: getattr(tuned.rules.config, name.replace("-", "_")) for name in settings.env_options}
    algo_options = {name: getattr(tuned.algo_config, name.replace("-", "_")) for name in settings.algo_options}
    algo_options |= {name: values[name] for name in _SIZES if name in values}
    lines = [f"# {ratio:.2f} times the throughput of the defaults, measured by redline tune {settings.env}"]
    for title, table in (("", general), ("env", env_options), (tuned.algo.group, algo_options)):
        lines += [f"\n[{title}]"] if title and table else []
        lines += [f"{name} = {toml_value(value)}" for name, value in table.items()]
    return "\n".join(lines) + "\n"


def default_path(env: str) -> Path:
    """Return the file for the tuned settings of an environment, in the current folder."""
    return Path(f"tuned-{re.sub('[:/]', '-', env)}.toml")


def _title(plan: Plan, seconds: float) -> str:
    return (
        f"{plan.settings.env} with {plan.settings.algo} on {plan.hardware.name} ({plan.device}), {plan.num_envs:,} "
        f"environments, batch {plan.algo_config.batch_size:,}, {plan.precision}; at most {seconds:g} s. Ratios are to the best "
        "so far, of compiled candidates to the defaults."
    )


def _line(row: Row) -> str:
    how = "as trained" if row.compiled else "eager"
    if row.per_second is None:
        return f"  {row.label:<28}{how:>10}  {row.reason}"
    return f"  {row.label:<28}{how:>10}{quantity(row.per_second):>13}{row.ratio or 1.0:>7.2f}x"


def _verdict(ratio: float, unfinished: bool, seconds: float, path: Path, env: str) -> str:
    written = f"Written to {path}: redline train {env} --config {path}"
    if unfinished:
        return f"The defaults stay: nothing else was ready in time to compare with them; give more --seconds. {written}"
    if ratio == 1.0:
        return f"The defaults are the fastest measured, in {seconds:.0f} s. {written}"
    return f"{ratio:.2f} times the defaults, found in {seconds:.0f} s. {written}\n{CAUTION}"


class _progress:
    """A progress bar for the time of the search, only on a terminal."""

    def __init__(self, file: TextIO, seconds: float) -> None:
        console = Console(file=file)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("defaults", total=seconds)

    def __enter__(self) -> Callable[[float, str], None]:
        self.bar.start()
        return lambda elapsed, label: self.bar.update(self.task, completed=elapsed, description=f"after {label}")

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
