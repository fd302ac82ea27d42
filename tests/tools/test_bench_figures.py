"""Figures with their spread, and which differences between two records count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redline.core.errors import UserError
from redline.tools.bench_figures import Use, compare, find_figures, read_record, shown, summarize


def record(*samples: float, games: int = 2, **options: Any) -> dict[str, Any]:
    row = {"games": games, "eager": summarize(samples), "compiled": None}
    return {
        "commit": "abc",
        "date": "today",
        "hardware": "h",
        "train": {"algo": "ppo", "algo_options": options, "rows": [row]},
    }


def test_a_figure_is_the_median_with_its_spread() -> None:
    figure = summarize([3.0, 1.0, 2.0], {"gpu_percent": 97.0})
    assert figure == {"value": 2.0, "low": 1.0, "high": 3.0, "repeats": 3, "gpu_percent": 97.0}
    assert shown(figure) == "2 ±50%"
    assert shown(None) == "-"


def test_a_figure_is_named_by_the_settings_that_decide_it() -> None:
    assert find_figures(record(1.0, hidden="8")).keys() == {
        'train, algo ppo, algo_options {"hidden": "8"}, games 2, eager'
    }
    collected = {"collect": {"actors": 2, "seconds": 0.5, "bare": {"frames": summarize([1.0]), "queue": 0.25}}}
    assert find_figures(collected).keys() == {"collect, actors 2, bare, frames"}


@pytest.mark.parametrize(
    ("new", "tolerance", "slower", "text"),
    [
        ((80.0, 85.0), 5.0, 1, "SLOWER 18%"),
        ((80.0, 99.5), 5.0, 0, "within the spread"),  # one repeat is as fast as an old one
        ((95.0, 97.0), 5.0, 0, "within the spread"),  # apart from each other, but by less than 5 percent
        ((95.0, 97.0), 1.0, 1, "SLOWER 4%"),
        ((120.0, 130.0), 5.0, 0, "faster 25%"),
    ],
)
def test_what_counts_as_a_regression(new: tuple[float, ...], tolerance: float, slower: int, text: str) -> None:
    lines, count = compare(record(99.0, 100.0, 101.0), record(*new), tolerance)
    assert count == slower
    assert text in "\n".join(lines)


def test_figures_of_other_settings_are_not_compared() -> None:
    old = record(100.0, games=2)
    old["train"]["rows"] += record(100.0, games=4)["train"]["rows"]
    assert compare(old, record(99.0, games=4), 5.0)[0][-1].startswith("1 figures compared with abc of today: 0 slower")
    with pytest.raises(UserError, match="No figure of the two has the same settings, such as 'train, algo ppo"):
        compare(old, record(1.0, games=8), 5.0)
    with pytest.raises(UserError, match="No figure of the two has the same settings"):
        compare(old, record(1.0, games=4, hidden="8"), 5.0)


def test_another_torch_is_told() -> None:
    lines, _ = compare(record(1.0) | {"torch": "2.8"}, record(1.0) | {"torch": "2.9"}, 5.0)
    assert lines[0] == "torch was 2.8, now 2.9."


def test_a_file_of_something_else_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "other.json"
    for text in ("[]", "{}", "{"):
        path.write_text(text)
        with pytest.raises(UserError, match="compare is "):
            read_record(str(path))


def test_use_of_a_cpu() -> None:
    with Use(torch.device("cpu")) as use:
        sum(range(10**6))
    assert use.record["peak_bytes"] > 10**7
    assert use.record["cpu_percent"] >= 0
