"""``batchyard show``: a batch as clients of the API see it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from batchyard.cli.offline import offline_services
from batchyard.wire import to_json


def show(batch_id: Annotated[str, typer.Argument(help="For example batch_0123….")]) -> None:
    """Print a batch as JSON: its status, counts, usage and files."""
    asyncio.run(_show(batch_id))


async def _show(batch_id: str) -> None:
    async with offline_services() as services:
        batch = await services.store.batches.get(batch_id)
    typer.echo(msgspec.json.format(to_json(batch.to_wire()), indent=2).decode())
