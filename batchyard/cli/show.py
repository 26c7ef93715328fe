"""``batchyard show``: a batch in a few lines, or as clients of the API see it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from batchyard.cli import options
from batchyard.cli.batch_view import batch_object
from batchyard.cli.offline import offline_services
from batchyard.cli.summary import describe


def show(
    batch_id: Annotated[str, options.BATCH],
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print OpenAI's Batch object, and our fields in `batchyard`."),
    ] = False,
) -> None:
    """Show a batch: its status, why it waits, its requests, its files, and what went wrong."""
    typer.echo(asyncio.run(_show(batch_id, as_json)))


async def _show(batch_id: str, as_json: bool) -> str:
    async with offline_services() as services:
        batch = await services.store.batches.get(batch_id)
        if not as_json:
            return await describe(services, batch)
    encoded = msgspec.json.encode(batch_object(batch))
    return msgspec.json.format(encoded, indent=2).decode()
