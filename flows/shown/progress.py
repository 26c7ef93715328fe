"""What people see of a batch while its chunks run: a progress bar in Prefect, lines in its log."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from prefect.utilities.urls import url_for

from batchyard.batch.prices import cost_words
from batchyard.errors import StoreError
from batchyard.lifecycle import BatchStatus
from batchyard.logs import event_logger
from batchyard.services.story import story
from batchyard.store import RunnerKind
from flows.shown.artifacts import create_artifact, update_progress
from flows.shown.run_page import NOT_SHOWN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from uuid import UUID

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, ChunkSummary
    from flows.shown.run_history import RunHistory

log = event_logger(__name__)

_FIRST_LOOK_SECONDS: Final = 1.0
"""A batch that is done by then has its report, and needs no progress."""
_MOST_SECONDS: Final = 30.0
_LOOKS: Final = 10
"""The pause is this fraction of the time so far, from 3 to 30 seconds: a look every three seconds
would cost Prefect's server as much as a chunk does, for hours."""


@asynccontextmanager
async def watch_progress(
    services: Services, batch_id: str, history: RunHistory, *, at_end: AsyncExitStack
) -> AsyncIterator[None]:
    """Show and sample the progress while the block runs. What goes wrong here ends no batch.

    The last call to Prefect is awaited by ``at_end``, and not here: the batch goes on meanwhile.
    """
    watch = _Watch(services, batch_id, history)
    over = asyncio.Event()
    # Not cancelled: a call that is cut short may still reach Prefect, after the last one.
    watcher = asyncio.create_task(watch.follow(until=over), name=f"progress of {batch_id}")
    at_end.push_async_callback(asyncio.wait, (watcher,))
    try:
        yield
    finally:
        over.set()


class _Watch:
    """Looks at one batch, and sends Prefect only what has changed."""

    def __init__(self, services: Services, batch_id: str, history: RunHistory) -> None:
        self._services = services
        self._batch_id = batch_id
        self._history = history
        self._artifact: UUID | None = None
        self._shown: tuple[float, str] | None = None
        self._done_chunks = 0
        self._waits_for = ""
        self._runs: tuple[str, ...] = ()
        self._warnings: set[str] = set()

    async def follow(self, *, until: asyncio.Event) -> None:
        await self._sample()
        pause = _FIRST_LOOK_SECONDS
        while not until.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await until.wait()
            if not until.is_set():
                await self._look()
                pause = min(_MOST_SECONDS, max(3.0, self._history.now / _LOOKS))
        self._history.ended = self._history.now
        await self._look() if self._artifact is not None else await self._sample()

    async def _sample(self) -> ChunkSummary | None:
        try:
            chunks = await self._services.store.chunks.summary(self._batch_id)
        except StoreError as error:
            log.warning("progress.not_seen", error, batch=self._batch_id)
            return None
        self._history.see(chunks)
        return chunks

    async def _look(self) -> None:
        chunks = await self._sample()
        if chunks is None:
            return
        try:
            batch = await self._services.store.batches.get(self._batch_id)
            if batch.status is not BatchStatus.IN_PROGRESS and self._artifact is None:
                return
            await self._log(batch, chunks)
            await self._show(batch, chunks)
        except (*NOT_SHOWN, StoreError) as error:
            log.warning("progress.not_shown", error, batch=self._batch_id)

    async def _log(self, batch: BatchRecord, chunks: ChunkSummary) -> None:
        for warning in batch.warnings:
            # Those of the check of its URLs are in the log from before it ran.
            if warning.code != "url_not_checked" and warning.message not in self._warnings:
                story.warned(batch.id, warning.message)
        self._warnings = {each.message for each in batch.warnings}
        reason = _wait(batch) if not chunks.leased else ""
        if reason and reason != self._waits_for:
            story.waiting(batch.id, reason)
        self._waits_for = reason
        if chunks.leased:
            runs = await self._runs_of(str(batch.model))
            if set(runs) - set(self._runs):
                story.running(batch.id, runs)
            self._runs = runs
        if chunks.done > self._done_chunks:
            story.progressed(batch.id, batch.counts.total, chunks)
        self._done_chunks = chunks.done

    async def _runs_of(self, model: str) -> tuple[str, ...]:
        """The addresses of the run-chunks flow runs that serve the model now."""
        silent_seconds = self._services.settings.lease_seconds
        rows = await self._services.store.runners.live(
            kind=RunnerKind.CHUNKS, within_seconds=silent_seconds, model=model
        )
        urls = (url_for("flow-run", obj_id=each.flow_run_id) for each in rows if each.flow_run_id)
        return tuple(url for url in urls if url)

    async def _show(self, batch: BatchRecord, chunks: ChunkSummary) -> None:
        total = batch.counts.total
        answered = chunks.completed + chunks.failed
        percent = 100.0 * answered / total if total else 0.0
        shown = (percent, self._description(batch, chunks))
        if shown == self._shown:
            return
        if self._artifact is None:
            self._artifact = await create_artifact(
                kind="progress", data=percent, description=shown[1]
            )
        else:
            await update_progress(self._artifact, percent=percent, description=shown[1])
        self._shown = shown

    def _description(self, batch: BatchRecord, chunks: ChunkSummary) -> str:
        """Markdown in one line: counts, speed, when it is done, where to look further."""
        answered = chunks.completed + chunks.failed
        parts = [
            f"**{answered:,} of {batch.counts.total:,}** requests answered",
            f"chunk {chunks.done:,} of {chunks.pending + chunks.leased + chunks.done:,} done",
        ]
        rates = self._history.rates()
        if self._waits_for:
            parts.append(f"waiting: {self._waits_for}")
        elif rates and rates[-1].output_tokens_per_second >= 1:
            parts.append(f"{rates[-1].output_tokens_per_second:,.0f} output tokens per second")
        if cost := cost_words(batch):
            parts.append(cost)
        if batch.eta_at is not None:
            late = ", after its completion window" if batch.eta_at > batch.expires_at else ""
            parts.append(f"probably done at {_time(batch.eta_at)}{late}")
        parts += [f"[run-chunks of {batch.model}]({url})" for url in self._runs]
        if page := self._services.settings.page_of(batch.id):
            parts.append(f"[{batch.id}]({page})")
        return " · ".join(parts)


def _wait(batch: BatchRecord) -> str:
    if batch.paused_at is not None:
        return "the batch is paused"
    return batch.wait_reason or "an engine is starting, or other batches go first"


def _time(seconds: int) -> str:
    """To the minute: a forecast is no more exact, and each change of it is a call to Prefect."""
    return datetime.fromtimestamp(60 * round(seconds / 60), tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
