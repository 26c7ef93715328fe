"""Retention: files that have expired or that nothing needs, and bytes that nothing names any more,
are wiped.

Rows are marked first, then bytes go, so that no row is found without its bytes. A crash in
between leaves bytes without a row, as do writers that were killed: those are for the sweep.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from batchyard.errors import RecordNotFound, StorageError
from batchyard.files.parts import expire_uploads
from batchyard.intervals import DAY_SECONDS
from batchyard.lifecycle import TERMINAL
from batchyard.services.keys import BATCHES, FILES, UPLOADS, batch_id_of, file_id_of
from batchyard.services.restore.storage_mark import write_mark
from batchyard.store import FORGOTTEN_SECONDS
from batchyard.store.tables.file import FILE_LIFETIME_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

    from batchyard.services.services import Services
    from batchyard.storage.base import ListedObject, Storage
    from batchyard.store import FileRecord

_IDEMPOTENCY_SECONDS: Final = 2 * DAY_SECONDS
_DELIVERIES_SECONDS: Final = 30 * DAY_SECONDS
_STATUS_CHANGES_SECONDS: Final = DAY_SECONDS
"""So long they wait for a Prefect that is away, or was never there."""

_LEASES_SECONDS: Final = 7 * DAY_SECONDS
"""The owner of a lease renews it every few seconds: after days there is no owner."""

_ROWS_AT_ONCE = 100
_FORGOTTEN_AT_ONCE = 1_000
_KEYS_AT_ONCE = 5_000
_DELETES_AT_ONCE = 32
_MOST_FAILED: Final = 100
"""So many objects that cannot be deleted, and the next time goes on."""


@dataclass(frozen=True, slots=True)
class Expired:
    """Files whose time was over, and those of parts of chains that have ended.

    ``objects`` may be fewer: two files may share their bytes.
    """

    files: int
    bytes: int
    objects: int


@dataclass(frozen=True, slots=True)
class Swept:
    """Objects that nothing named, and half-written ones of writers that were killed."""

    objects: int
    bytes: int
    unfinished: int


@dataclass(slots=True)
class _Deletions:
    """Deletes objects. One that cannot be deleted keeps no other from it."""

    storage: Storage
    failed: list[StorageError] = field(default_factory=list)

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete the objects; how many it were.

        Raises :class:`~batchyard.errors.StorageUnavailable` and what else may be over by the next
        time, and the first error once there are many.
        """
        count = 0
        for start in range(0, len(keys), _DELETES_AT_ONCE):
            ended = await asyncio.gather(
                *(self.storage.delete(key) for key in keys[start : start + _DELETES_AT_ONCE]),
                return_exceptions=True,
            )
            for error in ended:
                if error is None:
                    count += 1
                elif isinstance(error, StorageError) and not error.is_retriable:
                    self.failed.append(error)
                else:
                    raise error
            if len(self.failed) >= _MOST_FAILED:
                self.check()
        return count

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.failed:
            raise self.failed[0]


async def clean_up(services: Services) -> tuple[Expired, Swept]:
    """:func:`expire_files` and :func:`sweep_orphans`, the second also if an object of the first
    cannot be deleted.
    """
    deletions = _Deletions(services.storage)
    expired = await _expire(services, deletions)
    swept = await _sweep(services, deletions, DAY_SECONDS)
    deletions.check()
    return expired, swept


async def expire_files(services: Services) -> Expired:
    """Delete all files past their ``expires_at``, rows and bytes.

    The files of the parts of chains that have ended go too.
    Uploads whose hour is over go too, idempotency keys of two days ago, deliveries that ended a
    month ago, lengths of answers of which there was none for a month, background responses that
    ended a month ago, rows of files that were deleted a month ago, and what only batches that have
    not ended need. The input of a batch that has not ended stays. Of many callers at once each
    file is counted by one. Raises :class:`~batchyard.errors.StorageError`; then the sweep finds
    what is left.
    """
    deletions = _Deletions(services.storage)
    expired = await _expire(services, deletions)
    deletions.check()
    return expired


