"""Choose the collector for an environment: on the device, in this process, or with actor processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from redline.algos.algorithm import Algorithm
from redline.algos.learner import Learner
from redline.collect.actor_collector import ActorCollector
from redline.collect.collector import Collector, CollectorOptions, Prepare
from redline.collect.device_collector import DeviceCollector
from redline.collect.env_supervisor import EnvSupervisor
from redline.collect.sync_collector import SyncCollector
from redline.envs.batch import EnvState, Rules
from redline.envs.gym_envs import GymEnvs


def make_collector(
    options: CollectorOptions,
    rules: Rules,
    envs: EnvState,
    learner: Learner,
    algo: Algorithm,
    algo_config: Any,
    device: torch.device,
    prepare: Prepare,
    notify: Callable[[str], None],
) -> Collector:
    """Return the collector that plays `rules` for `learner`, a Learner of `algo` with the options `algo_config`.

    Tensor games continue from `envs`; for CPU environments, only their number is used. `prepare` speeds up the functions
    around the steps of CPU environments. If actors cannot start, this process plays instead, see `Collector.start`.
    """
    if not rules.game.ON_CPU:
        return DeviceCollector(rules, learner, envs, options.backplay, options.backplay_steps)
    num_envs = len(envs.key)

    def in_this_process() -> SyncCollector:
        backplay = (options.backplay, options.backplay_steps)
        gym_envs = GymEnvs(
            rules.game, rules.config, num_envs, rules.time_limit, *backplay, learner.first_env, choose_levels=True
        )
        supervisor = EnvSupervisor(gym_envs, notify)
        gym_envs.reset(options.seed)
        return SyncCollector(rules, learner, supervisor, device, prepare)

    if not options.actors:
        return in_this_process()
    check = os.environ.get("REDLINE_CHECK", "0") not in ("", "0")
    return ActorCollector(
        rules, learner, algo, algo_config, num_envs, device, options, prepare, notify, in_this_process, check
    )
