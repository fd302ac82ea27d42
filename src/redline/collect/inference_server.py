"""Actions for all actors from one place: a thread that moves, together, those who are waiting."""

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
    """A ring whose writer asks for actions."""

    ring: SharedRing
    env_index: Tensor  # (K,) int64: its environments' numbers among all


class InferenceServer:
    """Asks the player. New weights come from another thread, whole."""

    def __init__(
        self,
        player: ActorPolicy,
        requests: Sequence[Request],
        outputs: Sequence[str],
        acted: int,
        progress: Callable[[], float],
    ) -> None:
        """`acted` are the turns every environment had before this began."""
        self.player, self.requests, self.progress, self.acted = player, requests, progress, acted
        self.outputs = [f"out.{name}" for name in outputs]
        self.lock = threading.Lock()  # between answering and a writer's recovery; actors know nothing of it
        self.offered: tuple[Tensor, int, torch.cuda.Event | None] | None = None
        self.error: BaseException | None = None
        self.asked = acted * len(requests)  # times the player was: numbers its draws
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="redline-server", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def offer(self, weights: Tensor, version: int) -> None:
        """`flat_weights` that nobody changes any more; the player takes them before its next move."""
        done = None
        if weights.is_cuda:
            done = torch.cuda.Event()
            done.record()
        self.offered = weights, version, done

    def close(self) -> None:
        self.stop.set()
        if self.thread.is_alive():
            self.thread.join()

    def _run(self) -> None:
        try:
            gpu = self.player.device.type == "cuda"
            with torch.cuda.stream(torch.cuda.Stream(self.player.device)) if gpu else nullcontext():
                nap = Backoff()
                while not self.stop.is_set():
                    if self.serve():
                        nap.found()
                    else:
                        nap.take()
        except BaseException as error:  # the thread that waits for rows raises it
            self.error = error

    def serve(self) -> bool:
        """Move all who wait; False: nobody does."""
        with self.lock:
            waiting = [(seat, row) for seat in self.requests if (row := seat.ring.asking()) is not None]
            if not waiting:
                return False
            self._take_weights()
            device = self.player.device
            obs = torch.cat([torch.from_numpy(row["obs"]) for _, row in waiting]).to(device)
            episode_start = torch.cat([torch.from_numpy(row["episode_start"]) for _, row in waiting]).to(device)
            env_index = torch.cat([seat.env_index for seat, _ in waiting]).to(device)
            acted = self.acted + min(seat.ring.written for seat, _ in waiting)
            action, outputs = self.player.move(obs, episode_start, env_index, self.asked, acted, self.progress())
            self.asked += 1
            said = {"action": action.cpu().numpy()}
            said |= {name: x.cpu().numpy() for name, x in zip(self.outputs, outputs, strict=True)}
            start = 0
            for seat, row in waiting:
                end = start + len(seat.env_index)
                for name, values in said.items():
                    row[name][:] = values[start:end]
                row["version"][...] = self.player.version
                seat.ring.answer()
                start = end
        return True

    def _take_weights(self) -> None:
        offered = self.offered
        if offered is not None and offered[1] != self.player.version:
            weights, version, done = offered
            if done is not None:
                done.wait()
                weights.record_stream(torch.cuda.current_stream())
            self.player.load(weights, version)
