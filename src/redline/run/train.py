"""Train an agent: turn settings into a run folder with the trained agent and its score. The loop is in `trainer`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redline.core.errors import EnvFailure, EnvsLost, UserError
from redline.engine import distributed
from redline.engine.launch import follows
from redline.engine.out_of_memory import free_caches, is_out_of_memory
from redline.envs import env_activity
from redline.run import final_evaluation, resume
from redline.run import ranks as rank_share
from redline.run.checkpoint import Checkpoints, RunLock, prepare_run_dir
from redline.run.failure import (
    TrainingFailed,
    describe_saved,
    newest_checkpoint,
    not_deterministic,
    out_of_memory,
)
from redline.run.opening import finished_line, opening_lines
from redline.run.plan import Plan
from redline.run.preemption import watch_for_notice
from redline.run.progress import Progress
from redline.run.run_folder import ENV_ACTIVITY, RESULT, remove_unused, write_json
from redline.run.session import Session
from redline.run.settings import Settings
from redline.run.signals import StopSignals
from redline.run.trainer import EXIT_CODES as EXIT_CODES
from redline.run.trainer import Trainer
from redline.run.watchdog import Watchdog

_PENDING = "evaluation_pending"  # in result.json: the final evaluation was interrupted; the same command repeats it


@dataclass(frozen=True)
class Run:
    """A trained run: its folder and its results, named like the fields of `--json`."""

    path: Path
    result: dict[str, Any]


def train(
    settings: Settings,
    progress: Progress | None = None,
    signals: StopSignals | None = None,
    on_folder: Callable[[Path], None] = lambda path: None,  # noqa: ARG005
) -> Run:
    """Train with `settings`, continuing from the newest checkpoint in the run folder unless `settings.resume` differs.

    progress: display to use; closed at the end. signals: a StopSignals that the caller has already entered.
    on_folder: called by rank 0 with the run folder once it is chosen and locked.
    If started by torchrun, this process is one rank of the run; rank 0 writes the folder and evaluates.
    """
    with (
        progress or Progress(settings.env, quiet=follows()) as progress,
        nullcontext(signals) if signals else StopSignals(progress.say, settings.grace) as signals,
        watch_for_notice(settings.preemption_notice, signals),
        Watchdog(
            settings.env, lambda text, code: signals.end_process(f"{text}\n{signals.describe_saved()}", code)
        ) as watchdog,
        closing(distributed.join(settings.device, settings.rank_timeout)) as ranks,
    ):
        if settings.deterministic:  # required by cuBLAS, which reads it once; measuring the devices uses cuBLAS already
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        progress.start_activity("Choosing settings and measuring this machine")
        plan = rank_share.decide(settings, ranks)
        deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
        new_folder = ranks.leads and not plan.run_dir.exists()
        ranks.lead(lambda: prepare_run_dir(plan.run_dir))
        signals.describe_saved = lambda: describe_saved(plan.run_dir)
        watchdog.allow(plan.rules.config)
        progress.describe(
            f"{settings.env} · {plan.settings.algo} · {plan.hardware.name}",
            plan.rules.game.spec(plan.rules.config).score_name,
            len(plan.curriculum.phases) if plan.curriculum else 0,
        )
        try:
            lock = ranks.lead(lambda: RunLock(plan.run_dir, notify=progress.say))
            with lock if ranks.leads else nullcontext() as lock, _env_activity(plan):
                _set_deterministic(deterministic or settings.deterministic)
                if ranks.leads:
                    on_folder(plan.run_dir)
                return _train_within_memory(plan, lock, progress, signals, watchdog)
        except Exception as error:
            if isinstance(error, UserError) and new_folder:
                remove_unused(plan.run_dir)
            cause = error.__cause__ if isinstance(error, TrainingFailed) else error
            if settings.deterministic and isinstance(cause, RuntimeError) and "deterministic" in str(cause):
                raise not_deterministic(plan, cause) from error
            raise
        finally:
            _set_deterministic(deterministic)
            torch.set_num_threads(threads)  # the session used the plan's


def _env_activity(plan: Plan) -> AbstractContextManager[None]:
    """Record on rank 0 which environment is being stepped, so that the next start knows which one crashed the process."""
    in_this_process = plan.rules.game.ON_CPU and not plan.actors and plan.ranks.leads
    return env_activity.kept_in(plan.run_dir / ENV_ACTIVITY) if in_this_process else nullcontext()


def _train_within_memory(
    plan: Plan, lock: RunLock | None, progress: Progress, signals: StopSignals, watchdog: Watchdog
) -> Run:
    """Train; if memory runs out and splitting batches does not help, restart from the newest checkpoint.

    The failed iteration may be half done, so the state in memory is unusable. Every restart needs a newer checkpoint.
    """
    first = newest_checkpoint(plan.run_dir)
    tried: set[str] = set()
    while True:
        try:
            return _train(plan, lock, progress, signals, watchdog)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            newest = newest_checkpoint(plan.run_dir)
            if plan.settings.oom == "stop" or newest in tried or plan.ranks.active:  # other ranks would hang
                raise out_of_memory(plan, newest) from error
        free_caches()
        tried.add(newest)
        start = f"from {newest}" if newest else "from the start"
        progress.say(
            f"{plan.device} ran out of memory outside of a batch; memory is freed and the run goes on {start}."
        )
        if newest != first and newest:
            plan = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, resume="auto"))


def _train(plan: Plan, lock: RunLock | None, progress: Progress, signals: StopSignals, watchdog: Watchdog) -> Run:
    """Train the run in its folder, from scratch or a checkpoint to the final evaluation, after checking that it may."""
    ranks = plan.ranks
    notes = ranks.lead(lambda: resume.check_run_folder(plan))
    identity = plan.identity_hash
    checkpoints = Checkpoints(
        plan.run_dir,
        lock=lock,
        config_hash=identity,
        env_hash=identity,
        world_size=ranks.size,
        check=resume.check_state,
        notify=progress.say,
    )
    finished = ranks.lead(lambda: resume.finished_result(plan, checkpoints))
    if finished and not (_PENDING in finished and plan.settings.eval_episodes):
        progress.say(finished_line(plan, finished))
        return Run(plan.run_dir, finished)
    progress.start_activity("Building games and networks")
    with closing(resume.open_session(plan, progress.say, progress.explain)) as session:
        watchdog.allow(plan.rules.config, session.describe_env)
        checkpoint = rank_share.load_shared(ranks, lambda: resume.load_checkpoint(plan, checkpoints), progress.say)
        trainer = Trainer(plan, session, checkpoints, progress, signals, checkpoint)
        rank_share.check_weights(ranks, session.tensors(replay=False))
        trainer.write_config()
        for line in (*notes, *opening_lines(plan)):
            progress.say(line)
        with trainer.saving_failures():
            stopped_by = trainer.run()
        result = finished or trainer.result(stopped_by)
        evaluates = bool(plan.settings.eval_episodes) and stopped_by not in EXIT_CODES
        if not ranks.leads:
            if not evaluates:  # torchrun kills all ranks once one fails: rank 0 must write its result first
                ranks.broadcast(None)
            return Run(plan.run_dir, result)
        if evaluates:
            result |= _evaluate_last(plan, session, progress, signals, result)
            if hint := final_evaluation.sampling_hint(plan, result, trainer.last_score):
                progress.say(hint)
        write_json(plan.run_dir / RESULT, result)
        if not evaluates:
            ranks.broadcast(None)
    return Run(plan.run_dir, result)


def _evaluate_last(
    plan: Plan, session: Session, progress: Progress, signals: StopSignals, result: dict[str, Any]
) -> dict[str, Any]:
    """Return the result of the final evaluation. If a signal ends it, the agent is already saved, without a score."""
    path = plan.run_dir / RESULT
    result.pop(_PENDING, None)
    write_json(path, result | {_PENDING: True})
    try:
        signals.stop_if_caught()  # a signal came while the last checkpoint was written
        return _evaluate(plan, session, progress)
    except KeyboardInterrupt:
        if signals.caught in ("SIGINT", ""):  # the user does not want a score
            write_json(path, result)
        raise


def _evaluate(plan: Plan, session: Session, progress: Progress) -> dict[str, Any]:
    """Return the result of the final evaluation; empty if there is too little memory for it."""
    try:
        return final_evaluation.evaluate_session(plan, session, progress)
    except Exception as error:
        if isinstance(error, EnvFailure | EnvsLost):
            saved = "The agent is saved, without a score; the same command repeats the evaluation."
            raise EnvsLost(f"{error} {saved}") from error
        if not is_out_of_memory(error):
            raise
    free_caches()
    progress.say(
        f"{plan.device} ran out of memory in the final evaluation; repeat it with redline eval {plan.run_dir}."
    )
    return {}


def _set_deterministic(on: bool) -> None:
    """Set torch's deterministic mode only if it differs: setting it imports the compiler, which takes seconds."""
    if on != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(on)
