"""Fetch: the user's input becomes our own immutable object."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from batchyard.datasets.files import has_local_files
from batchyard.errors import ObjectNotFound
from batchyard.locations.local_file import LocalFile
from batchyard.locations.several import Several
from batchyard.processes.threads import in_thread
from batchyard.schedule.turns import SMALL_BYTES
from batchyard.services.batch_span import traced
from batchyard.services.services import Progress
from batchyard.services.user_locations import places_of
from batchyard.steps.create.check_urls import check_urls
from batchyard.steps.fetch.input_file import (
    check_input_file,
    no_input_file,
    record_input,
    store_input,
)
from batchyard.steps.fetch.input_place import failures_of_input, pinned, read_input
from batchyard.steps.fetch.join import join_files, join_places
from batchyard.steps.fetch.render import render_rows
from batchyard.storage.compression import unpacked_name
from batchyard.storage.file import os_errors_as_ours

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from batchyard.locations.access import Location
    from batchyard.services.services import Services


@traced("batch.fetch")
async def fetch_input(services: Services, batch_id: str) -> int:
    """Copy the input into the object store, unless that is done; returns its size in bytes.

    Before that, its destinations are asked whether they take the results. Raises
    :class:`~batchyard.errors.InputRefused` where they do not, or where there is no such file, for
    this tenant and for this purpose, and :class:`~batchyard.errors.StorageError`; a file over the
    limit is refused as soon as the limit is passed.
    """
    batch = await services.store.batches.get(batch_id)
    await check_urls(services, batch)
    file = await services.store.files.recorded(batch.input_file_id)
    if file is not None and file.deleted_at is None:
        check_input_file(batch, file)
        return file.size_bytes
    places = await places_of(services, batch_id)
    location = places.input
    if file is not None and (location is not None or batch.options.parts):
        # Fetched earlier, and deleted by its tenant since: the bytes are kept for the batch. Its
        # row could not be written a second time.
        return file.size_bytes
    if location is not None:
        location = await pinned(services, batch, location)
    if isinstance(location, Several) and places.template is None:
        await _check_here(services, location)
        return await join_places(services, batch, location.places)
    if batch.options.parts:
        return await join_files(services, batch)
    if location is None:
        raise no_input_file(batch.input_file_id)
    if places.template is not None:
        await _check_here(services, location)
        return await render_rows(services, batch, location, places.template)
    services.on_progress(Progress(batch_id, "fetching"))

    limits = services.settings.limits.to_limits(of_client=batch.options.public_urls)

    async def parts() -> AsyncGenerator[bytes]:
        done = 0
        read = read_input(services, batch, location, limit_bytes=limits.max_bytes)
        async with aclosing(read) as stream:
            async for part in stream:
                done += len(part)
                services.on_progress(Progress(batch_id, "fetching", done))
                yield part

    await _check_here(services, location)
    stored = await store_input(services, batch, parts())
    return await record_input(
        services, batch, stored, unpacked_name(location.filename) or "input.jsonl"
    )


async def is_small_here(services: Services, batch_id: str) -> bool:
    """Whether the input is a small file of this machine, so that it is soon fetched."""
    places = await places_of(services, batch_id)
    location = places.input
    if not isinstance(location, LocalFile) or places.template is not None:
        return False
    try:
        return (await in_thread(location.path.stat)).st_size <= SMALL_BYTES
    except OSError:
        # To say so is soon done.
        return True


async def _check_here(services: Services, location: Location) -> None:
    """Refuse a path that is missing here, naming this machine: it may be on another one.

    Raises :class:`~batchyard.errors.StorageError`.
    """
    if isinstance(location, Several):
        for place in location.places:
            await _check_here(services, place)
        return
    if not isinstance(location, LocalFile):
        return
    where = services.where(location)
    with failures_of_input(), os_errors_as_ours(f"{location}{where}"):
        is_here = await in_thread(has_local_files, location.path)
    if not is_here and where:
        raise ObjectNotFound(
            f"{location} does not exist{where}, where this batch is run: give s3://bucket/key "
            "(or az://, gs://, hf://), a URL, or a path that is the same file on every machine"
        )
