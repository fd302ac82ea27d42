"""The training loop: a session with its budget, clock, log and checkpoints. It names no game, algorithm or replay kind."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from redline.algos.learner import check_acted
from redline.collect.actor_supervisor import ActorsLost
from redline.core.errors import EnvsLost, StorageError, UserError
from redline.engine import hardware
from redline.engine.distributed import ReportedByLeader
from redline.engine.fast import first_line
from redline.engine.out_of_memory import is_out_of_memory
from redline.run import ranks as rank_share
from redline.run.budget import Budget, Clock, next_chunk, seconds_left
from redline.run.checkpoint import Checkpoint, Checkpoints
from redline.run.divergence import DivergenceGuard
from redline.run.failure import describe_saved, training_failed
from redline.run.fallback import save_elsewhere
from redline.run.live_weights import LiveWeights
from redline.run.metrics_log import Metrics, NoMetrics
from redline.run.periodic_evaluation import PeriodicEvaluation
from redline.run.plan import Plan
from redline.run.progress import Progress, device_use, quantity
from redline.run.ranks import Decision
from redline.run.run_folder import write_config
from redline.run.session import Session
from redline.run.signals import EXIT_CODES as SIGNAL_CODES
from redline.run.signals import StopSignals, Unsaved
from redline.run.trust import signed

EXIT_CODES = {**SIGNAL_CODES, "actors": 70, "envs": 70, "diverged": 70}  # by `stopped_by`; 0 for a limit
_EVALUATING = "in the evaluation: the agent is saved, without a score"
_MAX_FAILED_SAVES = 3  # consecutive; a fourth would fail as well


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
        """Continue from `checkpoint`, or start from scratch if it is None."""
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
        self.start_seconds: dict[str, float] = {}  # by activity before training time counts, and by compiled function
        self.last_score: float | None = None  # mean score at the last log point with a finished episode
        self._steps_before, self._samples_before = session.env_steps, session.samples_trained
        # Seconds, steps and samples at the first update; if the first ones ran uncompiled, at the first compiled update.
        self._first_updated: tuple[float, int, int] | None = None
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
        self._acted: int | None = int(session.learner.acted)  # None after checking that the learner counts its steps

    def run(self) -> str:
        """Train until a limit, a signal or a failure, save the last checkpoint, and return the reason for stopping."""
        plan, session, signals, saved_at = self.plan, self.session, self.signals, time.monotonic()
        in_foreground = plan.compile and not session.compiling
        self.progress.start_activity("Compiling" if in_foreground else "Preparing the first update")
        signals.before_exit = lambda: self.checkpoints.wait(signals.grace)
        self._evaluate_if_due()  # if a signal interrupted it in the previous start
        decision = self._decide(signals.caught or self.budget.reached(*self._used()), False, 1)
        while not decision.stopped_by:
            # One step: play and learn for about a second. With tensor games nothing here waits for the device.
            session.progress, chunk = decision.progress, decision.chunk
            before = time.monotonic(), session.env_steps, session.updates
            count = self.budget.iterations(chunk, session.env_steps, session.steps_per_iteration)
            count = self.evaluation.iterations(count)
            try:
                session.iterate(count, lambda: signals.pending and not plan.ranks.active)  # ranks stop together, below
            except EnvsLost as error:  # everything learned so far is saved
                if plan.ranks.active:  # the others wait for the rest of this iteration
                    raise
                self.progress.say(str(error))
                lost = "actors" if isinstance(error, ActorsLost) else "envs"
                decision = dataclasses.replace(decision, stopped_by=lost)
                break

            # Once a step: read the metrics, the only host synchronisation.
            record, seconds = self._log(*before)
            chunk = next_chunk(chunk, seconds, plan.settings.log_seconds)
            diverged = self.guard.check(record)
            if not diverged:
                self._evaluate_if_due()
            stopped_by = diverged or signals.caught or self.budget.reached(*self._used())
            self._check_saves()

            # Once in a while, or on SIGUSR1: a checkpoint, written while training continues.
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
        """Return the loop's next action, the same on all ranks."""
        progress = min(self.budget.progress(*self._used()), 1.0)
        return rank_share.agree(self.plan.ranks, Decision(stopped_by, save, chunk, progress))

    @contextmanager
    def saving_failures(self) -> Iterator[None]:
        """Save the state when an exception ends training, and raise an error that names the saved checkpoint instead."""
        try:
            yield
        except (Exception, SystemExit) as error:  # a signal handler of the host program may exit
            self.clock.stop()
            self.checkpoints.wait()
            if is_out_of_memory(error):  # the run restarts from the newest checkpoint
                self.metrics.close()
                raise
            saved = "" if isinstance(error, StorageError) else self._rescue()
            self.metrics.close()
            if isinstance(error, SystemExit):
                raise
            raise training_failed(self.plan.run_dir, error, self.session.env_steps, saved) from error

    def _rescue(self) -> str:
        """Save the state after an exception, possibly in mid-iteration; return a sentence about the checkpoint."""
        if self.plan.ranks.active:  # the other ranks cannot join a save now
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
        """Write config.json, on rank 0 only."""
        if self.plan.ranks.leads:
            write_config(self.plan.run_dir, self.describe())

    def describe(self) -> dict[str, Any]:
        """Return the content of config.json: the settings and, if batches are split to fit into memory, the number of parts."""
        parts = self.session.learner.micro_batches
        return signed(self.plan.describe()) | ({"micro_batches": parts} if parts > 1 else {})

    def _used(self) -> tuple[int, int, float]:
        """Return the used budget: environment steps, episodes and seconds of training."""
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
            if session.compiling:
                function = self.progress.detail  # whose compilation began before the first update
                self.progress.start_activity("Compiling", shows_records=True)
                self.progress.explain(function or "in another process")
        if self.first_update is not None and self._first_updated is None and not session.compiling:
            self.clock.first_update()
            self._first_updated = self.clock.this_start, session.env_steps, session.samples_trained
            compiled = {f"Compiling {name}": seconds for name, seconds in session.compiler.seconds.items()}
            self.start_seconds = self.progress.activity_seconds() | compiled
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
        self.progress.show(record, None if session.compiling else done, seconds_left(done, self.clock.training))
        return record, seconds

    def _evaluate_if_due(self) -> None:
        """Evaluate if another `eval_every` steps are done, and save the weights with their score."""
        if not self.evaluation.due:
            return
        self.checkpoints.wait()  # this save must not be skipped because another is in progress
        record = self.plan.ranks.lead(lambda: self.evaluation.run(lambda: self.signals.caught))
        if record:
            self.evaluation.accept(record)
            self.metrics.write(record)
            self._save(background=True)

    def _save(self, background: bool) -> None:
        """Save the run; if that fails in the foreground, save to the fallback folder and raise StorageError."""
        try:
            self._save_to(self.checkpoints, background)
        except (StorageError, ReportedByLeader) as error:
            raise self._save_elsewhere(str(error)) from error

    def _check_saves(self) -> None:
        """Raise StorageError if saving fails repeatedly: the run could train for days and lose everything."""
        checkpoints = self.checkpoints
        if self.plan.ranks.lead(lambda: checkpoints.failures >= _MAX_FAILED_SAVES and not checkpoints.busy):
            raise self._save_elsewhere(
                f"{self.checkpoints.failures} checkpoints in a row were not written. {self.checkpoints.last_error}"
            )

    def _save_elsewhere(self, problem: str) -> UserError:
        self.signals.loop_is_back()
        if not self.plan.ranks.leads:
            if self.plan.settings.fallback_dir is not None:  # rank 0 saves this rank's part too
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
        """Return the result of training, without evaluation. Speeds cover this start, from its first update if possible."""
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
            "start_seconds": self.start_seconds,
            "peak_memory_bytes": hardware.peak_bytes(plan.device),
            "micro_batches": session.learner.micro_batches,
            "stopped_by": stopped_by,
            "settings": plan.describe(),
        }