async def _expire(services: Services, deletions: _Deletions) -> Expired:
    await expire_uploads(services)
    await services.store.idempotency.prune(_IDEMPOTENCY_SECONDS)
    await services.store.deliveries.prune(_DELIVERIES_SECONDS)
    await services.store.status_changes.prune(_STATUS_CHANGES_SECONDS)
    await services.store.lengths.prune(FORGOTTEN_SECONDS)
    await services.store.leases.prune(_LEASES_SECONDS)
    await services.store.uploads.prune(FILE_LIFETIME_SECONDS)
    await services.store.batch_schedule.forget_roots()
    files = size_bytes = objects = 0
    while found := await services.store.files.expired(_ROWS_AT_ONCE):
        marked = await services.store.files.delete_expired([file.id for file in found])
        gone = [file for file in found if file.id in marked]
        if not gone:
            break
        files += len(gone)
        size_bytes += sum(file.size_bytes for file in gone)
        objects += await _wipe(services, deletions, gone)
    async for gone in _files_of_ended_chains(services):
        files += len(gone)
        size_bytes += sum(file.size_bytes for file in gone)
        objects += await _wipe(services, deletions, gone)
    await services.store.completions.prune()
    await services.store.responses.prune(FILE_LIFETIME_SECONDS)
    while old := await services.store.files.long_deleted(FILE_LIFETIME_SECONDS, _FORGOTTEN_AT_ONCE):
        await services.store.files.forget(old)
    return Expired(files, size_bytes, objects)


async def _files_of_ended_chains(services: Services) -> AsyncGenerator[list[FileRecord]]:
    """Files of parts, marked deleted. What the chain's tenant can ask for is in the chain's own.

    A part that ends after its chain keeps its files until a later time.
    """
    chains, after = services.store.chains, ""
    while ended := await chains.ended_with_files(after=after, limit=_ROWS_AT_ONCE):
        for chain_id in ended:
            found = await chains.files_of_parts(chain_id)
            for start in range(0, len(found.file_ids), _ROWS_AT_ONCE):
                some = found.file_ids[start : start + _ROWS_AT_ONCE]
                yield await services.store.files.delete_unread(some)
            # Not before: a process that ends in between leaves the rest to the next one.
            if found.are_all:
                await chains.forget_files(chain_id)
        after = ended[-1]


async def sweep_orphans(services: Services, older_than_seconds: float = DAY_SECONDS) -> Swept:
    """Wipe what nothing needs: files without a row, plans and segments of ended batches,
    parts of ended uploads.

    Bytes come before their row, so nothing younger than ``older_than_seconds`` is touched, and a
    batch keeps its plan and segments as long after its end. Nor is anything that has no row and is
    older than the database's first one: that belongs to another installation in the same place.

    Raises :class:`~batchyard.errors.StorageError`; the next sweep goes on from there. Raises
    :class:`~batchyard.errors.OtherState`, and deletes nothing, where the object store is ahead of
    the database, which then does not know what was written since its backup.
    """
    deletions = _Deletions(services.storage)
    swept = await _sweep(services, deletions, older_than_seconds)
    deletions.check()
    return swept


async def _sweep(services: Services, deletions: _Deletions, older_than_seconds: float) -> Swept:
    await write_mark(services)
    unfinished = 0
    for prefix in (FILES, BATCHES, UPLOADS):
        unfinished += await services.storage.remove_unfinished(prefix, older_than_seconds)
    objects = size_bytes = 0
    for orphans in (_file_orphans, _batch_orphans, _upload_orphans):
        async for found in orphans(services, older_than_seconds):
            objects += await deletions.delete([each.key for each in found])
            size_bytes += sum(each.size_bytes for each in found)
    return Swept(objects, size_bytes, unfinished)


