"""``batchyard list``: batches, newest first, a line for each."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from batchyard import intervals
from batchyard.batch.prices import cost_words
from batchyard.cli.batches.batch_view import batch_object, error_words, status_words
from batchyard.cli.terminal import options
from batchyard.cli.terminal.as_json import print_lines
from batchyard.cli.terminal.offline import offline_services
from batchyard.cli.terminal.table import make_table, user_text, write_table
from batchyard.errors import StoreUnavailable
from batchyard.lifecycle import STOPPABLE, BatchStatus
from batchyard.logs.time_words import relative
from batchyard.services.machine.connections import connections
from batchyard.wire import ended_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.table import Table

    from batchyard.store import BatchRecord

    _Show: TypeAlias = Callable[[list[BatchRecord], float], None]

_COLUMNS = ("id", "status", "model", "answered", "failed", "deadline", "done", "priority", "why")
_RIGHT = frozenset({"answered", "failed", "priority", "cost"})
_NOTHING = "-"
_ID_WIDTH = len("batch_") + 32
_STYLES = {
    BatchStatus.IN_PROGRESS: "cyan",
    BatchStatus.COMPLETED: "green",
    BatchStatus.FAILED: "red",
    BatchStatus.EXPIRED: "red",
    BatchStatus.CANCELLING: "dim",
    BatchStatus.CANCELLED: "dim",
}


def list_batches(
    everything: Annotated[
        bool, typer.Option("--all", help="Also list batches that have ended.")
    ] = False,
    tenant: Annotated[str | None, options.ONLY_TENANT] = None,
    limit: Annotated[int, options.LIMIT] = 50,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Keep the list up to date until Ctrl-C."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print a JSON object per line; with --watch, each batch again when it changes.",
        ),
    ] = False,
) -> None:
    """List unfinished batches with their progress and expected end."""
    if watch:
        asyncio.run(_watch(tenant, not everything, limit, as_json=as_json))
    batches, now, database = asyncio.run(_page(tenant, not everything, limit + 1))
    shown = batches[:limit]
    if as_json:
        print_lines(map(batch_object, shown))
    else:
        write_table(table(shown, now))
    if not shown:
        kind = "batches" if everything else "unfinished batches"
        hint = "" if everything else " --all also lists those that have ended."
        typer.echo(f"batchyard: There are no {kind} in {database}.{hint}", err=True)
    if len(batches) > limit:
        typer.echo(f"batchyard: There are more than {limit:,}: give a larger --limit.", err=True)


async def _watch(tenant: str | None, unfinished: bool, limit: int, *, as_json: bool) -> NoReturn:
    """In a pipe, a table for each change; on a terminal, one that changes."""
    console = Console(highlight=False) if sys.stdout.isatty() else None
    async with offline_services() as services:
        show = _changed_objects() if as_json else _changed_tables()
        with contextlib.ExitStack() as stack:
            if console is not None and not as_json:
                live = stack.enter_context(Live(console=console, auto_refresh=False, screen=True))
                show = _redrawn(live)
                # Killed at once, it would leave the terminal without its own screen and cursor.
                signal.signal(signal.SIGTERM, _end)
            while True:
                # While the database cannot be reached, the last table stays.
                with contextlib.suppress(StoreUnavailable):
                    batches = await services.store.batches.page(
                        tenant=tenant, unfinished=unfinished, limit=limit
                    )
                    show(batches, await services.store.database.now())
                await asyncio.sleep(intervals.LOOK_SECONDS)


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _redrawn(live: Live) -> _Show:
    return lambda batches, now: live.update(table(batches, now), refresh=True)


def _changed_tables() -> _Show:
    shown: list[dict[str, Any]] | None = None

    def show(batches: list[BatchRecord], now: float) -> None:
        nonlocal shown
        objects = [batch_object(batch) for batch in batches]
        if objects != shown:
            write_table(table(batches, now))
            sys.stdout.flush()
        shown = objects

    return show


def _changed_objects() -> _Show:
    shown: dict[str, dict[str, Any]] = {}

    def show(batches: list[BatchRecord], _: float) -> None:
        nonlocal shown
        objects = {batch.id: batch_object(batch) for batch in batches}
        print_lines(each for name, each in objects.items() if shown.get(name) != each)
        sys.stdout.flush()
        shown = objects

    return show


async def _page(
    tenant: str | None, unfinished: bool, limit: int
) -> tuple[list[BatchRecord], float, str]:
    """Batches, the time by the clock that theirs are by, and which database that is."""
    async with offline_services() as services:
        batches = await services.store.batches.page(
            tenant=tenant, unfinished=unfinished, limit=limit
        )
        database = connections(services.settings)["Database"]
        return batches, await services.store.database.now(), database


def table(batches: Iterable[BatchRecord], now: float) -> Table:
    """``now`` in Unix seconds; times are relative to it."""
    found = list(batches)
    # Only where there are prices: without them the column would always be empty.
    has_costs = any(batch.cost is not None for batch in found)
    columns = (*_COLUMNS, "cost") if has_costs else _COLUMNS
    rows = (
        (*_row(batch, now), *([cost_words(batch) or _NOTHING] if has_costs else []))
        for batch in found
    )
    made = make_table(columns, rows, right=_RIGHT)
    # A watched list is as wide as its terminal. Without an id, a line would be of no use.
    made.columns[0].min_width = _ID_WIDTH
    return made


def _row(batch: BatchRecord, now: float) -> tuple[str | Text, ...]:
    counts = batch.counts
    return (
        batch.id,
        Text(status_words(batch), style=_style(batch)),
        user_text(_models(batch)),
        f"{counts.completed + counts.failed:,}/{counts.total:,}" if counts.total else _NOTHING,
        f"{counts.failed:,}",
        _NOTHING if ended_at(batch) else relative(batch.expires_at - now),
        _done(batch, now),
        str(batch.priority),
        user_text(_why(batch)),
    )


def _models(batch: BatchRecord) -> str:
    names = ", ".join(batch.models) or _NOTHING
    if batch.part_of is not None:
        return f"{names} (part of {batch.part_of})"
    return f"{names} (responses)" if batch.is_hidden else names


def _style(batch: BatchRecord) -> str:
    """For terminals without NO_COLOR: rich leaves colours out for all others."""
    if batch.status in STOPPABLE and (batch.paused_at or batch.wait_reason):
        return "yellow"
    return _STYLES.get(batch.status, "")


def _why(batch: BatchRecord) -> str:
    """Why it waits, or why it failed."""
    if batch.errors:
        first, *others = batch.errors
        more = f" (and {len(others):,} more)" if others else ""
        return f"{error_words(first)}{more}"
    return (batch.wait_reason or "") if ended_at(batch) is None else ""


def _done(batch: BatchRecord, now: float) -> Text:
    """When it ended or will probably end; red if by forecast its window ends first."""
    end = ended_at(batch)
    if end is not None:
        return Text(relative(end - now))
    if batch.eta_at is None:
        return Text(_NOTHING)
    words = relative(max(0.0, batch.eta_at - now))  # a forecast is some seconds old
    if batch.eta_at > batch.expires_at:
        return Text(f"{words}, at risk", style="bold red")
    return Text(words)
