"""Algorithm: the members of an algorithm's module as a typed record, validated by name when it is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from redline.algos.learner import Learner
from redline.core.errors import UserError
from redline.core.records import PolicyInput, Spec

SelectActions = Callable[[Any, nn.Module, PolicyInput], tuple[Tensor, tuple[Tensor, ...]]]


def _fill_nothing(config: Any, num_envs: int, requested: Collection[str]) -> tuple[Any, dict[str, str]]:
    del num_envs, requested
    return config, {}


def _unknown_memory(config: Any, spec: Spec, state_bytes: int, num_envs: int) -> dict[str, int]:
    del config, spec, state_bytes, num_envs
    return {}


def _once(config: Any, num_envs: int, accumulate: int) -> float:
    del config, num_envs, accumulate
    return 1.0


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: the members of its module, under the same names. A module may omit members that have a default."""

    name: str  # as in --algo: `a2c`, `my_package.a2c`
    group: str  # of its options, the last part of the name: --a2c.*
    module: ModuleType

    # A frozen dataclass of options; every field has a default, and `batch_size: int` is one of them.
    Config: type[Any]
    # A subclass of algos.learner.Learner: (rules, config, state, num_envs, seed, runtime, accumulate) -> Learner.
    Learner: type[Learner]
    # (config, acting network, PolicyInput of N environments) -> actions (N,) int64, POLICY_OUTPUTS (N,) float32 each.
    select_actions: SelectActions
    # (spec, config) -> the network `select_actions` takes, with the structure of Learner.acting_network.
    acting_network: Callable[[Spec, Any], nn.Module]
    # (spec, config, a checkpoint's model group) -> network in eval mode: forward(obs (N, …), legal (N, A) or None) ->
    # (N, A) float32, whose largest entry is the greedy action.
    policy_network: Callable[[Spec, Any, dict[str, Tensor]], nn.Module]

    POLICY_OUTPUTS: tuple[str, ...] = ()  # names of the outputs `select_actions` returns besides actions
    STOCHASTIC: bool = False  # policy_network returns logits: actions can be sampled (`redline eval --sample`)
    RESUME_FIXED: tuple[str, ...] = ()  # options that a resumed run must keep
    PRESETS: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)  # --preset: option -> value

    # (config, num_envs, names of the options the user set) -> config with dependent options filled in, reasons by option.
    fill_defaults: Callable[[Any, int, Collection[str]], tuple[Any, dict[str, str]]] = _fill_nothing
    # (config, spec, bytes of one State, num_envs) -> bytes of rollouts and replay memory on the device, keyed by
    # the option that sets their size. Networks, gradients and temporaries are measured instead.
    memory_bytes: Callable[[Any, Spec, int, int], dict[str, int]] = _unknown_memory
    # (config, num_envs, accumulate) -> average number of times the learner trains on each environment step.
    samples_per_step: Callable[[Any, int, int], float] = _once

    @property
    def options(self) -> frozenset[str]:
        """Names of the fields of Config."""
        return frozenset(field.name for field in dataclasses.fields(self.Config))


_REQUIRED = {
    "Config": "a frozen dataclass of options with a default for every field, batch_size among them",
    "Learner": "a subclass of redline.algos.learner.Learner",
    "select_actions": "a function (config, network, policy_input) -> actions (N,) int64, tuple of outputs (N,) float32",
    "acting_network": "a function (spec, config) -> torch.nn.Module",
    "policy_network": "a function (spec, config, model) -> torch.nn.Module",
}
_OPTIONAL = {
    "POLICY_OUTPUTS": "a tuple of names",
    "STOCHASTIC": "True or False",
    "RESUME_FIXED": "a tuple of names of options",
    "PRESETS": "a dict: name of the preset -> dict: option -> value",
    "fill_defaults": "a function (config, num_envs, requested) -> config, dict: option -> reason",
    "memory_bytes": "a function (config, spec, state_bytes, num_envs) -> dict: option -> bytes",
    "samples_per_step": "a function (config, num_envs, accumulate) -> float",
}


def from_module(name: str, module: ModuleType) -> Algorithm:
    """Return the Algorithm defined by a module. A missing or wrong member raises UserError with its name and expected form."""
    members = {member: getattr(module, member) for member in (*_REQUIRED, *_OPTIONAL) if hasattr(module, member)}
    for member, expected in (_REQUIRED | _OPTIONAL).items():
        if member in members:
            if member == "Config" and (problem := _config_problem(members[member])):
                raise UserError(f"Config of the algorithm '{name}' {problem}; expected {expected}.")
            if not _holds(member, members[member]):
                raise UserError(f"{member} of the algorithm '{name}' is {members[member]!r}; expected {expected}.")
        elif member in _REQUIRED:
            raise UserError(f"The algorithm '{name}' has no {member}; expected {expected}.")
    missing = sorted(getattr(members["Learner"], "__abstractmethods__", ()))
    if missing:
        raise UserError(f"The Learner of the algorithm '{name}' does not define {', '.join(missing)}.")
    algorithm = Algorithm(name, name.rpartition(".")[2], module, **members)
    for member, options in (("RESUME_FIXED", algorithm.RESUME_FIXED), *algorithm.PRESETS.items()):
        unknown = [option for option in options if option not in algorithm.options]
        if unknown:
            raise UserError(f"{member} of the algorithm '{name}' names {unknown[0]}, which is no option of its Config.")
    return algorithm


def _holds(member: str, value: Any) -> bool:
    """Return whether a member has the expected type."""
    if member == "Config":
        return not _config_problem(value)
    if member == "Learner":
        return isinstance(value, type) and issubclass(value, Learner)
    if member in ("POLICY_OUTPUTS", "RESUME_FIXED"):
        return isinstance(value, tuple) and all(isinstance(word, str) for word in value)
    if member == "STOCHASTIC":
        return isinstance(value, bool)
    if member == "PRESETS":
        return isinstance(value, Mapping) and all(isinstance(preset, Mapping) for preset in value.values())
    return callable(value)


def _config_problem(value: Any) -> str:
    """Return why a value cannot be an algorithm's Config, as the end of a sentence, or an empty string."""
    if not (isinstance(value, type) and dataclasses.is_dataclass(value)):
        return f"is {value!r}"
    if not value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "is not frozen"
    missing, fields = dataclasses.MISSING, dataclasses.fields(value)
    required = [field.name for field in fields if field.default is missing and field.default_factory is missing]
    if required:
        return f"has no default for {required[0]}"
    return "" if any(field.name == "batch_size" for field in fields) else "has no batch_size"
