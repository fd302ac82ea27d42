"""Words into typed values: what is understood, and that everything else is one sentence, never another exception."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from redline.algos import dqn
from redline.cli.commands.doctor import DoctorOptions
from redline.cli.commands.eval import EvalOptions
from redline.cli.commands.watch import WatchOptions
from redline.core.errors import UserError
from redline.games import snake
from redline.run.options import build, parse_number, parse_value
from redline.run.settings import Settings

KINDS = [  # every type that an option of ours has, and its kin
    *{
        hint
        for kind in (Settings, dqn.Config, snake.Config, EvalOptions, WatchOptions, DoctorOptions)
        for name, hint in typing.get_type_hints(kind).items()
        if not name.endswith("_options")
    },
    tuple[float, ...],
    Literal["left", "right"] | None,
]


@dataclass(frozen=True)
class Options:
    """A component's options."""

    width: int = 3
    rate: float = 0.5
    mode: Literal["fast", "slow"] = "fast"
    layers: tuple[int, ...] = (8,)
    limit: int | None = None
    loud: bool = False
    name: str = "x"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("20M", 20_000_000),
        ("20m", 20_000_000),
        ("1.5k", 1500),
        ("1e6", 1_000_000),
        ("1_000", 1000),
        ("3", 3),
        ("-7", -7),
        ("+7", 7),
        ("0", 0),
        ("2G", 2 * 10**9),
        ("2b", 2 * 10**9),
        ("1e3k", 10**6),
        (" 5 ", 5),
        ("1.001M", 1_001_000),  # in floats 1.001 * 10**6 is 1000999.9999999999
        ("8.29M", 8_290_000),
        ("9007199254740993", 9007199254740993),  # 2**53 + 1, which no float holds: a seed must arrive as given
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775807", 1 - 2**63),
    ],
)
def test_whole_numbers(text: str, number: int) -> None:
    assert parse_number(text) == number
    value = parse_value(int, text, "steps")
    assert (value, type(value)) == (number, int)
    real = parse_value(float, text, "minutes")
    assert (real, type(real)) == (float(number), float)


@pytest.mark.parametrize(
    ("text", "number"), [("0.25", 0.25), ("1e-4", 1e-4), ("-.5", -0.5), ("1.5", 1.5), (".5k", 500)]
)
def test_real_numbers(text: str, number: float) -> None:
    assert parse_value(float, text, "rate") == number


@pytest.mark.parametrize("kind", [int, float, int | None, float | None])
@pytest.mark.parametrize(
    "text", ["many", "nan", "inf", "-inf", "1e999", "20T", "M", "1.2.3", "--5", "1e", "0x10", "NaNk"]
)
def test_no_numbers(kind: Any, text: str) -> None:
    with pytest.raises(UserError, match=r"expected a number, such as 3, 1.5k or 20M") as error:
        parse_value(kind, text, "some.key")
    assert str(error.value).startswith(f"some.key is '{text}';")


@pytest.mark.parametrize("text", ["1.5", "1e-3", "0.0001k", "9223372036854775808", "1e30", "1.0000001M"])
def test_numbers_that_are_not_whole_or_too_large(text: str) -> None:
    with pytest.raises(UserError, match=f"num_envs is '{text}'; expected a whole number"):
        parse_value(int, text, "num_envs")


@given(st.integers(1 - 2**63, 2**63 - 1))
def test_every_whole_number_arrives_as_it_was_given(number: int) -> None:
    assert parse_value(int, str(number), "seed") == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_real_number_arrives_as_it_was_given(number: float) -> None:
    assert parse_value(float, repr(number), "rate") == number


@pytest.mark.parametrize(
    ("text", "value"),
    [("256,256", (256, 256)), ("8", (8,)), ("(1k, 2,)", (1000, 2)), ("[4]", (4,)), ("", ()), ("()", ())],
)
def test_tuples(text: str, value: tuple[int, ...]) -> None:
    assert parse_value(tuple[int, ...], text, "hidden") == value


@pytest.mark.parametrize("text", ["256,x", "1;2", "1.5,2", "256 256", "many", "nan", "1e999", "20T"])
def test_no_tuples(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_value(tuple[int, ...], text, "hidden")
    assert str(error.value) == f"hidden is '{text}'; expected whole numbers separated by commas, such as 64,64."


def test_choices() -> None:
    kind = Literal["auto", "mlp", "cnn"]
    assert parse_value(kind, "cnn", "net") == "cnn"
    with pytest.raises(UserError) as error:
        parse_value(kind, "cn", "dqn.net")
    assert str(error.value) == "dqn.net is 'cn'; did you mean 'cnn'? Expected auto, mlp, cnn."
    with pytest.raises(UserError) as error:
        parse_value(kind, "zzz", "dqn.net")
    assert str(error.value) == "dqn.net is 'zzz'. Expected auto, mlp, cnn."


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("Yes", True),
        ("on", True),
        ("1", True),
        ("FALSE", False),
        ("no", False),
        ("off", False),
        ("0", False),
    ],
)
def test_truth(text: str, value: bool) -> None:
    assert parse_value(bool, text, "double") is value
    assert parse_value(bool | None, text, "double") is value


