"""From asynchronous actor processes to rollouts: they play while the learner learns; nobody waits for a lock.

    actor 0: environments ─► ring ─┐
    actor 1: environments ─► ring ─┼─► staged rows of all environments ─► device ─► the learner, a row at a time
    actor 2: environments ─► ring ─┘

The policy is asked in the actors, to which weights are published as they are learned, or here for all of them at once.
The newest row stays staged until the next has come: only then is it known whether that one continues it. Where an actor was
replaced or rows were dropped it does not, and the row is cut there: no sample spans the break.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike

from redline.algos.algorithm import Algorithm
from redline.algos.learner import Learner
from redline.collect.actor_policy import ActorPolicy, flat_weights
from redline.collect.actor_supervisor import ActorSupervisor, CannotStart
from redline.collect.collector import Collector, CollectorOptions, Prepare
from redline.collect.inference_server import InferenceServer, Request
from redline.collect.row_format import ENDS, TOLD, plain_spec, row_fields
from redline.collect.shared_memory import CELL, Array, Backoff, Memory, SharedLayout, Status, Weights
from redline.collect.shared_ring import SharedRing, SharedRingSpec
from redline.collect.sync_collector import CPUCollector
from redline.engine import hardware
from redline.envs.batch import Rules

_MOVED = 1_000  # transitions moved at once, where a rollout is waited for anyway
_LONG_WAIT_NS = 10_000_000_000
_PUBLISH_EVERY = 8  # updates between two publications of weights, of a learner that learns after every row
_AHEAD = 64  # rows an actor may be ahead of a learner that learns after every row


class ActorCollector(CPUCollector):
    """N environments that actor processes play, from `start` on."""

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
        """`fallback` makes the collector that takes over if actors cannot start; `check` adds checksums to rows and weights."""
        super().__init__(rules, learner, num_envs, device)
        self.algo, self.config, self.options, self.notify = algo, config, options, notify
        self.fallback, self.check = fallback, check
        self.publish_every = options.publish or (1 if learner.rollout_steps > 1 else _PUBLISH_EVERY)
        self.cores: hardware.SharedCores | None = None  # divided between actors and learner, on a CPU
        self.device, self.number = device, 0
        self.version, self.updates = 0, 0  # of the weights published, and updates since
        self.outputs = tuple(torch.zeros(num_envs, device=device) for _ in algo.POLICY_OUTPUTS)
        self.targets = {"obs": self.state.obs, "episode_start": self.episode_start, "action": self.action}
        self.targets |= {"reward": self.reward, "terminated": self.terminated, "truncated": self.truncated}
        self.targets |= {f"out.{name}": x for name, x in zip(algo.POLICY_OUTPUTS, self.outputs, strict=True)}
        self._absorb = prepare(self.absorb)
        self._share_memory(num_envs)
        self._make_staging(num_envs)
        self.server: InferenceServer | None = None
        self.supervisor: ActorSupervisor | None = None
        self.begun = time.monotonic()
        self.rows_read = self.rows_before = 0
        self.lag = self.wait_ns = self.move_ns = 0.0
        self.counted = [(0, 0)] * options.actors  # busy and waiting nanoseconds of each actor, when last asked

    def _share_memory(self, num_envs: int) -> None:
        """One block for all that is shared: rings, weights, how the actors are."""
        options, spec = self.options, self.learner.spec
        self.capacity = max(self.learner.rollout_steps, _AHEAD) + 2
        self.groups = _split(num_envs, options.actors, 2 if options.central else 1)
        size = 4 * flat_weights(self.learner.acting_network).numel()
        offsets = {"control": 0, "weights": CELL * 8}
        end = CELL * 8 + Weights.layout(size).bytes
        statuses, rings = [], []
        for own in self.groups:
            statuses.append((end, sum(count for _, count in own)))
            end += Status.layout(statuses[-1][1]).bytes
            for _, count in own:
                fields = SharedLayout(row_fields(spec, count, self.algo.POLICY_OUTPUTS))
                plan = SharedRingSpec(fields, self.capacity, options.drop_oldest, self.check, "final_obs", ENDS)
                rings.append((end, plan))
                end += plan.layout.bytes
        self.memory = Memory.create(end)
        self.control = self.memory.array(offsets["control"], (2,), np.float64)  # stop; share of training done
        self.weights = Weights(self.memory, offsets["weights"], size, check=self.check)
        self.statuses = [Status(self.memory, *place) for place in statuses]
        self.rings = [SharedRing(self.memory, offset, plan) for offset, plan in rings]
        self.slices = [slice(first, first + count) for own in self.groups for first, count in own]
        self.breaks: list[list[int]] = [[] for _ in rings]  # rows of each that do not continue the one before
        common = {
            "parent": os.getpid(),
            "fd": self.memory.fd,
            "bytes": self.memory.size,
            **offsets,
            "env": options.env,
            "options": asdict(self.rules.config),
            "time_limit": self.rules.time_limit,
            "practice": (options.backplay, options.backplay_steps),
            "spec": plain_spec(spec),
            "inference": "central" if options.central else "actors",
            "algo": self.algo.name,
            "algo_options": asdict(self.config),
            "num_envs": num_envs,
            "seed": options.seed,
            "check": self.check,
        }
        places = iter(rings)
        self.jobs: list[dict[str, Any]] = []
        for own, (status, _) in zip(self.groups, statuses, strict=True):
            parts = []
            for first, count in own:
                offset, plan = next(places)
                parts.append({"first": first, "num_envs": count, "ring": offset, "plan": plan.to_json()})
            self.jobs.append(common | {"status": status, "groups": parts})

    def _make_staging(self, num_envs: int) -> None:
        """Rows of all environments: one copy a ring and a field moves many; page-locked where a GPU fetches them."""
        self.rows = self.capacity + 1
        self.least = min(math.ceil(_MOVED / num_envs), self.learner.rollout_steps)
        pinned = self.device.type == "cuda"
        fields = row_fields(self.learner.spec, num_envs, self.algo.POLICY_OUTPUTS) | {
            "version": ((len(self.rings),), np.int64)
        }
        self.staged = {name: _host_array((self.rows, *shape), dtype, pinned) for name, (shape, dtype) in fields.items()}
        self.parts = [
            {name: array[:, index] if name == "version" else array[:, env_index] for name, array in self.staged.items()}
            for index, env_index in enumerate(self.slices)
        ]
        self.on_host = {name: torch.from_numpy(self.staged[name]) for name in (*self.targets, "final_obs")}
        self.fetched = {k: x.to(self.device, copy=True) for k, x in self.on_host.items()} if pinned else self.on_host
        self.side = torch.cuda.Stream(self.device) if pinned else None
        self.arrived = torch.cuda.Event() if pinned else None
        self.count, self.taken = 0, 0  # rows staged, and those of them that went to the learner; the last one stays

    def start(self, progress: float) -> Collector:
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
        options, config = self.options, self.rules.config
        self.control[1] = progress
        acted, key = int(self.learner.acted), int(self.learner.key)
        num_envs = self.slices[-1].stop
        if options.central:
            player = ActorPolicy(self.rules, self.algo, self.config, num_envs, key, self.device)
            lane_of = [torch.arange(env_index.start, env_index.stop) for env_index in self.slices]
            requests = [Request(ring, env_index) for ring, env_index in zip(self.rings, lane_of, strict=True)]
            self.server = InferenceServer(
                player, requests, self.algo.POLICY_OUTPUTS, acted, lambda: float(self.control[1])
            )
        self._publish()
        if self.server:
            self.server.start()
        more = {"acted": acted, "key": key, "number": self.number}
        shares = options.actors >= (os.cpu_count() or 1)  # the cores, with the learner
        allowed = self.cores.others if self.cores else [[]] * options.actors  # none: the system decides
        rings = iter(self.rings)
        own_rings = [[next(rings) for _ in own] for own in self.groups]
        guard = self.server.lock if self.server else nullcontext()
        self.supervisor = ActorSupervisor(
            [job | more | {"cores": own, "shares": shares} for job, own in zip(self.jobs, allowed, strict=True)],
            self.statuses,
            own_rings,
            config.timeout,
            config.restarts,
            self.notify,
            self._break,
            guard,
        )
        self.begun = time.monotonic()

    def restart_episodes(self, seed: int, number: int) -> None:
        del seed  # that of the options
        if self.supervisor is not None:
            raise RuntimeError("restart_episodes was called after start; actors cannot be restarted.")
        self.number = number

    def close(self) -> None:
        self.control[0] = 1.0
        try:
            if self.supervisor is not None:
                self.supervisor.close()
            if self.server is not None:
                self.server.close()
            self.memory.close()
        finally:
            if self.cores is not None:
                self.cores.give_back()
                self.cores = None

    # -------------------------------------------------------------------------------------------------------- rows

    def step(self) -> None:
        """The learner ingests the next row of all environments."""
        if self.taken + 1 >= self.count:
            self._stage()
        row = self.taken
        for name, target in self.targets.items():
            target.copy_(self.fetched[name][row])
        given = self.fetched
        ended = (given["terminated"][row] | given["truncated"][row]).view(-1, *(1,) * (self.final_obs.ndim - 1))
        self.final_obs.copy_(torch.where(ended, given["final_obs"][row], given["obs"][row + 1]))  # see ENDS
        self._absorb()
        self.episode_stats.add({name: self.staged[name][row] for name in TOLD})
        self.lag += self.version - float(self.staged["version"][row].mean())
        self.rows_read += 1
        self.taken += 1

    @torch.no_grad()
    def absorb(self) -> None:
        """Remember a row that was played elsewhere."""
        self.learner.record_actions(self.observe(), None, self.action, self.outputs)
        self.ingest()

    def _stage(self) -> None:
        """Move more rows of all environments here, waiting until there are enough."""
        if self.arrived is not None:
            self.arrived.synchronize()  # the rows before have left
        if self.count:  # the one that stayed is the first now
            for array in self.staged.values():
                array[0] = array[self.count - 1]
        start = min(self.count, 1)
        began = time.perf_counter_ns()
        least = self.least + 1 - start
        nap, told = Backoff(), False
        while (found := min(ring.available() for ring in self.rings)) < least:
            self._check()
            nap.take()
            if not told and time.perf_counter_ns() - began > _LONG_WAIT_NS:
                self.notify("Waiting for the environments: no actor has played for ten seconds.")
                told = True
        moved = time.perf_counter_ns()
        rows = min(found, self.rows - start)
        for index in range(len(self.rings)):
            self._move(index, rows, start)
        self.count, self.taken = start + rows, 0
        if self.side is not None and self.arrived is not None:
            self.side.wait_stream(torch.cuda.current_stream())  # what was fetched before has been read
            with torch.cuda.stream(self.side):
                for name, tensor in self.fetched.items():
                    tensor[: self.count].copy_(self.on_host[name][: self.count], non_blocking=True)
                self.arrived.record()
            torch.cuda.current_stream().wait_event(self.arrived)
        self.wait_ns += moved - began
        self.move_ns += time.perf_counter_ns() - moved

    def _move(self, index: int, rows: int, start: int) -> None:
        """So many rows of one ring, to be staged from `start` on; where they do not continue what was before, that is cut."""
        ring, part, breaks = self.rings[index], self.parts[index], self.breaks[index]
        done = 0
        while done < rows:
            here = start + done
            copied = ring.take(rows - done, part, here, breaks)
            if not copied:  # overwritten while they were copied
                self._check()
                time.sleep(0)
                continue
            first = ring.next - copied
            broken = [here] if ring.skipped else []  # staged rows that do not continue the one before
            while breaks and breaks[0] < ring.next:
                broken.append(here + max(0, breaks.pop(0) - first))
            for row in broken:
                part["episode_start"][row] = True  # of what is seen, too: frames before it are not its own
                if row:
                    part["truncated"][row - 1] |= ~part["terminated"][row - 1]
            done += copied

    def _break(self, ring: SharedRing) -> None:
        """The next row of that ring is of another process than those before."""
        self.breaks[self.rings.index(ring)].append(ring.written)

    def _check(self) -> None:
        """Raise what keeps rows from coming."""
        assert self.supervisor is not None
        self.supervisor.check()
        if self.server is not None and self.server.error is not None:
            raise self.server.error

    # ---------------------------------------------------------------------------------------------------- policies

    def on_update(self, progress: float) -> None:
        """After an update: actors get new weights, every `publish` times."""
        self.updates += 1
        self.control[1] = progress
        if self.updates >= self.publish_every:
            self._publish()

    def _publish(self) -> None:
        self.updates = 0
        self.version += 1
        weights = flat_weights(self.learner.acting_network)
        if self.server is not None:
            self.server.offer(weights, self.version)
        else:
            self.weights.publish(weights.cpu().numpy(), self.version)

    # ---------------------------------------------------------------------------------------------------- measures

    def metrics(self) -> dict[str, float]:
        """How collecting went since this was last asked."""
        now = time.monotonic()
        seconds, rows = max(now - self.begun, 1e-9), max(self.rows_read - self.rows_before, 1)
        num_envs = self.slices[-1].stop
        rings = iter(self.rings)
        depth = [max(next(rings).available() for _ in own) / self.capacity for own in self.groups]
        counts = [(status.busy_ns, status.wait_ns) for status in self.statuses]
        spent = [(b - b0, w - w0) for (b, w), (b0, w0) in zip(counts, self.counted, strict=True)]
        busy = [b / max(b + w, 1) for b, w in spent]
        found = {
            "queue": float(np.mean(depth)),
            "queue_max": max(depth),
            **{f"queue_{actor}": fill for actor, fill in enumerate(depth, 1)},
            "drops": float(sum(ring.dropped for ring in self.rings)),
            "policy_lag": self.lag / rows,
            "actor_busy": float(np.mean(busy)),
            "learner_wait": self.wait_ns / 1e9 / seconds,
            "reader_ms": self.move_ns / 1e6 / (rows * num_envs / 1000),  # to move 1,000 transitions
            "restarts": float(self.supervisor.failed if self.supervisor else 0),
        }
        self.begun, self.rows_before, self.counted = now, self.rows_read, counts
        self.lag = self.wait_ns = self.move_ns = 0.0
        return found


def _split(num_envs: int, actors: int, parts: int) -> list[list[tuple[int, int]]]:
    """For each actor its groups of environments: (first, count). No group is empty; two groups take turns to wait for actions."""
    found, first = [], 0
    for own in np.array_split(np.arange(num_envs), actors):
        groups = []
        for group in np.array_split(own, min(parts, len(own))):
            groups.append((first, len(group)))
            first += len(group)
        found.append(groups)
    return found


def _host_array(shape: tuple[int, ...], dtype: DTypeLike, pinned: bool) -> Array:
    if not pinned:
        return np.zeros(shape, dtype)
    kind = torch.from_numpy(np.zeros(1, dtype)).dtype
    array: Array = torch.zeros(shape, dtype=kind, pin_memory=True).numpy()
    return array
