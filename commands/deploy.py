"""``batchyard deploy``: everything that Batchyard needs on a Prefect server, from one file.

It changes only what differs from the file, so the command can be repeated at any time: after an
upgrade, after a change of the file, and after the loss of Prefect's database.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer

from batchyard.cli.terminal.say import say
from batchyard.dispatch import RECONCILE, checked_api_url
from batchyard.errors import DispatchFailed, SettingsError
from batchyard.settings import read_settings
from batchyard.settings_sources import config_file
from batchyard.web.proxies import check_proxies, proxy_for, proxy_words
from batchyard.web.url import shown
from commands.prefect.refusals import login_refused

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

    from commands.prefect.deploy_file import DeployFile

_POLL_SECONDS = 1.0


def register(app: typer.Typer) -> None:
    """Add the command; an entry point of the group ``batchyard.commands``."""
    app.command("deploy")(deploy)


def deploy(
    file: Annotated[
        Path | None,
        typer.Argument(help="The file of models. Default: the batchyard.toml of this process."),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete engine blocks that the file does not name.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, help="How many seconds to wait for the Prefect server.")
    ] = 60.0,
) -> None:
    """Make pools, block types, engine blocks and deployments on the Prefect server.

    It changes only what differs from the file, so the command can be repeated.
    """
    from httpx import HTTPError  # noqa: PLC0415 - see below
    from prefect.exceptions import PrefectException  # noqa: PLC0415 - see below
    from prefect.settings import PREFECT_API_URL  # noqa: PLC0415 - a second

    from commands.prefect.deploy_file import DeployFile, read_deploy_file  # noqa: PLC0415 - see above

    if file is not None and not file.is_file():
        raise SettingsError(f"There is no file {file}.")
    settings = read_settings()
    path = file or config_file()
    wanted = DeployFile() if path is None else read_deploy_file(path)
    url = checked_api_url(PREFECT_API_URL.value())
    check_proxies(os.environ)
    models = f"{len(wanted.models)} models in {path}" if path else "no batchyard.toml, so no models"
    say(f"Prefect: {shown(url)}\nModels:  {models}")
    try:
        changes = asyncio.run(_deploy(wanted, settings.pools, url, wait, prune=prune))
    except (HTTPError, PrefectException) as error:
        why = login_refused(url, error) or (
            f"Prefect's API at {shown(url)} did not do what was asked ({type(error).__name__}): "
            "see the log of its server, and run `batchyard deploy` again."
        )
        raise DispatchFailed(why) from error
    if not changes:
        say("Everything is up to date.")


async def _deploy(
    wanted: DeployFile, pools: dict[str, str], url: str, wait_seconds: float, *, prune: bool
) -> int:
    """Blocks first: with pools, runners whose models have no block are ended, and with deployments,
    batches are run.
    """
    from prefect import get_client  # noqa: PLC0415 - a second

    from commands.prefect.deployments import deploy_unmet, wanted_deployments  # noqa: PLC0415 - see above
    from commands.prefect.objects import delete_block, make_blocks, make_pools, other_blocks  # noqa: PLC0415 - see above

    changes = 0

    def changed(what: str) -> None:
        nonlocal changes
        changes += 1
        say(what)

    async with get_client() as client:
        await _wait_for(client, url, wait_seconds)
        async for change in make_blocks(client, wanted):
            changed(change)
        async for change in make_pools(client, wanted):
            changed(change)
        names = {model.name for model in wanted.models}
        async for block in other_blocks(client, wanted):
            # Of two blocks of one model, the runner might take the other one.
            if prune or block.partition("/")[2] in names:
                await delete_block(client, block)
                changed(f"block {block} deleted")
            else:
                say(f"block {block} is not in the file; --prune deletes it")
        deployments = wanted_deployments(wanted.gpu_pools, pools | wanted.pool_of_model)
        for name in await deploy_unmet(client, deployments):
            changed(f"deployment {name} written")
            if name == RECONCILE:
                # It keeps running by itself. Its schedule might start it in a quarter of an hour.
                found = await client.read_deployment_by_name(name)
                await client.create_flow_run_from_deployment(
                    found.id, name="reconcile", tags=["reconcile"]
                )
    return changes


async def _wait_for(client: PrefectClient, url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    is_told = False
    while (error := await client.api_healthcheck()) is not None:
        if time.monotonic() >= deadline:
            way = proxy_words(proxy_for(url, os.environ))
            raise DispatchFailed(
                f"Prefect's API at {shown(url)} does not answer{way} ({type(error).__name__})."
            )
        if not is_told:
            say(f"Waiting for Prefect's API at {shown(url)} …", err=True)
            is_told = True
        await asyncio.sleep(_POLL_SECONDS)
