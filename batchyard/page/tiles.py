"""The tiles: eight figures of now, most of which are also filters of the table below them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.intervals import DAY_SECONDS, HOUR_SECONDS, MINUTE_SECONDS
from batchyard.page.words import (
    NOTHING,
    clock_time,
    compact,
    count,
    line_count,
    percent,
    short_duration,
)
from batchyard.store.batch.filters import Show

if TYPE_CHECKING:
    from batchyard.store.overview import AnswerTotals, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A figure. ``show`` is the filter that it sets; None: it sets none."""

    key: str
    label: str
    value: str
    detail: str = ""
    show: Show | None = None
    is_alarming: bool = False
    help: str = ""


def tiles_of(work: Work, now: float) -> list[Tile]:
    """Those for which there is data: what is not known is not drawn as 0."""
    return [
        Tile(
            key="running",
            label="Running",
            value=count(work.running),
            detail=_waiting(work),
            show=Show.RUNNING,
            help="Batches with requests in an engine, or whose files are being written.",
        ),
        Tile(
            key="backlog",
            label="Backlog",
            value=compact(work.backlog_tokens),
            detail=f"tokens, {line_count(work.backlog_requests)}",
            help="Estimated tokens, prompts and answers, of all lines without an answer.",
        ),
        *_speed(work),
        Tile(
            key="oldest",
            label="Oldest waiting",
            value=NOTHING
            if work.oldest_waiting_at is None
            else short_duration(now - work.oldest_waiting_at),
            detail="nothing waits" if work.oldest_waiting_at is None else "since creation",
            show=Show.WAITING,
            help="Age of the oldest batch of which no request is in an engine.",
        ),
        Tile(
            key="late",
            label="Deadlines at risk",
            value=count(work.late),
            detail="by forecast" if work.late else "none, by forecast",
            show=Show.LATE,
            is_alarming=work.late > 0,
            help="Batches that will probably end after their completion window.",
        ),
        Tile(
            key="failed",
            label="Lines failed",
            value=count(work.hour.failed),
            detail=_share(work.hour),
            show=Show.FAILED,
            is_alarming=work.hour.failed > 0,
            help="Lines that got an error in the last hour. The filter shows batches with any.",
        ),
        *_hits(work.hour),
        *_done(work, now),
    ]


def _waiting(work: Work) -> str:
    parts = [f"{count(work.waiting)} waiting"]
    if work.paused:
        parts.append(f"{count(work.paused)} paused")
    return ", ".join(parts)


def _speed(work: Work) -> list[Tile]:
    minute, hour = (_tokens(each) for each in (work.minute, work.hour))
    if not hour and not work.running:
        return []
    return [
        Tile(
            key="speed",
            label="Tokens/s",
            value=compact(minute / MINUTE_SECONDS),
            detail=f"{compact(hour / HOUR_SECONDS)} last hour",
            help="Tokens of prompts and answers in the last minute, a second.",
        )
    ]


def _hits(hour: AnswerTotals) -> list[Tile]:
    if not hour.input_tokens:
        return []
    return [
        Tile(
            key="hits",
            label="Cache hit rate",
            value=percent(hour.cached_tokens, hour.input_tokens),
            detail="prompts, last hour",
            help="Share of the prompts' tokens that the engines had in their cache already.",
        )
    ]


def _done(work: Work, now: float) -> list[Tile]:
    if work.done_at is None:
        return []
    left = max(0.0, work.done_at - now)
    *day, time = clock_time(work.done_at, now).split(", ")
    if left < DAY_SECONDS:
        day = []  # the time left says which day
    return [
        Tile(
            key="done",
            label="All done at about",
            value=time,
            detail=", ".join([*day, f"in {short_duration(left)}"]),
            help="The latest forecast end of the batches that are not paused.",
        )
    ]


def _share(hour: AnswerTotals) -> str:
    answered = hour.completed + hour.failed
    return f"{percent(hour.failed, answered)}, last hour" if answered else "last hour"


def _tokens(answered: AnswerTotals) -> int:
    return answered.input_tokens + answered.output_tokens
