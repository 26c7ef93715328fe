"""Tokens per second and hit rate over time, as an image that Prefect's Markdown shows.

Prefect's UI drops styles and scripts from Markdown, and shows an image with a `data:` URL.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final

from batchyard.logs.time_words import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flows.shown.run_history import Rate

_LEAST_POINTS: Final = 3
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 220, 64, 48, 28, 28
_TOKENS, _HITS, _TEXT, _GRID = "#2563eb", "#d97706", "#6b7280", "#d1d5db"


def speed_plot(rates: Sequence[Rate]) -> str:
    """Markdown of the plot; empty for a batch that ran for too short a time to plot."""
    if len(rates) < _LEAST_POINTS:
        return ""
    encoded = base64.b64encode(svg(rates).encode()).decode()
    return f"![Output tokens per second and hit rate](data:image/svg+xml;base64,{encoded})"


def svg(rates: Sequence[Rate]) -> str:
    """The image: tokens per second to the left scale, the hit rate in percent to the right one."""
    first, last = rates[0].seconds, rates[-1].seconds
    most = max(rate.output_tokens_per_second for rate in rates) or 1.0

    def x(seconds: float) -> float:
        share = (seconds - first) / ((last - first) or 1.0)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(share: float) -> float:
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    speed = [(x(r.seconds), y(r.output_tokens_per_second / most)) for r in rates]
    hits = [(x(r.seconds), y(min(1.0, r.hit_rate))) for r in rates if r.hit_rate is not None]
    parts = [
        *(_line([(_LEFT, y(at)), (_WIDTH - _RIGHT, y(at))], _GRID, 1) for at in (0.0, 0.5, 1.0)),
        *(_text(_LEFT - 6, y(at) + 4, f"{at * most:,.0f}", "end") for at in (0.0, 0.5, 1.0)),
        *(_text(_WIDTH - _RIGHT + 6, y(at) + 4, f"{at:.0%}", "start") for at in (0.0, 0.5, 1.0)),
        _text(_LEFT, _HEIGHT - 8, duration(first), "start"),
        _text(_WIDTH - _RIGHT, _HEIGHT - 8, duration(last), "end"),
        _line(hits, _HITS, 2),
        _line(speed, _TOKENS, 2),
        _text(_LEFT, 16, "output tokens per second", "start", _TOKENS),
        _text(_WIDTH - _RIGHT, 16, "cache hit rate", "end", _HITS),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">'
        f"{''.join(parts)}</svg>"
    )


def _line(points: Sequence[tuple[float, float]], colour: str, width: int) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = _TEXT) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'
