"""``batchyard webhooks``: the endpoints that are notified when a tenant's batches end.

A secret is shown only once, when it is created, and is the only text on standard output.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchyard.cli.terminal import options
from batchyard.cli.terminal.as_json import LINES, OBJECT, print_lines, print_object
from batchyard.cli.terminal.offline import offline_services
from batchyard.cli.terminal.table import print_table, user_text
from batchyard.delivery.webhooks import send_test
from batchyard.logs.time_words import relative
from batchyard.notify.event import EVENT_TYPES
from batchyard.services.webhook_checks import check_name, check_webhook_url, checked_event_types
from batchyard.web.url import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.text import Text

    from batchyard.services.services import Services
    from batchyard.store import EndpointWithSecret, WebhookEndpointRecord

_COLUMNS = ("id", "tenant", "name", "url", "events", "secret", "made", "state")
_ID = typer.Argument(metavar="ID", help="An endpoint's id, for example whe_0123….")
_URL = "An https URL that receives the events."
_KEEP_OLD = typer.Option("--keep-old", help="Keep the old secret valid for another 24 hours.")
_SUCCESS = range(200, 300)

app = typer.Typer(
    help="Create, list, test, change and delete webhook endpoints.", no_args_is_help=True
)


@app.command()
def create(
    url: Annotated[str, typer.Argument(metavar="URL", help=_URL)],
    name: Annotated[
        str, typer.Option(help="A name for people; it need not be unique.")
    ] = "webhook",
    event: Annotated[
        list[str] | None,
        typer.Option(help="An event type such as batch.completed; may be repeated. Default: all."),
    ] = None,
    tenant: Annotated[str, options.TENANT] = "default",
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Notify a URL when a tenant's batches end, and print the signing secret."""
    made = asyncio.run(_create(tenant, name, url, event or EVENT_TYPES))
    _show_made(made, as_json)


@app.command("list")
def list_endpoints(
    tenant: Annotated[str | None, options.ONLY_TENANT] = None,
    limit: Annotated[int, options.LIMIT] = 50,
    as_json: Annotated[bool, LINES] = False,
) -> None:
    """List endpoints, newest first, including disabled ones and the reason."""
    endpoints, now, has_more = asyncio.run(_list(tenant, limit))
    if as_json:
        print_lines(map(_object, endpoints))
    else:
        print_table(_COLUMNS, _rows(endpoints, now))
    if has_more:
        typer.echo(f"batchyard: There are more than {limit:,}: give a larger --limit.", err=True)


@app.command()
def show(endpoint_id: Annotated[str, _ID]) -> None:
    """Print an endpoint as JSON, with its URL but not the URL's query."""
    print_object(_object(asyncio.run(_get(endpoint_id))))


@app.command()
def update(
    endpoint_id: Annotated[str, _ID],
    url: Annotated[str | None, typer.Option(help=_URL)] = None,
    name: Annotated[str | None, typer.Option(help="Another name for people.")] = None,
    event: Annotated[
        list[str] | None,
        typer.Option(help="An event type that replaces the earlier ones; may be repeated."),
    ] = None,
) -> None:
    """Change an endpoint, and enable it again if it was disabled."""
    print_object(_object(asyncio.run(_update(endpoint_id, url, name, event))))


@app.command()
def delete(endpoint_id: Annotated[str, _ID]) -> None:
    """Delete an endpoint. Pending events for it are dropped."""
    asyncio.run(_delete(endpoint_id))


