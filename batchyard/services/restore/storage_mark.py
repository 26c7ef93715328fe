"""The mark in the object store: proof that the database knows what lies there.

The database counts, and writes each number into the object store. A database that was restored
from an older backup has a lower number than the object store, and an empty one that was put in its
place has another name. Neither knows the objects that came later, so it must not delete them.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from batchyard.errors import (
    AccessDenied,
    ObjectNotFound,
    OtherState,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from batchyard.logs import event_logger
from batchyard.services.keys import MARK
from batchyard.services.leases.renewal import renewing
from batchyard.services.segments.segments import put_bytes, read_object
from batchyard.store import Mark

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from batchyard.services.services import Services

log = event_logger(__name__)

_SECONDS = 60.0
"""A database that is lost this soon after its backup is not recognized. Each mark is a PUT."""
_ACCEPT = (
    "Objects that the database does not name are kept. If this database is the one to continue "
    "with: batchyard storage accept"
)


async def stored_mark(services: Services) -> Mark | None:
    """What the object store has; None: no mark.

    Raises :class:`~batchyard.errors.StorageError`, and :class:`~batchyard.errors.OtherState` for
    one that cannot be read.
    """
    try:
        found = await read_object(services.storage, MARK)
    except ObjectNotFound:
        return None
    try:
        return msgspec.json.decode(found, type=Mark)
    except msgspec.MsgspecError as error:
        raise OtherState(
            f"The object {MARK} of the object store, its mark, is damaged. {_ACCEPT}"
        ) from error


async def check_mark(services: Services) -> Mark | None:
    """The object store's mark. Raises :class:`~batchyard.errors.OtherState` if it is ahead."""
    found, ours = await stored_mark(services), await services.store.storage_mark.get()
    if found is None:
        return None
    if ours is None or ours.database != found.database:
        raise OtherState(
            "The object store was last used with another database, or this one was restored from a "
            f"backup that is older than its first mark. {_ACCEPT}"
        )
    if found.number > ours.number:
        raise OtherState(
            "The object store was used with a newer state of this database, which was probably "
            f"restored from a backup (mark {found.number}, the database has {ours.number}). "
            f"{_ACCEPT}"
        )
    return found


async def is_other_storage(services: Services) -> bool:
    """Whether the object store is not the one that the database is used with.

    Then what the database names is missing there, and elsewhere it is not. Raises
    :class:`~batchyard.errors.StoreError` and :class:`~batchyard.errors.StorageError`.
    """
    ours = await services.store.storage_mark.get()
    if ours is None:
        return False
    try:
        found = await stored_mark(services)
    except OtherState:
        return False
    return found is None or found.database != ours.database


@asynccontextmanager
async def unavailable_here(services: Services) -> AsyncIterator[None]:
    """Read our object store in the block, which may be set up wrong on this machine alone.

    Raises :class:`~batchyard.errors.StorageUnavailable` where it refuses this process, where
    something is missing because it is not the one that the database is used with, or where this
    machine has no room for a copy: it may succeed later, or elsewhere.
    """
    try:
        try:
            yield
        except ObjectNotFound as error:
            if not await is_other_storage(services):
                raise
            raise StorageUnavailable(
                f"{error}: this machine is set up with another object store"
            ) from error
    except (AccessDenied, StorageFull) as error:
        raise StorageUnavailable(str(error)) from error


async def write_mark(services: Services) -> None:
    """Raise the number. Raises as :func:`check_mark`, and then writes nothing."""
    await check_mark(services)
    await _put(services, await services.store.storage_mark.advance())


async def accept_storage(services: Services) -> None:
    """Make this database the one that knows what is in the object store."""
    beyond = 0
    with suppress(OtherState):
        found = await stored_mark(services)
        beyond = 0 if found is None else found.number
    await _put(services, await services.store.storage_mark.advance(beyond))


async def mark_if_due(services: Services) -> None:
    """Raise the number if no process has done so for a minute. Raises nothing of the storage's."""
    if not await services.store.storage_mark.take_turn(_SECONDS):
        return
    try:
        await write_mark(services)
    except OtherState as error:
        log.error("storage.ahead", error)
    except StorageError as error:
        log.warning("storage.not_marked", error)


def keep_marking(services: Services) -> AbstractAsyncContextManager[None]:
    """Raise the number while the block runs, which does not wait for the object store."""
    mark = partial(mark_if_due, services)
    return renewing(mark, every_seconds=_SECONDS / 4, what="the mark in the object store")


async def _put(services: Services, mark: Mark) -> None:
    # After the database's own: the object store is ahead only of a database that was restored.
    await put_bytes(services.storage, MARK, [msgspec.json.encode(mark)])
