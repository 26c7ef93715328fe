"""``batchyard deliver``: send due notifications by hand, as run-batches does while it runs."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from batchyard.cli.terminal.as_json import OBJECT, print_object
from batchyard.cli.terminal.offline import offline_services
from batchyard.delivery.deliver import Deliverer


def deliver(as_json: Annotated[bool, OBJECT] = False) -> None:
    """Attempt all webhooks and e-mails that are due now, and print the results."""
    asyncio.run(_deliver(as_json))


async def _deliver(as_json: bool) -> None:
    async with offline_services() as services, Deliverer(services) as deliverer:
        counts = await deliverer.deliver_due()
    if as_json:
        print_object(asdict(counts))
        return
    typer.echo(
        f"delivered         {counts.delivered:,}\n"
        f"to try again      {counts.to_try_again:,}\n"
        f"failed            {counts.failed:,}"
    )
