"""``batchyard logs``: what has happened to a batch, from the database and from Prefect."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from batchyard.cli.terminal import options
from batchyard.cli.terminal.as_json import LINES, print_lines
from batchyard.cli.terminal.offline import offline_services
from batchyard.cli.terminal.table import make_table, write_table
from batchyard.dispatch import PrefectApi
from batchyard.errors import BatchyardError
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.logs.printable import printable
from batchyard.logs.time_words import bare_moment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

_PATIENCE_SECONDS: Final = 10.0
_MOST_DELIVERIES: Final = 100
_STYLES: Final = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


@dataclass(frozen=True, slots=True)
class _Entry:
    """What happened, at which Unix seconds, as the batch, a delivery or Prefect says."""

    at: float
    source: str
    level: str
    text: str


def logs(
    batch_id: Annotated[str, options.BATCH],
    limit: Annotated[
        int, typer.Option(help="How many lines of Prefect's logs, the newest.", min=0, max=10_000)
    ] = 500,
    as_json: Annotated[bool, LINES] = False,
) -> None:
    """Show what has happened to a batch: its statuses, notifications, and Prefect's logs of it.

    Errors are shown by their codes. Prefect's logs are those of the batch's own flow runs; the
    engine's log is on its machine, in BATCHYARD_HOME/logs.
    """
    entries, why_not = asyncio.run(_entries(batch_id, limit))
    if as_json:
        print_lines(map(asdict, entries))
    else:
        table = make_table(("time (UTC)", "source", "what happened"), map(_row, entries))
        write_table(table)
    if why_not:
        typer.echo(f"batchyard: Prefect's logs are left out: {why_not}", err=True)


async def _entries(batch_id: str, limit: int) -> tuple[list[_Entry], str]:
    async with offline_services() as services:
        batch = await services.store.batches.get(batch_id)
        found = [*_of_batch(batch), *await _of_deliveries(services, batch_id)]
        of_prefect, why_not = await _of_prefect(batch, limit)
    return sorted([*found, *of_prefect], key=lambda entry: entry.at), why_not


def _of_batch(batch: BatchRecord) -> Iterator[_Entry]:
    counts = batch.counts
    yield _Entry(batch.created_at, "batch", "INFO", f"created, {batch.completion_window}")
    for status in BatchStatus:
        at = getattr(batch, status.timestamp_field) if status.timestamp_field else None
        if at is None:
            continue
        words = status.value
        if status is BatchStatus.IN_PROGRESS:
            words += f", {counts.total:,} requests of model {batch.model}"
        if status in TERMINAL and counts.total:
            words += f", {counts.completed:,} succeeded, {counts.failed:,} failed"
        yield _Entry(at, "batch", "ERROR" if status is BatchStatus.FAILED else "INFO", words)
        if status in TERMINAL:
            yield from _at_the_end(batch, at)
    if batch.paused_at is not None:
        yield _Entry(batch.paused_at, "batch", "INFO", "paused")
    if batch.at_risk_at is not None:
        words = "at risk: by forecast it ends after its window"
        yield _Entry(batch.at_risk_at, "batch", "WARNING", words)


def _at_the_end(batch: BatchRecord, at: float) -> Iterator[_Entry]:
    """Codes only: a message may name what a client has written."""
    for error in batch.errors or ():
        where = "" if error.line is None else f" in line {error.line}"
        yield _Entry(at, "batch", "ERROR", f"{error.code}{where}")
    for kind in batch.undelivered or {}:
        yield _Entry(
            at, "batch", "ERROR", f"the {kind} file could not be written to its destination"
        )


async def _of_deliveries(services: Services, batch_id: str) -> list[_Entry]:
    deliveries = services.store.deliveries
    found = []
    for each in await deliveries.page(batch_id=batch_id, limit=_MOST_DELIVERIES):
        what = f"{each.kind.value} {each.id} of {each.event_type}"
        found.append(_Entry(each.created_at, "delivery", "INFO", f"{what}: due"))
        for attempt in await deliveries.attempts(each.id):
            is_good = attempt.error is None
            # A mail server's answer has no status that is one of HTTP.
            status = "no answer" if attempt.status_code is None else str(attempt.status_code)
            words = f"{what}: attempt {attempt.number}: {'delivered' if is_good else status}"
            found.append(_Entry(attempt.at, "delivery", "INFO" if is_good else "WARNING", words))
    return found


async def _of_prefect(batch: BatchRecord, limit: int) -> tuple[list[_Entry], str]:
    """The logs, and why there are none."""
    if not os.environ.get("PREFECT_API_URL"):
        return [], "PREFECT_API_URL is not set."
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS), PrefectApi.from_environment() as api:
            runs = {run.id for run in await api.named(batch.id)} | {batch.flow_run_id or ""}
            found = await api.logs(runs - {""}, limit)
    except TimeoutError:
        return [], "Prefect is too slow."
    except BatchyardError as error:
        return [], str(error)
    return [
        _Entry(each.at, "prefect", each.level, f"{each.logger}: {_first_line(each.message)}")
        for each in found
    ], ""


def _first_line(message: str) -> str:
    """Of an exception, its type and text; what follows is its traceback."""
    return printable(message.strip().partition("\n")[0])


def _row(entry: _Entry) -> tuple[str | Text, ...]:
    text = Text(printable(entry.text), style=_STYLES.get(entry.level, ""))
    return bare_moment(entry.at), entry.source, text