@app.command()
def rotate(
    endpoint_id: Annotated[str, _ID],
    keep_old: Annotated[bool, _KEEP_OLD] = False,
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Make a new signing secret for an endpoint and print it."""
    made = asyncio.run(_rotate(endpoint_id, keep_old))
    _show_made(made, as_json)


@app.command("test")
def try_endpoint(
    endpoint_id: Annotated[str, _ID],
    event: Annotated[str, typer.Option(help="The type of the event.")] = "batch.completed",
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Send a signed sample event now, once, and print the status of the answer.

    The exit status is 1 if there was no answer, or another than 2xx.
    """
    status_code = asyncio.run(_try(endpoint_id, event))
    if as_json:
        print_object({"id": endpoint_id, "status_code": status_code})
    else:
        typer.echo(status_code)
    if status_code not in _SUCCESS:
        raise typer.Exit(1)


@app.command()
def secret(
    tenant: Annotated[str, options.TENANT] = "default",
    keep_old: Annotated[bool, _KEEP_OLD] = False,
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Make a new secret for the webhook URLs of a tenant's batches, and print it."""
    value = asyncio.run(_secret(tenant, keep_old))
    about = {"tenant": tenant} if as_json else None
    _show_secret(value, f"The secret of tenant {tenant}", about)


async def _create(
    tenant: str, name: str, url: str, event_types: Sequence[str]
) -> EndpointWithSecret:
    async with offline_services() as services:
        await _check(services, name, url)
        types = checked_event_types(event_types, param="--event")
        return await services.store.webhook_endpoints.create(
            tenant, name=name, url=url, event_types=types
        )


async def _list(
    tenant: str | None, limit: int
) -> tuple[Sequence[WebhookEndpointRecord], float, bool]:
    """Endpoints, the time by the clock that theirs are by, and whether there are more."""
    async with offline_services() as services:
        page = await services.store.webhook_endpoints.page(tenant, limit=limit)
        return page, await services.store.database.now(), page.has_more


async def _get(endpoint_id: str) -> WebhookEndpointRecord:
    async with offline_services() as services:
        return await services.store.webhook_endpoints.get(endpoint_id)


async def _update(
    endpoint_id: str, url: str | None, name: str | None, event: Sequence[str] | None
) -> WebhookEndpointRecord:
    async with offline_services() as services:
        await _check(services, name, url)
        return await services.store.webhook_endpoints.update(
            endpoint_id,
            name=name,
            url=url,
            event_types=checked_event_types(event, param="--event") if event else None,
        )


async def _delete(endpoint_id: str) -> None:
    async with offline_services() as services:
        await services.store.webhook_endpoints.delete(endpoint_id)


async def _rotate(endpoint_id: str, keep_old: bool) -> EndpointWithSecret:
    async with offline_services() as services:
        return await services.store.webhook_endpoints.rotate(endpoint_id, keep_old=keep_old)


async def _try(endpoint_id: str, event_type: str) -> int:
    async with offline_services() as services:
        (checked,) = checked_event_types([event_type], param="--event")
        return await send_test(services, endpoint_id, checked)


async def _secret(tenant: str, keep_old: bool) -> str:
    async with offline_services() as services:
        return await services.store.tenants.rotate_webhook_secret(tenant, keep_old=keep_old)


async def _check(services: Services, name: str | None, url: str | None) -> None:
    if name is not None:
        check_name(name)
    if url is not None:
        await check_webhook_url(url, services.settings, param="url")


def _show_made(made: EndpointWithSecret, as_json: bool) -> None:
    about = _object(made.record) if as_json else None
    _show_secret(made.secret, f"The signing secret of {made.record.id}", about)


def _show_secret(value: str, whose: str, about: dict[str, Any] | None) -> None:
    """``about``: what a program is told besides; None: people get the secret only."""
    if about is None:
        typer.echo(value)
    else:
        print_object({**about, "signing_secret": value})
    typer.echo(f"batchyard: {whose} is shown only this once: keep it.", err=True)


def _object(endpoint: WebhookEndpointRecord) -> dict[str, Any]:
    return {
        "id": endpoint.id,
        "tenant": endpoint.tenant,
        "name": endpoint.name,
        "url": _shown_url(endpoint),
        "event_types": endpoint.event_types,
        "signing_secret_hint": endpoint.secret_hint,
        "created_at": endpoint.created_at,
        "updated_at": endpoint.updated_at,
        "disabled_at": endpoint.disabled_at,
        "disabled_reason": endpoint.disabled_reason,
    }


def _shown_url(endpoint: WebhookEndpointRecord) -> str:
    if endpoint.url is None:
        return "(lost with its key: set a new one with batchyard webhooks update --url)"
    return shown(endpoint.url)


def _rows(
    endpoints: Iterable[WebhookEndpointRecord], now: float
) -> Iterator[tuple[str | Text, ...]]:
    for endpoint in endpoints:
        yield (
            endpoint.id,
            user_text(endpoint.tenant),
            user_text(endpoint.name),
            user_text(_shown_url(endpoint)),
            _event_words(endpoint.event_types),
            endpoint.secret_hint,
            relative(endpoint.created_at - now),
            user_text(f"disabled: {endpoint.disabled_reason}" if endpoint.disabled_at else "on"),
        )


def _event_words(event_types: Sequence[str]) -> str:
    if set(event_types) == set(EVENT_TYPES):
        return "all"
    return ",".join(each.removeprefix("batch.") for each in event_types)
