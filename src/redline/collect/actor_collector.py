"""Collect from asynchronous actor processes: they play while the learner learns, and no process waits for a lock.

    actor 0: environments ─► ring ─┐
    actor 1: environments ─► ring ─┼─► staged rows of all environments ─► device ─► learner, one row a step
    actor 2: environments ─► ring ─┘

Actions are chosen in the actors, to which the learner publishes its weights, or centrally by an InferenceServer.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from redline.algos.algorithm import Algorithm
from redline.algos.learner import Learner
from redline.collect.actor_job import ActorJob
from redline.collect.actor_memory import ActorMemory, ring_rows, split_envs
from redline.collect.actor_policy import ActorPolicy, flat_weights
from redline.collect.actor_supervisor import ActorSupervisor
from redline.collect.child_process import CannotStart
from redline.collect.collector import Collector, CollectorOptions, Prepare
from redline.collect.inference_server import InferenceServer, Request
from redline.collect.row_format import EPISODE_FIELDS, row_fields, spec_to_json
from redline.collect.row_staging import RowStaging
from redline.collect.sync_collector import CPUCollector
from redline.core.errors import UserError
from redline.core.faults import reach
from redline.engine import hardware
from redline.engine.stages import Stage, Stages
from redline.envs.batch import Rules

_MOVED = 1_000  # transitions to move at once, for a learner that waits for a rollout anyway
_PUBLISH_EVERY = 8  # updates between publications of weights, for a learner without rollouts


class ActorCollector(CPUCollector):
    """Collects from N CPU environments played by actor processes, which run from `start` on."""

    def __init__(
        self,
        rules: Rules,
        learner: Learner,
        algo: Algorithm,
        config: Any,
        num_envs: int,
        device: torch.device,
        options: CollectorOptions,
        prepare: Prepare,
        notify: Callable[[str], None],
        fallback: Callable[[], Collector],
        check: bool = False,
    ) -> None:
        """`fallback` makes the collector to use if actors cannot start; `check` adds checksums to rows and weights."""
        super().__init__(rules, learner, num_envs, device, notify)
        self.algo, self.config, self.options = algo, config, options
        self.num_envs, self.device, self.fallback, self.check = num_envs, device, fallback, check
        self.number = 0  # the argument of `restart_episodes`
        self.version, self.updates = 0, 0  # publications of weights, and updates since the last one
        self.publish_every = options.publish or (1 if learner.rollout_steps > 1 else _PUBLISH_EVERY)
        self.outputs = tuple(torch.zeros(num_envs, device=device) for _ in algo.POLICY_OUTPUTS)
        self.buffers = {"obs": self.state.obs, "episode_start": self.episode_start, "action": self.action}
        self.buffers |= {"reward": self.reward, "terminated": self.terminated, "truncated": self.truncated}
        self.buffers |= {f"out.{name}": x for name, x in zip(algo.POLICY_OUTPUTS, self.outputs, strict=True)}
        self._ingest = prepare(self.ingest_row)
        self.capacity = options.ring_rows or ring_rows(learner.rollout_steps)
        staged_rows = options.staged_rows or min(math.ceil(_MOVED / num_envs), learner.rollout_steps, self.capacity - 1)
        if staged_rows >= self.capacity:
            raise UserError(
                f"staged_rows is {staged_rows}; expected fewer than the {self.capacity} rows of a ring (--ring-rows)."
            )
        groups = split_envs(num_envs, options.actors, 2 if options.central else 1)
        size = 4 * flat_weights(learner.acting_network).numel()
        self.shared = ActorMemory(
            learner.spec, algo.POLICY_OUTPUTS, groups, self.capacity, size, options.drop_oldest, check
        )
        self.staging = RowStaging(
            self.shared.rings,
            self.shared.slices,
            row_fields(learner.spec, num_envs, algo.POLICY_OUTPUTS),
            (*self.buffers, "final_obs"),
            staged_rows,
            device,
            self._raise_failure,
            notify,
            options.pin_memory,
        )
        self.cores: hardware.SharedCores | None = None  # on a CPU, divided between actors and learner
        self.server: InferenceServer | None = None
        self.supervisor: ActorSupervisor | None = None
        self._reset_metrics()

    # ---------------------------------------------------------------------------------------------------- start and end

    def start(self, progress: float) -> Collector:
        """Start the actors and return this collector, or the fallback if they cannot start."""
        if self.supervisor is not None:
            return self
        if self.device.type == "cpu":
            self.cores = hardware.SharedCores(self.options.actors)
        try:
            self._start(progress)
        except CannotStart as error:
            self.notify(f"Playing in this process: actors cannot start ({error}).")
            self.close()
            collector = self.fallback()
            collector.restart_episodes(self.options.seed, self.number)
            return collector.start(progress)
        return self

    def _start(self, progress: float) -> None:
        self.shared.control.progress = progress
        acted, key = int(self.learner.acted), int(self.learner.key)
        if self.options.central:
            self.server = self._make_server(acted, key)
        self._publish()
        if self.server:
            self.server.start()
        config = self.rules.config
        self.supervisor = ActorSupervisor(
            self._jobs(acted, key),
            self.shared.statuses,
            self.shared.rings_of,
            config.timeout,
            config.restarts,
            self.notify,
            self.staging.add_break,
            self.server.lock if self.server else nullcontext(),
        )
        self._reset_metrics()

    def _make_server(self, acted: int, key: int) -> InferenceServer:
        first = self.learner.first_env
        policy = ActorPolicy(self.rules, self.algo, self.config, self.learner.total_envs, key, self.device)
        requests = [
            Request(ring, torch.arange(first + envs.start, first + envs.stop))
            for ring, envs in zip(self.shared.rings, self.shared.slices, strict=True)
        ]
        control = self.shared.control
        return InferenceServer(policy, requests, self.algo.POLICY_OUTPUTS, acted, lambda: control.progress)

    def _jobs(self, acted: int, key: int) -> list[ActorJob]:
        """Return the job of each actor."""
        options, shared = self.options, self.shared
        cores = self.cores.others if self.cores else [[]] * options.actors
        return [
            ActorJob(
                parent=os.getpid(),
                fd=shared.memory.fd,
                bytes=shared.memory.size,
                control_offset=shared.control_offset,
                weights_offset=shared.weights_offset,
                status_offset=status_offset,
                groups=tuple(replace(group, first=self.learner.first_env + group.first) for group in groups),
                env=options.env,
                env_options=asdict(self.rules.config),
                time_limit=self.rules.time_limit,
                backplay=options.backplay,
                backplay_steps=options.backplay_steps,
                spec=spec_to_json(self.learner.spec),
                central=options.central,
                algo=self.algo.name,
                algo_options=asdict(self.config),
                num_envs=self.learner.total_envs,
                seed=options.seed,
                check=self.check,
                number=self.number,
                acted=acted,
                key=key,
                cores=tuple(own_cores),
                low_priority=options.actors >= (os.cpu_count() or 1),
            )
            for groups, status_offset, own_cores in zip(shared.jobs, shared.status_offsets, cores, strict=True)
        ]

    def restart_episodes(self, seed: int, number: int) -> None:
        """Set the episodes that actors will play; must be called before `start`."""
        del seed  # actors use the seed of the options
        if self.supervisor is not None:
            raise RuntimeError("restart_episodes was called after start; actors keep their episodes.")
        self.number = number

    def close(self) -> None:
        self.shared.control.stop()
        try:
            if self.supervisor is not None:
                self.supervisor.close()
            if self.server is not None:
                self.server.close()
            self.shared.close()
        finally:
            if self.cores is not None:
                self.cores.give_back()
                self.cores = None

    # ------------------------------------------------------------------------------------------------------------- rows

    def step(self) -> None:
        row = self.staging.next_row()
        self.load_row(row)
        self._ingest()
        arrays = self.staging.arrays
        self.episode_stats.add({name: arrays[name][row] for name in EPISODE_FIELDS})
        self.lag += self.version - float(arrays["version"][row].mean())
        self.rows_read += 1

    def load_row(self, row: int) -> None:
        """Copy a staged row to the buffers of the transition."""
        staged = self.staging.device
        for name, buffer in self.buffers.items():
            buffer.copy_(staged[name][row])
        ended = (staged["terminated"][row] | staged["truncated"][row]).view(-1, *(1,) * (self.final_obs.ndim - 1))
        self.final_obs.copy_(torch.where(ended, staged["final_obs"][row], staged["obs"][row + 1]))  # see END_FLAGS

    @property
    def stages(self) -> Stages:
        return {
            "staging.wait": Stage("actors' wait", compiled=False),
            "staging.move": Stage("rings", compiled=False),
            "staging.copy_to_device": Stage("host-device copies", compiled=False),
            "load_row": Stage("host-device copies", compiled=False),
            "_ingest": Stage("replay write", compiled=False),
            "_publish": Stage("publication of weights", compiled=False),
        }

    @torch.no_grad()
    def ingest_row(self) -> None:
        """Hand the transition in the buffers, whose actions were chosen by actors or the server, to the learner."""
        self.learner.record_actions(self.observe(), None, self.action, self.outputs)
        self.ingest()

    def _raise_failure(self) -> None:
        """Raise the failure that stopped the actors or the inference server, if there is one."""
        if self.supervisor is None:
            raise RuntimeError("step was called before start.")
        self.supervisor.check()
        if self.server is not None and self.server.error is not None:
            raise self.server.error

    # ---------------------------------------------------------------------------------------------------------- weights

    def on_update(self, progress: float) -> None:
        """Count an update; publish the weights every `publish_every` updates."""
        self.updates += 1
        self.shared.control.progress = progress
        if self.updates >= self.publish_every:
            self._publish()

    def _publish(self) -> None:
        reach("publish")
        self.updates = 0
        self.version += 1
        weights = flat_weights(self.learner.acting_network)
        if self.server is not None:
            self.server.offer(weights, self.version)
        else:
            self.shared.weights.publish(weights.cpu().numpy(), self.version)

    # ---------------------------------------------------------------------------------------------------------- metrics

    @property
    def env_steps_played(self) -> int:
        """Steps that actors have played, summed over environments, including those the learner has not read yet."""
        return sum(status.steps for status in self.shared.statuses)

    def metrics(self) -> dict[str, float]:
        """Return queue depths, policy lag, and the fractions of time that actors were busy and the learner waited."""
        seconds, rows = max(time.monotonic() - self.since, 1e-9), max(self.rows_read, 1)
        depths = [max(ring.available() for ring in rings) / self.capacity for rings in self.shared.rings_of]
        spent = [
            (busy - busy_before, wait - wait_before)
            for (busy, wait), (busy_before, wait_before) in zip(self._actor_times(), self.actor_times, strict=True)
        ]
        metrics = {
            "queue": float(np.mean(depths)),
            "queue_max": max(depths),
            **{f"queue_{actor}": depth for actor, depth in enumerate(depths, 1)},
            "drops": float(sum(ring.dropped for ring in self.shared.rings)),
            "policy_lag": self.lag / rows,  # publications between choosing an action and learning from it
            "actor_busy": float(np.mean([busy / max(busy + wait, 1) for busy, wait in spent])),
            "learner_wait": self.staging.wait_ns / 1e9 / seconds,
            "reader_ms": self.staging.move_ns / 1e6 / (rows * self.num_envs / 1000),  # to move 1,000 transitions
            "restarts": float(self.supervisor.budget.failures if self.supervisor else 0),
        }
        self.advise_limit(int(self.staging.arrays["length"].max()))
        if self.rules.config.nonfinite == "mask":
            metrics["masked_values"] = float(sum(status.masked for status in self.shared.statuses))
        self._reset_metrics()
        return metrics

    def _actor_times(self) -> list[tuple[int, int]]:
        return [(status.busy_ns, status.wait_ns) for status in self.shared.statuses]

    def _reset_metrics(self) -> None:
        self.since, self.actor_times = time.monotonic(), self._actor_times()
        self.rows_read, self.lag = 0, 0.0
        self.staging.wait_ns = self.staging.move_ns = 0.0
