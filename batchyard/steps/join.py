"""Join: several input files of one tenant become the one input of a batch."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchyard.errors import ObjectTooLarge, RecordNotFound
from batchyard.services.keys import file_key
from batchyard.services.services import Progress
from batchyard.steps.input_file import check_input_file, no_input_file
from batchyard.store import InputPart, NewFile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from batchyard.batch_error import BatchError
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, FileRecord


async def join_files(services: Services, batch: BatchRecord) -> int:
    """Store the lines of the files in ``options.parts`` as the input; returns its size in bytes.

    How many lines each file has is recorded as well, so that an error can name its file. Raises
    :class:`~batchyard.errors.InputRefused` for a file that may not be used, and
    :class:`~batchyard.errors.StorageError`; an input over the limit is refused as soon as the
    limit is passed.
    """
    services.on_progress(Progress(batch.id, "fetching"))
    files = [await _file(services, batch, part.file_id) for part in batch.options.parts]
    counted: list[InputPart] = []
    parts = _joined(services, batch, files, counted)
    stored = await services.storage.put(file_key(batch.input_file_id), parts)
    # Before the file's row, with which this step is done.
    await services.store.batches.note_parts(batch.id, counted)
    await services.store.files.create(
        NewFile(
            id=batch.input_file_id,
            purpose="batch",
            filename=f"{batch.id}_input.jsonl",
            size_bytes=stored.size_bytes,
            sha256=stored.sha256,
            storage_key=stored.key,
            tenant=batch.tenant,
        )
    )
    return stored.size_bytes


def with_its_file(error: BatchError, parts: Sequence[InputPart]) -> BatchError:
    """The error, whose message also names the file and the line that its line comes from."""
    if error.line is None:
        return error
    line = error.line
    for part in parts:
        if line <= part.lines:
            return replace(error, message=f"{part.file_id}, line {line}: {error.message}")
        line -= part.lines
    return error


async def _file(services: Services, batch: BatchRecord, file_id: str) -> FileRecord:
    try:
        file = await services.store.files.get(file_id)
    except RecordNotFound:
        raise no_input_file(file_id) from None
    check_input_file(batch, file)
    return file


async def _joined(
    services: Services, batch: BatchRecord, files: Sequence[FileRecord], counted: list[InputPart]
) -> AsyncIterator[bytes]:
    """The files' bytes, each with a line end behind its last line and without a BOM."""
    limit, size_bytes = services.settings.limits.max_bytes, 0
    for file in files:
        lines, last = 0, b"\n"
        async for block in _without_bom(services.storage.get(file.storage_key)):
            lines += block.count(b"\n")
            size_bytes += len(block)
            if size_bytes > limit:
                raise ObjectTooLarge(f"The files have more than {limit} bytes together.")
            services.on_progress(Progress(batch.id, "fetching", size_bytes))
            last = block
            yield block
        if not last.endswith(b"\n"):
            lines += 1
            size_bytes += 1
            yield b"\n"
        counted.append(InputPart(file.id, lines))


async def _without_bom(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same, none of them empty."""
    head: bytes | None = b""
    async for block in blocks:
        if head is None:
            yield block
            continue
        head += block
        if len(head) >= len(codecs.BOM_UTF8):
            if rest := head.removeprefix(codecs.BOM_UTF8):
                yield rest
            head = None
    if head:
        yield head