@pytest.mark.parametrize("text", ["maybe", "", "2", "none"])
def test_no_truth(text: str) -> None:
    with pytest.raises(UserError, match=f"double is '{text}'; expected true or false"):
        parse_value(bool, text, "double")


@pytest.mark.parametrize("text", ["none", "None", "auto", "AUTO"])
def test_what_may_be_left_open(text: str) -> None:
    assert parse_value(int | None, text, "num_envs") is None
    assert parse_value(bool | None, text, "compile") is None
    with pytest.raises(UserError):
        parse_value(int, text, "num_envs")


def test_build() -> None:
    words = {"width": "4k", "rate": "1e-3", "mode": "slow", "layers": "1,2", "limit": "auto", "loud": "on", "name": "7"}
    assert build(Options, words, "") == Options(4000, 1e-3, "slow", (1, 2), None, True, "7")
    assert build(Options, {}, "") == Options()
    # words win over defaults; what is no text is taken as it is
    assert build(Options, {"width": 9, "limit": None}, "", {"width": 1, "rate": 0.1}) == Options(width=9, rate=0.1)


@pytest.mark.fault("H1")
def test_build_names_the_key_and_the_nearest() -> None:
    with pytest.raises(UserError) as error:
        build(Options, {"widht": "4"}, "env.")
    assert str(error.value) == "There is no option env.widht; did you mean 'width'?"
    with pytest.raises(UserError) as error:
        build(Options, {"qqq": "4"}, "env.")
    assert str(error.value) == "There is no option env.qqq."
    with pytest.raises(UserError, match=r"^env.width is 'wide'; expected a number"):
        build(Options, {"width": "wide"}, "env.")


def test_dashes_are_underscores() -> None:
    assert build(dqn.Config, {"learning-rate": "1e-3"}, "dqn.").learning_rate == 1e-3


def _is(value: Any, kind: Any) -> bool:
    """Whether `value` is of the annotated type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_is(part, arguments[0]) for part in value)
    if arguments:
        return any(_is(value, option) for option in arguments)
    return type(value) is kind and not (kind is float and not math.isfinite(value))


numberish = st.text(alphabet="0123456789.eE+-_kKmMgGbB,()[] infaINF", max_size=16)


@pytest.mark.fault("H1")
@given(
    kind=st.sampled_from(KINDS), text=st.one_of(st.text(), numberish, st.sampled_from(["auto", "none", "left", "yes"]))
)
@example(kind=int, text="1e-99999999999")  # would take for ever if it were made a fraction
@example(kind=int, text="1" * 5000)  # more digits than Python reads
@example(kind=float, text="9" * 400)  # beyond a float
@example(kind=int, text="\ud800")
@example(kind=int, text="٣")
def test_any_text_gives_a_value_of_the_type_or_one_sentence(kind: Any, text: str) -> None:
    refused = ""
    try:
        value = parse_value(kind, text, "key")
    except UserError as error:
        refused = str(error)
    assert refused.startswith("key is '") if refused else _is(value, kind)


@pytest.mark.fault("H1")
@given(
    words=st.dictionaries(
        st.one_of(st.text(max_size=8), st.sampled_from([field.name for field in dataclasses.fields(dqn.Config)])),
        st.one_of(st.text(max_size=8), numberish),
        max_size=3,
    )
)
def test_any_words_build_a_config_or_one_sentence(words: dict[str, str]) -> None:
    refused, found = "", None
    try:
        found = build(dqn.Config, words, "dqn.")
    except UserError as error:
        refused = str(error)
    assert "dqn." in refused if refused else isinstance(found, dqn.Config)


@pytest.mark.parametrize(("word", "example"), [("64x3", "64,64,64"), ("128*2", "128,128"), ("64x0", "64,64")])
def test_layers_written_as_a_product_get_a_hint(word: str, example: str) -> None:
    with pytest.raises(
        UserError, match=rf"ppo.hidden is '.*'; expected numbers separated by commas, such as {example}\.$"
    ):
        parse_value(tuple[int, ...], word, "ppo.hidden")
