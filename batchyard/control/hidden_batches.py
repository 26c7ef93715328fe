"""Batches that are made of waiting lines, and that their tenant neither created nor sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from batchyard.batch.batch_options import OnInvalid
from batchyard.errors import LeaseLost, TransitionConflict
from batchyard.files.parts import wipe_object
from batchyard.files.upload import FileUse, store_content

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from batchyard.services.services import Services
    from batchyard.store import NewBatch, NewFile


async def make_hidden_batch(
    services: Services,
    wanted: NewBatch,
    lines: Iterable[bytes],
    *,
    filename: str,
    expires_at: float,
    record: Callable[[NewFile, NewBatch], Awaitable[None]],
) -> NewBatch:
    """Make a batch of these lines, which ends at ``expires_at`` at the latest.

    ``wanted`` is the batch without its input file and its window; ``record`` writes the two rows,
    and what else belongs to them, in one transaction. All of it is durable, or nothing. Raises what
    ``record`` does.
    """
    use = FileUse(filename, "batch")
    stored = await store_content(services, wanted.tenant, _content(lines), lambda: use)
    file = stored.model_copy(update={"hidden_for": wanted.hidden_for})
    now = await services.store.database.now()
    # What is wrong with one line ends that line.
    options = msgspec.structs.replace(wanted.options, on_invalid=OnInvalid.ERROR_FILE)
    batch = wanted.model_copy(
        update={
            "input_file_id": file.id,
            # No later, or at times it would be in another class of urgency.
            "window_seconds": max(0, int(expires_at) - int(now)),
            "options": options,
        }
    )
    try:
        await record(file, batch)
    except (LeaseLost, TransitionConflict):
        # After another error the batch may be there: then these are its bytes.
        await wipe_object(services, file.storage_key)
        raise
    return batch


async def _content(lines: Iterable[bytes]) -> AsyncIterator[bytes]:
    for each in lines:
        yield each
