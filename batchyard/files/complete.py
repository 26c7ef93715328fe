"""The parts of an upload become one file: streamed from object to object, then recorded."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from batchyard.errors import (
    RecordNotFound,
    RequestRefused,
    StorageError,
    StoreError,
    TransitionConflict,
)
from batchyard.files.parts import wipe_object, wipe_parts
from batchyard.files.upload import FileUse, store_content
from batchyard.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from batchyard.services.services import Services
    from batchyard.store import FileRecord, PartRecord, UploadRecord


_LOCKS: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
"""Of uploads. Each request to complete one makes a copy of it, so they do that one by one: the
first success ends the upload for the others."""


async def complete_upload(
    services: Services, tenant: str, upload_id: str, part_ids: Sequence[str], md5: str | None
) -> tuple[UploadRecord, FileRecord]:
    """Make the file of these parts, in this order, and wipe the parts.

    ``md5``: hex of the whole file, to be compared. A refusal leaves the upload pending, with its
    parts. Raises :class:`~batchyard.errors.RecordNotFound`,
    :class:`~batchyard.errors.TransitionConflict` unless it is pending,
    :class:`~batchyard.errors.RequestRefused`, and errors of the store and the storage.
    """
    async with _LOCKS.setdefault(upload_id, asyncio.Lock()):
        ended = await _complete(services, tenant, upload_id, part_ids, md5)
    # The client must hear of its file: asked again, this upload is over. Its parts that stay here
    # are wiped with those of expired ones.
    with suppress(StoreError):
        await wipe_parts(services, await services.store.uploads.parts_of(upload_id))
    return ended


async def _complete(
    services: Services, tenant: str, upload_id: str, part_ids: Sequence[str], md5: str | None
) -> tuple[UploadRecord, FileRecord]:
    uploads = services.store.uploads
    upload = await uploads.get(upload_id, tenant)
    parts = await uploads.chosen_parts(upload_id, part_ids, tenant=tenant)
    use = FileUse(upload.filename, upload.purpose, upload.file_lifetime_seconds)
    try:
        file = await store_content(services, tenant, _joined(services, parts, md5), lambda: use)
    except StorageError:
        # If the upload has ended meanwhile, its parts were deleted: that is the reason to give.
        await uploads.chosen_parts(upload_id, part_ids, tenant=tenant)
        raise
    try:
        return await uploads.complete(upload_id, part_ids, file, tenant=tenant)
    except (RecordNotFound, RequestRefused, TransitionConflict):
        # Another request completed or cancelled it meanwhile.
        await wipe_object(services, file.storage_key)
        raise


async def _joined(
    services: Services, parts: Sequence[PartRecord], md5: str | None
) -> AsyncIterator[bytes]:
    """Their bytes; at the end refuses what has another MD5 than ``md5``."""
    digest = hashlib.md5(usedforsecurity=False)
    for part in parts:
        async for block in services.storage.get(part.storage_key):
            if md5 is not None:
                await in_thread(digest.update, block)
            yield block
    if md5 is not None and digest.hexdigest() != md5.lower():
        raise RequestRefused(
            "The file has another MD5 than 'md5' says.", param="md5", code="invalid_value"
        )
