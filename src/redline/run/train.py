"""Train an agent: the loop, and the run folder around it. It names no game, no algorithm and no replay kind."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from redline.algos.learner import check_acted
from redline.collect.actor_supervisor import ActorsLost
from redline.core.errors import EnvFailure, EnvsLost, StorageError, UserError
from redline.engine import distributed, hardware
from redline.engine.distributed import ReportedByLeader
from redline.engine.fast import first_line
from redline.engine.launch import follows
from redline.engine.out_of_memory import free_caches, is_out_of_memory
from redline.envs import env_activity
from redline.run import final_evaluation, resume
from redline.run import ranks as rank_share
from redline.run.budget import Budget, Clock, next_chunk, seconds_left
from redline.run.checkpoint import Checkpoint, Checkpoints, RunLock, prepare_run_dir
from redline.run.divergence import DivergenceGuard
from redline.run.failure import (
    TrainingFailed,
    describe_saved,
    newest_checkpoint,
    not_deterministic,
    out_of_memory,
    training_failed,
)
from redline.run.fallback import save_elsewhere
from redline.run.live_weights import LiveWeights
from redline.run.metrics_log import Metrics, NoMetrics
from redline.run.opening import finished_line, opening_lines
from redline.run.periodic_evaluation import PeriodicEvaluation
from redline.run.plan import Plan
from redline.run.preemption import watch_for_notice
from redline.run.progress import Progress, device_use, quantity
from redline.run.ranks import Decision
from redline.run.run_folder import ENV_ACTIVITY, RESULT, remove_unused, write_config, write_json
from redline.run.session import Session
from redline.run.settings import Settings
from redline.run.signals import EXIT_CODES as SIGNAL_CODES
from redline.run.signals import StopSignals, Unsaved
from redline.run.trust import signed
from redline.run.watchdog import Watchdog

EXIT_CODES = {**SIGNAL_CODES, "actors": 70, "envs": 70, "diverged": 70}  # by `stopped_by`; 0 for a limit
_PENDING = "evaluation_pending"  # in result.json: the final evaluation was interrupted, and the same command repeats it
_EVALUATING = "in the evaluation: the agent is saved, without a score"
_MAX_FAILED_SAVES = 3  # in a row; a fourth would fail as well


@dataclass(frozen=True)
class Run:
    """A trained run: its folder and its results, named as the fields of `--json`."""

    path: Path
    result: dict[str, Any]


def train(
    settings: Settings,
    progress: Progress | None = None,
    signals: StopSignals | None = None,
    on_folder: Callable[[Path], None] = lambda path: None,  # noqa: ARG005
) -> Run:
    """Train with `settings`, continuing from the newest checkpoint in the run folder unless `settings.resume` differs.

    progress: where to show it; closed at the end. signals: those entered already, by a program that began with them.
    on_folder: called with the run folder once it is chosen and locked, by rank 0.
    Started by torchrun, this process is one rank of the run; rank 0 writes the folder and evaluates.
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
        progress.start_activity("Choosing settings")
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
            torch.set_num_threads(threads)  # a session uses the plan's


def _env_activity(plan: Plan) -> AbstractContextManager[None]:
    """Record which environment this process plays, for the next start if it ends the process; rank 0 does."""
    in_this_process = plan.rules.game.ON_CPU and not plan.actors and plan.ranks.leads
    return env_activity.kept_in(plan.run_dir / ENV_ACTIVITY) if in_this_process else nullcontext()


