"""What people see of a batch in the Prefect UI: a progress bar while it runs, a report at its end.

No prompt, answer, URL query or key is in either.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from httpx import HTTPError
from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    aupdate_progress_artifact,
)
from prefect.exceptions import PrefectException

from batchyard.errors import StoreError
from batchyard.lifecycle import BatchStatus
from batchyard.logs import event_logger
from batchyard.prices import money
from batchyard.services.places import places_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)

_PROGRESS_SECONDS = 3.0
_NOT_SHOWN = (PrefectException, HTTPError, OSError, StoreError)
"""Errors that prevent showing something. No batch fails because of them."""


@asynccontextmanager
async def watch_progress(services: Services, batch_id: str) -> AsyncIterator[None]:
    """Update a progress artifact from the chunk rows while the block runs."""
    batch = await services.store.batches.get(batch_id)
    if batch.status is not BatchStatus.IN_PROGRESS:
        yield
        return
    bar = _ProgressBar(services, batch)
    over = asyncio.Event()
    # Not cancelled: a call that is cut short may still reach Prefect, after the last one.
    watcher = asyncio.create_task(bar.follow(until=over))
    try:
        yield
    finally:
        over.set()
        await watcher


async def report_batch(services: Services, batch: BatchRecord) -> None:
    """The batch as a Markdown artifact, keyed by its id."""
    try:
        await acreate_markdown_artifact(
            markdown=await _report(services, batch),
            key=batch.id.replace("_", "-"),
            description=_headline(batch),
        )
    except _NOT_SHOWN as error:
        log.warning("report.not_shown", error, batch=batch.id)


def _headline(batch: BatchRecord) -> str:
    counts = batch.counts
    if not counts.total:
        return batch.status.value
    return f"{batch.status.value}: {counts.completed:,} of {counts.total:,} requests succeeded"


class _ProgressBar:
    """The progress artifact of one batch, written only when there is news."""

    def __init__(self, services: Services, batch: BatchRecord) -> None:
        self._batches = services.store.batches
        self._batch = batch
        self._artifact: UUID | None = None
        self._shown: tuple[float, str] | None = None

    async def follow(self, *, until: asyncio.Event) -> None:
        while not until.is_set():
            await self._show()
            with suppress(TimeoutError):
                async with asyncio.timeout(_PROGRESS_SECONDS):
                    await until.wait()
        await self._show()

    async def _show(self) -> None:
        try:
            batch = await self._batches.get(self._batch.id)
            answered = batch.counts.completed + batch.counts.failed
            shown = (100.0 * answered / batch.counts.total, _expectation(batch))
            if shown == self._shown:
                return
            percent, description = shown
            if self._artifact is None:
                self._artifact = await acreate_progress_artifact(
                    progress=percent, description=description
                )
            else:
                await aupdate_progress_artifact(
                    self._artifact, progress=percent, description=description
                )
            self._shown = shown
        except _NOT_SHOWN as error:
            log.warning("progress.not_shown", error, batch=self._batch.id)


def _expectation(batch: BatchRecord) -> str:
    said = f"Requests answered of {batch.counts.total:,}"
    if batch.paused_at is not None:
        return f"{said}; paused"
    if batch.wait_reason is not None:
        return f"{said}; waiting: {batch.wait_reason}"
    if batch.eta_at is None:
        return said
    late = ", after its completion window" if batch.eta_at > batch.expires_at else ""
    return f"{said}; probably done at {_time(batch.eta_at)}{late}"


def _time(seconds: int) -> str:
    """To the minute: a forecast is no more exact, and each change of it is a call to Prefect."""
    return datetime.fromtimestamp(60 * round(seconds / 60), tz=UTC).strftime("%Y-%m-%d %H:%M UTC")


async def _report(services: Services, batch: BatchRecord) -> str:
    counts, usage = batch.counts, batch.usage
    rows = [
        ("Model", _cell(batch.model or "–")),
        ("Endpoint", batch.endpoint),
        ("Requests", f"{counts.total:,}"),
        ("Succeeded", f"{counts.completed:,}"),
        ("Failed", f"{counts.failed:,}"),
        *_shared(batch),
        ("Input tokens", f"{usage.input_tokens:,}"),
        ("– of these from cache", f"{usage.input_tokens_details.cached_tokens:,}"),
        ("Output tokens", f"{usage.output_tokens:,}"),
        *_cost(batch),
        *_speed(batch),
    ]
    lines = [f"# {_headline(batch).capitalize()}", ""]
    lines += ["| Batch | " + batch.id + " |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows)]
    if batch.undelivered:
        texts = batch.undelivered.values()
        lines += ["", "## Not written", "", *(f"- {_cell(text)}" for text in texts)]
    if batch.errors:
        lines += ["", "## Errors", "", "| Line | Code | Message |", "|---|---|---|"]
        lines += [f"| {e.line or '–'} | {e.code} | {_cell(e.message)} |" for e in batch.errors]
    lines += ["", "## Files", "", "| File | Id | Where |", "|---|---|---|"]
    return "\n".join([*lines, *await _files(services, batch)])


def _shared(batch: BatchRecord) -> list[tuple[str, str]]:
    if not batch.options.deduplicate:
        return []
    return [("Answered by an identical request", f"{batch.deduplicated_requests:,}")]


def _cost(batch: BatchRecord) -> list[tuple[str, str]]:
    if batch.cost is None or batch.currency is None:
        return []
    return [("Cost", money(batch.cost, batch.currency))]


def _speed(batch: BatchRecord) -> list[tuple[str, str]]:
    if batch.in_progress_at is None or batch.finalizing_at is None:
        return []
    # Whole seconds are all that the lifecycle records.
    seconds = max(1, batch.finalizing_at - batch.in_progress_at)
    counts = batch.counts
    return [
        ("Time, including waiting for an engine", f"{seconds:,} s"),
        ("Requests per second", f"{(counts.completed + counts.failed) / seconds:,.1f}"),
        ("Output tokens per second", f"{batch.usage.output_tokens / seconds:,.1f}"),
    ]


async def _files(services: Services, batch: BatchRecord) -> list[str]:
    wanted = await places_of(services, batch.id)
    rows = []
    for name, file_id, location in (
        ("Input", batch.input_file_id, wanted.input),
        ("Output", batch.output_file_id, wanted.output),
        ("Errors", batch.error_file_id, wanted.error),
    ):
        if file_id is not None:
            # As text, a location leaves out what makes a presigned URL a secret.
            where = _cell(str(location)) if location else "Batchyard's store"
            rows.append(f"| {name} | {file_id} | {where} |")
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
