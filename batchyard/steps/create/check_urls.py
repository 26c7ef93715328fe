"""Ask the servers of a batch's destinations, before anything runs, whether they take its files."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batchyard.batch_error import BatchError
from batchyard.errors import AccessDenied, InputRefused, ObjectNotFound, StorageError
from batchyard.lifecycle import BatchStatus
from batchyard.services.story import story
from batchyard.services.user_locations import places_of

if TYPE_CHECKING:
    from batchyard.locations.access import Access, Location
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
    places = {"output": wanted.output, "error": wanted.error}
    asked = {kind: place for kind, place in places.items() if place is not None}
    # Side by side: a server that says nothing is waited for.
    answers = await asyncio.gather(*(_doubt_of(kind, asked[kind], access) for kind in asked))
    if refusals := [answer for answer in answers if isinstance(answer, BatchError)]:
        raise InputRefused(refusals)
    found = zip(asked, answers, strict=True)
    doubts = {kind: answer for kind, answer in found if isinstance(answer, str)}
    if doubts or any(facts.doubt for facts in batch.options.urls.values()):
        await services.store.batch_places.note_doubts(batch.id, doubts)
        for warning in (await services.store.batches.get(batch.id)).warnings:
            story.warned(batch.id, warning.message)


async def _doubt_of(kind: str, place: Location, access: Access) -> BatchError | str | None:
    """Why the place will not take the file; words where that is not certain."""
    try:
        await place.probe(access)
    except (AccessDenied, ObjectNotFound) as error:
        message = f"The {kind} file could not be written: {error}."
        return BatchError(code="destination_refused", message=message, param=f"{kind}_url")
    except StorageError as error:
        return str(error)
    return None
