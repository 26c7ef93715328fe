"""The parts of an upload become one file: streamed from object to object, then recorded."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

from batchyard.errors import (
    RecordNotFound,
    RequestRefused,
    StorageError,
    StoreError,
    TransitionConflict,
)
from batchyard.files.parts import wipe_object, wipe_parts
from batchyard.files.upload import FileUse, plain_input, store_content
from batchyard.processes.threads import in_thread
from batchyard.services.quotas import arriving, default_quota

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from batchyard.services.services import Services
    from batchyard.store import FileRecord, PartRecord, UploadRecord


_LOCKS: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
"""The locks of uploads. Each request to complete one makes a copy of it, so they do that one by
one: after the first success the others make none."""


async def complete_upload(
    services: Services, tenant: str, upload_id: str, part_ids: Sequence[str], md5: str | None
) -> tuple[UploadRecord, FileRecord]:
    """Make the file of these parts, in this order, and wipe the parts.

    The same request again changes nothing and returns the same, as long as its file exists.
    ``md5``: hex of the whole file, to be compared. A refusal leaves the upload pending, with its
    parts. Raises :class:`~batchyard.errors.RecordNotFound`,
    :class:`~batchyard.errors.TransitionConflict` if it has ended in another way,
    :class:`~batchyard.errors.RequestRefused`, and errors of the store and the storage.
    """
    async with _LOCKS.setdefault(upload_id, asyncio.Lock()):
        try:
            ended = await _complete(services, tenant, upload_id, part_ids, md5)
        except TransitionConflict:
            # The answer to the same request may have been lost: SDKs send it again by themselves.
            before = await services.store.uploads.completed(
                upload_id, _fingerprint(part_ids, md5), tenant=tenant
            )
            if before is None:
                raise
            ended = before
    # There is a file: whatever fails now is no failure of the request. Parts that stay here are
    # wiped with those of expired uploads.
    with suppress(StoreError):
        await wipe_parts(services, await services.store.uploads.parts_of(upload_id))
    return ended


def _fingerprint(part_ids: Sequence[str], md5: str | None) -> str:
    """A hash of the request. It is kept in the database: it must not change with the software."""
    asked = [*part_ids, md5 and md5.lower()]
    return hashlib.sha256(msgspec.json.encode(asked)).hexdigest()


async def _complete(
    services: Services, tenant: str, upload_id: str, part_ids: Sequence[str], md5: str | None
) -> tuple[UploadRecord, FileRecord]:
    uploads = services.store.uploads
    upload = await uploads.get(upload_id, tenant)
    parts = await uploads.chosen_parts(upload_id, part_ids, tenant=tenant)
    use = FileUse(upload.filename, upload.purpose, upload.file_lifetime_seconds)
    try:
        joined = _joined(services, parts, md5)
        plain = plain_input(services, joined, lambda: use.purpose == "batch")
        # What was announced counts already, and may be compressed.
        count = partial(services.arrivals.add_part, tenant, upload_id, upload.bytes)
        with arriving(services, tenant, add=count) as within_quota:
            file = await store_content(services, tenant, within_quota(plain), lambda: use)
    except StorageError:
        # If the upload has ended meanwhile, its parts were deleted: that is the reason to give.
        await uploads.chosen_parts(upload_id, part_ids, tenant=tenant)
        raise
    try:
        if (more := file.size_bytes - upload.bytes) > 0:
            await services.store.tenants.check_room(
                tenant, default_quota(services), stored_bytes=more
            )
        return await uploads.complete(
            upload_id, part_ids, file, tenant=tenant, fingerprint=_fingerprint(part_ids, md5)
        )
    except (RecordNotFound, RequestRefused, TransitionConflict):
        # Another request completed or cancelled it meanwhile, or there is no room for the file.
        await wipe_object(services, file.storage_key)
        raise


async def _joined(
    services: Services, parts: Sequence[PartRecord], md5: str | None
) -> AsyncGenerator[bytes]:
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
