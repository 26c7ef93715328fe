"""``batchyard cancel``: stop a batch and keep its finished lines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from batchyard import intervals
from batchyard.cli.batches.batch_view import batch_object
from batchyard.cli.terminal import options
from batchyard.cli.terminal.as_json import OBJECT, print_object
from batchyard.cli.terminal.ensure_runner import ensure_runner_if_prefect_is_set
from batchyard.cli.terminal.offline import offline_services
from batchyard.lifecycle import TERMINAL

if TYPE_CHECKING:
    from batchyard.store import BatchRecord


def cancel(
    batch_id: Annotated[str, options.BATCH],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the batch has ended.")] = False,
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Cancel a batch, and print its status. Finished lines keep their results."""
    batch = asyncio.run(_cancel(batch_id, wait))
    if as_json:
        print_object(batch_object(batch))
    else:
        typer.echo(batch.status.value)


async def _cancel(batch_id: str, wait: bool) -> BatchRecord:
    async with offline_services() as services:
        batch = await services.store.batches.cancel(batch_id)
        if batch.status not in TERMINAL:
            # A runner has to write its files, and the batch may have no owner.
            await ensure_runner_if_prefect_is_set(services, batch_id)
        while wait and batch.status not in TERMINAL:
            await asyncio.sleep(intervals.LOOK_SECONDS)
            batch = await services.store.batches.get(batch_id)
    return batch
