"""Table: the results of a batch as one Parquet file, joined to the rows of its dataset."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batchyard.datasets.files import TABLE_SUFFIX, is_table
from batchyard.datasets.jobs import TABLE_FILE, JoinJob
from batchyard.datasets.process import run_job
from batchyard.errors import DatasetRefused, ObjectNotFound, RecordNotFound
from batchyard.processes.threads import in_thread
from batchyard.services.keys import file_key
from batchyard.services.restore.storage_mark import unavailable_here
from batchyard.services.segments.local_copy import local_copy
from batchyard.steps.fetch.input_file import is_kept
from batchyard.storage.compression import packed, packed_suffix
from batchyard.storage.file import os_errors_as_ours, write_file
from batchyard.wire import result_file_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.locations.access import Location
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

_EMBEDDINGS: Final = "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class ResultKeys:
    """Where the result files of a batch are in the object store; None: it has no such file."""

    output: str | None = None
    error: str | None = None

    def of(self, kind: str, location: Location) -> str | None:
        """What is written to the location: its file, or any of both for a table."""
        own = self.output if kind == "output" else self.error
        return own or (self.error if is_table(location) else None)


@asynccontextmanager
async def result_path(
    services: Services, batch: BatchRecord, key: str, keys: ResultKeys, location: Location
) -> AsyncIterator[Path]:
    """The local file that goes to ``location``: a result file as it is, or the table of both.

    Raises :class:`~batchyard.errors.StorageError`, which is ``StorageUnavailable`` where another
    machine may get the file, and for a table :class:`~batchyard.errors.DatasetRefused` and
    :class:`~batchyard.errors.RequestRefused`.
    """
    async with AsyncExitStack() as stack:
        async with unavailable_here(services):
            local = _local_result(services, batch, key, keys, location)
            path = await stack.enter_async_context(local)
        yield path


@asynccontextmanager
async def _local_result(
    services: Services, batch: BatchRecord, key: str, keys: ResultKeys, location: Location
) -> AsyncIterator[Path]:
    if not is_table(location):
        async with local_copy(services, key) as path:
            if not packed_suffix(location.filename):
                yield path
                return
            async with _packed(services, path, location.filename) as small:
                yield small
        return
    with os_errors_as_ours(str(services.spool)):
        folder = Path(tempfile.mkdtemp(dir=services.spool, prefix="table-"))
        try:
            yield await _made(services, batch, keys, folder)
        finally:
            await in_thread(shutil.rmtree, folder, ignore_errors=True)


@asynccontextmanager
async def _packed(services: Services, path: Path, name: str) -> AsyncIterator[Path]:
    """A copy of the file, compressed as the end of ``name`` says."""
    with os_errors_as_ours(str(services.spool)):
        folder = Path(await in_thread(tempfile.mkdtemp, dir=services.spool, prefix="packed-"))
    try:
        copy = folder / "result"
        await write_file(copy, packed(path, name), is_private=True)
        yield copy
    finally:
        await in_thread(shutil.rmtree, folder, ignore_errors=True)


async def _made(services: Services, batch: BatchRecord, keys: ResultKeys, folder: Path) -> Path:
    storage = services.storage

    async def local(key: str) -> str:
        return str((await storage.local_path(key, folder)).absolute())

    rows_key = await _rows_key(services, batch)
    try:
        lines = await local(file_key(batch.input_file_id))
    except ObjectNotFound:
        if await is_kept(services, batch.input_file_id):
            raise
        raise DatasetRefused(
            f"The table is made with the input of the batch, {batch.input_file_id}, which is no "
            "longer kept: it was deleted or has expired. Give a place that does not end in "
            f"{TABLE_SUFFIX}, for JSON lines.",
            code="no_such_result",
        ) from None
    job = JoinJob(
        lines=lines,
        output=await local(keys.output) if keys.output else None,
        error=await local(keys.error) if keys.error else None,
        rows=await local(rows_key) if rows_key else None,
        has_embeddings=await _answered_by(services, batch) == _EMBEDDINGS,
        merged_by=batch.id if batch.options.merges else None,
    )
    async with aclosing(run_job(job, folder, batch.tenant)) as parts:
        async for _ in parts:
            pass
    return folder / TABLE_FILE


async def _answered_by(services: Services, batch: BatchRecord) -> str:
    """The endpoint of the answers: of a chain that of its last stage."""
    further = await services.store.chains.stages_of(batch)
    return further[-1].endpoint if further else batch.endpoint


async def _rows_key(services: Services, batch: BatchRecord) -> str | None:
    """Where the rows are; None: it has none, or they are no longer kept."""
    try:
        return (await services.store.files.get(result_file_id(batch.id, "rows"))).storage_key
    except RecordNotFound:
        return None
