"""Reading a place that the user named as the input: what fails there is no failure of ours."""

from __future__ import annotations

from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from batchyard.errors import StorageError, StorageFull
from batchyard.locations.bucket_object import BucketObject
from batchyard.locations.location import read_location
from batchyard.locations.several import one_of, places_in

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from batchyard.locations.access import Location
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord


@contextmanager
def failures_of_input() -> Iterator[None]:
    """Mark errors in the block as the input's: nobody could say when they will have passed.

    A full disk is ours, as the block writes nothing to the input.
    """
    try:
        yield
    except StorageError as error:
        error.is_of_input |= not isinstance(error, StorageFull)
        raise


async def pinned(services: Services, batch: BatchRecord, place: Location) -> Location:
    """The place as it is now, where its bucket keeps earlier versions: all files are of one.

    Raises :class:`~batchyard.errors.StorageError`, marked as the input's.
    """
    access = services.access_for(batch.options)
    buckets: dict[str, str] = {}
    found: list[Location] = []
    for each in places_in(place):
        if not isinstance(each, BucketObject):
            found.append(each)
            continue
        if each.bucket not in buckets:
            with failures_of_input():
                buckets[each.bucket] = (await each.pinned(access)).bucket
        found.append(replace(each, bucket=buckets[each.bucket]))
    return one_of(found)


async def read_input(
    services: Services, batch: BatchRecord, place: Location, *, limit_bytes: int
) -> AsyncGenerator[bytes]:
    """The bytes at the place, as the owner of the batch may read them.

    Raises :class:`~batchyard.errors.StorageError`, marked as the input's.
    """
    access = services.access_for(batch.options)
    try:
        read = read_location(place, limit_bytes=limit_bytes, access=access)
        async with aclosing(read) as stream:
            async for block in stream:
                yield block
    except StorageError as error:
        error.is_of_input = True
        raise
