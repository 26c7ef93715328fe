"""``/webhook_endpoints``: who is told of the ends of a tenant's batches, and tries of it.

Also ``/webhook_event_types``, and ``/webhook_secret``, which signs what goes to the URLs that
batches name themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from batchyard.api.answer import answer
from batchyard.api.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.body import read_json
from batchyard.api.pages import known_cursor, read_paging, to_list_page
from batchyard.delivery.webhooks import secret_hint, send_test
from batchyard.notify.event import EVENT_TYPES
from batchyard.services.webhook_checks import check_name, check_webhook_url, checked_event_types

if TYPE_CHECKING:
    from batchyard.api.auth import Caller
    from batchyard.api.body import JsonObject
    from batchyard.store import EndpointWithSecret, WebhookEndpointRecord

router = APIRouter()

MOST_ENDPOINTS: Final = 100
DEFAULT_ENDPOINTS: Final = 20

_KEYS = {"name", "url", "event_types"}
_KEEP_OLD = "keep_old_secret_active_for_24_hours"


class WebhookEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The WebhookEndpoint object. Of its secret it has the last characters."""

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: int
    updated_at: int
    name: str
    url: str
    event_types: tuple[str, ...]
    signing_secret_hint: str


class WebhookEndpointWithSecret(WebhookEndpoint, frozen=True, kw_only=True):
    """The same, once: as its secret is made."""

    signing_secret: str

    def __repr__(self) -> str:
        return f"WebhookEndpointWithSecret(id={self.id!r})"


class WebhookEndpointDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """What the deletion of an endpoint answers."""

    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: bool = True


class WebhookEndpointTest(msgspec.Struct, frozen=True, kw_only=True):
    """How a sample event was received. ``success``: there was an answer, whatever its status."""

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: bool = True


class WebhookEventTypeList(msgspec.Struct, frozen=True, kw_only=True):
    """All of them: this list has no pages."""

    object: Literal["list"] = "list"
    data: tuple[str, ...]


class WebhookSecret(msgspec.Struct, frozen=True, kw_only=True):
    """The secret that signs what goes to batches' own webhooks, once: as it is made."""

    object: Literal["webhook_secret"] = "webhook_secret"
    signing_secret: str
    signing_secret_hint: str

    def __repr__(self) -> str:
        return f"WebhookSecret({self.signing_secret_hint})"


@router.post("/webhook_endpoints")
async def create_endpoint(request: Request, caller: Authenticated) -> Response:
    asked = await read_json(request)
    asked.only(_KEYS)
    name, url, event_types = asked.text("name"), asked.text("url"), asked.texts("event_types")
    _check(caller, name, url)
    made = await caller.services.store.webhook_endpoints.create(
        caller.tenant,
        name=name,
        url=url,
        event_types=checked_event_types(event_types, param="event_types"),
    )
    return answer(_with_secret(made))


@router.get("/webhook_endpoints")
async def list_endpoints(request: Request, caller: Authenticated) -> Response:
    asked = {key: text for key, text in request.query_params.items() if key in {"limit", "after"}}
    paging = read_paging(asked, most=MOST_ENDPOINTS, default=DEFAULT_ENDPOINTS)
    with known_cursor(paging):
        page = await caller.services.store.webhook_endpoints.page(
            caller.tenant, limit=paging.limit, after=paging.after
        )
    return answer(to_list_page([_to_wire(each) for each in page], has_more=page.has_more))


@router.get("/webhook_endpoints/{webhook_endpoint_id}")
async def retrieve_endpoint(webhook_endpoint_id: str, caller: Authenticated) -> Response:
    endpoints = caller.services.store.webhook_endpoints
    return answer(_to_wire(await endpoints.get(webhook_endpoint_id, caller.tenant)))


@router.post("/webhook_endpoints/{webhook_endpoint_id}")
async def update_endpoint(
    webhook_endpoint_id: str, request: Request, caller: Authenticated
) -> Response:
    asked = await read_json(request, may_be_empty=True)
    asked.only(_KEYS)
    name, url = asked.optional_text("name"), asked.optional_text("url")
    event_types = asked.optional_texts("event_types")
    _check(caller, name, url)
    if event_types is not None:
        event_types = list(checked_event_types(event_types, param="event_types"))
    endpoint = await caller.services.store.webhook_endpoints.update(
        webhook_endpoint_id, caller.tenant, name=name, url=url, event_types=event_types
    )
    return answer(_to_wire(endpoint))


@router.delete("/webhook_endpoints/{webhook_endpoint_id}")
async def remove_endpoint(webhook_endpoint_id: str, caller: Authenticated) -> Response:
    await caller.services.store.webhook_endpoints.delete(webhook_endpoint_id, caller.tenant)
    return answer(WebhookEndpointDeleted(id=webhook_endpoint_id))


@router.post("/webhook_endpoints/{webhook_endpoint_id}/rotate_secret")
async def rotate_endpoint_secret(
    webhook_endpoint_id: str, request: Request, caller: Authenticated
) -> Response:
    keep_old = _keep_old(await read_json(request, may_be_empty=True))
    made = await caller.services.store.webhook_endpoints.rotate(
        webhook_endpoint_id, caller.tenant, keep_old=keep_old
    )
    return answer(_with_secret(made))


@router.post("/webhook_endpoints/{webhook_endpoint_id}/test")
async def test_endpoint(
    webhook_endpoint_id: str, request: Request, caller: Authenticated
) -> Response:
    asked = await read_json(request)
    asked.only({"event_type"})
    (event_type,) = checked_event_types([asked.text("event_type")], param="event_type")
    status_code = await send_test(
        caller.services, webhook_endpoint_id, event_type, tenant=caller.tenant
    )
    return answer(
        WebhookEndpointTest(
            webhook_endpoint_id=webhook_endpoint_id,
            event_type=event_type,
            status_code=status_code,
        )
    )


@router.get("/webhook_event_types")
async def list_event_types(_: Authenticated) -> Response:
    return answer(WebhookEventTypeList(data=EVENT_TYPES))


@router.post("/webhook_secret")
async def rotate_webhook_secret(request: Request, caller: Authenticated) -> Response:
    keep_old = _keep_old(await read_json(request, may_be_empty=True))
    secret = await caller.services.store.tenants.rotate_webhook_secret(
        caller.tenant, keep_old=keep_old
    )
    return answer(WebhookSecret(signing_secret=secret, signing_secret_hint=secret_hint(secret)))


def _check(caller: Caller, name: str | None, url: str | None) -> None:
    if name is not None:
        check_name(name)
    if url is not None:
        check_webhook_url(url, caller.services.settings, param="url")


def _keep_old(asked: JsonObject) -> bool:
    asked.only({_KEEP_OLD})
    return asked.optional_boolean(_KEEP_OLD) or False


def _to_wire(endpoint: WebhookEndpointRecord) -> WebhookEndpoint:
    return WebhookEndpoint(**_values(endpoint))


def _with_secret(made: EndpointWithSecret) -> WebhookEndpointWithSecret:
    return WebhookEndpointWithSecret(**_values(made.record), signing_secret=made.secret)


def _values(endpoint: WebhookEndpointRecord) -> dict[str, Any]:
    return {
        "id": endpoint.id,
        "created_at": endpoint.created_at,
        "updated_at": endpoint.updated_at,
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": endpoint.event_types,
        "signing_secret_hint": endpoint.secret_hint,
    }
