"""Draw the learning curves of bench/agents.py: `python bench/plot_agents.py FILE [FILE ...] [--folder docs/images]`.

One picture per row, learning-ROW.png: the score of training games over environment steps, as the mean of the seeds with its
interval, or as a single curve for rows with one seed. Runs without a stored curve are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from redline.tools.curves import draw, line


def picture(row: dict[str, Any]) -> bytes | None:
    """Return the PNG of a row; None if it has no curve."""
    points = [run["curve"] for run in row["runs"] if run.get("curve")]
    wins = row["figure"].endswith("win_rate") and any("win_rate" in point for curve in points for point in curve)
    figure, label = ("win_rate", "games won in training, %") if wins else ("score", "score in training")
    scale = 100 if wins else 1
    curves = []
    for curve in points:
        if known := [(point["env_steps"], scale * point[figure]) for point in curve if figure in point]:
            curves.append(line(*np.array(known).T))
    if not curves:
        return None
    seeds = f"{len(curves)} seeds" if len(curves) > 1 else "one seed"
    return draw({seeds: curves}, row["title"].replace("`", ""), "environment steps", label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    for file in arguments.files:
        for name, row in json.loads(file.read_text())["rows"].items():
            path = arguments.folder / f"learning-{name}.png"
            if (png := picture(row)) is not None:
                path.write_bytes(png)
                print(path)


if __name__ == "__main__":
    main()
