"""Start a runner of batches, after its work was written to the database.

So nothing is lost if Prefect cannot be reached: the reconciler starts one too, within seconds.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from batchyard.dispatch import PrefectApi, ensure_batch_runner
from batchyard.errors import BatchyardError

if TYPE_CHECKING:
    from batchyard.services.services import Services


async def ensure_runner(api: PrefectApi, services: Services, what: str) -> None:
    """Start a runner for ``what``; if that fails, say on standard error that it has to wait."""
    try:
        silent_seconds = services.settings.batch_lease_seconds
        await ensure_batch_runner(api, services.store, silent_seconds=silent_seconds)
    except BatchyardError as error:
        typer.echo(
            f"batchyard: {error} {what} is saved and waits until Prefect is back and the "
            "reconciler runs.",
            err=True,
        )


async def ensure_runner_if_prefect_is_set(services: Services, what: str) -> None:
    """As :func:`ensure_runner`, but do nothing if ``PREFECT_API_URL`` is not set."""
    if os.environ.get("PREFECT_API_URL"):
        async with PrefectApi.from_environment() as api:
            await ensure_runner(api, services, what)
