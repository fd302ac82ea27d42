"""Options of DQN, the options that a resumed run must keep, and presets. The algorithm is in `dqn`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from redline import replay
from redline.algos.distribution import Categorical, Kind, Quantile
from redline.algos.network_config import NETWORK_RESUME_FIXED, NetworkConfig
from redline.algos.td_targets import Munchausen
from redline.core.errors import UserError

_FRACTIONS = ("gamma", "tau", "epsilon_start", "epsilon_high", "epsilon_low", "priority_alpha", "priority_beta")


@dataclass(frozen=True)
class Config(NetworkConfig):
    """Options of DQN."""

    batch_size: int = 512  # transitions per gradient step
    updates: int = 1  # gradient steps per `train_every` steps of every environment
    train_every: int = 1  # steps that every environment plays per iteration with gradient steps
    learning_rate: float = 1e-3  # of Adam, at the start of training
    learning_rate_end: float | None = None  # at the end of training, linear; none: constant
    gamma: float = 0.97  # discount, at the start of training
    gamma_end: float | None = None  # at the end of training, linear in 1 / (1 - gamma); none: constant
    n_step: int = 3  # steps of a return before it bootstraps
    double: bool = True  # the online network chooses the next action, the target network evaluates it
    dueling: bool = False  # split outputs into state value and advantages
    distribution: Literal["none", "categorical", "quantile"] = "none"  # learn return distributions: C51, QR-DQN
    atoms: int = 51  # support points or quantiles of a distribution
    v_min: float = -10.0  # lowest support point of a categorical distribution
    v_max: float = 10.0  # highest support point
    munchausen: bool = False  # add scaled log-probabilities to rewards; needs double off
    munchausen_alpha: float = 0.9  # weight of the scaled log-probability
    munchausen_tau: float = 0.03  # temperature of the soft policy
    munchausen_clip: float = -1.0  # lowest scaled log-probability
    noisy: bool = False  # explore by learned noise in the weights, besides epsilon
    noisy_sigma: float = 0.5  # initial scale of the noise
    huber: float = 1.0  # TD errors beyond this count linearly
    max_grad_norm: float = 10.0  # gradients are clipped to this norm
    target_period: int = 1  # gradient steps between updates of the target network
    tau: float = 0.01  # weight of the online network in such an update; 1: hard copy
    epsilon_start: float = 1.0  # epsilon of every environment at the start
    epsilon_high: float = 0.1  # final epsilon of the most exploratory environment
    epsilon_low: float = 0.001  # final epsilon of the most careful environment
    epsilon_steps: int = 1_000_000  # environment steps until the final epsilon
    replay: str = replay.DEFAULT  # kind of replay memory; `redline list` shows them
    replay_capacity: int = 1_000_000  # transitions
    prioritized: bool = False  # sample by TD error (Schaul et al. 2016)
    priority_alpha: float = 0.5  # exponent of the TD error: 0 uniform, 1 proportional
    priority_beta: float = 0.4  # importance-sampling exponent at the start of training; 1 at the end
    learning_starts: int = 50_000  # environment steps before the first gradient step

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "updates", "train_every", "n_step", "target_period", "replay_capacity"):
            if getattr(self, name) < 1:
                raise UserError(f"dqn.{name} is {getattr(self, name)}; expected at least 1.")
        for name in (*_FRACTIONS, "munchausen_alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"dqn.{name} is {getattr(self, name)}; expected a number from 0 to 1.")
        for name in ("learning_rate", "huber", "max_grad_norm", "munchausen_tau"):
            if not getattr(self, name) > 0:
                raise UserError(f"dqn.{name} is {getattr(self, name)}; expected a number above 0.")
        if self.learning_rate_end is not None and not self.learning_rate_end >= 0:
            raise UserError(f"dqn.learning_rate_end is {self.learning_rate_end}; expected 0 or more, or none.")
        if self.gamma_end is not None:
            self.expect(("gamma_end",), "a number from 0 to below 1, or none", lambda x: 0 <= x < 1)
            self.expect(("gamma",), "below 1 where gamma_end is set", lambda x: x < 1)
        replay.check(self.replay)
        if self.distribution not in ("none", "categorical", "quantile"):
            raise UserError(f"dqn.distribution is '{self.distribution}'; expected none, categorical, quantile.")
        if not 2 <= self.atoms <= 10_000:
            raise UserError(f"dqn.atoms is {self.atoms}; expected 2 to 10,000.")
        if not -math.inf < self.v_min < self.v_max < math.inf:
            raise UserError(f"dqn.v_min is {self.v_min}; expected a number below dqn.v_max, {self.v_max}.")
        if not self.munchausen_clip <= 0:
            raise UserError(f"dqn.munchausen_clip is {self.munchausen_clip}; expected 0 or less.")
        if not 0 <= self.noisy_sigma < math.inf:
            raise UserError(f"dqn.noisy_sigma is {self.noisy_sigma}; expected 0 or more.")
        if self.munchausen and self.double:
            raise UserError(
                "dqn.munchausen is on; expected dqn.double off: soft values weigh all actions, so that there is no chosen "
                "one to evaluate. Add --no-dqn.double."
            )

    @property
    def kind(self) -> Kind | None:
        """Kind of return distribution; None: learn expected returns only."""
        if self.distribution == "none":
            return None
        quantiles = Quantile(self.atoms, self.huber)
        return quantiles if self.distribution == "quantile" else Categorical(self.atoms, self.v_min, self.v_max)

    @property
    def munchausen_options(self) -> Munchausen | None:
        """Options of Munchausen rewards; None: off."""
        if not self.munchausen:
            return None
        return Munchausen(self.munchausen_alpha, self.munchausen_tau, self.munchausen_clip)


RESUME_FIXED = (
    *NETWORK_RESUME_FIXED,
    *("dueling", "distribution", "atoms", "v_min", "v_max", "noisy"),
    "n_step",
    "gamma",
    "replay",
    "replay_capacity",
    "prioritized",
)

# Presets: combinations of options, by name. Options the user sets take precedence.
PRESETS: dict[str, dict[str, Any]] = {
    "plain": {"double": True, "dueling": False, "distribution": "none"},
    "rainbow": {  # Hessel et al. 2018
        "distribution": "categorical",
        "double": True,
        "dueling": True,
        "n_step": 3,
        "prioritized": True,
        "noisy": True,
    },
    "modern": {  # after Clark et al. 2024 (Beyond the Rainbow), with uniform replay
        "distribution": "quantile",
        "atoms": 32,
        "huber": 1.0,
        "munchausen": True,
        "double": False,
        "dueling": False,
        "layer_norm": True,
        "n_step": 3,
    },
}
