"""Learning curves as PNG, drawn with matplotlib, which is optional: `pip install 'redline[report]'`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from redline.run.statistics import Values, bootstrap_mean

PIXELS = 960, 540  # width and height
_DPI = 120
_GRID = 400  # points at which the curves of a group are compared
_FEW = 40  # curves with fewer points mark each one
_BRIGHT = ["#6aa8ff", "#ffa657", "#6cc58c", "#ff6a55", "#cf96ea", "#c9a28c", "#f29ac8", "#a8adb7", "#d3d35a", "#55c8ce"]
_DARK = {  # matplotlib's settings for a dark page
    "figure.facecolor": "#1c1f26",
    "axes.facecolor": "#1c1f26",
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor"), "#e8e9ec"),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), "#6b7280"),
    "axes.prop_cycle": f"cycler('color', {_BRIGHT})",
}


class Curve(NamedTuple):
    """A line, x ascending, and its 95 % interval; (n,) each, NaN where there is no interval."""

    x: Values
    y: Values
    low: Values
    high: Values


def line(x: Values, y: Values) -> Curve:
    """Return a curve without an interval."""
    return Curve(x, y, np.full(len(x), np.nan), np.full(len(x), np.nan))


def mean_and_interval(curves: Sequence[Curve]) -> Curve | None:
    """Return the mean of several curves and its bootstrap interval, over the range they share; None if there is none."""
    first, last = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    if first >= last:
        return None
    x = np.linspace(first, last, _GRID)
    y = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    return Curve(x, y.mean(0), *bootstrap_mean(y))


def draw(groups: Mapping[str, Sequence[Curve]], title: str, x_label: str, y_label: str, dark: bool = False) -> bytes:
    """Return a PNG with a line and its interval for each group: its only curve, or the mean of several.

    Raises ImportError without matplotlib.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and may open windows
    from matplotlib.ticker import EngFormatter

    with rc_context(_DARK if dark else {}):
        figure = Figure(figsize=(PIXELS[0] / _DPI, PIXELS[1] / _DPI), dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        drawn, labels = [], []
        for number, (label, curves) in enumerate(groups.items()):
            colour = f"C{number % 10}"
            mean = mean_and_interval(curves) if len(curves) > 1 else None
            for x, y, low, high in [mean] if mean else curves:
                axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
                (handle,) = axes.plot(
                    x, y, color=colour, linewidth=1.5, marker="o" if len(x) <= _FEW else "", markersize=4
                )
            drawn.append(handle)
            labels.append(_plain(label))
        axes.set(title=_plain(title), xlabel=x_label, ylabel=y_label)
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.yaxis.set_major_formatter(EngFormatter())
        if all((curve.y >= 0).all() for curves in groups.values() for curve in curves):
            axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(drawn, labels, fontsize="small", framealpha=0.6)
        data = io.BytesIO()
        figure.savefig(data, format="png")
    return data.getvalue()


def _plain(text: str) -> str:
    """Return text escaped for matplotlib: no formulas between dollar signs, no label hidden by an underscore."""
    text = "".join(character if character.isprintable() else " " for character in text)
    return text.replace("$", r"\$").replace("_", " _", text.startswith("_"))
