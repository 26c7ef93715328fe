"""Deliver the result files of an ended batch again: they are kept until their time is over."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from batchyard.datasets.files import is_table
from batchyard.errors import RecordNotFound, RequestRefused
from batchyard.lifecycle import TERMINAL
from batchyard.locations.location import write_location
from batchyard.services.user_locations import places_of
from batchyard.steps.collect.publish import publish_file
from batchyard.steps.collect.table import ResultKeys, result_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.locations.access import Access, Location
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, DeliveryRecord, FileRecord

Kind: TypeAlias = Literal["output", "error"]
_MOST_PENDING: Final = 20
"""The most of one batch, because each may be gigabytes."""
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


async def kept_for(
    services: Services, batch: BatchRecord, kind: Kind, place: Location | None
) -> FileRecord:
    """:func:`kept_file`; a table of failed lines only is made of the error file."""
    if kind == "output" and batch.output_file_id is None and batch.error_file_id is not None:
        kind = "error" if place is not None and is_table(place) else kind
    return await kept_file(services, batch, kind)


async def _keys_of(services: Services, batch: BatchRecord) -> ResultKeys:
    """Those of the files that are still kept."""
    keys: dict[str, str] = {}
    for kind, file_id in (("output", batch.output_file_id), ("error", batch.error_file_id)):
        if file_id is not None:
            with suppress(RecordNotFound):
                keys[kind] = (await services.store.files.get(file_id)).storage_key
    return ResultKeys(**keys)


async def write_kept(
    services: Services, batch: BatchRecord, kind: Kind, place: Location, access: Access
) -> None:
    """Write a result file to this location, and note that it is there.

    Raises :class:`~batchyard.errors.RequestRefused` as :func:`kept_file` does, and
    :class:`~batchyard.errors.StorageError`.
    """
    key = (await kept_for(services, batch, kind, place)).storage_key
    keys = await _keys_of(services, batch)
    async with result_path(services, batch, key, keys, place) as path:
        await write_location(place, path, access)
    await services.store.batch_places.record_published(batch.id, kind, place.text)


async def ask_for_delivery(
    services: Services, batch: BatchRecord, places: Mapping[Kind, Location]
) -> list[DeliveryRecord]:
    """Have result files delivered to a client's URLs, by whichever process delivers.

    Raises :class:`~batchyard.errors.RequestRefused` as :func:`kept_file` does, and
    :class:`~batchyard.errors.TransitionConflict` where too many are pending.
    """
    for kind, place in places.items():
        await kept_for(services, batch, kind, place)
    return await services.store.deliveries.give_files(
        batch, {str(kind): place.text for kind, place in places.items()}, most_pending=_MOST_PENDING
    )


async def redirect(
    services: Services, batch: BatchRecord, places: Mapping[Kind, Location]
) -> BatchRecord:
    """Have result files of a batch that has not ended go elsewhere than it was asked at first.

    Raises :class:`~batchyard.errors.TransitionConflict` while they are made.
    """
    return await services.store.batch_places.redirect(
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
    keys = await _keys_of(services, batch)
    for kind, place in places.items():
        if (batch.output_file_id if kind == "output" else batch.error_file_id) is not None:
            await kept_file(services, batch, kind)
        failure = await publish_file(
            services, batch, kind, keys, place, access=access or services.access
        )
        if failure is None:
            await services.store.batch_places.record_published(batch.id, kind, place.text)
        else:
            failures.append(failure.words)
    return tuple(failures)
