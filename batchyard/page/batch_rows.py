"""The table of batches: its rows, its columns, and its state, which is in the URL."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from batchyard.batch.prices import cost_words
from batchyard.page.words import (
    NOTHING,
    ago,
    compact,
    count,
    model_of,
    name_of,
    percent,
    short_duration,
    status_of,
)
from batchyard.store.batch.filters import Asked, Show, Sort
from batchyard.wire import ended_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.store import BatchRecord
    from batchyard.store.overview import ListedBatch, Listing, Overview

PAGE_SIZE: Final = 50
_MOST_PAGES: Final = 10_000
_MOST_SEARCH_CHARS: Final = 200
_ID_CHARS: Final = 18
"""Enough to tell batches apart; all of it is on the page of the batch."""

FILTERS: Final = (
    (Show.RECENT, "Open and last day"),
    (Show.RUNNING, "Running"),
    (Show.WAITING, "Waiting"),
    (Show.LATE, "At risk"),
    (Show.FAILED, "With failures"),
    (Show.ENDED, "Ended"),
    (Show.ALL, "All"),
)
_COLUMNS: Final = (
    ("Batch", None, ""),
    ("Status", Sort.STATUS, ""),
    ("Lines", Sort.LINES, "wide"),
    ("Tokens/s", None, "number"),
    ("Done", Sort.ETA, ""),
    ("Priority", Sort.PRIORITY, "number"),
    ("Tokens", None, "number"),
    ("Created", Sort.CREATED, "number"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Shares of a whole of 100, from left to right; what is missing is left."""

    answered: float = 0.0
    failed: float = 0.0

    @classmethod
    def of(cls, batch: BatchRecord) -> Bar:
        """Each part that is there is seen: at least half a percent of the bar."""
        if not batch.total:
            return cls()
        answered, failed = (
            max(0.5, 100 * part / batch.total) if part else 0.0
            for part in (batch.completed, batch.failed)
        )
        scale = 100 / max(100.0, answered + failed)
        return cls(answered=round(answered * scale, 2), failed=round(failed * scale, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBar:
    """A completion window as a bar of 100: how much of it is over, and where the end is seen."""

    elapsed: float
    eta: float | None
    is_late: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A row, as text."""

    id: str
    name: str
    has_name: bool
    model: str
    endpoint: str
    tenant: str | None
    look: str
    status: str
    why: str
    bar: Bar
    answered: str
    failed: str
    left: str
    share: str
    speed: str
    done: str
    done_detail: str
    window: WindowBar | None
    priority: str
    tokens: str
    cached: str
    cost: str
    created: str


@dataclass(frozen=True, slots=True)
class Column:
    """A heading. ``url``: the table sorted by it; None: it cannot be."""

    label: str
    kind: str
    url: str | None
    direction: str | None
    """``ascending`` or ``descending``, if the table is sorted by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTable:
    """All that the template needs. URLs are queries, behind ``/`` or the fragment's address."""

    rows: list[BatchRow]
    columns: list[Column]
    filters: list[tuple[str, str, bool]]
    query: str
    search: str
    hidden: dict[str, str]
    """What the search form keeps of the state."""
    total: str
    shown: str
    previous: str | None
    next: str | None
    empty: str
    """Why there are no rows, and what helps."""


def asked_from(query: Mapping[str, str], tenant: str | None) -> Asked:
    """The state of the table. What is not known in it is the default, as in an old bookmark."""
    show, sort, page = query.get("show", ""), query.get("sort", ""), query.get("page", "")
    return Asked(
        tenant=tenant,
        show=Show(show) if show in set(Show) else Show.RECENT,
        search=query.get("q", "").strip()[:_MOST_SEARCH_CHARS],
        sort=Sort(sort) if sort in set(Sort) else Sort.CREATED,
        is_descending=query.get("order") != "up",
        page=min(int(page), _MOST_PAGES) if re.fullmatch("[0-9]{1,18}", page) else 0,
        limit=PAGE_SIZE,
    )


def query_of(asked: Asked) -> str:
    """The state as a query; the default is an empty one."""
    parts = {
        "show": "" if asked.show is Show.RECENT else asked.show.value,
        "q": asked.search,
        "sort": "" if asked.sort is Sort.CREATED else asked.sort.value,
        "order": "" if asked.is_descending else "up",
        "page": str(asked.page) if asked.page else "",
    }
    given = {name: value for name, value in parts.items() if value}
    return f"?{urlencode(given)}" if given else ""


async def read_page(overview: Overview, asked: Asked) -> tuple[Asked, Listing]:
    """The batches of the page that is asked for, or of the last one if there are fewer pages.

    They may have left the filter since the page was opened or bookmarked.
    """
    listing = await overview.batches(asked)
    if listing.total and not listing.batches:
        asked = replace(asked, page=(listing.total - 1) // asked.limit)
        listing = await overview.batches(asked)
    return asked, listing


def table_of(asked: Asked, listing: Listing, now: float) -> BatchTable:
    """The table for one page of batches."""
    first = asked.page * asked.limit
    last = first + len(listing.batches)
    is_for_all = asked.tenant is None
    return BatchTable(
        rows=[row_of(each, now, with_tenant=is_for_all) for each in listing.batches],
        columns=[_column(asked, *each) for each in _COLUMNS],
        filters=[
            (label, query_of(replace(asked, show=show, page=0)), show is asked.show)
            for show, label in FILTERS
        ],
        query=query_of(asked),
        search=asked.search,
        hidden=_hidden(asked),
        total=count(listing.total),
        shown=f"{count(first + 1)}–{count(last)}" if listing.batches else "",
        previous=query_of(replace(asked, page=asked.page - 1)) if asked.page else None,
        next=query_of(replace(asked, page=asked.page + 1)) if last < listing.total else None,
        empty=_empty(asked),
    )


def row_of(listed: ListedBatch, now: float, *, with_tenant: bool) -> BatchRow:
    """One batch as a row."""
    batch = listed.batch
    look, status = status_of(batch, is_running=listed.running > 0)
    name = name_of(batch)
    done, detail = done_words(batch, now)
    tokens = listed.input_tokens + listed.output_tokens
    return BatchRow(
        id=batch.id,
        name=name or f"{batch.id[:_ID_CHARS]}…",
        has_name=name is not None,
        model=model_of(batch),
        endpoint=batch.endpoint,
        tenant=batch.tenant if with_tenant else None,
        look=look,
        status=status,
        why=why_of(batch),
        bar=Bar.of(batch),
        answered=count(batch.completed) if batch.total else NOTHING,
        failed=f"{count(batch.failed)} failed" if batch.failed else "",
        left=_left(batch),
        share=percent(batch.completed + batch.failed, batch.total),
        speed=NOTHING if listed.tokens_per_second is None else compact(listed.tokens_per_second),
        done=done,
        done_detail=detail,
        window=window_of(batch, now),
        priority=str(batch.priority),
        tokens=compact(tokens) if tokens else NOTHING,
        cached=f"{percent(listed.cached_tokens, listed.input_tokens)} cached"
        if listed.input_tokens
        else "",
        cost=cost_words(batch),
        created=ago(now - batch.created_at),
    )


def _left(batch: BatchRecord) -> str:
    has_ended = ended_at(batch) is not None
    if not batch.total:
        return "none was run" if has_ended else "not counted yet"
    left = batch.total - batch.completed - batch.failed
    return f"{count(left)} {'not run' if has_ended else 'left'}" if left else ""


def why_of(batch: BatchRecord) -> str:
    """Why it waits, or why it failed, in one line."""
    if batch.errors:
        first, *others = batch.errors
        where = f"line {first.line}: " if first.line is not None else ""
        more = f" (and {count(len(others))} more)" if others else ""
        return f"{where}{first.message}{more}"
    return (batch.wait_reason or "") if ended_at(batch) is None else ""


def done_words(batch: BatchRecord, now: float) -> tuple[str, str]:
    """When it ended or will probably end, and against what."""
    end = ended_at(batch)
    if end is not None:
        return ago(now - end), f"took {short_duration(end - batch.created_at)}"
    window = f"window ends {_in(batch.expires_at - now)}"
    if batch.eta_at is None:
        return NOTHING, window
    done = f"in {short_duration(max(0.0, batch.eta_at - now))}"
    return done, f"at risk, {window}" if batch.eta_at > batch.expires_at else window


def window_of(batch: BatchRecord, now: float) -> WindowBar | None:
    """None: it has ended, so its window does not matter."""
    if ended_at(batch) is not None:
        return None
    whole = max(1, batch.expires_at - batch.created_at)
    eta = None
    if batch.eta_at is not None:
        eta = round(_within(100 * (max(now, batch.eta_at) - batch.created_at) / whole), 1)
    return WindowBar(
        elapsed=round(_within(100 * (now - batch.created_at) / whole), 1),
        eta=eta,
        is_late=batch.eta_at is not None and batch.eta_at > batch.expires_at,
    )


def _within(share: float) -> float:
    return min(100.0, max(0.0, share))


def _in(seconds: float) -> str:
    return f"in {short_duration(seconds)}" if seconds > 0 else "now"


def _column(asked: Asked, label: str, sort: Sort | None, kind: str) -> Column:
    if sort is None:
        return Column(label, kind, None, None)
    is_current = asked.sort is sort
    turned = replace(
        asked, sort=sort, is_descending=not (is_current and asked.is_descending), page=0
    )
    direction = "descending" if asked.is_descending else "ascending"
    return Column(label, kind, query_of(turned), direction if is_current else None)


def _hidden(asked: Asked) -> dict[str, str]:
    parts = {
        "show": "" if asked.show is Show.RECENT else asked.show.value,
        "sort": "" if asked.sort is Sort.CREATED else asked.sort.value,
        "order": "" if asked.is_descending else "up",
    }
    return {name: value for name, value in parts.items() if value}


def _empty(asked: Asked) -> str:
    if asked.search:
        return "No batch has this in its id, model or metadata."
    match asked.show:
        case Show.RECENT:
            return "Nothing is open, and nothing has ended in the last day."
        case Show.ALL:
            return "There are no batches yet."
        case Show.RUNNING:
            return "No batch is running."
        case Show.WAITING:
            return "No batch is waiting."
        case Show.LATE:
            return "By forecast, every batch ends within its window."
        case Show.FAILED:
            return "No open batch, and none of the last day, has failures."
        case Show.ENDED:
            return "No batch has ended yet."
