"""Collect: from segments to the output and error files, in the order of the input.

The segments are read in the order of their keys, so that the earlier one of two answers counts.
:class:`~batchyard.steps.collect.result_lines.ResultLines` puts their lines in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from batchyard.batch.chains import stage_file_id
from batchyard.batch.ledger import Charge
from batchyard.batch_error import BatchError
from batchyard.errors import ObjectChanged, ObjectNotFound
from batchyard.lifecycle import BatchStatus
from batchyard.lines.framing import custom_id_of, read_lines
from batchyard.logs import event_logger
from batchyard.results.results import NoAnswerCode, Outcome, not_run
from batchyard.services.batch_span import traced
from batchyard.services.keys import (
    file_key,
    result_key,
    results_prefix,
    segments_prefix,
    stage_prefix,
)
from batchyard.services.segments.local_copy import local_copy
from batchyard.services.segments.new_lines import new_segments
from batchyard.services.services import Progress
from batchyard.steps.collect.ledger import Charged, ledger_parts
from batchyard.steps.collect.result_lines import ResultLines
from batchyard.storage.file import os_errors_as_ours
from batchyard.store import HiddenFor, NewFile
from batchyard.store.tables.file import FILE_LIFETIME_SECONDS
from batchyard.wire import NO_USAGE, RequestCounts, TokenUsage, result_file_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
    from pathlib import Path
    from typing import Literal

    from batchyard.results.line_errors import ErrorCount
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)

_READ_AT_ONCE = 4
"""Segments; each has sixteen mebibytes and a line, at most."""
LISTED_AGAIN_SECONDS: Final = (1.0, 4.0, 15.0)
"""Some object stores list a new object a little later."""
DAMAGED = BatchError(
    "server_error", "Some finished lines could not be read from the object store; retry them."
)

_UNFINISHED = {
    BatchStatus.CANCELLED: NoAnswerCode.CANCELLED,
    BatchStatus.EXPIRED: NoAnswerCode.EXPIRED,
    BatchStatus.FAILED: NoAnswerCode.FAILED,
}


@dataclass(frozen=True, slots=True)
class Collected:
    """The files, durable but not yet published; None where one would be empty."""

    target: BatchStatus
    """The status in which the batch will end."""
    errors: tuple[BatchError, ...] | None
    """Why it failed; None for any other end."""
    output: NewFile | None
    error: NewFile | None
    others: tuple[NewFile, ...]
    """The answers of the stages before the last, and the ledger, if there are any."""
    counts: RequestCounts
    error_counts: tuple[ErrorCount, ...]
    usage: TokenUsage
    deduplicated: int
    """Requests in the two files that have another one's answer."""
    epoch: int
    """The lease under which they were made."""


@traced("batch.collect")
async def collect_results(services: Services, batch_id: str, epoch: int) -> Collected:
    """Make the two files of a batch that runs no more.

    A batch in progress moves to ``finalizing``. Lines without a result get their
    ``batch_expired``, ``batch_cancelled`` or ``batch_failed`` line in the error file and count as
    neither completed nor failed. A batch that failed before its first result has no files. Running
    it again replaces the same objects; under another lease it makes others,
    so that what is published already is not overwritten.
    """
    batch = await services.store.batches.get(batch_id)
    if batch.status is BatchStatus.IN_PROGRESS:
        batch = await services.store.batches.advance(
            batch_id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING
        )
    services.on_progress(Progress(batch_id, "collecting"))
    prefix = results_prefix(batch)
    with (
        os_errors_as_ours(str(services.spool)),
        ResultLines(services.spool, batch.counts.total) as lines,
    ):
        known: dict[str, None] = {}
        damaged = []
        # Before it began, lines that are answered already may be there, and are not its own yet.
        if batch.in_progress_at is not None:
            damaged = await _add_all_segments(services, batch, prefix, lines, known)
        errors = (*(batch.errors or ()), *damaged) or None
        counts = lines.counts()
        target = _target(batch.status, counts, may_fail=bool(errors))
        is_empty = target is BatchStatus.FAILED and not (counts.completed or counts.failed)
        if target in _UNFINISHED and counts.total and not is_empty:
            reason = errors[0].message if errors and target is BatchStatus.FAILED else ""
            await _add_unfinished(services, batch, lines, _UNFINISHED[target], reason)
        usage = await services.store.chains.usage(batch_id) if batch.is_parent else lines.usage
        others = await _write_stages(services, batch, epoch)
        if batch.options.ledger:
            ledger, used = await _write_ledger(services, batch, [*known], epoch)
            # Of a chain the chunks also have lines that ran twice.
            usage, others = used if batch.is_parent else usage, (*others, *ledger)
        return Collected(
            target=target,
            errors=errors if target is BatchStatus.FAILED else None,
            output=await _write_file(services, batch, lines, Outcome.OUTPUT, epoch),
            error=await _write_file(services, batch, lines, Outcome.ERROR, epoch),
            others=others,
            counts=counts,
            error_counts=lines.errors.counts(),
            usage=usage,
            deduplicated=lines.copies,
            epoch=epoch,
        )


