"""``batchyard list``: batches, newest first, a line for each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchyard.cli.batch_view import batch_object, ended_at, status_words
from batchyard.cli.offline import offline_services
from batchyard.cli.time_words import relative

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchyard.store import BatchRecord

_WIDTH = 10_000
"""Wider than any table: what is cut off or wrapped can be neither copied nor read by a program."""
_COLUMNS = ("id", "status", "model", "answered", "failed", "deadline", "done", "priority")
_RIGHT = frozenset({"answered", "failed", "priority"})
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
    batches, now = asyncio.run(_page(tenant, not everything, limit + 1))
    shown = batches[:limit]
    if as_json:
        for batch in shown:
            typer.echo(msgspec.json.encode(batch_object(batch)).decode())
    else:
        Console(width=_WIDTH, highlight=False).print(table(shown, now), crop=False)
    if len(batches) > limit:
        typer.echo(f"batchyard: There are more than {limit:,}: give a larger --limit.", err=True)


async def _page(
    tenant: str | None, unfinished: bool, limit: int
) -> tuple[list[BatchRecord], float]:
    """Batches, and the time by the clock that theirs are by."""
    async with offline_services() as services:
        batches = await services.store.batches.page(
            tenant=tenant, unfinished=unfinished, limit=limit
        )
        return batches, await services.store.database.now()


def table(batches: Iterable[BatchRecord], now: float) -> Table:
    """``now`` in Unix seconds; times are relative to it."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        made.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=True)
    for batch in batches:
        counts = batch.counts
        made.add_row(
            batch.id,
            status_words(batch),
            _model(batch),
            f"{counts.completed + counts.failed:,}/{counts.total:,}" if counts.total else _NOTHING,
            f"{counts.failed:,}",
            _NOTHING if ended_at(batch) else relative(batch.expires_at - now),
            _done(batch, now),
            str(batch.priority),
        )
    return made


def _model(batch: BatchRecord) -> Text:
    """A user's words: no markup, no control characters."""
    name = batch.model or ", ".join(batch.options.models) or _NOTHING
    return Text("".join(each if each.isprintable() else "�" for each in name))


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
