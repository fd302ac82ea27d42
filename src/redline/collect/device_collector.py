"""Collect from tensor games: policy, games and learner share a device, and no data leaves it between log points."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from redline.algos.learner import Learner
from redline.collect.backplay import init_backplay, step_backplay
from redline.collect.collector import Collector
from redline.collect.episode_stats import DeviceEpisodeStats
from redline.core.records import Step, Transition, assign, leaves, map_record
from redline.engine.stages import Stage, Stages
from redline.envs import batch
from redline.envs.batch import EnvState, Rules

_SNAPSHOTS = "snapshots."  # prefix of the tensors that backplay adds to a checkpoint


class DeviceCollector(Collector):
    """Collects from N tensor games in static buffers, so that a whole step can be compiled and captured."""

    on_device = True
    restores_episodes = True
    episode_stats: DeviceEpisodeStats

    def __init__(
        self, rules: Rules, learner: Learner, envs: EnvState, backplay: float = 0.0, backplay_steps: int = 32
    ) -> None:
        """Continue from `envs`; with probability `backplay`, a game starts shortly before the environment's last loss."""
        self.rules, self.learner = rules, learner
        self.envs = map_record(torch.clone, envs)
        self.backplay, self.backplay_steps = backplay, backplay_steps
        self.snapshots = init_backplay(envs) if backplay else None
        self.episode_stats = DeviceEpisodeStats.zero(len(envs.key), envs.key.device)

    @torch.no_grad()
    def step(self) -> None:
        """Choose actions for all games, play them, and hand the transition to the learner."""
        obs, legal = self.observe()
        action = self.act(obs, legal)
        envs, step = self.play(action)
        self.ingest(Transition(self.envs.game, action, step))
        self.advance(envs, step)

    def observe(self) -> tuple[Tensor, Tensor | None]:
        """Return the observations (N, …) and the action masks (N, A) bool of all games; None if every action is legal."""
        state = self.envs.game
        return self.rules.game.observe(self.rules.config, state), batch.legal(self.rules, state)

    def act(self, obs: Tensor, legal: Tensor | None) -> Tensor:
        """Return the learner's actions (N,)."""
        return self.learner.act(obs, legal)

    def play(self, action: Tensor) -> tuple[EnvState, Step]:
        """Return the environments after the actions (N,), and the outcome."""
        snapshots = self.snapshots
        return batch.step(self.rules, self.envs, action, None if snapshots is None else snapshots.left == 1)

    def ingest(self, transition: Transition) -> None:
        """Hand a transition to the learner."""
        self.learner.ingest(transition)

    def advance(self, envs: EnvState, step: Step) -> None:
        """Count the episodes that ended in `step` and continue from `envs`."""
        snapshots = self.snapshots
        self.episode_stats.add(step, None if snapshots is None else snapshots.left == 0)
        if snapshots is not None:
            envs, after = step_backplay(envs, snapshots, step, self.backplay, self.backplay_steps)
            assign(snapshots, after)
        assign(self.envs, envs)

    @property
    def stages(self) -> Stages:
        return {
            "observe": Stage("observation"),
            "act": Stage("inference"),
            "play": Stage("environment step"),
            "ingest": Stage("replay write"),
            "advance": Stage("episode statistics"),
        }

    def tensors(self) -> dict[str, Tensor]:
        snapshots = {} if self.snapshots is None else leaves(self.snapshots, _SNAPSHOTS)
        return leaves(self.envs) | snapshots

    def adapt(self, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return `saved` with the snapshots added or removed if the resumed run has turned backplay on or off."""
        own = {name: x for name, x in self.tensors().items() if name.startswith(_SNAPSHOTS)}
        return own | {name: x for name, x in saved.items() if name in own or not name.startswith(_SNAPSHOTS)}

    def restart_episodes(self, seed: int, number: int) -> None:
        first = number * self.learner.total_envs + self.learner.first_env
        env_index = first + torch.arange(len(self.envs.key), device=self.envs.key.device)
        assign(self.envs, batch.reset(self.rules, batch.env_keys(seed, env_index)))
        if self.snapshots is not None:
            assign(self.snapshots, init_backplay(self.envs))

    def close(self) -> None:
        """Do nothing: tensors are freed with the collector."""