def _target(status: BatchStatus, counts: RequestCounts, *, may_fail: bool) -> BatchStatus:
    if status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    if counts.completed + counts.failed == counts.total:
        return BatchStatus.COMPLETED
    # A batch in progress is stopped early because it cannot be run, or because its window ended.
    return BatchStatus.FAILED if may_fail else BatchStatus.EXPIRED


async def _add_all_segments(
    services: Services,
    batch: BatchRecord,
    prefix: str,
    lines: ResultLines,
    known: dict[str, None],
) -> list[BatchError]:
    """Add all segments; an error for each that is damaged, or for all that are missing.

    ``known`` gets their keys, in the order in which they were added.
    """
    # Before they are listed: a segment is stored before its lines are counted in its chunk's row.
    counted = (
        await services.store.chains.get(batch.id)
        if batch.is_parent
        else await services.store.chunks.summary(batch.id)
    )
    recorded = counted.completed + counted.failed
    for seconds in (0.0, *LISTED_AGAIN_SECONDS):
        await asyncio.sleep(seconds)
        damaged = []
        async with contextlib.aclosing(_add_segments(services, prefix, lines, known)) as keys:
            async for key in keys:
                log.error("segment.damaged", key=key)
                damaged.append(DAMAGED)
        counts = lines.counts()
        missing = recorded - counts.completed - counts.failed
        if damaged or missing <= 0:
            return damaged
    log.error("segments.missing", batch=batch.id, lines=missing)
    return [DAMAGED]


async def _add_segments(
    services: Services, prefix: str, lines: ResultLines, known: dict[str, None]
) -> AsyncGenerator[str]:
    """Add the segments that are not ``known`` yet, in the order of their keys.

    Yields the keys of those that are damaged.
    """
    new = new_segments(services.storage, prefix, known, at_once=_READ_AT_ONCE)
    async with contextlib.aclosing(new) as segments:
        async for key, segment in segments:
            known[key] = None
            if not await lines.add_segment(segment):
                yield key


async def _add_unfinished(
    services: Services, batch: BatchRecord, lines: ResultLines, code: NoAnswerCode, reason: str
) -> None:
    def unfinished(path: Path) -> Iterator[tuple[int, bytes]]:
        with path.open("rb") as file:
            for ordinal, physical in enumerate(read_lines(file, path.stat().st_size)):
                if not lines.has_line(ordinal):
                    custom_id = custom_id_of(physical.data or b"")
                    yield ordinal, not_run(batch.id, ordinal, custom_id, code, reason).line

    try:
        async with local_copy(services, file_key(batch.input_file_id)) as path:
            await lines.add_errors(unfinished(path))
    except (ObjectNotFound, ObjectChanged) as error:
        # Without the input their ids are not known, and the finished lines must not wait for them.
        log.warning("batch.input_gone", error, batch=batch.id)


