"""Deliver the result files of an ended batch again: they are kept until their time is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from batchyard.errors import RecordNotFound, RequestRefused
from batchyard.lifecycle import TERMINAL
from batchyard.services.places import places_of
from batchyard.steps.publish import publish_file
from batchyard.storage.location import write_location

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.services.services import Services
    from batchyard.storage.access import Access, Location
    from batchyard.store import BatchRecord, DeliveryRecord, FileRecord

Kind: TypeAlias = Literal["output", "error"]
_MOST_PENDING: Final = 20
"""Of one batch: each may be gigabytes."""
KINDS: Final[tuple[Kind, ...]] = ("output", "error")


async def kept_file(services: Services, batch: BatchRecord, kind: Kind) -> FileRecord:
    """The output or the error file of an ended batch.

    Raises :class:`~batchyard.errors.RequestRefused` where there is none, or none yet.
    """
    param = f"{kind}_file_id"
    if batch.status not in TERMINAL:
        raise RequestRefused(
            f"{batch.id} is {batch.status.value}: its results are made when it ends.",
            param=param,
            code="batch_not_ended",
        )
    file_id = batch.output_file_id if kind == "output" else batch.error_file_id
    if file_id is None:
        why = "none of its requests succeeded" if kind == "output" else "none of them failed"
        raise RequestRefused(
            f"{batch.id} has no {kind} file: {why}.", param=param, code="no_such_result"
        )
    try:
        return await services.store.files.get(file_id)
    except RecordNotFound:
        raise RequestRefused(
            f"The {kind} file of {batch.id} is no longer kept: it was deleted or has expired.",
            param=param,
            code="no_such_result",
        ) from None


async def write_kept(
    services: Services, batch: BatchRecord, kind: Kind, place: Location, access: Access
) -> None:
    """Write a result file to this location, and note that it is there.

    Raises :class:`~batchyard.errors.RequestRefused` as :func:`kept_file` does, and
    :class:`~batchyard.errors.StorageError`.
    """
    key = (await kept_file(services, batch, kind)).storage_key
    path = await services.storage.local_path(key, services.spool)
    await write_location(place, path, access)
    await services.store.batches.record_published(batch.id, kind, place.text)


async def ask_for_delivery(
    services: Services, batch: BatchRecord, places: Mapping[Kind, Location]
) -> list[DeliveryRecord]:
    """Have result files delivered to a client's URLs, by whichever process delivers.

    Raises :class:`~batchyard.errors.RequestRefused` as :func:`kept_file` does, and
    :class:`~batchyard.errors.TransitionConflict` where too many are pending.
    """
    for kind in places:
        await kept_file(services, batch, kind)
    return await services.store.deliveries.give_files(
        batch, {str(kind): place.text for kind, place in places.items()}, most_pending=_MOST_PENDING
    )


async def redirect(
    services: Services, batch: BatchRecord, places: Mapping[Kind, Location]
) -> BatchRecord:
    """Have result files of a batch that has not ended go elsewhere than it was asked at first.

    Raises :class:`~batchyard.errors.TransitionConflict` while they are made.
    """
    return await services.store.batches.redirect(
        batch.id,
        {str(kind): place.text for kind, place in places.items()},
        {str(kind): place.expires_at for kind, place in places.items()},
    )


async def redeliver(services: Services, batch: BatchRecord) -> tuple[str, ...]:
    """Write what could not be written when the batch ended, where the user wanted it.

    What still cannot be written, in a sentence each; nothing to do, nothing to say.
    """
    wanted = await places_of(services, batch.id)
    missing = batch.undelivered or {}
    places = {"output": wanted.output, "error": wanted.error}
    again = {kind: place for kind in KINDS if (place := places[kind]) and kind in missing}
    return await deliver_to(services, batch, again, access=services.access_for(batch.options))


async def deliver_to(
    services: Services,
    batch: BatchRecord,
    places: Mapping[Kind, Location],
    *,
    access: Access | None = None,
) -> tuple[str, ...]:
    """Write result files to these locations; what could not be written, in a sentence each.

    Raises :class:`~batchyard.errors.RequestRefused` as :func:`kept_file` does.
    """
    failures = []
    for kind, place in places.items():
        has_file = (batch.output_file_id if kind == "output" else batch.error_file_id) is not None
        key = (await kept_file(services, batch, kind)).storage_key if has_file else None
        failure = await publish_file(services, kind, key, place, access or services.access)
        if failure is None:
            await services.store.batches.record_published(batch.id, kind, place.text)
        else:
            failures.append(failure.words)
    return tuple(failures)
