"""Central inference: a thread that chooses the actions of all waiting actors in one batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from redline.collect.actor_policy import ActorPolicy
from redline.collect.shared_memory import Backoff
from redline.collect.shared_ring import SharedRing


class Request(NamedTuple):
    """A ring whose writer may request actions."""

    ring: SharedRing
    env_index: Tensor  # (K,) int64: indices of its environments among all


class InferenceServer:
    """Serves requests in its own thread, with the newest weights offered by the learner."""

    def __init__(
        self,
        policy: ActorPolicy,
        requests: Sequence[Request],
        outputs: Sequence[str],
        acted: int,
        progress: Callable[[], float],
    ) -> None:
        """`outputs` are the algorithm's POLICY_OUTPUTS; `acted` is the number of steps every environment has already taken."""
        self.policy, self.requests, self.progress, self.acted = policy, requests, progress, acted
        self.outputs = [f"out.{name}" for name in outputs]
        self.lock = threading.Lock()  # serializes serving and the recovery of a ring; actors do not use it
        self.offered: tuple[Tensor, int, torch.cuda.Event | None] | None = None
        self.error: BaseException | None = None  # ended the thread; raised by the thread that waits for rows
        self.draws = acted * len(requests)  # batches served; numbers the policy's random draws
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="redline-inference", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def offer(self, weights: Tensor, version: int) -> None:
        """Offer new weights, the result of `flat_weights`; they are loaded before the next batch and must not change."""
        ready = None
        if weights.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self.offered = weights, version, ready

    def close(self) -> None:
        self.stop.set()
        if self.thread.is_alive():
            self.thread.join()

    def _run(self) -> None:
        try:
            gpu = self.policy.device.type == "cuda"
            with torch.cuda.stream(torch.cuda.Stream(self.policy.device)) if gpu else nullcontext():
                backoff = Backoff()
                while not self.stop.is_set():
                    if self.serve():
                        backoff.reset()
                    else:
                        backoff.sleep()
        except BaseException as error:
            self.error = error

    def serve(self) -> bool:
        """Choose actions for all pending requests; return False if there are none."""
        with self.lock:
            pending = [(request, row) for request in self.requests if (row := request.ring.pending()) is not None]
            if not pending:
                return False
            self._load_weights()
            device = self.policy.device
            obs = torch.cat([torch.from_numpy(row["obs"]) for _, row in pending]).to(device)
            episode_start = torch.cat([torch.from_numpy(row["episode_start"]) for _, row in pending]).to(device)
            env_index = torch.cat([request.env_index for request, _ in pending]).to(device)
            acted = self.acted + min(request.ring.written for request, _ in pending)
            action, outputs = self.policy.act(obs, episode_start, env_index, self.draws, acted, self.progress())
            self.draws += 1
            fields = {"action": action.cpu().numpy()}
            fields |= {name: x.cpu().numpy() for name, x in zip(self.outputs, outputs, strict=True)}
            start = 0
            for request, row in pending:
                end = start + len(request.env_index)
                for name, values in fields.items():
                    row[name][:] = values[start:end]
                row["version"][...] = self.policy.version
                request.ring.respond()
                start = end
        return True

    def _load_weights(self) -> None:
        offered = self.offered
        if offered is not None and offered[1] != self.policy.version:
            weights, version, ready = offered
            if ready is not None:
                ready.wait()
                weights.record_stream(torch.cuda.current_stream())
            self.policy.load(weights, version)
