"""Write a plan as a TOML file, from which `redline train ENV --config FILE` reads back the same plan."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from redline.recipes import Setting
from redline.run.plan import DEFAULT_SOURCES, Plan
from redline.run.settings import ALGO_SHORTHANDS

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_NOT_WRITTEN = ("env", "env_options", "algo_options", "phases", "rules_version", "provenance", *ALGO_SHORTHANDS)


def plan_to_toml(plan: Plan) -> str:
    """Return every option of a plan as TOML, with the source and reason of each value that is not a mere default.

    Options that are not set, such as an unused budget, are written as comments. So are options changed by the recipe's
    curriculum, because a requested value would remove them from it.
    """
    record = plan.describe()
    general = {name: value for name, value in record.items() if name not in _NOT_WRITTEN}
    general["inference"] = plan.inference if plan.actors else plan.settings.inference
    unset = [name for name, value in general.items() if value is None]
    if plan.settings.minutes is None and plan.minutes is not None:
        unset.append("minutes")  # a default that applies only if no other limit is set
    if not plan.threads:
        unset.append("threads")
    phases = plan.curriculum.phases if plan.curriculum and plan.settings.curriculum_file is None else ()
    in_curriculum = {name for phase in phases for name in phase.options}
    env_options, sources = record["env_options"], plan.provenance
    kwargs = {name: value for name, value in env_options.items() if isinstance(value, Mapping)}
    plain = {name: value for name, value in env_options.items() if name not in kwargs}
    env_sources = {name.removeprefix("env."): s for name, s in sources.items() if name.startswith("env.")}
    lines = [f"# redline train {plan.settings.env} --config FILE", *_table(general, sources, unset)]
    lines += ["", "[env]", *_table(plain, env_sources, in_curriculum)]
    for name, values in kwargs.items():
        lines += ["", f"[env.{name}]", *_table(values)] if values else []
    lines += ["", f"[{plan.algo.group}]", *_table(record["algo_options"], sources)]
    return "\n".join(lines) + "\n"


def _table(
    values: Mapping[str, Any], sources: Mapping[str, Setting] | None = None, unset: Iterable[str] = ()
) -> list[str]:
    """Return a line of TOML for each value; the options in `unset` as comments."""
    lines = []
    for name, value in values.items():
        key = name if _PLAIN_KEY.fullmatch(name) else json.dumps(name)
        setting = (sources or {}).get(name)
        if setting and setting.source in DEFAULT_SOURCES:
            setting = None
        why = ": ".join(filter(None, (setting.source, str(setting.reason)))) if setting else ""
        line = f"{key} = {toml_value(value)}" + (f"  # {why}" if why else "")
        lines.append(line if name not in unset else f"# {key} =" if value is None else f"# {line}")
    return lines


def toml_value(value: Any) -> str:
    """Return a value as TOML. TOML has no null, so None becomes the string "None", which the command line accepts as none."""
    if value is None:
        return '"None"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(name))} = {toml_value(entry)}" for name, entry in value.items())
        return f"{{ {', '.join(pairs)} }}"
    return json.dumps(str(value), ensure_ascii=False)
