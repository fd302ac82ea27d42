"""Environments: batches of tensor games on a device, Gymnasium environments on the CPU, adapters to Gymnasium and SB3.

Names are imported on first use, so that registering the Gymnasium ids does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redline.envs.batch import Rules
    from redline.envs.env import Env, EnvStep, make
    from redline.envs.rules import (
        CPU_ENVS,
        change_rules,
        live_rules,
        load_game,
        make_rules,
        set_live,
        with_live,
    )

__all__ = [
    "CPU_ENVS",
    "Env",
    "EnvStep",
    "Rules",
    "change_rules",
    "live_rules",
    "load_game",
    "make",
    "make_rules",
    "set_live",
    "with_live",
]

_MODULES = {"Rules": "batch"} | dict.fromkeys(("Env", "EnvStep", "make"), "env")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'rules')}"), name)
    globals()[name] = value
    return value
