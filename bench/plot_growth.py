"""Draw the measurements of bench/growth.py: `python bench/plot_growth.py FILE [FILE ...] [--folder docs/images]`.

One picture per part, growth-PART.png, with a line for each curve of each file, best of the repeats.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Panel = tuple[str, Callable[[Row], float | None]]  # label of the y axis, and function that returns a row's value

SIZE, DPI = (9.0, 3.6), 100
FLOP_PER_WEIGHT = 12  # of a DQN step: four forward passes and a backward pass that costs two, 2 FLOP each


def best(row: Row, name: str = "speed") -> float | None:
    """Return the best of the repeats of a figure."""
    return row[name]["high"] if name in row else None


def duration(row: Row) -> float | None:
    """Return the seconds of one step of all games."""
    return row["games"] / row["speed"]["high"]


def memory(row: Row) -> float | None:
    """Return bytes per game: those held between steps or, for training on a GPU, the peak allocated."""
    return row.get("bytes_each") or row.get("peak_bytes_each")


def flops(row: Row) -> float | None:
    """Return FLOP per second of the network's matrix products."""
    return FLOP_PER_WEIGHT * row["weights"] * row["speed"]["high"]


def per_actor(row: Row) -> float | None:
    return row["speed"]["high"] / row["x"]


PARTS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "games": ("games", (("environment steps per second", best), ("seconds per step of all games", duration))),
    "boards": ("cells of the board", (("environment steps per second", best), ("bytes per game", memory))),
    "capacity": (
        "transitions in memory",
        (("samples per second", best), ("transitions written per second", lambda row: best(row, "written"))),
    ),
    "width": ("units per hidden layer", (("environment steps per second", best), ("operations per second", flops))),
    "actors": ("actor processes", (("environment steps per second", best), ("steps per second and actor", per_actor))),
}


def machine(record: Row) -> str:
    """Return the machine of a record in one word."""
    return "H200" if "H200" in record["hardware"] else "CPU"


def draw(part: str, records: list[Row], path: Path) -> bool:
    """Write the picture of a part; return False if no record has rows for it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    label, panels = PARTS[part]
    rows = [
        (f"{row['curve']}, {machine(record)}", row)
        for record in records
        for row in record["rows"]
        if row["part"] == part and "error" not in row
    ]
    if not rows:
        return False
    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    for axes, (title, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for curve in dict.fromkeys(name for name, _ in rows):
            line = sorted((row["x"], y) for name, row in rows if name == curve and (y := value(row)) is not None)
            axes.loglog(*zip(*line, strict=True), label=curve, marker="o", markersize=3.5, linewidth=1.4)
        axes.set(xlabel=label, ylabel=title)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        low, high = (math.log10(limit) for limit in axes.get_ylim())
        axes.set_ylim(10 ** math.floor(low), 10 ** math.ceil(high))  # whole powers of ten: slopes are comparable
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="x-small")
    figure.savefig(path, format="png")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    records = [json.loads(file.read_text()) for file in arguments.files]
    for part in PARTS:
        path = arguments.folder / f"growth-{part}.png"
        if draw(part, records, path):
            print(path)


if __name__ == "__main__":
    main()
