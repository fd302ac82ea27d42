"""Parse words into typed dataclass fields, by name; unknown names and impossible values raise UserError."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
import sys
import types
import typing
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, TypeVar, Union

from redline.core.errors import UserError, nearest

T = TypeVar("T")
_REPEATED = re.compile(r"([1-9]\d*)[x*](\d+)")  # 64x3
_SUFFIX = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def parse_number(text: str) -> float:
    """Return the number in `20M`, `1.5k`, `1e6` or `1_000`: an int if it is whole, since floats cannot hold a long seed."""
    cleaned = text.strip().replace("_", "").lower()
    factor = _SUFFIX.get(cleaned[-1:], 1)
    digits = cleaned[:-1] if factor != 1 else cleaned
    number = float(digits) * factor
    if not 1 <= abs(number) < 2**64:
        return number
    exact = Fraction(digits) * factor
    return int(exact) if exact.denominator == 1 else number


def parse_value(kind: Any, text: str, key: str) -> Any:
    """Return the value of the option `key`, parsed from `text` as the annotated type `kind`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if text.lower() == "auto" and str in arguments:
            return "auto"
        if text.lower() in ("none", "auto") and type(None) in arguments:
            return None
        return parse_value(next(k for k in arguments if k is not type(None)), text, key)
    if origin is Literal:
        if text not in arguments:
            hint = nearest(text, arguments) or "."
            raise UserError(f"{key} is '{text}'{hint} Expected {', '.join(map(str, arguments))}.")
        return text
    if origin is tuple:
        if repeated := _REPEATED.fullmatch(text.strip()):
            width, count = repeated.groups()
            example = ",".join([width] * min(int(count), 3)) if 0 < int(count) < 100 else f"{width},{width}"
            raise UserError(f"{key} is '{text}'; expected numbers separated by commas, such as {example}.")
        parts = [part for part in text.strip("()[] ").split(",") if part.strip()]
        try:
            return tuple(parse_value(arguments[0], part, key) for part in parts)
        except UserError:
            if arguments[0] not in (int, float):
                raise
            expected = "whole numbers" if arguments[0] is int else "numbers"
            raise UserError(f"{key} is '{text}'; expected {expected} separated by commas, such as 64,64.") from None
    if kind is bool:
        if text.lower() in ("true", "yes", "on", "1"):
            return True
        if text.lower() in ("false", "no", "off", "0"):
            return False
        raise UserError(f"{key} is '{text}'; expected true or false.")
    if kind in (int, float):
        try:
            number = parse_number(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise UserError(f"{key} is '{text}'; expected a number, such as 3, 1.5k or 20M.")
        if kind is int:
            if number != int(number) or abs(number) >= 2**63:
                raise UserError(f"{key} is '{text}'; expected a whole number.")
            return int(number)
        return float(number)
    return text


def check_value(kind: Any, value: Any, key: str) -> Any:
    """Return a value given in Python or JSON if it has the annotated type `kind`; raise UserError otherwise."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return check_value(next(k for k in arguments if k is not type(None)), value, key)
    if origin is tuple and isinstance(value, tuple | list):
        return tuple(check_value(arguments[0], part, key) for part in value)
    if kind in (bool, str) and isinstance(value, kind):
        return value
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if kind is float and is_number and abs(value) <= sys.float_info.max:
        return value
    if kind is int and is_number and abs(value) < 2**63 and value == int(value):
        return int(value)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    expected = "a list" if origin is tuple else names.get(kind)
    if expected is None:  # another type, such as a mapping: its dataclass checks it
        return value
    raise UserError(f"{key} is {value!r:.80}; expected {expected}.")


def parse(kind: type, words: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values of a dataclass's fields, by name; text is parsed, other values are checked."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    values = {}
    for name, word in words.items():
        plain = name.replace("-", "_")
        if plain not in fields:
            raise UserError(f"There is no option {prefix}{name}{nearest(plain, fields) or '.'}")
        read = parse_value if isinstance(word, str) else check_value
        values[plain] = read(fields[plain], word, prefix + name)
    return values


def build(kind: type[T], words: Mapping[str, Any], prefix: str, defaults: Mapping[str, Any] | None = None) -> T:
    """Return a `kind` dataclass from words by field name; `defaults` fill the other fields."""
    return kind(**{**(defaults or {}), **parse(kind, words, prefix)})
