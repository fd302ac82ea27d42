"""Learning curves as PNG, drawn with matplotlib, which is optional: `pip install 'redline[report]'`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Curve = tuple[Values, Values]  # x ascending and y, (n,) each

PIXELS = 960, 540  # width and height
_DPI = 120
_GRID = 400  # points at which the curves of a group are compared


def mean_and_range(curves: Sequence[Curve]) -> tuple[Values, Values, Values, Values] | None:
    """Return x, mean, lowest and highest y of several curves, (n,) each, where all overlap; None where they do not."""
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if first >= last:
        return None
    x = np.linspace(first, last, _GRID)
    y = np.stack([np.interp(x, *curve) for curve in curves])
    return x, y.mean(0), y.min(0), y.max(0)


def draw(groups: Mapping[str, Sequence[Curve]], title: str, x_label: str, y_label: str) -> bytes:
    """Return a PNG with a line for each group: its one curve, or the mean of several in a band from lowest to highest.

    Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and may open windows
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(PIXELS[0] / _DPI, PIXELS[1] / _DPI), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    lines, labels = [], []
    for number, (label, curves) in enumerate(groups.items()):
        colour = f"C{number % 10}"
        band = mean_and_range(curves) if len(curves) > 1 else None
        if band:
            x, mean, low, high = band
            axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            curves = [(x, mean)]
        for x, y in curves:
            (line,) = axes.plot(x, y, color=colour, linewidth=1.5, marker="o" if len(x) == 1 else "")
        lines.append(line)
        labels.append(_plain(label))
    axes.set(title=_plain(title), xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_formatter(EngFormatter())
    if all((y >= 0).all() for curves in groups.values() for _, y in curves):
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(lines, labels, fontsize="small")
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _plain(text: str) -> str:
    """Return text as matplotlib shows it verbatim: no formulas between dollars, no label hidden by an underscore."""
    return text.replace("$", r"\$").replace("_", " _", text.startswith("_"))
