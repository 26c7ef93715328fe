"""A batch whose lines come with the request, for every route that takes such: file and batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from batchyard.errors import IdempotencyConflict, RequestRefused
from batchyard.files.parts import wipe_object
from batchyard.files.upload import FileUse, store_content
from batchyard.steps.create.create import accept_batch

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from batchyard.services.services import Services
    from batchyard.steps.create.create import BatchRequest
    from batchyard.store import BatchRecord, IdempotencyKey

_FILENAME: Final = "requests.jsonl"


async def accept_batch_of(
    services: Services,
    lines: AsyncIterable[bytes],
    request: BatchRequest,
    *,
    batches_per_hour: int | None = None,
    idempotency: IdempotencyKey | None = None,
) -> BatchRecord:
    """Store JSON Lines as an input file of ``request.tenant``, and create a batch of it.

    ``lines`` are the file's bytes, cut anywhere. The file is one that the tenant may list,
    download and delete, and expires as an uploaded one. Both rows are written in one transaction:
    if the process dies before it, the bytes are left to the sweep. Raises what
    :func:`~batchyard.files.upload.store_content` and
    :func:`~batchyard.steps.create.create.accept_batch` raise.
    """
    use = FileUse(_FILENAME, "batch")
    file = await store_content(services, request.tenant, lines, lambda: use)
    try:
        batch = await accept_batch(
            services,
            replace(request, input_file_id=file.id),
            input_file=file,
            batches_per_hour=batches_per_hour,
            idempotency=idempotency,
        )
    except (IdempotencyConflict, RequestRefused):
        await wipe_object(services, file.storage_key)
        raise
    if batch.input_file_id != file.id:
        # The same request was accepted before.
        await wipe_object(services, file.storage_key)
    return batch
