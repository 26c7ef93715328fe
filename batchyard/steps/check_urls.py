"""Ask the servers of a batch's destinations, before anything runs, whether they take its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.batch_error import BatchError
from batchyard.errors import AccessDenied, InputRefused, ObjectNotFound, StorageError
from batchyard.lifecycle import BatchStatus
from batchyard.services.places import places_of

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord


async def check_urls(services: Services, batch: BatchRecord) -> None:
    """Refuse a batch whose results no presigned URL of it would take, now or later.

    Where nothing is known, the batch's ``warnings`` say so. Raises
    :class:`~batchyard.errors.InputRefused`.
    """
    if batch.status is not BatchStatus.VALIDATING:
        return
    wanted = await places_of(services, batch.id)
    access = services.access_for(batch.options)
    doubts = {}
    for kind, place in (("output", wanted.output), ("error", wanted.error)):
        if place is None:
            continue
        try:
            await place.probe(access)
        except (AccessDenied, ObjectNotFound) as error:
            message = f"The {kind} file could not be written: {error}."
            refusal = BatchError(code="destination_refused", message=message, param=f"{kind}_url")
            raise InputRefused([refusal]) from None
        except StorageError as error:
            doubts[kind] = str(error)
    if doubts or any(facts.doubt for facts in batch.options.urls.values()):
        await services.store.batch_places.note_doubts(batch.id, doubts)
