"""The parts of an upload: stored as they come, wiped once they are not needed.

Each is an object of its own: they arrive side by side.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final

from batchyard.errors import (
    RecordNotFound,
    StorageError,
    StorageLimitExceeded,
    TransitionConflict,
)
from batchyard.logs import event_logger
from batchyard.services.keys import part_key
from batchyard.services.quotas import arriving, default_quota
from batchyard.store import NewPart
from batchyard.wire import new_part_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from batchyard.services.services import Services
    from batchyard.store import PartRecord, UploadRecord

log = event_logger(__name__)

MAX_PART_BYTES: Final = 64 * 1024**2

_PARTS_AT_ONCE = 200


async def add_part(
    services: Services, tenant: str, upload_id: str, content: AsyncGenerator[bytes]
) -> PartRecord:
    """Store one part. Nothing of ``content`` is read for an upload that takes no more.

    Raises :class:`~batchyard.errors.RecordNotFound`,
    :class:`~batchyard.errors.TransitionConflict`,
    :class:`~batchyard.errors.StorageLimitExceeded`, what ``content`` raises, and errors of the
    store and the storage.
    """
    uploads = services.store.uploads
    upload = await uploads.get(upload_id, tenant)
    if upload.status != "pending":
        raise TransitionConflict(f"Upload '{upload_id}' is {upload.status} and takes no parts.")
    part_id = new_part_id()
    count = partial(services.arrivals.add_part, tenant, upload_id, upload.bytes)
    with arriving(services, tenant, add=count) as within_quota:
        stored = await services.storage.put(part_key(upload_id, part_id), within_quota(content))
    part = NewPart(
        id=part_id, size_bytes=stored.size_bytes, sha256=stored.sha256, storage_key=stored.key
    )
    try:
        quota = default_quota(services)
        return await uploads.add_part(upload_id, part, quota=quota, tenant=tenant)
    except (RecordNotFound, StorageLimitExceeded, TransitionConflict):
        await wipe_object(services, stored.key)
        raise


async def cancel_upload(services: Services, tenant: str, upload_id: str) -> UploadRecord:
    """End the upload and wipe its parts; a second time changes nothing. Raises as the store."""
    upload = await services.store.uploads.cancel(upload_id, tenant)
    await wipe_parts(services, await services.store.uploads.parts_of(upload_id))
    return upload


async def wipe_parts(services: Services, parts: Sequence[PartRecord]) -> int:
    """Wipe parts of an upload that has ended, bytes and then rows; how many.

    What cannot be wiped now keeps its row, for :func:`expire_uploads`.
    """
    wiped = [part.id for part in parts if await wipe_object(services, part.storage_key)]
    if wiped:
        await services.store.uploads.forget_parts(wiped)
    return len(wiped)


async def expire_uploads(services: Services) -> int:
    """Mark the uploads whose hour is over, and wipe what ended ones have left; parts wiped."""
    uploads = services.store.uploads
    while overdue := await uploads.expired(_PARTS_AT_ONCE):
        await uploads.expire([upload.id for upload in overdue])
    wiped = 0
    while parts := await uploads.leftover_parts(_PARTS_AT_ONCE):
        done = await wipe_parts(services, parts)
        wiped += done
        if done < len(parts):
            break
    return wiped


async def wipe_object(services: Services, key: str) -> bool:
    """Remove an object that is unknown to clients or not needed; False: it is still there."""
    with contextlib.suppress(StorageError):
        await services.storage.delete(key)
        return True
    log.warning("upload.bytes_left", key=key)
    return False