async def count_unknown(services: Services) -> Swept:
    """What the sweep would delete in time because no row of the database names it."""
    objects = size_bytes = 0
    for orphans in (_file_orphans(services, 0), _batch_orphans(services, 0, kept_seconds=math.inf)):
        async for found in orphans:
            objects += len(found)
            size_bytes += sum(each.size_bytes for each in found)
    return Swept(objects, size_bytes, 0)


async def _file_orphans(
    services: Services, older_than_seconds: float
) -> AsyncIterator[list[ListedObject]]:
    """Objects under ``files/`` that no row names, nor may come to name."""
    files = services.store.files

    async def known(keys: Sequence[str]) -> set[str]:
        recorded = await files.known([file_id_of(key) for key in keys])
        return {key for key in keys if file_id_of(key) in recorded}

    async for page in _old_objects(services, FILES, older_than_seconds, known):
        # In this order: a batch that ends in between has its rows when they are looked for.
        awaited = await files.awaited()
        named = await files.storage_keys([each.key for each in page])
        yield [
            each for each in page if each.key not in named and file_id_of(each.key) not in awaited
        ]


async def _batch_orphans(
    services: Services, older_than_seconds: float, *, kept_seconds: float | None = None
) -> AsyncIterator[list[ListedObject]]:
    """Plans and segments of batches that are not known, or have ended ``kept_seconds`` ago."""
    kept_seconds = older_than_seconds if kept_seconds is None else kept_seconds
    async for page in _old_objects(services, BATCHES, older_than_seconds):
        batch_ids = {batch_id_of(each.key) for each in page}
        over = {
            batch_id for batch_id in batch_ids if await _is_over(services, batch_id, kept_seconds)
        }
        yield [each for each in page if batch_id_of(each.key) in over]


async def _upload_orphans(
    services: Services, older_than_seconds: float
) -> AsyncIterator[list[ListedObject]]:
    """All parts of that age: an upload lives for an hour."""
    async for found in _old_objects(services, UPLOADS, older_than_seconds):
        yield found


async def _none_is_known(_: Sequence[str]) -> set[str]:
    return set()


async def _old_objects(
    services: Services,
    prefix: str,
    older_than_seconds: float,
    known: Callable[[Sequence[str]], Awaitable[set[str]]] = _none_is_known,
) -> AsyncIterator[list[ListedObject]]:
    """What lies under ``prefix`` and may be swept, by its age only.

    ``known``: which of some keys have a row. Bytes come before their row, so those of the first
    one are older than it.
    """
    known_since = await services.store.files.known_since()
    if known_since is None:
        return
    oldest_seconds = await services.store.database.now() - known_since

    async def ours(page: list[ListedObject]) -> list[ListedObject]:
        early = [each.key for each in page if each.age_seconds > oldest_seconds]
        others = set(early) - (await known(early) if early else set())
        return [each for each in page if each.key not in others]

    page: list[ListedObject] = []
    async for each in services.storage.listing(prefix):
        if each.age_seconds >= older_than_seconds:
            page.append(each)
        if len(page) == _KEYS_AT_ONCE:
            yield await ours(page)
            page = []
    if page:
        yield await ours(page)


async def _is_over(services: Services, batch_id: str, kept_seconds: float) -> bool:
    try:
        batch = await services.store.batches.get(batch_id)
    except RecordNotFound:
        return True
    if batch.status not in TERMINAL:
        return False
    if batch.part_of is not None:
        # The chain may need its answers for the next stage.
        return await _is_over(services, batch.part_of, kept_seconds)
    ends = (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
    ended_at = max(end for end in ends if end is not None)
    return await services.store.database.now() - ended_at >= kept_seconds


async def _wipe(services: Services, deletions: _Deletions, gone: Sequence[FileRecord]) -> int:
    """Delete the bytes of files that are marked, if no other file has them: how many objects."""
    keys = {file.storage_key for file in gone}
    keys -= await services.store.files.storage_keys(sorted(keys))
    return await deletions.delete(sorted(keys))
