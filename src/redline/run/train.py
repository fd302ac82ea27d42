"""Training: the only loop. It names no game and no algorithm."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch

from redline import replay
from redline.collect.actor_supervisor import ActorsLost
from redline.core.errors import UserError
from redline.run import device_choice
from redline.run.checkpoint import Checkpoint, Checkpoints, RunLock, prepare_run_dir
from redline.run.config import Plan, Settings
from redline.run.evaluate import Policy, evaluate, greedy
from redline.run.progress import Progress, device_use, quantity
from redline.run.run_folder import Metrics, read_config, write_config, write_json
from redline.run.session import Session

_LOG_SECONDS = 1.0  # aimed at between log points
_EVAL_STEPS = 4_000  # of a slot in the evaluation at the end: an agent that never loses must not play for ever
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 75, "actors": 70}


@dataclass(frozen=True)
class Run:
    """A trained run: its folder and its results, by the names of `--json`."""

    path: Path
    result: dict[str, Any]


def train(settings: Settings) -> Run:
    """Train as `settings` ask, continuing the run folder's newest checkpoint unless told otherwise."""
    if settings.deterministic:  # without it cuBLAS refuses; it looks once, and measuring devices uses it already
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    plan = device_choice.decide(settings)
    deterministic = torch.are_deterministic_algorithms_enabled()
    prepare_run_dir(plan.run_dir)
    phases = len(plan.curriculum.phases) if plan.curriculum else 0
    progress = Progress(f"{settings.env} · {plan.settings.algo} · {plan.hardware.name}", _score_name(plan), phases)
    try:
        with RunLock(plan.run_dir, notify=progress.say) as lock:
            if settings.deterministic:
                torch.use_deterministic_algorithms(True)
            return _train(plan, lock, progress)
    except torch.OutOfMemoryError as error:
        less = " or less --replay-capacity" if hasattr(plan.algo_config, "replay_capacity") else ""
        raise UserError(
            f"{plan.device} ran out of memory; take fewer games (--num-envs, now {plan.num_envs:,}), a smaller batch "
            f"(--batch-size, now {plan.algo_config.batch_size:,}){less}."
        ) from error
    finally:
        torch.use_deterministic_algorithms(deterministic)
        progress.close()


def _train(plan: Plan, lock: RunLock, progress: Progress) -> Run:
    for line in _opening(plan):
        progress.say(line)
    checkpoints = Checkpoints(
        plan.run_dir, lock=lock, config_hash=plan.identity_hash, env_hash=plan.identity_hash, notify=progress.say
    )
    if plan.settings.resume != "never" and (plan.run_dir / "config.json").exists():
        _check_same_run(plan, read_config(plan.run_dir), progress)
    session = _begin(plan, progress)  # before checkpoints are moved aside: settings that do not fit are found here
    try:
        return _run(plan, session, checkpoints, progress)
    finally:
        session.close()


def _begin(plan: Plan, progress: Progress) -> Session:
    """Return a session. A run that starts anew does not inherit the replay files of the previous one."""
    backups = {plan.run_dir / name: plan.run_dir / f".old-{name}" for name in replay.run_files()}
    moved = {file: old for file, old in backups.items() if plan.settings.resume == "never" and file.exists()}
    for file, old in moved.items():
        file.rename(old)
    try:
        session = Session(plan, progress.say)
    except BaseException:
        for file, old in moved.items():
            file.unlink(missing_ok=True)
            old.rename(file)
        raise
    for old in backups.values():
        old.unlink(missing_ok=True)
    return session


