"""The ledger of a batch that has ended: a row for each line, and one for what no line used.

The rows are those of a hidden file that was made with the results. What the batch cost is known
when it ends, so the last row is made as the ledger is read: the sums over all rows are the batch's
``usage`` and cost, whatever the lines say. See ADR 85.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from batchyard.batch.ledger import LedgerSums
from batchyard.database.columns import USAGE_COLUMNS
from batchyard.errors import RecordNotFound, RequestRefused
from batchyard.lifecycle import TERMINAL
from batchyard.wire import TokenUsage, result_file_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, FileRecord


async def ledger_blocks(services: Services, batch: BatchRecord) -> AsyncGenerator[bytes]:
    """The rows as JSON Lines, some at a time.

    Raises :class:`~batchyard.errors.RequestRefused` for a batch that has no ledger, or has not
    ended, or whose ledger is no longer kept, and :class:`~batchyard.errors.StorageError`.
    """
    file = await ledger_file(services, batch)
    sums = LedgerSums()
    if file is not None:
        left = b""
        async with aclosing(services.storage.get(file.storage_key)) as parts:
            async for part in parts:
                whole, end, left = (left + part).rpartition(b"\n")
                for line in whole.split(b"\n") if end else ():
                    sums.add(line)
                if end:
                    yield whole + end
    usage = TokenUsage(*(getattr(batch, name) for name in USAGE_COLUMNS))
    rest = sums.rest(usage, batch.cost, batch.currency, batch.model)
    if rest is not None:
        yield rest.to_line()


async def ledger_file(services: Services, batch: BatchRecord) -> FileRecord | None:
    """The file with the rows of lines; None: no line was run.

    Raises :class:`~batchyard.errors.RequestRefused` as :func:`ledger_blocks` does.
    """
    if not batch.options.ledger:
        raise RequestRefused(
            f"{batch.id} has no ledger: it was not created with `ledger`.",
            param=None,
            code="no_ledger",
        )
    if batch.status not in TERMINAL:
        raise RequestRefused(
            f"The ledger of {batch.id} is there when it has ended: it is {batch.status.value}.",
            param=None,
            code="result_not_ready",
        )
    file_id = result_file_id(batch.id, "ledger")
    try:
        # As its tenant sees it: one whose time is over is gone, wiped or not.
        return await services.store.files.get(file_id, batch.tenant)
    except RecordNotFound:
        results = {each for each in (batch.output_file_id, batch.error_file_id) if each}
        # Rows of files are forgotten a month after their deletion, all of a batch together.
        if await services.store.files.known([file_id, *results]) == results:
            return None
        raise RequestRefused(
            f"The ledger of {batch.id} is no longer kept: it was deleted or has expired.",
            param=None,
            code="results_gone",
        ) from None