def _train_within_memory(
    plan: Plan, lock: RunLock | None, progress: Progress, signals: StopSignals, watchdog: Watchdog
) -> Run:
    """Train; where memory runs out and smaller parts of batches do not help, once again from the newest checkpoint.

    The failed iteration may be half done, so the state in memory cannot be used. Each repetition needs a newer checkpoint.
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
            if plan.settings.oom == "stop" or newest in tried or plan.ranks.active:  # other ranks would wait
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
    """Train the run in its folder, from start or checkpoint to the final evaluation. Refusals come first."""
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
    with closing(resume.open_session(plan, progress.say)) as session:
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
            if not evaluates:  # torchrun ends all ranks once it sees one fail: rank 0 writes its result first
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
    """Return the result of the final evaluation. Where a signal ends it, the agent is saved and its score is missing."""
    path = plan.run_dir / RESULT
    result.pop(_PENDING, None)
    write_json(path, result | {_PENDING: True})
    try:
        signals.stop_if_caught()  # while the last checkpoint was written
        return _evaluate(plan, session, progress)
    except KeyboardInterrupt:
        if signals.caught in ("SIGINT", ""):  # the user does without a score
            write_json(path, result)
        raise


def _evaluate(plan: Plan, session: Session, progress: Progress) -> dict[str, Any]:
    """Return the result of the final evaluation; nothing if there is too little memory for it."""
    try:
        return final_evaluation.evaluate_session(plan, session, progress)
    except Exception as error:
        if isinstance(error, EnvFailure):
            saved = "The agent is saved, without a score; the same command repeats the evaluation."
            raise EnvsLost(f"{error} {saved}") from error
        if not is_out_of_memory(error):
            raise
    free_caches()
    progress.say(
        f"{plan.device} ran out of memory in the final evaluation; repeat it with redline eval {plan.run_dir}."
    )
    return {}


class Trainer:
    """A session with its budget, clock, log and checkpoints. `run` is the training loop."""

    def __init__(
        self,
        plan: Plan,
        session: Session,
        checkpoints: Checkpoints,
        progress: Progress,
        signals: StopSignals,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Continue from `checkpoint`, or start at zero."""
        self.plan, self.session, self.checkpoints, self.progress = plan, session, checkpoints, progress
        self.signals = signals
        self.budget = Budget(plan.settings.steps, plan.settings.episodes, plan.minutes)
        state: dict[str, Any] = checkpoint.state if checkpoint else {"seconds": 0.0, "preparation": 0.0, "episodes": 0}
        if checkpoint:
            session.load(checkpoint.tensors, state["session"])
            steps = quantity(session.env_steps)
            progress.say(f"Continuing {plan.run_dir} from {checkpoint.path.name} ({steps} steps).")
        wandb = plan.describe() if plan.settings.wandb else None
        self.metrics: Metrics | NoMetrics = NoMetrics()
        if plan.ranks.leads:
            self.metrics = Metrics(plan.run_dir, session.env_steps, plan.settings.tensorboard, progress.say, wandb)
        self.live_weights = LiveWeights(plan.run_dir)
        self.episodes: int = state["episodes"]
        self.clock = Clock(state["seconds"], state["preparation"])
        self.first_update: float | None = None  # seconds from the start of the process
        self.last_score: float | None = None  # mean of the last log point at which an episode had ended
        self._steps_before, self._samples_before = session.env_steps, session.samples_trained
        self._first_updated: tuple[float, int, int] | None = None  # seconds, steps and samples at the first update
        self._logged_updates = session.updates
        self._recorded_micro_batches = session.learner.micro_batches
        self.evaluation = PeriodicEvaluation(plan, session, progress, state.get("evaluated_at", 0))
        self.guard = DivergenceGuard(
            session.learner,
            progress.say,
            session.env_steps,
            state.get("rollbacks", 0),
            now=lambda: plan.ranks.broadcast(time.monotonic()),  # all ranks keep the same weights
        )
        self._acted: int | None = int(session.learner.acted)  # None once the learner was seen to count its steps

    def run(self) -> str:
        """Train until a limit, a signal or lost actors, and save the last checkpoint; returns what ended it."""
        plan, session, signals, saved_at = self.plan, self.session, self.signals, time.monotonic()
        self.progress.start_activity("Compiling" if plan.compile else "Preparing the first update")
        signals.before_exit = lambda: self.checkpoints.wait(signals.grace)
        self._evaluate_if_due()  # where a signal interrupted it before
        decision = self._decide(signals.caught or self.budget.reached(*self._used()), False, 1)
        while not decision.stopped_by:
            # One step: play and learn for about a second. With tensor games nothing here waits for the device.
            session.progress, chunk = decision.progress, decision.chunk
            before = time.monotonic(), session.env_steps, session.updates
            count = self.budget.iterations(chunk, session.env_steps, session.steps_per_iteration)
            count = self.evaluation.iterations(count)
            try:
                session.iterate(count, lambda: signals.pending and not plan.ranks.active)  # ranks stop together, below
            except EnvsLost as error:  # everything learned until now is saved
                if plan.ranks.active:  # the others wait for the rest of this iteration
                    raise
                self.progress.say(str(error))
                lost = "actors" if isinstance(error, ActorsLost) else "envs"
                decision = dataclasses.replace(decision, stopped_by=lost)
                break

            # Once a step: read the metrics, the one look at the device.
            record, seconds = self._log(*before)
            chunk = next_chunk(chunk, seconds, plan.settings.log_seconds)
            diverged = self.guard.check(record)
            if not diverged:
                self._evaluate_if_due()
            stopped_by = diverged or signals.caught or self.budget.reached(*self._used())
            self._check_saves()

            # Once in a while, or on SIGUSR1: a checkpoint, written while training goes on.
            due = signals.save_requested or time.monotonic() - saved_at >= 60 * plan.settings.checkpoint_minutes
            decision = self._decide(stopped_by, due and not self.guard.suspect, chunk)
            if decision.save and not decision.stopped_by:
                decision = dataclasses.replace(decision, stopped_by=self.guard.before_save())
                if not decision.stopped_by:
                    if signals.save_requested:
                        self.checkpoints.wait()  # a save is dropped while another one is written
                        signals.save_requested = False
                    self._save(background=True)
                saved_at = time.monotonic()
        stopped_by = decision.stopped_by
        self.clock.stop()
        signals.loop_is_back()
        self.checkpoints.wait()
        if stopped_by not in EXIT_CODES:
            stopped_by = self.guard.before_save() or self.guard.at_end() or stopped_by
        unsaved = plan.ranks.lead(lambda: self.checkpoints.last_step != session.env_steps)
        if unsaved and not self.guard.bad_weight():
            self.progress.start_activity("Saving")
            self._save(background=False)
        signals.saved(_EVALUATING)
        self.metrics.close()
        return stopped_by

    def _decide(self, stopped_by: str, save: bool, chunk: int) -> Decision:
        """Return what to do next, the same on all ranks."""
        progress = min(self.budget.progress(*self._used()), 1.0)
        return rank_share.agree(self.plan.ranks, Decision(stopped_by, save, chunk, progress))

    @contextmanager
    def saving_failures(self) -> Iterator[None]:
        """Save what was learned when an exception ends training, and say so in the error that is raised in its place."""
        try:
            yield
        except (Exception, SystemExit) as error:  # a signal handler of the host program may exit
            self.clock.stop()
            self.checkpoints.wait()
            if is_out_of_memory(error):  # the run goes on from the newest checkpoint
                self.metrics.close()
                raise
            saved = "" if isinstance(error, StorageError) else self._rescue()
            self.metrics.close()
            if isinstance(error, SystemExit):
                raise
            raise training_failed(self.plan.run_dir, error, self.session.env_steps, saved) from error

    def _rescue(self) -> str:
        """Save the state after an exception, in the midst of an iteration perhaps; return a sentence about it."""
        if self.plan.ranks.active:  # the others are elsewhere
            return describe_saved(self.plan.run_dir)
        try:
            self.session.end_iteration()
            if self.session.env_steps == self._steps_before:
                return ""
            self.signals.loop_is_back()
            if self.checkpoints.last_step != self.session.env_steps:
                self._save(background=False)
        except Exception as error:  # the device may be lost, the disk full, or the weights not finite
            reason = str(error) if isinstance(error, StorageError) else first_line(error)
            return f"{reason.rstrip('.')}. {describe_saved(self.plan.run_dir)}"
        return describe_saved(self.plan.run_dir)

    def write_config(self) -> None:
        """Write config.json; rank 0 does."""
        if self.plan.ranks.leads:
            write_config(self.plan.run_dir, self.describe())

    def describe(self) -> dict[str, Any]:
        """Return the content of config.json: the settings and, where batches are split to fit into memory, the parts."""
        parts = self.session.learner.micro_batches
        return signed(self.plan.describe()) | ({"micro_batches": parts} if parts > 1 else {})

    def _used(self) -> tuple[int, int, float]:
        """What of the budget is used: environment steps, episodes and seconds of training."""
        return self.session.env_steps, self.episodes, self.clock.training

    def _log(self, started: float, steps: int, updates: int) -> tuple[dict[str, Any], float]:
        """Write and show a log record of the iterations since `started`; return it and the seconds they took."""
        session = self.session
        self.plan.ranks.wait_for_device()
        episode_stats = session.collector.episode_stats.read()  # waits for the device
        episode_stats = rank_share.merge_episode_stats(self.plan.ranks, episode_stats)
        if self._acted is not None:
            check_acted(session.learner, self._acted)
            self._acted = None
        seconds = max(time.monotonic() - started, 1e-9)
        self.episodes += int(episode_stats["episodes"])
        if session.updates > self._logged_updates and self.first_update is None:
            self.first_update = time.time() - psutil.Process().create_time()
            self.clock.first_update()
            self._first_updated = self.clock.this_start, session.env_steps, session.samples_trained
            self.progress.start_activity("Training")
        self.signals.unsaved = Unsaved.EXPERIENCE if self.first_update is None else Unsaved.TRAINING
        record = {
            "env_steps": session.env_steps,
            "updates": session.updates,
            "samples_trained": session.samples_trained,
            "seconds": self.clock.seconds,
            **session.describe_phase(),
            "env_steps_per_second": (session.env_steps - steps) / seconds,
            "samples_per_second": (session.updates - updates) * session.samples_per_update / seconds,
            "updates_per_second": (session.updates - updates) / seconds,
            **episode_stats,
            **session.read_metrics(session.updates - self._logged_updates),
            **device_use(self.plan.device),
            "memory/peak_bytes": hardware.peak_bytes(self.plan.device),
            "micro_batches": session.learner.micro_batches,
        }
        if session.learner.micro_batches != self._recorded_micro_batches:
            self._recorded_micro_batches = session.learner.micro_batches
            self.write_config()
        self._logged_updates = session.updates
        self.last_score = record.get("score", self.last_score)
        self.metrics.write(record)
        if self.plan.ranks.leads:
            self.live_weights.publish(lambda: session.learner.trained_state()["model"], session.env_steps)
        done = self.budget.progress(*self._used())
        self.progress.show(record, done, seconds_left(done, self.clock.training))
        return record, seconds

    def _evaluate_if_due(self) -> None:
        """Evaluate if another `eval_every` steps are trained, and save the weights with their score."""
        if not self.evaluation.due:
            return
        self.checkpoints.wait()  # this save must not be skipped because another one is under way
        record = self.plan.ranks.lead(lambda: self.evaluation.run(lambda: self.signals.caught))
        if record:
            self.evaluation.accept(record)
            self.metrics.write(record)
            self._save(background=True)

    def _save(self, background: bool) -> None:
        """Save the run; where that fails in the foreground, save it elsewhere and raise StorageError."""
        try:
            self._save_to(self.checkpoints, background)
        except (StorageError, ReportedByLeader) as error:
            raise self._save_elsewhere(str(error)) from error

    def _check_saves(self) -> None:
        """Stop a run whose checkpoints fail again and again: it would train for days and lose everything."""
        checkpoints = self.checkpoints
        if self.plan.ranks.lead(lambda: checkpoints.failures >= _MAX_FAILED_SAVES and not checkpoints.busy):
            raise self._save_elsewhere(
                f"{self.checkpoints.failures} checkpoints in a row were not written. {self.checkpoints.last_error}"
            )

    def _save_elsewhere(self, problem: str) -> UserError:
        self.signals.loop_is_back()
        if not self.plan.ranks.leads:
            if self.plan.settings.fallback_dir is not None:  # rank 0 saves this rank's part, too
                self._save_to(self.checkpoints, background=False)
            return ReportedByLeader(problem, StorageError.exit_code)
        sentence = save_elsewhere(
            self.plan, self.describe(), lambda place: self._save_to(place, background=False), self.progress.say
        )
        return StorageError(f"{problem} {sentence}")

    def _save_to(self, checkpoints: Checkpoints, background: bool) -> None:
        session = self.session
        tensors = session.tensors(replay=self.plan.settings.save_replay)
        complete = tensors.keys() == session.tensors().keys()
        state = {
            "session": session.counters(),
            "seconds": self.clock.seconds,
            "preparation": self.clock.preparation,
            "episodes": self.episodes,
            "samples_trained": session.samples_trained,
            "micro_batches": session.learner.micro_batches,
            "rollbacks": self.guard.rollbacks,
            "evaluated_at": self.evaluation.evaluated_at,
        }
        level = session.learner.resume_level(session.collector.restores_episodes) if complete else "L1"
        score = self.evaluation.score if self.evaluation.evaluated_at == session.env_steps else None
        how = {"score": score, "resume_level": level, "background": background}
        rank_share.save(self.plan.ranks, checkpoints, session.env_steps, tensors, state, **how)

    def result(self, stopped_by: str) -> dict[str, Any]:
        """The result of training, without evaluation. Speeds are those of this start, from its first update if it had more."""
        plan, session = self.plan, self.session
        before = 0.0, self._steps_before, self._samples_before
        if self._first_updated and session.env_steps > self._first_updated[1]:
            before = self._first_updated
        seconds = max(self.clock.this_start - before[0], 1e-9)
        return {
            "env": plan.settings.env,
            "algo": plan.settings.algo,
            "device": str(plan.device),
            "run": str(plan.run_dir),
            "env_steps": session.env_steps,
            "updates": session.updates,
            "samples_trained": session.samples_trained,
            "episodes": self.episodes,
            "seconds": self.clock.seconds,
            "preparation_seconds": self.clock.preparation,
            "env_steps_per_second": (session.env_steps - before[1]) / seconds,
            "samples_per_second": (session.samples_trained - before[2]) / seconds,
            "seconds_to_first_update": self.first_update,
            "peak_memory_bytes": hardware.peak_bytes(plan.device),
            "micro_batches": session.learner.micro_batches,
            "stopped_by": stopped_by,
            "settings": plan.describe(),
        }


def _set_deterministic(on: bool) -> None:
    """Set torch's switch, if it is not set so: setting it imports the compiler, which takes seconds."""
    if on != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(on)
