"""``batchyard submit``: hand a batch to the runners and return at once."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from batchyard.cli.metadata import parse_metadata
from batchyard.cli.offline import offline_services
from batchyard.dispatch import PROCESS_BATCH, PrefectApi
from batchyard.errors import BatchyardError
from batchyard.steps.create import BatchRequest, create_batch
from batchyard.steps.publish import fail_batch


def submit(
    input_file: Annotated[
        str, typer.Option("--input-file", "-i", help="Path, s3://bucket/key or http(s) URL.")
    ],
    output_file: Annotated[
        str | None, typer.Option("--output-file", "-o", help="Likewise; a URL takes a PUT.")
    ] = None,
    errors: Annotated[
        str | None, typer.Option("--errors", "-e", help="Where failed lines go.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model that every line must name.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="The endpoint that every line must name.")
    ] = None,
    completion_window: Annotated[str, typer.Option(help="A number and m, h or d.")] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option(help="key=value; may be given several times.")
    ] = None,
) -> None:
    """Create a batch, start its flow run on the control pool, and print its id.

    Presigned URLs are kept encrypted in the database and are never shown to Prefect.
    """
    request = BatchRequest(
        input=input_file,
        output=output_file,
        error=errors,
        endpoint=endpoint,
        models=(model,) if model else (),
        completion_window=completion_window,
        metadata=parse_metadata(metadata),
    )
    typer.echo(asyncio.run(_submit(request)))


async def _submit(request: BatchRequest) -> str:
    async with PrefectApi.from_environment() as api, offline_services() as services:
        batch_id = await create_batch(services, request)
        try:
            await api.start(PROCESS_BATCH, {"batch_id": batch_id}, name=batch_id, key=batch_id)
        except BatchyardError as error:
            # Nobody would ever run it, and the user will submit again.
            await fail_batch(services, batch_id, error)
            raise
    return batch_id
