"""``batchyard cancel``: stop a batch and keep its finished lines."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from batchyard import intervals
from batchyard.cli import options
from batchyard.cli.ensure_runner import ensure_runner_if_prefect_is_set
from batchyard.cli.offline import offline_services
from batchyard.lifecycle import TERMINAL


def cancel(
    batch_id: Annotated[str, options.BATCH],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the batch has ended.")] = False,
) -> None:
    """Cancel a batch, and print its status. Finished lines keep their results."""
    asyncio.run(_cancel(batch_id, wait))


async def _cancel(batch_id: str, wait: bool) -> None:
    async with offline_services() as services:
        batch = await services.store.batches.cancel(batch_id)
        if batch.status not in TERMINAL:
            # A runner has to write its files, and the batch may have no owner.
            await ensure_runner_if_prefect_is_set(services, batch_id)
        while wait and batch.status not in TERMINAL:
            await asyncio.sleep(intervals.LOOK_SECONDS)
            batch = await services.store.batches.get(batch_id)
    typer.echo(batch.status.value)
