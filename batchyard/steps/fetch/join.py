"""Join: several files of a tenant, or places of a user, become the one input of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.batch_error import InputPart
from batchyard.errors import ObjectTooLarge, RecordNotFound
from batchyard.locations.several import whole_lines
from batchyard.services.services import Progress
from batchyard.steps.fetch.input_file import (
    check_input_file,
    no_input_file,
    record_input,
    store_input,
)
from batchyard.steps.fetch.input_place import read_input

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from batchyard.locations.access import Location
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, FileRecord

    _Source = tuple[str, AsyncIterator[bytes]]
    """The name of a source in errors, and its bytes."""


async def join_files(services: Services, batch: BatchRecord) -> int:
    """Store the lines of the files in ``options.parts`` as the input; returns its size in bytes.

    Raises :class:`~batchyard.errors.InputRefused` for a file that may not be used, and
    :class:`~batchyard.errors.StorageError`; an input over the limit is refused as soon as the
    limit is passed.
    """
    files = [await _file(services, batch, part.file_id) for part in batch.options.parts]
    sources = [(file.id, services.storage.get(file.storage_key)) for file in files]
    return await _store(services, batch, sources)


async def join_places(services: Services, batch: BatchRecord, places: Sequence[Location]) -> int:
    """The same for the lines at these places. Raises :class:`~batchyard.errors.StorageError`."""
    limit = _limit_bytes(services, batch)
    sources = [
        (str(place), read_input(services, batch, place, limit_bytes=limit)) for place in places
    ]
    return await _store(services, batch, sources)


async def _store(services: Services, batch: BatchRecord, sources: Sequence[_Source]) -> int:
    """How many lines each source has is recorded, so that an error can name it."""
    services.on_progress(Progress(batch.id, "fetching"))
    counted: list[InputPart] = []
    parts = _joined(services, batch, sources, counted)
    stored = await store_input(services, batch, parts)
    # Before the file's row, with which this step is done.
    await services.store.batch_places.note_parts(batch.id, counted)
    return await record_input(services, batch, stored)


async def _file(services: Services, batch: BatchRecord, file_id: str) -> FileRecord:
    try:
        file = await services.store.files.get(file_id)
    except RecordNotFound:
        raise no_input_file(file_id) from None
    check_input_file(batch, file)
    return file


async def _joined(
    services: Services, batch: BatchRecord, sources: Sequence[_Source], counted: list[InputPart]
) -> AsyncGenerator[bytes]:
    """The sources' bytes, each with a line end behind its last line and without a BOM."""
    limit, size_bytes = _limit_bytes(services, batch), 0
    for name, blocks in sources:
        lines = 0
        async for block, ends in whole_lines(blocks):
            lines += ends
            size_bytes += len(block)
            if size_bytes > limit:
                raise ObjectTooLarge(f"The files have more than {limit} bytes together.")
            services.on_progress(Progress(batch.id, "fetching", size_bytes))
            yield block
        counted.append(InputPart(name, lines))


def _limit_bytes(services: Services, batch: BatchRecord) -> int:
    limits = services.settings.limits
    return limits.to_limits(of_client=batch.options.public_urls).max_bytes
