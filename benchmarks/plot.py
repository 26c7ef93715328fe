"""Plots as SVG, written by hand: bars and lines. The same values give the same bytes.

Colours are such that they can be read on white and on black alike, without asking which it is:
a page's theme is not always the browser's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Points = Sequence[tuple[float, float]]

FOLDER = Path(__file__).parents[1] / "docs" / "plots"
WIDTH = 720
_INK, _GRID, _OURS, _OTHERS = "#768390", "#afb8c144", "#2f81f7", "#8c959f"
_SERIES = (_OURS, "#d4762c", "#3fa266", "#a371f7")
_ROW, _BAR, _TITLE = 24, 16, 40
_NAMES, _VALUES = 310, 70
"""Room left of the bars and right of them."""
_LEFT, _RIGHT, _HEIGHT = 70, 150, 300
"""Of a plot of lines: room for the scale, for the names at the lines' ends, and its height."""


@dataclass(frozen=True)
class Bar:
    """``group`` is written above the first bar of each group."""

    group: str
    name: str
    value: float
    is_ours: bool = False


def bars(title: str, rows: Sequence[Bar], *, unit: str = "") -> str:
    """Horizontal bars from zero, each with its value behind it."""
    most = max((row.value for row in rows), default=1.0) or 1.0
    room = WIDTH - _NAMES - _VALUES
    parts, y, group = [], _TITLE, ""
    for row in rows:
        if row.group != group:
            group = row.group
            y += 6
            parts.append(_text(12, y + 13, group, weight="600"))
            y += _ROW
        length = room * row.value / most
        colour = _OURS if row.is_ours else _OTHERS
        place = f'x="{_NAMES}" y="{y}" width="{length:.1f}" height="{_BAR}"'
        parts += [
            _text(_NAMES - 8, y + 13, row.name, anchor="end"),
            f'<rect {place} rx="2" fill="{colour}"/>',
            _text(_NAMES + length + 6, y + 13, f"{_number(row.value)}{unit}"),
        ]
        y += _ROW
    return _svg(title, parts, y + 8)


def lines(
    title: str, series: Mapping[str, Points], *, x_name: str, y_name: str, log_x: bool = False
) -> str:
    """A line for each series through its points, from zero upwards; ``log_x``: by powers of 10."""
    points = [point for each in series.values() for point in each]
    top = max(y for _, y in points) * 1.1 or 1.0
    left_x, right_x = min(x for x, _ in points), max(x for x, _ in points)
    bottom_y = _TITLE + _HEIGHT

    def across(x: float) -> float:
        low, high, at = (math.log10(v) if log_x else v for v in (left_x, right_x, x))
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * ((at - low) / (high - low) if high > low else 0.5)

    def up(y: float) -> float:
        return bottom_y - _HEIGHT * y / top

    parts = []
    for tick in _ticks(top):
        y = up(tick)
        place = f'x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"'
        parts.append(f'<line {place} stroke="{_GRID}"/>')
        parts.append(_text(_LEFT - 8, y + 4, _number(tick), anchor="end"))
    parts += [
        _text(across(x), bottom_y + 18, _number(x), anchor="middle")
        for x in sorted({x for x, _ in points})
    ]
    for (name, each), colour in zip(series.items(), _SERIES, strict=False):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in each)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>'
            for x, y in each
        ]
        last_x, last_y = each[-1]
        parts.append(_text(across(last_x) + 8, up(last_y) + 4, name, colour=colour))
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(_text(middle, bottom_y + 38, x_name, anchor="middle"))
    parts.append(_text(12, _TITLE - 2, y_name))
    return _svg(title, parts, bottom_y + 50)


def save(name: str, svg: str) -> str:
    """Write ``docs/plots/NAME.svg``; the Markdown that shows it on the page of benchmarks."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.svg").write_text(svg)
    return f"![{name.replace('_', ' ')}](plots/{name}.svg)"


def _svg(title: str, parts: Sequence[str], height: float) -> str:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" role="img" font-size="13" '
        'font-family="system-ui, sans-serif">'
    )
    heading = _text(12, 20, title, weight="600")
    return "\n".join([opening, f"<title>{escape(title)}</title>", heading, *parts, "</svg>\n"])


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    weight: str = "400",
    colour: str = _INK,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 or value == round(value) else f"{value:.1f}"


def _ticks(top: float) -> list[float]:
    """About five round numbers from zero to ``top``."""
    step = 10.0 ** math.floor(math.log10(top))
    while top / step < 4:
        step /= 2
    while top / step > 8:
        step *= 2
    return [step * number for number in range(int(top / step) + 1)]
