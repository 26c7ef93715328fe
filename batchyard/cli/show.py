"""``batchyard show``: a batch as clients of the API see it, and further fields of Batchyard."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from batchyard.cli import options
from batchyard.cli.batch_view import batch_object
from batchyard.cli.offline import offline_services


def show(batch_id: Annotated[str, options.BATCH]) -> None:
    """Print a batch as JSON: its status, counts, usage and files."""
    asyncio.run(_show(batch_id))


async def _show(batch_id: str) -> None:
    async with offline_services() as services:
        batch = await services.store.batches.get(batch_id)
    encoded = msgspec.json.encode(batch_object(batch))
    typer.echo(msgspec.json.format(encoded, indent=2).decode())
