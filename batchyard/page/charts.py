"""Drawings as SVG coordinates. The numbers come from the database, the colours from the CSS."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.page.words import compact, line_count, short_duration
from batchyard.store.batch.history import POINT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.store import BatchPoint
    from batchyard.store.overview import ListedBatch

_SPARK_WIDTH: Final = 96
_SPARK_HEIGHT: Final = 20
_FEWEST_ROWS: Final = 3
"""Two speeds are between them, which is the least that a line needs."""


@dataclass(frozen=True, slots=True)
class Sparkline:
    """The points of a polyline in a box of 96 by 20, and what it says in words."""

    points: str
    words: str


def sparkline(values: Sequence[float], every_seconds: float) -> Sparkline:
    """``values``: at least two, the newest last; the line ends at the right edge."""
    top = max(*values, 1e-9)
    step = _SPARK_WIDTH / (len(values) - 1)
    points = (
        f"{index * step:.1f},{_SPARK_HEIGHT - 1 - (_SPARK_HEIGHT - 2) * value / top:.1f}"
        for index, value in enumerate(values)
    )
    minutes = short_duration(len(values) * every_seconds)
    words = f"Last {minutes}: up to {compact(max(values))} tokens/s, now {compact(values[-1])}"
    return Sparkline(" ".join(points), words)


@dataclass(frozen=True, slots=True)
class Charts:
    """What uPlot draws, as JSON: columns over time, for two charts."""

    flow: str
    """Time; answered; answered and failed; those and running; all lines. Stacked already."""
    speed: str
    """Time; tokens per second; share of the prompt from the cache, in percent."""
    words: str
    """The same in words, for people who cannot see the charts."""


def charts_of(
    listed: ListedBatch, points: Sequence[BatchPoint], now: float, ended_at: int | None
) -> Charts | None:
    """None: no line was answered or sent to an engine yet, so there is nothing to draw."""
    batch = listed.batch
    if batch.in_progress_at is None or not batch.total:
        return None
    rows = [_Row(float(batch.in_progress_at), 0, 0, 0, 0, 0, 0)]
    rows += [
        _Row(
            float(point.at),
            point.completed,
            point.failed,
            point.running,
            point.input_tokens,
            point.cached_tokens,
            point.output_tokens,
        )
        for point in points
        if point.at > batch.in_progress_at
    ]
    last = _Row(
        float(now if ended_at is None else ended_at),
        batch.completed,
        batch.failed,
        listed.running,
        listed.input_tokens,
        listed.cached_tokens,
        listed.output_tokens,
    )
    # A batch waits for its files after its last answer: no line goes down.
    if last.at - rows[-1].at >= (POINT_SECONDS if ended_at is None else 1):
        rows.append(last)
    if len(rows) < _FEWEST_ROWS or not any(
        row.completed + row.failed + row.running for row in rows
    ):
        return None
    speeds = [_speed(before, after) for before, after in pairwise(rows)]
    flow = [
        [row.at for row in rows],
        [row.completed for row in rows],
        [row.completed + row.failed for row in rows],
        [min(batch.total, row.completed + row.failed + row.running) for row in rows],
        [batch.total for _ in rows],
    ]
    speed = [
        [row.at for row in rows[1:]],
        [each[0] for each in speeds],
        [each[1] for each in speeds],
    ]
    fastest = max(each[0] for each in speeds)
    words = (
        f"{batch.completed:,} answered and {batch.failed:,} failed of {line_count(batch.total)} in "
        f"{short_duration(rows[-1].at - rows[0].at)}; up to {compact(fastest)} tokens a second."
    )
    return Charts(_json(flow), _json(speed), words)


@dataclass(frozen=True, slots=True)
class _Row:
    at: float
    completed: int
    failed: int
    running: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int


def _speed(before: _Row, after: _Row) -> tuple[float, float | None]:
    prompt = after.input_tokens - before.input_tokens
    tokens = prompt + after.output_tokens - before.output_tokens
    share = None
    if prompt > 0:
        share = round(100 * max(0, after.cached_tokens - before.cached_tokens) / prompt, 1)
    return round(max(0, tokens) / (after.at - before.at), 1), share


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