def _run(plan: Plan, session: Session, checkpoints: Checkpoints, progress: Progress) -> Run:
    found = _find_checkpoint(plan, checkpoints)
    seconds, episodes, compiling = 0.0, 0, 0.0
    if found:
        session.load(found.tensors, found.state["session"])
        seconds, episodes = found.state["seconds"], found.state["episodes"]
        compiling = found.state.get("compiling", 0.0)
        progress.say(f"Continuing {plan.run_dir} from {found.path.name} ({quantity(session.env_steps)} steps).")
    write_config(plan.run_dir, plan.describe())
    metrics = Metrics(plan.run_dir, session.env_steps, plan.settings.tensorboard, progress.say)

    started = time.monotonic() - seconds
    steps_before, samples_before, seconds_before = session.env_steps, session.samples_trained, seconds
    saved_at = time.monotonic()
    first_update: float | None = None
    chunk, updates_logged = 1, session.updates
    first_chunk = True
    record: dict[str, Any] = {}

    def save(background: bool) -> None:
        state = {"session": session.counters(), "seconds": time.monotonic() - started, "episodes": episodes}
        state["compiling"] = compiling
        tensors, everything = session.tensors(replay=plan.settings.save_replay), session.tensors()
        checkpoints.save(
            session.env_steps,
            tensors,
            state,
            score=record.get("score"),
            resume_level=_resume_level(session, tensors.keys() == everything.keys()),
            background=background,
        )

    with _Signals() as signals:
        stopped_by = _reached(plan, session, episodes, time.monotonic() - started)
        if stopped_by:
            progress.say(f"This run has reached its limit of {stopped_by} already; give a higher one to go on.")
        while not stopped_by:
            # Play and learn: nothing here waits for the device.
            session.progress = min(_progress_done(plan, session, episodes, time.monotonic() - started, compiling), 1.0)
            count = _iterations_allowed(plan, session, chunk)
            chunk_started, steps_started, samples_started = time.monotonic(), session.env_steps, session.samples_trained
            try:
                session.iterate(count)
            except ActorsLost as error:  # what was learned until then is kept
                progress.say(str(error))
                stopped_by = "actors"
                break

            # Log: the one look at the device.
            episode_stats = session.collector.episode_stats.read()
            now = time.monotonic()
            took = max(now - chunk_started, 1e-9)
            compiling += took if first_chunk else 0.0
            first_chunk = False
            if first_update is None and session.updates > updates_logged:
                first_update = time.time() - psutil.Process().create_time()
            episodes += int(episode_stats["episodes"])
            record = {
                "env_steps": session.env_steps,
                "updates": session.updates,
                "samples_trained": session.samples_trained,
                "seconds": now - started,
                **session.describe_phase(),
                "env_steps_per_second": (session.env_steps - steps_started) / took,
                "samples_per_second": (session.samples_trained - samples_started) / took,
                **episode_stats,
                **session.read_metrics(session.updates - updates_logged),
                **device_use(plan.device),
            }
            updates_logged = session.updates
            metrics.write(record)
            fraction_done = _progress_done(plan, session, episodes, now - started)
            left = (now - started) * max(1 / fraction_done - 1, 0) if fraction_done > 0 else None
            progress.show(record, fraction_done, left)
            chunk = _next_chunk(chunk, took)

            # Once in a while: a checkpoint, written beside training.
            if now - saved_at >= 60 * plan.settings.checkpoint_minutes:
                save(background=True)
                saved_at = now
            stopped_by = signals.caught or _reached(plan, session, episodes, now - started)

        seconds = time.monotonic() - started
        checkpoints.wait()
        if checkpoints.last_step != session.env_steps:
            save(background=False)
    metrics.close()

    spent = max(seconds - seconds_before, 1e-9)
    result: dict[str, Any] = {
        "env": plan.settings.env,
        "algo": plan.settings.algo,
        "device": str(plan.device),
        "run": str(plan.run_dir),
        "env_steps": session.env_steps,
        "updates": session.updates,
        "samples_trained": session.samples_trained,
        "episodes": episodes,
        "seconds": seconds,
        "env_steps_per_second": (session.env_steps - steps_before) / spent,
        "samples_per_second": (session.samples_trained - samples_before) / spent,
        "seconds_to_first_update": first_update,
        "stopped_by": stopped_by,
        "settings": plan.describe(),
    }
    if plan.settings.eval_episodes and stopped_by not in EXIT_CODES:
        progress.say(
            f"Evaluating: {plan.settings.eval_episodes} greedy games on held-out seeds, at most {_EVAL_STEPS:,} steps each."
        )
        session.stop_playing()  # cores are for evaluation now
        outcome = evaluate(
            plan.rules,
            _agent(plan, session),
            plan.settings.eval_episodes,
            plan.device,
            slot_steps=_EVAL_STEPS,
            compile=plan.compile,
            graph=plan.graph,
            notify=progress.say,
        ).summary()
        result |= {f"eval_{k}" if k in ("episodes", "stopped_by") else k: value for k, value in outcome.items()}
        result["eval_max_steps"] = _EVAL_STEPS
        result["winnable"] = plan.rules.game.spec(plan.rules.config).winnable
    write_json(plan.run_dir / "result.json", result)
    return Run(plan.run_dir, result)


