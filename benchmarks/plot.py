"""Plots as SVG: bars and lines. The same values give the same bytes.

Colours are such that they can be read on white and on black alike, without asking which it is:
a page's theme is not always the browser's.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    Points = Sequence[tuple[float, float]]

FOLDER = Path(__file__).parents[1] / "docs" / "plots"
_INK, _GRID, _OURS, _OTHERS = "#768390", "#afb8c144", "#2f81f7", "#8c959f"
_SERIES = (_OURS, "#d4762c", "#3fa266", "#a371f7")
_WIDTH, _HEIGHT, _ROW = 7.5, 4.0, 0.27
"""Inches. Of every plot, of a plot of lines, and of each row of a plot of bars."""
_STYLE = {
    "svg.hashsalt": "batchyard",  # ids are random otherwise
    "svg.fonttype": "none",  # text stays text
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.color": _GRID,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


@dataclass(frozen=True)
class Bar:
    """``group`` is written above the first bar of each group."""

    group: str
    name: str
    value: float
    is_ours: bool = False


def bars(title: str, rows: Sequence[Bar], *, unit: str = "") -> str:
    """Horizontal bars from zero, each with its value behind it."""
    places: list[Bar | str] = []
    for row in rows:
        if row.group not in places:
            places.append(row.group)
        places.append(row)
    with mpl.rc_context(_STYLE):
        figure, axes = _empty(title, _ROW * (len(places) + 1))
        for place, row in enumerate(places):
            if isinstance(row, Bar):
                drawn = axes.barh(place, row.value, color=_OURS if row.is_ours else _OTHERS)
                axes.bar_label(drawn, [f"{_number(row.value)}{unit}"], padding=4)
        names = [row.name if isinstance(row, Bar) else row for row in places]
        axes.set_yticks(range(len(places)), names)
        for label, row in zip(axes.get_yticklabels(), places, strict=True):
            label.set_fontweight("normal" if isinstance(row, Bar) else "bold")
        axes.invert_yaxis()
        axes.xaxis.set_visible(False)
        axes.tick_params(left=False)
        return _svg(figure, title)


def lines(
    title: str, series: Mapping[str, Points], *, x_name: str, y_name: str, log_x: bool = False
) -> str:
    """A line for each series through its points, from zero upwards; ``log_x``: by powers of 10."""
    with mpl.rc_context(_STYLE):
        figure, axes = _empty(title, _HEIGHT)
        for (name, points), colour in zip(series.items(), _SERIES, strict=False):
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour)
            axes.annotate(name, points[-1], (8, -3), textcoords="offset points", color=colour)
        if log_x:
            axes.set_xscale("log")
            axes.xaxis.set_minor_locator(NullLocator())
        xs = sorted({x for points in series.values() for x, _ in points})
        axes.set_xticks(xs, [_number(x) for x in xs])
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: _number(value))
        axes.set(xlabel=x_name, ylabel=y_name)
        axes.grid(axis="y")
        axes.tick_params(length=0)
        return _svg(figure, title)


def save(name: str, svg: str) -> str:
    """Write ``docs/plots/NAME.svg``; the Markdown that shows it on the page of benchmarks."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.svg").write_text(svg)
    return f"![{name.replace('_', ' ')}](plots/{name}.svg)"


def _empty(title: str, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.spines[:].set_visible(False)
    return figure, axes


def _svg(figure: Figure, title: str) -> str:
    """``tight``: the picture grows with the names in it, so that none is cut off."""
    text = StringIO()
    about = {"Title": title, "Date": None, "Creator": None}
    figure.savefig(text, format="svg", transparent=True, bbox_inches="tight", metadata=about)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 or value == round(value) else f"{value:.1f}"
