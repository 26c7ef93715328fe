"""The input of a batch: which files it may read, and the row of the one that it gets."""

from __future__ import annotations

from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from batchyard.batch_error import BatchError
from batchyard.errors import (
    InputRefused,
    RecordNotFound,
    StorageError,
    StorageLimitExceeded,
    TransitionConflict,
)
from batchyard.services.keys import file_key
from batchyard.services.quotas import arriving, default_quota
from batchyard.store import NewFile
from batchyard.store.tables.file import FILE_LIFETIME_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from batchyard.services.services import Services
    from batchyard.storage.base import StoredObject
    from batchyard.store import BatchRecord, FileRecord


def check_input_file(batch: BatchRecord, file: FileRecord) -> None:
    """Refuse a file of another tenant, and one that has expired, as if it did not exist.

    Raises :class:`~batchyard.errors.InputRefused`, for a file of another purpose too.
    """
    if file.tenant != batch.tenant or (
        file.expires_at is not None and file.expires_at <= batch.created_at
    ):
        raise no_input_file(file.id)
    if file.purpose != "batch":
        raise _refused(
            f"File {file.id} was uploaded with purpose '{file.purpose}': upload it with purpose "
            "'batch'."
        )


async def store_input(
    services: Services, batch: BatchRecord, parts: AsyncGenerator[bytes]
) -> StoredObject:
    """Store what the batch reads, under the key of its file, while its tenant has room for it.

    Raises :class:`~batchyard.errors.StorageLimitExceeded`, what ``parts`` raise, and errors of the
    store and the storage. Raises :class:`~batchyard.errors.TransitionConflict`, and stores nothing,
    where the file was recorded meanwhile.
    """
    with arriving(services, batch.tenant) as within_quota:
        awaited = within_quota(unless_recorded(services, batch, parts))
        return await services.storage.put(file_key(batch.input_file_id), awaited)


async def unless_recorded(
    services: Services, batch: BatchRecord, parts: AsyncGenerator[bytes]
) -> AsyncGenerator[bytes]:
    """Pass ``parts`` on. Raises :class:`~batchyard.errors.TransitionConflict` behind them where
    the batch's input was recorded meanwhile, so that what stores them does not.
    """
    async with aclosing(parts) as stream:
        async for part in stream:
            yield part
    # To fetch takes minutes, in which the batch's lease may be lost. The place may have had other
    # bytes when the next owner read it, whose plan says where each line begins.
    if await services.store.files.recorded(batch.input_file_id) is not None:
        raise TransitionConflict(
            f"The input of {batch.id} was stored by another process meanwhile."
        )


async def record_input(
    services: Services,
    batch: BatchRecord,
    stored: StoredObject,
    filename: str | None = None,
    *,
    lifetime_seconds: int = FILE_LIFETIME_SECONDS,
) -> int:
    """Record the object as the file that the batch reads; its size in bytes.

    Without a ``filename`` it is named after the batch. Raises
    :class:`~batchyard.errors.StorageLimitExceeded`, and
    :class:`~batchyard.errors.TransitionConflict` where the file is recorded already.
    """
    file = NewFile(
        id=batch.input_file_id,
        purpose="batch",
        filename=filename or f"{batch.id}_input.jsonl",
        size_bytes=stored.size_bytes,
        sha256=stored.sha256,
        storage_key=stored.key,
        tenant=batch.tenant,
        lifetime_seconds=lifetime_seconds,
    )
    await record_file(services, file)
    return stored.size_bytes


async def record_file(services: Services, file: NewFile) -> None:
    """Record a file whose bytes are stored, or delete them if its tenant has no room for it.

    Raises what :func:`record_input` does.
    """
    try:
        await services.store.files.create(file, quota=default_quota(services))
    except StorageLimitExceeded:
        await wipe_unnamed(services, file.storage_key)
        raise


async def is_kept(services: Services, file_id: str) -> bool:
    """Whether the file was recorded and is not deleted."""
    with suppress(RecordNotFound):
        await services.store.files.get(file_id)
        return True
    return False


async def wipe_unnamed(services: Services, key: str) -> None:
    """Delete bytes that no row names. If that fails now, the sweep does it."""
    with suppress(StorageError):
        await services.storage.delete(key)


def no_input_file(file_id: str) -> InputRefused:
    """The file does not exist, for this batch."""
    return _refused(
        f"Cannot find file {file_id}, or you do not have access to it: upload it, and create the "
        "batch again."
    )


def _refused(message: str) -> InputRefused:
    return InputRefused([BatchError("invalid_request", message, param="file_id")])
