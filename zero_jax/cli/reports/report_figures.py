"""The figures of a run's report as SVG: curves over steps, and bars of memory and communication."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

MAX_POINTS = 1500
"""Of a curve: more than a screen has columns only make the file larger."""

Series = Sequence[tuple[float, float]]


def thinned(series: Series, most: int = MAX_POINTS) -> Series:
    """At most `most` of the points, evenly, with the last one; those that are not finite are left out.

    >>> thinned([(i, i) for i in range(10)], 4)
    [(0, 0), (3, 3), (6, 6), (9, 9)]
    """
    finite = [(x, y) for x, y in series if math.isfinite(y)]
    if len(finite) <= most:
        return finite
    return [finite[i * (len(finite) - 1) // (most - 1)] for i in range(most)]


def curves(lines: Mapping[str, Series], *, title: str, unit: str, log_scale: bool = False) -> str:
    """Named curves over steps; the one of few points has markers."""
    figure, axes = _figure(3.0)
    for name, series in lines.items():
        points = thinned(series)
        if points:
            few, constant = len(points) <= 40, len(points) == 2 and points[0][1] == points[1][1]
            axes.plot(*zip(*points, strict=True), marker="o" if few and not constant else None, markersize=3.5,
                      linewidth=1.6 if few else 0.9, label=name, linestyle="--" if constant else "-")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    if log_scale:
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    if len(lines) > 1 and axes.get_legend_handles_labels()[0]:  # none where a run ended before its first step
        axes.legend(fontsize=8, frameon=False)
    return _svg(figure)


def bars(values: Mapping[str, float], *, title: str, unit: str, beside: Mapping[str, float] | None = None,
         names: tuple[str, str] = ("", "")) -> str:
    """A horizontal bar for each name; beside: a second, grey one below it; names: of the two kinds of bars."""
    figure, axes = _figure(0.9 + 0.42 * len(values))
    rows = range(len(values))
    height = 0.7 if beside is None else 0.36
    axes.barh([row - (height / 2 if beside is not None else 0) for row in rows], list(values.values()), height,
              label=names[0])
    if beside is not None:
        axes.barh([row + height / 2 for row in rows], [beside.get(name, 0.0) for name in values], height,
                  color="0.75", label=names[1])
        axes.legend(fontsize=8, frameon=False)
    axes.set_yticks(list(rows), list(values), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=8)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.25, axis="x")
    return _svg(figure)


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # slow to import, and needed once
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    """The figure as an `svg` element: text stays text, and no date makes two of them differ."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "zero_jax"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("?>")[2].partition(">")[2].strip()  # without the XML and DOCTYPE lines
