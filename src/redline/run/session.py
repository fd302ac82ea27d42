"""The session of a plan: environments, learner and the iteration that plays and learns."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from redline.algos.learner import Learner, check_learner, check_ranks
from redline.collect.collector import CollectorOptions
from redline.collect.factory import make_collector
from redline.core.faults import reach, spoil
from redline.engine import fast, hardware
from redline.envs import batch, live_rules, set_live, with_live
from redline.run.checkpoint import copy_into
from redline.run.memory import check_memory, fits_twice
from redline.run.plan import Plan, share_of
from redline.run.precompile import Precompilation

_BETWEEN, _PLAYING, _LEARNING = (
    "between iterations",
    "playing",
    "learning",
)  # stages of an iteration, used by `end_iteration`

_EAGER_SECONDS = 10.0  # without an update; then functions are compiled anyway


class Session:
    """Everything that trains, on its device. `iterate` is the hot loop: with tensor games it never synchronises."""

    def __init__(
        self,
        plan: Plan,
        notify: Callable[[str], None],
        report: Callable[[str], None] = lambda text: None,  # noqa: ARG005
        may_overlap: bool = False,
    ) -> None:
        """notify: called with messages. report: called with a few words about the function being compiled or captured.

        may_overlap: start playing and learning uncompiled while another process compiles, if the plan allows it.
        """
        self.plan, self.notify, self._report = plan, notify, report
        reach("session")
        own = share_of(plan)  # this rank's share
        micro_batches = check_memory(own)
        if plan.threads:
            torch.set_num_threads(plan.threads)
        if plan.device.type == "cuda":  # streams and events belong to the current device
            torch.cuda.set_device(plan.device)
        settings = plan.settings
        if settings.interop_threads and (problem := hardware.set_interop_threads(settings.interop_threads)):
            notify(f"Running with {torch.get_num_interop_threads()} inter-op threads: {problem}.")
        overlaps, shares = plan.starts_uncompiled, plan.shares_compilation
        if not (may_overlap and (overlaps or shares) and fits_twice(plan)):
            overlaps = shares = False
        self.compiler = self._make_compiler()
        self.compiler.postponed = overlaps
        runtime = fast.runtime(
            plan.device,
            plan.precision,
            self.compiler,
            plan.own_folder,
            settings.cudnn_benchmark,
            settings.fused_optimizer,
            settings.pin_memory,
            plan.ranks,
        )
        rules, self.phase = plan.rules, 0  # of the curriculum
        if plan.curriculum:
            first = plan.curriculum.rules[0]
            rules = live_rules(first, plan.curriculum.live, plan.device)
        number = plan.ranks.rank * own.num_envs  # of this rank's first environment
        env_index = torch.arange(number, number + own.num_envs, device=plan.device)
        keys = batch.env_keys(plan.settings.seed, env_index)
        envs = batch.reset(rules, keys)
        seed, accumulate = plan.settings.seed, plan.settings.accumulate
        self.learner: Learner = plan.algo.Learner(
            rules, own.algo_config, envs.game, own.num_envs, seed, runtime, accumulate
        )
        check_learner(self.learner)
        check_ranks(self.learner, plan.settings.algo)
        if plan.settings.oom == "stop":
            self.learner.max_micro_batches = 1
        self.learner.micro_batches = min(micro_batches, self.learner.max_micro_batches)
        self._told_micro_batches = 1
        self._tell_micro_batches(f"This batch does not fit into the memory of {plan.device}")
        options = CollectorOptions(
            env=plan.settings.env,
            seed=seed,
            actors=own.actors,
            central=plan.inference == "central",
            publish=plan.settings.publish,
            drop_oldest=plan.settings.drop_oldest,
            ring_rows=plan.settings.ring_rows,
            staged_rows=plan.settings.staged_rows,
            pin_memory=plan.settings.pin_memory,
            backplay=plan.backplay,
            backplay_steps=plan.backplay_steps,
        )
        self.collector = make_collector(
            options, rules, envs, self.learner, plan.algo, own.algo_config, plan.device, self._fast, notify
        )
        self._build()
        # Host counters of launches. The device has its own counters; the two are never compared.
        self.iterations = 0
        self.updates = 0
        self.remembered = (
            0  # iterations of experience in the learner; fewer than `iterations` after a resume without replay
        )
        self.progress = 0.0  # fraction of training done, 0 to 1, which schedules follow
        self._stage = _BETWEEN  # of the iteration
        self._threads = torch.get_num_threads()
        self._precompilation: Precompilation | None = None
        self._waits = overlaps and not shares  # learn uncompiled until the other process has compiled everything
        if self._waits:
            self._precompilation = Precompilation(plan, notify, report)
            # Threads synchronise at every operation: none should share a core with the compiler.
            torch.set_num_threads(max(self._threads - 1, 1))
        elif shares:
            self._precompilation = Precompilation(plan, notify, lambda _: None, skip=(self.collector.step.__name__,))
        self._eager_until = time.monotonic() + _EAGER_SECONDS
        self._eager_updates = -1  # updates made before compiling began
        self._updates_before = 0  # updates of the resumed checkpoint

    def _make_compiler(self) -> fast.Compiler:
        plan = self.plan
        # With options that change, torch 2.11 spends seconds at every start trying to combine the game's kernels, and fails.
        options = dataclasses.replace(
            plan.recipe.compiler, combine=plan.recipe.compiler.combine and not plan.curriculum
        )
        return fast.Compiler(
            plan.compile,
            self.notify,
            plan.device,
            options,
            plan.settings.compile_mode,
            self._before_compiling,
        )

    def _before_compiling(self, name: str, number: int, count: int) -> None:
        self._report(f"{name}, function {number} of at most {count}")
        if self._precompilation:
            self._precompilation.wait_for(name)

    @property
    def compiling(self) -> bool:
        """Whether all updates so far ran uncompiled because compilation was postponed."""
        return self.compiler.postponed or self.updates == self._eager_updates

    def _build(self) -> None:
        """Prepare the functions of an iteration; they are compiled and captured when first called."""
        # `start` may replace a collector whose steps cannot be compiled
        step = self.compiler(self.collector.step) if self.collector.on_device else lambda: self.collector.step()
        self._collect: Callable[[], None] = self._without_gradients(step)
        self._build_graphs()

    def _build_graphs(self) -> None:
        """Prepare the graphs of an iteration: a single one if both playing and learning can be captured."""
        if not self.collector.on_device:
            self._collect_only: Callable[[], None] = self._play
            self._update: Callable[[], None] = self._graph(self.learner.update)
            self._collect_and_learn: Callable[[], None] = self._play_and_learn
            return
        self._update = self.learner.update
        self._collect_only = fast.Graph(self._play, self._captures, self.notify, on_capture=self._report_capture)
        # Gradients that are exchanged through the host split the iteration: play is captured, learning is not.
        whole = self.plan.ranks.captures
        self._collect_and_learn = self._graph(self._play_and_learn) if whole else self._play_then_learn

    @property
    def _captures(self) -> bool:
        """Whether functions are captured as CUDA graphs; not while compilation is postponed."""
        return self.plan.graph and not self.compiler.postponed

    def _graph(self, function: Callable[[], None]) -> fast.Graph:
        """Return a learning function as a graph; if it does not fit into memory, batches are split."""
        captured = self._captures and self.plan.ranks.captures
        return fast.Graph(function, captured, self.notify, self.learner.split_batches, self._report_capture)

    def _report_capture(self) -> None:
        self._report("capturing a CUDA graph")

    def _fast(self, function: Callable[[], None]) -> Callable[[], None]:
        return fast.Graph(self.compiler(function), self.plan.graph, self.notify)

    def _without_gradients(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return a playing function, in inference mode if that is on; collectors disable gradients in any case."""
        return torch.inference_mode()(function) if self.plan.settings.inference_mode else function

    def _play(self) -> None:
        reach("collect")
        for _ in range(self.learner.rollout_steps):
            self._collect()

    def _play_and_learn(self) -> None:
        self._play()
        self._stage = _LEARNING
        reach("update")
        self._update()

    def _play_then_learn(self) -> None:
        self._collect_only()
        self._stage = _LEARNING
        reach("update")
        self._update()

    @property
    def steps_per_iteration(self) -> int:
        return self.learner.rollout_steps * self.plan.num_envs

    @property
    def env_steps(self) -> int:
        return self.iterations * self.steps_per_iteration

    @property
    def samples_per_update(self) -> int:
        """Samples in one gradient step, of all ranks."""
        return self.plan.ranks.size * self.learner.samples_per_update

    @property
    def samples_trained(self) -> int:
        return self.updates * self.samples_per_update

    def iterate(self, count: int, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Run `count` iterations: `rollout_steps` steps in every environment, then an update if the learner is ready.

        interrupted: called after each iteration; returns whether to stop early.
        """
        self.collector = self.collector.start(self.progress)
        for _ in range(count):
            if self.plan.settings.steps:  # exact with a budget of steps, so that a resumed run repeats
                self.progress = max(self.progress, min(self.env_steps / self.plan.settings.steps, 1.0))
            if self.learner.scheduled:
                self.learner.progress.fill_(self.progress)
            self._follow_curriculum()
            reach("iteration")
            if reach("weights"):
                spoil(self.learner.acting_network.state_dict())
            self.learner.before_iteration()
            self._stage = _PLAYING
            if self.learner.ready(self.remembered):
                self._collect_and_learn()
                self.updates += self.learner.updates_per_iteration
                self.collector.on_update(self.progress)
                self._tell_micro_batches(f"{self.plan.device} ran out of memory")
            else:
                reach("warm_up")
                self._collect_only()
            self._count_iteration()
            if self.compiler.postponed:
                self._compile_if_due()
            elif self._precompilation and self._precompilation.finished:
                self._stop_precompilation()
            if interrupted():
                return

    def _compile_if_due(self) -> None:
        """Switch to compiled functions after the first update, and once the other process has compiled them if there is one."""
        learned = self.updates > self._updates_before or time.monotonic() > self._eager_until
        waiting = self._waits and self._precompilation is not None and not self._precompilation.finished
        if not learned or waiting:
            return
        if self._waits:
            self._stop_precompilation()
            torch.set_num_threads(self._threads)
        self.compiler.postponed, self._eager_updates = False, self.updates
        self._build_graphs()
        torch.cuda.empty_cache()  # compiled functions allocate other sizes; does nothing without a GPU

    def _stop_precompilation(self) -> None:
        if self._precompilation:
            self._precompilation.close()
            self._precompilation = None

    def _count_iteration(self) -> None:
        self._stage = _BETWEEN
        self.learner.after_iteration()
        self.iterations += 1
        self.remembered += 1

    def end_iteration(self) -> None:
        """Make the state consistent after an exception in an iteration, so that it can be saved.

        Steps of an unfinished rollout are not counted. If the update failed, the rollout was complete and is counted.
        """
        if self._stage == _LEARNING:
            self._count_iteration()

    def _tell_micro_batches(self, reason: str) -> None:
        """Notify the user that batches are split, once for each number of parts."""
        parts = self.learner.micro_batches
        if parts == self._told_micro_batches:
            return
        self._told_micro_batches = parts
        size = self.learner.config.batch_size
        self.notify(
            f"{reason}: gradients of a batch of {size:,} are computed in {parts} parts of {-(-size // parts):,} samples, one "
            "after another, and are the same."
        )

    def _follow_curriculum(self) -> None:
        """Enter the phase that is due. Never go back, even if a resumed run has a larger budget."""
        curriculum = self.plan.curriculum
        if curriculum is None or (due := curriculum.at(self.progress)) <= self.phase:
            return
        recompiles = curriculum.compiles_again(self.phase, due)
        self._enter(due)
        if self.learner.spec.afterstates:  # observations contain rewards: the memory's follow the old rules
            self.learner.clear()
            self.remembered = 0
        phase = curriculum.phases[due]
        options = ", ".join(f"env.{name} {value}" for name, value in phase.options.items()) or "the run's own options"
        self.notify(
            f"Phase {phase.name} ({due + 1} of {len(curriculum.phases)}): {options}"
            f"{'; compiling again' if recompiles and self.plan.compile else ''}."
        )

    def _enter(self, phase: int) -> None:
        """Switch to the rules of a phase; games in progress continue under them."""
        assert self.plan.curriculum
        rules = self.plan.curriculum.rules[phase]
        set_live(self.collector.rules, rules)
        if self.plan.curriculum.compiles_again(self.phase, phase):
            self.collector.rules = with_live(rules, self.collector.rules)
            self._build()
        self.phase = phase

    def read_metrics(self, updates: int) -> dict[str, float]:
        """Return the learner's mean metrics over the last `updates`, its current ones, and the collector's; reset the means."""
        means = self.learner.read_metrics(updates) if updates else {}
        return means | self.learner.current_metrics() | self.collector.metrics()

    def describe_env(self, env_index: int) -> str:
        """Return a description of an environment stepped by this process, with its seed and latest actions."""
        return self.collector.describe_env(env_index)

    def synchronize(self) -> None:
        hardware.synchronize(self.plan.device)

    def tensors(self, replay: bool = True) -> dict[str, dict[str, Tensor]]:
        """Return the complete state in the groups of a checkpoint; `replay` includes the replay memory."""
        groups = {**self.learner.state_dict(), "envs": self.collector.tensors()}
        if not replay:
            groups.pop("replay", None)
        return groups

    def describe_phase(self) -> dict[str, Any]:
        """Return name and number (from 1) of the curriculum's phase; empty without a curriculum."""
        curriculum = self.plan.curriculum
        return {"phase": curriculum.phases[self.phase].name, "phase_number": self.phase + 1} if curriculum else {}

    def close(self) -> None:
        """Release processes, threads and files. No method is called afterwards."""
        try:
            self._stop_precompilation()
            self.stop_playing()
        finally:
            self.learner.close()

    def stop_playing(self) -> None:
        """Close the environments and give the actors' cores back to this process."""
        self.collector.close()

    def counters(self) -> dict[str, Any]:
        counts = {"iterations": self.iterations, "updates": self.updates, "remembered": self.remembered}
        return counts | self.describe_phase()

    def load(self, groups: Mapping[str, Mapping[str, Tensor]], counters: Mapping[str, Any]) -> None:
        """Load a checkpoint's state in place, into the tensors that captured graphs and compiled functions read."""
        own = self.tensors()
        for group, tensors in own.items():
            if group in groups:
                saved = groups[group]
                if group == "replay":
                    saved = self.learner.adapt(saved)
                elif group == "envs":
                    saved = self.collector.adapt(saved)
                copy_into(tensors, saved, what=group)
        self.iterations, self.updates = counters["iterations"], counters["updates"]
        self._updates_before = self.updates
        lost = not self.learner.loaded() or ("replay" in own and "replay" not in groups)
        self.remembered = 0 if lost else counters["remembered"]
        if not self.collector.restores_episodes:
            self.collector.restart_episodes(self.plan.settings.seed, self.iterations)
            if not self.learner.interrupt():
                self.remembered = 0
                self.notify(
                    "The replay memory of this run is lost: this kind of memory cannot continue with new episodes."
                )
        if self.plan.curriculum and (phase := self.plan.curriculum.find(counters.get("phase", ""))):
            self._enter(phase)