async def _write_stages(services: Services, batch: BatchRecord, epoch: int) -> tuple[NewFile, ...]:
    """The answers of each stage before the last one, as a file of its own."""
    files = []
    for stage in range(1, batch.stages + 1):
        with ResultLines(services.spool, batch.counts.total) as lines:
            prefix = stage_prefix(batch.id, stage)
            async with contextlib.aclosing(_add_segments(services, prefix, lines, {})) as damaged:
                async for key in damaged:
                    log.error("segment.damaged", key=key)
            name = f"stage{stage}"
            file_id = stage_file_id(batch.id, stage)
            file = await _write_lines(
                services, batch, lines.parts(Outcome.OUTPUT), file_id, name, epoch=epoch
            )
        if file is not None:
            files.append(file.model_copy(update={"hidden_for": HiddenFor.CHAIN}))
    return tuple(files)


async def _write_ledger(
    services: Services, batch: BatchRecord, keys: Sequence[str], epoch: int
) -> tuple[tuple[NewFile, ...], TokenUsage]:
    """What each line used and cost, and the tokens of all of them.

    ``keys``: the segments of the results, which are those of a batch with one stage.
    """
    used: list[TokenUsage] = []
    charged = await _charged(services, batch, keys)
    rows = ledger_parts(services.storage, services.spool, batch.counts.total, charged, used.append)
    async with contextlib.aclosing(rows):
        file_id = result_file_id(batch.id, "ledger")
        file = await _write_lines(services, batch, rows, file_id, "ledger", epoch=epoch)
    hidden = () if file is None else (file.model_copy(update={"hidden_for": HiddenFor.LEDGER}),)
    return hidden, functools.reduce(TokenUsage.plus, used, NO_USAGE)


async def _charged(
    services: Services, batch: BatchRecord, keys: Sequence[str]
) -> list[list[Charged]]:
    """What is charged for, in a list for each stage."""
    store, prices = services.store, services.store.usage.prices
    # A batch that was created without an endpoint may have lines of one only.
    endpoint, *others = batch.options.fields or [batch.endpoint]
    first = Charge(1, batch.endpoint if others else endpoint, batch.model, prices)
    if not batch.is_parent:
        return [[Charged(keys, first)]]

    async def keys_of(batch_id: str) -> list[str]:
        return [key async for key in services.storage.list(segments_prefix(batch_id))]

    further = await store.chains.stages_of(batch)
    charged = [[Charged(await keys_of(batch.id), first)], *([] for _ in further)]
    for part in await store.chains.parts(batch.id):
        stage = further[part.stage - 1]
        charge = Charge(part.stage + 1, stage.endpoint, stage.model or batch.model, prices)
        ordinals = np.frombuffer(part.ordinals, dtype="<u4")
        charged[part.stage].append(Charged(await keys_of(part.batch_id), charge, ordinals))
    return charged


async def _write_file(
    services: Services, batch: BatchRecord, lines: ResultLines, outcome: Outcome, epoch: int
) -> NewFile | None:
    kind: Literal["output", "error"] = "output" if outcome is Outcome.OUTPUT else "error"
    file_id = result_file_id(batch.id, kind)
    return await _write_lines(services, batch, lines.parts(outcome), file_id, kind, epoch=epoch)


async def _write_lines(
    services: Services,
    batch: BatchRecord,
    parts: AsyncGenerator[bytes],
    file_id: str,
    kind: str,
    *,
    epoch: int,
) -> NewFile | None:
    first = await anext(parts, b"")
    if not first:
        return None

    async def stream() -> AsyncIterator[bytes]:
        yield first
        async for part in parts:
            yield part

    stored = await services.storage.put(result_key(file_id, epoch), stream())
    return NewFile(
        id=file_id,
        purpose="batch_output",
        filename=f"{batch.id}_{kind}.jsonl",
        size_bytes=stored.size_bytes,
        sha256=stored.sha256,
        storage_key=stored.key,
        hidden_for=batch.hidden_for,
        tenant=batch.tenant,
        lifetime_seconds=batch.output_lifetime_seconds or FILE_LIFETIME_SECONDS,
    )
