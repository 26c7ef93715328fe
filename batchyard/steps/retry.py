"""Retry: a new batch of those lines of a finished one that have no answer, or a bad one."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from batchyard.errors import ObjectNotFound, RecordNotFound, RequestRefused, StorageError
from batchyard.framing import custom_id_of, joined, read_lines
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.services.keys import file_key
from batchyard.services.places import Places, places_of
from batchyard.steps.create import check_destinations, default_quota, parse_window, url_facts
from batchyard.storage.file import os_errors_as_ours
from batchyard.store import NewBatch, NewFile
from batchyard.threads import from_thread, in_thread
from batchyard.wire import new_file_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.services.services import Services
    from batchyard.storage.access import Location
    from batchyard.store import BatchRecord, FileRecord


class _ErrorLine(msgspec.Struct, frozen=True):
    custom_id: str


_parse_error_line = msgspec.json.Decoder(_ErrorLine).decode


async def retry_batch(
    services: Services,
    batch_id: str,
    *,
    completion_window: str | None = None,
    output: Location | None = None,
    error: Location | None = None,
) -> str:
    """Create a batch of the lines in ``batch_id``'s error file; the new batch's id.

    If the batch failed after validation, the new batch has all its lines. The lines keep their
    bytes and their order. Everything else is as before, except for the completion window, if one
    is given, and the locations: results are written to ``output`` and ``error`` only.

    Raises :class:`~batchyard.errors.RequestRefused` where there is nothing to retry,
    :class:`~batchyard.errors.QuotaExceeded`, and :class:`~batchyard.errors.StorageError` for a
    location that can never work.
    """
    batch = await services.store.batches.get(batch_id)
    window = completion_window or batch.completion_window
    window_seconds = parse_window(window, services.settings)
    places = await _destinations(services, batch, output, error)
    receivers = (await services.store.batches.locations(batch.id)).receivers
    source, errors = await _files_of(services, batch)
    file = await _copy_lines(services, batch, source, errors)
    await services.store.files.create(file)
    new = NewBatch(
        endpoint=batch.endpoint,
        completion_window=window,
        window_seconds=window_seconds,
        input_file_id=file.id,
        metadata=batch.metadata,
        options=msgspec.structs.replace(batch.options, urls=url_facts(places.output, places.error)),
        locations=places.to_text(receivers),
        priority=batch.priority,
        tenant=batch.tenant,
        output_lifetime_seconds=batch.output_lifetime_seconds,
        notify_email=batch.notify_email,
        retry_of=batch.id,
    )
    try:
        return (await services.store.batches.create(new, quota=default_quota(services))).id
    except RequestRefused:
        # No batch has this file, and the caller does not get its id.
        await services.store.files.delete(file.id)
        await services.storage.delete(file.storage_key)
        raise


async def _files_of(services: Services, batch: BatchRecord) -> tuple[FileRecord, FileRecord | None]:
    """The input file, and the error file that names the lines; None: all lines."""
    if batch.status not in TERMINAL:
        raise _refused(
            f"{batch.id} is {batch.status.value}: wait until it has ended, or cancel it, "
            "and retry then.",
            "batch_not_finished",
        )
    if batch.in_progress_at is None:
        why = (
            "its errors say why, put that right"
            if batch.status is BatchStatus.FAILED
            else "none of its requests was run"
        )
        raise _refused(
            f"{batch.id} ended before its input was found valid: {why} and submit the file as a "
            "new batch.",
            "batch_not_validated",
        )
    if batch.status is BatchStatus.FAILED and not (batch.output_file_id or batch.error_file_id):
        return await _file(services, batch, "input", batch.input_file_id), None
    if batch.error_file_id is None:
        raise _refused(
            f"Every request of {batch.id} was answered: there is nothing to retry.",
            "nothing_to_retry",
        )
    return (
        await _file(services, batch, "input", batch.input_file_id),
        await _file(services, batch, "error", batch.error_file_id),
    )


async def _file(services: Services, batch: BatchRecord, kind: str, file_id: str) -> FileRecord:
    try:
        return await services.store.files.get(file_id)
    except RecordNotFound:
        raise _file_gone(batch, kind) from None


async def _copy_lines(
    services: Services, batch: BatchRecord, source: FileRecord, errors: FileRecord | None
) -> NewFile:
    """Store the lines to retry as a file, durable but not yet recorded."""
    with os_errors_as_ours(str(services.spool)):
        folder = Path(tempfile.mkdtemp(dir=services.spool, prefix="retry-"))
    try:
        source_path = await _local_path(services, batch, "input", source, folder)
        errors_path = (
            None if errors is None else await _local_path(services, batch, "error", errors, folder)
        )
        file_id = new_file_id()
        parts = _parts(batch, source_path, errors_path)
        stored = await services.storage.put(file_key(file_id), from_thread(parts))
    finally:
        await in_thread(shutil.rmtree, folder, ignore_errors=True)
    return NewFile(
        id=file_id,
        purpose="batch",
        filename=f"{batch.id}_retry.jsonl",
        size_bytes=stored.size_bytes,
        sha256=stored.sha256,
        storage_key=stored.key,
        tenant=batch.tenant,
    )


async def _local_path(
    services: Services, batch: BatchRecord, kind: str, file: FileRecord, folder: Path
) -> Path:
    try:
        return await services.storage.local_path(file.storage_key, folder)
    except ObjectNotFound:
        raise _file_gone(batch, kind) from None


def _parts(batch: BatchRecord, source: Path, errors: Path | None) -> Iterator[bytes]:
    lines = _lines(source) if errors is None else _lines_in_error(batch, source, errors)
    return joined(line + b"\n" for line in lines)


def _lines_in_error(batch: BatchRecord, source: Path, errors: Path) -> Iterator[bytes]:
    """The input's lines that the error file names.

    Both are in the order of the input, so one walk over the two needs no memory of either.
    """
    wanted = (_parse_error_line(line).custom_id for line in _lines(errors))
    custom_id = next(wanted, None)
    for line in _lines(source):
        if custom_id is None:
            return
        if custom_id_of(line) == custom_id:
            yield line
            custom_id = next(wanted, None)
    if custom_id is not None:
        raise StorageError(
            f"The error file of {batch.id} names a request that its input file lacks, or in "
            "another order: one of the two was changed in the object store."
        )


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for physical in read_lines(file, path.stat().st_size):
            if physical.data:
                yield physical.data


async def _destinations(
    services: Services, batch: BatchRecord, output: Location | None, error: Location | None
) -> Places:
    """The checked locations; none may replace a file of the first batch."""
    old = await places_of(services, batch.id)
    kinds = {"input": old.input, "output": old.output, "error": old.error}
    taken = {f"the {kind} file of {batch.id}": location for kind, location in kinds.items()}
    output, error = await check_destinations(output, error, taken=taken)
    return Places(output=output, error=error)


def _file_gone(batch: BatchRecord, kind: str) -> RequestRefused:
    return _refused(
        f"The {kind} file of {batch.id} has expired or was deleted: submit the requests that are "
        "missing as a new batch.",
        "file_gone",
    )


def _refused(message: str, code: str) -> RequestRefused:
    return RequestRefused(message, param="batch_id", code=code)