def _resume_level(session: Session, whole: bool) -> str:
    """How much of a run its checkpoint brings back: all of it, all but the CPU environments, or the learner."""
    return "L1" if not whole else "L3" if session.collector.restores_episodes else "L2"


def _agent(plan: Plan, session: Session) -> Policy:
    """The greedy policy as `redline eval` will load it: in float32, whatever training ran in."""
    spec = plan.rules.game.spec(plan.rules.config)
    model = session.tensors(replay=False)["model"]
    return greedy(plan.algo.policy_network(spec, plan.algo_config, model).to(plan.device), plan.device)


def _score_name(plan: Plan) -> str:
    return plan.rules.game.spec(plan.rules.config).score_name


def _opening(plan: Plan) -> list[str]:
    machine = plan.hardware
    lines = [
        f"Training {plan.settings.env} with {plan.settings.algo} on {machine.name} ({plan.device}): "
        f"{plan.num_envs:,} games at once, batch {plan.algo_config.batch_size:,}, {plan.precision}"
        f"{', compiled' if plan.compile else ''}{', CUDA graphs' if plan.graph else ''}."
    ]
    if plan.settings.device == "auto" and torch.cuda.is_available():
        lines.append(f"Device {plan.device}: {plan.reasons['device']}.")
    if not plan.compile and plan.settings.compile is None:
        lines.append(f"Running without compilation: {plan.reasons['compile']}.")
    if plan.curriculum:
        phases = ", ".join(f"{x.name} {100 * x.start:.0f}-{100 * x.end:.0f} %" for x in plan.curriculum.phases)
        lines.append(f"Curriculum: {phases}; evaluation plays by the run's own options.")
    elif plan.recipe.curriculum(plan.rules.config) and plan.settings.curriculum is None:
        lines.append(f"Training without a curriculum: {plan.reasons['curriculum']}")
    if plan.compile:
        lines.append("Compiling; the first run on a machine takes longest.")
    return lines


def _find_checkpoint(plan: Plan, checkpoints: Checkpoints) -> Checkpoint | None:
    """The checkpoint to continue from, as --resume asks; a run folder of something else is refused."""
    wanted = plan.settings.resume
    if wanted == "never":
        aside = checkpoints.set_aside()
        for name in ("config.json", "metrics.jsonl", "result.json", "eval.json"):
            if aside and (plan.run_dir / name).exists():
                (plan.run_dir / name).rename(aside / name)
        return None
    if wanted in ("auto", "must"):
        found = checkpoints.load()
        if found is None and wanted == "must":
            raise UserError(f"resume is 'must', but there is no checkpoint in {plan.run_dir}; train one first.")
        return found
    if not Path(wanted).is_dir():
        raise UserError(f"resume is '{wanted}'; expected auto, must, never or the folder of a checkpoint.")
    found = checkpoints.load_path(wanted)
    checkpoints.set_aside(after=found.step)
    if found.path.resolve().parent != checkpoints.folder.resolve():
        checkpoints.last_step = None  # this folder has none of that step yet
    return found


