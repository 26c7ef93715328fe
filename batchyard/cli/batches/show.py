"""``batchyard show``: a batch in a few lines, or as clients of the API see it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from batchyard.cli.batches.batch_view import batch_object
from batchyard.cli.batches.summary import describe
from batchyard.cli.terminal import options
from batchyard.cli.terminal.as_json import print_field, print_object
from batchyard.cli.terminal.offline import offline_services


def show(
    batch_id: Annotated[str, options.BATCH],
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print OpenAI's Batch object, and our fields in `batchyard`."),
    ] = False,
    field: Annotated[
        str | None,
        typer.Option(
            help="Print one field of what --json prints, for scripts: `status`, "
            "`request_counts.completed`, `batchyard.tenant`. Text is printed without quotes, and "
            "null as an empty line.",
        ),
    ] = None,
) -> None:
    """Show a batch: its status, why it waits, its requests, its files, and what went wrong."""
    if as_json and field is not None:
        raise typer.BadParameter("Give --json or --field, not both.", param_hint="--field")
    asyncio.run(_show(batch_id, as_json, field))


async def _show(batch_id: str, as_json: bool, field: str | None) -> None:
    async with offline_services() as services:
        batch = await services.store.batches.get(batch_id)
        if as_json:
            print_object(batch_object(batch))
        elif field is not None:
            print_field(batch_object(batch), field)
        else:
            typer.echo(await describe(services, batch))
