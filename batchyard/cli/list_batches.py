"""``batchyard list``: batches, newest first, a line for each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.text import Text

from batchyard.cli.batch_view import batch_object, error_words, status_words
from batchyard.cli.offline import offline_services
from batchyard.cli.table import make_table, user_text, write_table
from batchyard.prices import money
from batchyard.services.connections import connections
from batchyard.time_words import relative
from batchyard.wire import ended_at

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from batchyard.store import BatchRecord

_COLUMNS = ("id", "status", "model", "answered", "failed", "deadline", "done", "priority", "why")
_RIGHT = frozenset({"answered", "failed", "priority", "cost"})
_NOTHING = "-"


def list_batches(
    everything: Annotated[
        bool, typer.Option("--all", help="Also list batches that have ended.")
    ] = False,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    limit: Annotated[
        int, typer.Option(help="How many to list, newest first.", min=1, max=10_000)
    ] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per line.")] = False,
) -> None:
    """List unfinished batches with their progress and expected end."""
    batches, now, database = asyncio.run(_page(tenant, not everything, limit + 1))
    shown = batches[:limit]
    if as_json:
        for batch in shown:
            typer.echo(msgspec.json.encode(batch_object(batch)).decode())
    else:
        write_table(table(shown, now))
    if not shown:
        kind = "batches" if everything else "unfinished batches"
        hint = "" if everything else " --all also lists those that have ended."
        typer.echo(f"batchyard: There are no {kind} in {database}.{hint}", err=True)
    if len(batches) > limit:
        typer.echo(f"batchyard: There are more than {limit:,}: give a larger --limit.", err=True)


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
    # Only where there are prices: without them the column would be empty for ever.
    has_costs = any(batch.cost is not None for batch in found)
    columns = (*_COLUMNS, "cost") if has_costs else _COLUMNS
    rows = ((*_row(batch, now), *([_cost(batch)] if has_costs else [])) for batch in found)
    return make_table(columns, rows, right=_RIGHT)


def _cost(batch: BatchRecord) -> str:
    if batch.cost is None or batch.currency is None:
        return _NOTHING
    return money(batch.cost, batch.currency)


def _row(batch: BatchRecord, now: float) -> tuple[str | Text, ...]:
    counts = batch.counts
    return (
        batch.id,
        status_words(batch),
        user_text(batch.model or ", ".join(batch.options.models) or _NOTHING),
        f"{counts.completed + counts.failed:,}/{counts.total:,}" if counts.total else _NOTHING,
        f"{counts.failed:,}",
        _NOTHING if ended_at(batch) else relative(batch.expires_at - now),
        _done(batch, now),
        str(batch.priority),
        user_text(_why(batch)),
    )


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
