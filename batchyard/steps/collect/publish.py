"""Publish: the batch ends, with its files where the user wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from batchyard.errors import BatchyardError, LeaseLost, LocationRefused, StorageUnavailable
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.locations.local_file import LocalFile
from batchyard.locations.location import parse_location, write_location
from batchyard.processes.threads import in_thread
from batchyard.services.batch_span import traced
from batchyard.services.services import Progress
from batchyard.steps.collect.table import ResultKeys, result_path
from batchyard.steps.fetch.input_file import wipe_unnamed
from batchyard.store import HiddenFor

if TYPE_CHECKING:
    from batchyard.locations.access import Access, Location
    from batchyard.services.services import Services
    from batchyard.steps.collect.collect import Collected
    from batchyard.store import BatchRecord


@traced("batch.publish")
async def publish_results(services: Services, batch_id: str, collected: Collected) -> BatchRecord:
    """Write the files to the user's locations, then end the batch as collected.

    The batch's ``undelivered`` says what could not be written there. Nothing is lost then: the
    files stay in the object store under their ids, and where a client's URL did not answer, the
    outbox delivers them later. A batch that has ended already does not change.

    Raises :class:`~batchyard.errors.LeaseLost` when another owner has the batch by now.
    """
    batch = await services.store.batches.get(batch_id)
    if batch.status in TERMINAL:
        await _delete_unwanted(services, batch)
        return batch
    if batch.epoch != collected.epoch:
        # Before the user's files are touched: another's may be there by now.
        raise LeaseLost(f"{batch_id} has another owner; drop what is left of it.")
    services.on_progress(Progress(batch_id, "publishing"))
    failures = await _publish_files(services, batch, collected)
    batch = await services.store.batches.finish(
        batch_id,
        target=collected.target,
        errors=collected.errors,
        output=collected.output,
        error=collected.error,
        others=collected.others,
        counts=collected.counts,
        error_counts=collected.error_counts,
        usage=collected.usage.to_wire(),
        deduplicated_requests=collected.deduplicated,
        undelivered={kind: failure.words for kind, failure in failures.items()},
        again={kind: each.again_to for kind, each in failures.items() if each.again_to is not None},
        epoch=collected.epoch,
    )
    await _delete_unwanted(services, batch)
    return batch


async def _delete_unwanted(services: Services, batch: BatchRecord) -> None:
    """Delete the files of a batch of background responses that were all deleted before its end.

    Who deletes the last response of a batch that has ended deletes them then.
    """
    if batch.hidden_for is not HiddenFor.RESPONSES:
        return
    if await services.store.responses.has_any(batch.id):
        return
    file_ids = (batch.input_file_id, batch.output_file_id, batch.error_file_id)
    for file in await services.store.files.delete_unread([each for each in file_ids if each]):
        await wipe_unnamed(services, file.storage_key)


class Failure(NamedTuple):
    """Why a result file is not where it was wanted."""

    words: str
    """A sentence without a full stop."""
    again_to: str | None = None
    """The place that may take it later; None: there it will never be taken."""


async def _publish_files(
    services: Services, batch: BatchRecord, collected: Collected
) -> dict[str, Failure]:
    """Write both files to the user's locations; by ``output`` and ``error`` what went wrong."""
    if collected.target is BatchStatus.FAILED and not (collected.output or collected.error):
        # Nothing was run: what lies at these places may be all that the user has.
        return {}
    access = services.access_for(batch.options)
    keys = ResultKeys(
        output=collected.output.storage_key if collected.output else None,
        error=collected.error.storage_key if collected.error else None,
    )
    failures = {}
    wanted = await services.store.batch_places.destinations(batch.id)
    for kind, text in wanted.items():
        try:
            place = _place(text)
        except LocationRefused as error:
            # Nobody can be asked for another place, and the results are there.
            failures[kind] = Failure(f"The {kind} file could not be written: {error}")
            continue
        failure = await publish_file(services, batch, kind, keys, place, access=access)
        if failure is not None:
            # The outbox takes every URL for a client's: it would refuse an operator's private one.
            failures[kind] = (
                failure if batch.options.public_urls else failure._replace(again_to=None)
            )
    return failures


def _place(text: str | None) -> Location:
    if text is None:
        raise LocationRefused("no key opens the place where it was wanted")
    return parse_location(text)


async def publish_file(
    services: Services,
    batch: BatchRecord,
    kind: str,
    keys: ResultKeys,
    location: Location | None,
    *,
    access: Access,
) -> Failure | None:
    """Write one result file to the user's location; what went wrong, if anything did.

    In any case the file is in the object store, and the batch must not wait for this copy.
    If the batch has no such file, an older one must not stay there.
    """
    if location is None:
        return None
    try:
        key = keys.of(kind, location)
        if key is None:
            if isinstance(location, LocalFile):
                # Results of an earlier run must not pass for this one's.
                await in_thread(location.path.unlink, missing_ok=True)
            return None
        async with result_path(services, batch, key, keys, location) as path:
            await write_location(location, path, access)
    except (BatchyardError, OSError) as error:
        where = services.where(location)
        may_work = isinstance(error, StorageUnavailable)
        return Failure(
            f"The {kind} file could not be written: {error}{where}",
            location.text if may_work else None,
        )
    except Exception as error:  # noqa: BLE001 - a defect here must not cost the results
        # Its text may hold a secret.
        return Failure(f"The {kind} file could not be written ({type(error).__name__})")
    return None
