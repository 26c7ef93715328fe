"""What people see of a batch in the Prefect UI: a progress bar while it runs, a report at its end.

No prompt, answer, URL query or key is in either.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    aupdate_progress_artifact,
)

from batchyard.lifecycle import BatchStatus
from batchyard.storage.location import parse_location

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from uuid import UUID

    from batchyard.steps.services import Services
    from batchyard.store import BatchRecord

_PROGRESS_SECONDS = 3.0


@asynccontextmanager
async def watch_progress(services: Services, batch_id: str) -> AsyncIterator[None]:
    """Keep a progress artifact true to the chunk rows while the block runs."""
    batch = await services.store.batches.get(batch_id)
    if batch.status is not BatchStatus.IN_PROGRESS:
        yield
        return
    artifact = await acreate_progress_artifact(
        progress=0.0, description=f"Requests answered of {batch.counts.total:,}"
    )
    watcher = asyncio.create_task(_follow(services, batch, artifact))
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])
        await _show(services, batch, artifact)


async def report_batch(
    services: Services, batch: BatchRecord, undelivered: Sequence[str] = ()
) -> None:
    """The batch as a Markdown artifact, keyed by its id."""
    await acreate_markdown_artifact(
        markdown=await _report(services, batch, undelivered),
        key=batch.id.replace("_", "-"),
        description=f"{batch.status.value}: {batch.counts.completed:,} of {batch.counts.total:,}",
    )


async def _follow(services: Services, batch: BatchRecord, artifact: UUID) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        await _show(services, batch, artifact)


async def _show(services: Services, batch: BatchRecord, artifact: UUID) -> None:
    chunks = await services.store.chunks.summary(batch.id)
    answered = chunks.completed + chunks.failed
    await aupdate_progress_artifact(artifact, progress=100.0 * answered / batch.counts.total)


async def _report(services: Services, batch: BatchRecord, undelivered: Sequence[str]) -> str:
    counts, usage = batch.counts, batch.usage
    rows = [
        ("Status", f"**{batch.status.value}**"),
        ("Model", batch.model or "–"),
        ("Endpoint", batch.endpoint),
        ("Requests", f"{counts.total:,}"),
        ("Succeeded", f"{counts.completed:,}"),
        ("Failed", f"{counts.failed:,}"),
        ("Input tokens", f"{usage.input_tokens:,}"),
        ("of these, from cache", f"{usage.input_tokens_details.cached_tokens:,}"),
        ("Output tokens", f"{usage.output_tokens:,}"),
        *_speed(batch),
    ]
    lines = [f"# {batch.id}", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows)]
    lines += ["", "## Files", "", *await _files(services, batch)]
    if undelivered:
        lines += ["", "## Not delivered", "", *(f"- {text}" for text in undelivered)]
    if batch.errors:
        lines += ["", "## Errors", "", "| Line | Code | Message |", "|---|---|---|"]
        lines += [f"| {e.line or '–'} | `{e.code}` | {_cell(e.message)} |" for e in batch.errors]
    return "\n".join(lines)


def _speed(batch: BatchRecord) -> list[tuple[str, str]]:
    if batch.in_progress_at is None or batch.finalizing_at is None:
        return []
    # Whole seconds are all that the lifecycle records.
    seconds = max(1, batch.finalizing_at - batch.in_progress_at)
    counts = batch.counts
    return [
        ("Time running, engine start included", f"{seconds:,} s"),
        ("Requests per second", f"{(counts.completed + counts.failed) / seconds:,.1f}"),
        ("Output tokens per second", f"{batch.usage.output_tokens / seconds:,.1f}"),
    ]


async def _files(services: Services, batch: BatchRecord) -> list[str]:
    wanted = await services.store.batches.locations(batch.id)
    lines = [f"- Input: `{batch.input_file_id}`"]
    for name, file_id, location in (
        ("Output", batch.output_file_id, wanted.output),
        ("Errors", batch.error_file_id, wanted.error),
    ):
        if file_id is not None:
            delivered = f", written to {parse_location(location)}" if location else ""
            lines.append(f"- {name}: `{file_id}`{delivered}")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
