"""``batchyard deliveries``: list, show and resend notifications and their attempts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from batchyard.cli.terminal import options
from batchyard.cli.terminal.as_json import LINES, OBJECT, print_lines, print_object
from batchyard.cli.terminal.ensure_runner import ensure_runner_if_prefect_is_set
from batchyard.cli.terminal.offline import offline_services
from batchyard.cli.terminal.table import print_table, user_text
from batchyard.delivery.webhooks import delivery_object, delivery_with_attempts
from batchyard.logs.time_words import relative
from batchyard.store import DeliveryStatus  # noqa: TC001 - Typer reads it at run time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.text import Text

    from batchyard.delivery.webhooks import Delivery, DeliveryWithAttempts
    from batchyard.store import DeliveryRecord, Page

_COLUMNS = ("id", "event", "batch", "to", "status", "attempts", "made", "next")
_NOTHING = "-"
_ID = typer.Argument(metavar="ID", help="A delivery's id, for example wh_0123….")

app = typer.Typer(help="List, show and resend webhooks and e-mails.", no_args_is_help=True)


@app.command("list")
def list_deliveries(
    tenant: Annotated[str | None, options.ONLY_TENANT] = None,
    batch: Annotated[str | None, typer.Option(help="Only this batch.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Only this endpoint.")] = None,
    status: Annotated[DeliveryStatus | None, typer.Option(help="Only this status.")] = None,
    limit: Annotated[int, options.LIMIT] = 50,
    as_json: Annotated[bool, LINES] = False,
) -> None:
    """List deliveries with their status, newest first."""
    page, now = asyncio.run(_page(tenant, batch, endpoint, status, limit))
    shown = [delivery_object(each) for each in page]
    if as_json:
        print_lines(shown)
    else:
        print_table(_COLUMNS, _rows(shown, now))
    if page.has_more:
        typer.echo(f"batchyard: There are more than {limit:,}: give a larger --limit.", err=True)


@app.command()
def show(delivery_id: Annotated[str, _ID]) -> None:
    """Print a delivery as JSON, with all attempts and their results."""
    found = asyncio.run(_get(delivery_id))
    print_object(found)


@app.command()
def replay(delivery_id: Annotated[str, _ID], as_json: Annotated[bool, OBJECT] = False) -> None:
    """Send a delivery again with the same id, now and then on the retry schedule."""
    found = asyncio.run(_replay(delivery_id))
    if as_json:
        print_object(delivery_object(found))
    else:
        typer.echo(found.status.value)


async def _page(
    tenant: str | None,
    batch_id: str | None,
    endpoint_id: str | None,
    status: DeliveryStatus | None,
    limit: int,
) -> tuple[Page[DeliveryRecord], float]:
    """Deliveries, and the time by the clock that theirs are by."""
    async with offline_services() as services:
        page = await services.store.deliveries.page(
            tenant, batch_id=batch_id, endpoint_id=endpoint_id, status=status, limit=limit
        )
        return page, await services.store.database.now()


async def _get(delivery_id: str) -> DeliveryWithAttempts:
    async with offline_services() as services:
        deliveries = services.store.deliveries
        found = await deliveries.get(delivery_id)
        return delivery_with_attempts(found, await deliveries.attempts(delivery_id))


async def _replay(delivery_id: str) -> DeliveryRecord:
    async with offline_services() as services:
        found = await services.store.deliveries.replay(delivery_id)
        await ensure_runner_if_prefect_is_set(services, found.id)
    return found


def _rows(deliveries: Iterable[Delivery], now: float) -> Iterator[tuple[str | Text, ...]]:
    for each in deliveries:
        next_at = each.next_attempt_at
        yield (
            each.id,
            each.event_type,
            each.response_id or each.batch_id or _NOTHING,
            user_text(each.webhook_endpoint_id or each.recipient or _NOTHING),
            each.status.value,
            str(each.attempt_count),
            relative(each.created_at - now),
            _NOTHING if next_at is None else relative(max(0.0, next_at - now)),
        )
