"""``batchyard deliver``: send due notifications by hand, as run-batches does while it runs."""

from __future__ import annotations

import asyncio

import typer

from batchyard.cli.offline import offline_services
from batchyard.delivery.deliver import Deliverer


def deliver() -> None:
    """Attempt all webhooks and e-mails that are due now, and print the results."""
    asyncio.run(_deliver())


async def _deliver() -> None:
    async with offline_services() as services, Deliverer(services) as deliverer:
        counts = await deliverer.deliver_due()
    typer.echo(
        f"delivered         {counts.delivered:,}\n"
        f"put off           {counts.put_off:,}\n"
        f"given up          {counts.failed:,}"
    )
