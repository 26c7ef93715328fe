"""``batchyard ledger``: what each line of a batch used and cost."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import Annotated

from batchyard.cli.batches.follow_results import write_to
from batchyard.cli.terminal import options
from batchyard.cli.terminal.offline import offline_services
from batchyard.files.read_ledger import ledger_blocks
from batchyard.processes.threads import in_thread


def ledger(batch_id: Annotated[str, options.BATCH]) -> None:
    """Print what each line of a batch that has ended used and cost, as JSON Lines.

    The batch must have been created with --ledger. Its lines are in the order of the input. What
    no line used, such as the time of an engine that has a price, is in a last row without a line.
    """
    asyncio.run(_print(batch_id))


async def _print(batch_id: str) -> None:
    async with offline_services() as services:
        batch = await services.store.batches.get(batch_id)
        async with aclosing(ledger_blocks(services, batch)) as blocks:
            async for block in blocks:
                await in_thread(write_to, sys.stdout.buffer, block)