def _check_same_run(plan: Plan, before: dict[str, Any], progress: Progress) -> None:
    """Refuse to continue another game, algorithm or network; tell of settings that changed."""
    for name in ("env", "algo"):
        if before[name] != getattr(plan.settings, name):
            raise UserError(
                f"{plan.run_dir} holds a run of {before['env']} with {before['algo']}, not of {plan.settings.env} with "
                f"{plan.settings.algo}; name another folder with --run-dir."
            )
    then, now = plan.identity(before), plan.identity()
    differs = [f"{key} was {then[key]!r}, now {value!r}" for key, value in now.items() if then[key] != value]
    # An option the run did not know had, as far as it matters, its default.
    defaults = {field.name: field.default for field in dataclasses.fields(plan.algo_config)}
    was, is_now = _plain(defaults) | before["algo_options"], plan.describe()["algo_options"]
    fixed = plan.algo.RESUME_FIXED
    changed = {k: (was.get(k), v) for k, v in _plain(is_now).items() if was.get(k) != v}
    differs += [f"{plan.settings.algo}.{k} was {a!r}, now {b!r}" for k, (a, b) in changed.items() if k in fixed]
    if differs:
        raise UserError(
            f"{plan.run_dir} cannot be continued with these settings: {'; '.join(differs)}. Give the old ones, name "
            "another folder with --run-dir, or start anew with --resume never."
        )
    if before.get("phases", []) != plan.describe()["phases"]:
        progress.say("Continuing with another curriculum than before; it begins at the phase that is due now.")
    if (practised := before.get("backplay", plan.backplay)) != plan.backplay:
        progress.say(f"Continuing with retry {plan.backplay}; it was {practised}.")
    for key, (a, b) in changed.items():
        progress.say(f"Continuing with {plan.settings.algo}.{key} {b!r}; it was {a!r}.")


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """As they look once written to JSON."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}


def _iterations_allowed(plan: Plan, session: Session, chunk: int) -> int:
    if plan.settings.steps is None:
        return chunk
    left = math.ceil((plan.settings.steps - session.env_steps) / session.steps_per_iteration)
    return max(1, min(chunk, left))


def _next_chunk(chunk: int, took: float) -> int:
    """As many iterations as fit between two log points, approached from below."""
    return max(1, min(round(chunk * _LOG_SECONDS / took), 4 * chunk))


def _reached(plan: Plan, session: Session, episodes: int, seconds: float) -> str:
    """The limit that is reached, or an empty string."""
    if plan.settings.steps is not None and session.env_steps >= plan.settings.steps:
        return "steps"
    if plan.settings.episodes is not None and episodes >= plan.settings.episodes:
        return "episodes"
    if plan.minutes is not None and seconds >= 60 * plan.minutes:
        return "minutes"
    return ""


def _progress_done(plan: Plan, session: Session, episodes: int, seconds: float, compiling: float = 0.0) -> float:
    """Of the limit that will be reached first. Seconds of compiling count as time spent, but as no part of a schedule."""
    settings = plan.settings
    shares = (
        session.env_steps / settings.steps if settings.steps else 0.0,
        episodes / settings.episodes if settings.episodes else 0.0,
        (seconds - compiling) / max(60 * plan.minutes - compiling, 1e-9) if plan.minutes else 0.0,
    )
    return max(shares)


class _Signals:
    """Turns SIGINT and SIGTERM into a note for the loop, which stops at its next log point with a checkpoint."""

    def __init__(self) -> None:
        self.caught = ""
        self.count = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.count += 1
        if self.count > 2:  # a second signal does not disturb the checkpoint; a third says that nobody will wait
            raise KeyboardInterrupt
        self.caught = self.caught or signal.Signals(number).name

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
