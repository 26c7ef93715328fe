"""``batchyard retry``: a new batch from the lines of another one that did not succeed."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from batchyard.cli import options
from batchyard.cli.as_json import OBJECT
from batchyard.cli.ensure_runner import ensure_runner
from batchyard.cli.offline import offline_services
from batchyard.cli.show import show
from batchyard.dispatch import PrefectApi
from batchyard.services.shared_database import check_shared_database
from batchyard.steps.create import check_paths
from batchyard.steps.retry import retry_batch
from batchyard.storage.access import Location  # noqa: TC001 - Typer reads it at run time


def retry(
    batch_id: Annotated[str, options.BATCH],
    output_file: Annotated[Location | None, options.OUTPUT_FILE] = None,
    errors: Annotated[Location | None, options.ERRORS] = None,
    completion_window: Annotated[
        str | None,
        typer.Option(
            help="A number and m, h or d, or background. Default: the window of the old batch."
        ),
    ] = None,
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Make a new batch from the error file of a batch that has ended, and print its id.

    If the batch failed without result files, all its lines are submitted again.
    """
    new_id = asyncio.run(_retry(batch_id, output_file, errors, completion_window, is_quiet=as_json))
    if as_json:
        show(new_id, as_json=True)


async def _retry(
    batch_id: str,
    output: Location | None,
    error: Location | None,
    completion_window: str | None,
    *,
    is_quiet: bool,
) -> str:
    async with PrefectApi.from_environment() as api, offline_services() as services:
        check_shared_database(services.settings)
        check_paths(services.settings, output=output, errors=error)
        new_id = await retry_batch(
            services, batch_id, completion_window=completion_window, output=output, error=error
        )
        typer.echo(new_id, err=is_quiet)
        await ensure_runner(api, services, new_id)
    return new_id
