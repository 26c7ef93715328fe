"""Render: the rows of a dataset become the one input of a batch, one line each."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batchyard.batch_error import BatchError
from batchyard.datasets.files import is_pattern, literal_of, local_files, object_files
from batchyard.datasets.jobs import ROWS_FILE, RenderJob
from batchyard.datasets.process import run_job
from batchyard.errors import (
    DatasetRefused,
    InputRefused,
    ObjectTooLarge,
    RequestRefused,
    StorageLimitExceeded,
    TransitionConflict,
)
from batchyard.locations.bucket_object import BucketObject
from batchyard.locations.local_file import LocalFile
from batchyard.locations.several import places_in
from batchyard.processes.threads import in_thread
from batchyard.services.keys import rows_key
from batchyard.services.quotas import arriving
from batchyard.services.services import Progress
from batchyard.steps.fetch.input_file import (
    is_kept,
    record_file,
    record_input,
    store_input,
    unless_recorded,
    wipe_unnamed,
)
from batchyard.steps.fetch.input_place import failures_of_input, read_input
from batchyard.storage.compression import unpacked_name
from batchyard.storage.file import os_errors_as_ours, read_file, write_file
from batchyard.store import NewFile
from batchyard.store.tables.file import FILE_LIFETIME_SECONDS
from batchyard.wire import result_file_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from batchyard.lines.rules import Limits
    from batchyard.locations.access import Location
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

CLIENTS_SECONDS: Final = 300
"""The seconds of processor time for a client's dataset: 50,000 rows take about ten."""
_LEAST_FILE_BYTES: Final = 1024**3
_NAME_CHARS: Final = 64
_ROWS_PURPOSE: Final = "user_data"


async def render_rows(
    services: Services, batch: BatchRecord, location: Location, template: str
) -> int:
    """Store the lines of the dataset's rows as the input; returns its size in bytes.

    The rows are stored as well, for the table of the results: the dataset may be gone by then.
    Running it again after a crash replaces the same objects. Raises
    :class:`~batchyard.errors.InputRefused` for a dataset or a template that cannot be used, and
    :class:`~batchyard.errors.StorageError`.
    """
    services.on_progress(Progress(batch.id, "fetching"))
    limits = services.settings.limits.to_limits(of_client=batch.options.public_urls)
    folder = Path(tempfile.mkdtemp(dir=services.spool, prefix="dataset-"))
    try:
        with failures_of_input(), os_errors_as_ours(str(location)):
            files = await _local_files(services, batch, location, folder, limits)
        job = RenderJob(
            files=tuple(map(str, files)),
            template=template,
            url=batch.endpoint,
            model=batch.models[0] if len(batch.models) == 1 else None,
            most_line_bytes=limits.max_line_bytes,
            most_rows=limits.max_requests,
        )
        return await _store(services, batch, job, folder, limits)
    except (DatasetRefused, RequestRefused) as error:
        param = "input_url" if batch.options.public_urls else "input"
        raise InputRefused([BatchError(error.refusal_code, str(error), param)]) from None
    finally:
        await in_thread(shutil.rmtree, folder, ignore_errors=True)


async def _store(
    services: Services, batch: BatchRecord, job: RenderJob, folder: Path, limits: Limits
) -> int:
    lines = _lines(services, batch, job, folder, limits)
    async with aclosing(lines):
        stored = await store_input(services, batch, lines)
    now = int(await services.store.database.now())
    # The table of the results is made with both: they are kept as long as the results.
    lifetime_seconds = max(0, batch.expires_at - now)
    lifetime_seconds += batch.output_lifetime_seconds or FILE_LIFETIME_SECONDS
    try:
        await _store_rows(services, batch, folder / ROWS_FILE, lifetime_seconds)
    except StorageLimitExceeded:
        await wipe_unnamed(services, stored.key)
        raise
    try:
        return await record_input(services, batch, stored, lifetime_seconds=lifetime_seconds)
    except StorageLimitExceeded:
        file = await services.store.files.delete(result_file_id(batch.id, "rows"))
        await wipe_unnamed(services, file.storage_key)
        raise


async def _store_rows(
    services: Services, batch: BatchRecord, path: Path, lifetime_seconds: int
) -> None:
    """They may be far larger than the lines that a template makes of them.

    Raises :class:`~batchyard.errors.TransitionConflict` where another process has recorded the
    lines meanwhile: what it has read may have been another version of the dataset.
    """
    file_id = result_file_id(batch.id, "rows")
    rows = unless_recorded(services, batch, read_file(path))
    with arriving(services, batch.tenant) as within_quota:
        # An earlier attempt has recorded them, and they would count twice.
        is_counted = await is_kept(services, file_id)
        awaited = rows if is_counted else within_quota(rows)
        kept = await services.storage.put(rows_key(batch.input_file_id), awaited)
    file = NewFile(
        id=file_id,
        purpose=_ROWS_PURPOSE,
        filename=f"{batch.id}_rows.parquet",
        size_bytes=kept.size_bytes,
        sha256=kept.sha256,
        storage_key=kept.key,
        tenant=batch.tenant,
        lifetime_seconds=lifetime_seconds,
    )
    with suppress(TransitionConflict):  # an earlier attempt has recorded it
        await record_file(services, file)


async def _lines(
    services: Services, batch: BatchRecord, job: RenderJob, folder: Path, limits: Limits
) -> AsyncGenerator[bytes]:
    done, most = 0, {}
    if batch.options.public_urls:
        # The operator's own datasets may be as large as there is room for.
        file_bytes = max(_LEAST_FILE_BYTES, 4 * limits.max_bytes)
        most = {"cpu_seconds": CLIENTS_SECONDS, "file_bytes": file_bytes}
    with failures_of_input(), os_errors_as_ours("the dataset"):
        async with aclosing(run_job(job, folder, batch.tenant, **most)) as parts:
            async for part in parts:
                done += len(part)
                if done > limits.max_bytes:
                    raise ObjectTooLarge(
                        f"The requests of the dataset have more than {limits.max_bytes} bytes."
                    )
                services.on_progress(Progress(batch.id, "fetching", done))
                yield part


async def _local_files(
    services: Services, batch: BatchRecord, location: Location, folder: Path, limits: Limits
) -> tuple[Path, ...]:
    """The files of the dataset on this machine: its own, or copies in ``folder``."""
    places: list[Location] = []
    for each in places_in(location):
        if isinstance(each, LocalFile):
            places += map(LocalFile, await in_thread(local_files, each.path.absolute()))
        elif isinstance(each, BucketObject) and (each.is_folder or is_pattern(each.key)):
            places += await _objects(services, batch, each)
        else:
            places.append(each)
    left, files = limits.max_bytes, []
    for number, place in enumerate(places):
        if isinstance(place, LocalFile):
            files.append(place.path)
            continue
        path = folder / str(number) / (unpacked_name(place.filename)[-_NAME_CHARS:] or "dataset")
        await in_thread(path.parent.mkdir)
        copy = await write_file(path, read_input(services, batch, place, limit_bytes=left))
        left -= copy.size_bytes
        files.append(path)
    return tuple(files)


async def _objects(
    services: Services, batch: BatchRecord, location: BucketObject
) -> list[Location]:
    """The data files of a prefix that ends in a slash, or of a pattern."""
    access = services.access_for(batch.options)
    keys = [key async for key in location.keys(access, literal_of(location.key))]
    found = object_files(keys, location.key, str(location))
    return [replace(location, key=key) for key in found]
