"""``/webhook_endpoints``: the URLs that receive a tenant's events, and test events.

Also ``/webhook_event_types``, and ``/webhook_secret``, which signs what goes to the URLs that
batches name themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Depends
from pydantic import Field

from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.http.json_body import Boolean, JsonBody, RequestBody, Text, Texts, Url, described
from batchyard.api.http.json_response import JsonResponse
from batchyard.api.http.pages import AskedPage, ListPage, known_cursor, to_list_page
from batchyard.api.http.route import Route
from batchyard.delivery.webhooks import secret_hint, send_test
from batchyard.notify.event import EVENT_TYPES
from batchyard.processes.tenant_turns import TenantTurns
from batchyard.services.webhook_checks import (
    MAX_NAME_CHARS,
    check_name,
    check_webhook_url,
    checked_event_types,
)

if TYPE_CHECKING:
    from batchyard.api.http.auth import Caller
    from batchyard.store import EndpointWithSecret, WebhookEndpointRecord

router = APIRouter(route_class=Route)

_TEST_TURNS: Final = TenantTurns(16)
"""Sample events that this process sends: a receiver may take its time."""
_LOST_URL: Final = "(lost with its key: set a new URL)"
"""OpenAI's clients expect a text here, never null."""

Name = Annotated[Text, described(minLength=1, maxLength=MAX_NAME_CHARS)]
EventType = Annotated[Text, described(enum=EVENT_TYPES)]
EventTypes = Annotated[Texts, described(items={"type": "string", "enum": EVENT_TYPES}, minItems=1)]


class CreateWebhookEndpoint(RequestBody):
    """A URL, and the events that are sent to it."""

    name: Name
    url: Url
    event_types: EventTypes


class UpdateWebhookEndpoint(RequestBody):
    """What is to change; null changes nothing."""

    name: Name | None = None
    url: Url | None = None
    event_types: EventTypes | None = None


class TestWebhookEndpoint(RequestBody):
    """The type of the sample event."""

    event_type: EventType


class RotateSecret(RequestBody):
    """What becomes of the old secret."""

    keep_old_secret_active_for_24_hours: Boolean | None = Field(
        default=None, description="Sign with the old secret as well for another day."
    )

    def keeps_old(self) -> bool:
        """Whether the old secret signs for another day."""
        return bool(self.keep_old_secret_active_for_24_hours)


RotateBody = Annotated[RotateSecret, Depends(JsonBody(RotateSecret, may_be_empty=True))]


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


@router.post("/webhook_endpoints", summary="Send events to a URL when batches end")
async def create_webhook_endpoint(
    caller: Authenticated,
    asked: Annotated[CreateWebhookEndpoint, Depends(JsonBody(CreateWebhookEndpoint))],
) -> JsonResponse[WebhookEndpointWithSecret]:
    """Send events of these types to the URL. The signing secret is only in this answer."""
    await _check(caller, asked.name, asked.url)
    made = await caller.services.store.webhook_endpoints.create(
        caller.tenant,
        name=asked.name,
        url=asked.url,
        event_types=checked_event_types(asked.event_types, param="event_types"),
    )
    return JsonResponse(_with_secret(made))


@router.get("/webhook_endpoints", summary="List webhook endpoints, the newest first")
async def list_webhook_endpoints(
    caller: Authenticated, paging: AskedPage
) -> JsonResponse[ListPage[WebhookEndpoint]]:
    """One page of your endpoints, without their secrets."""
    with known_cursor(paging):
        page = await caller.services.store.webhook_endpoints.page(
            caller.tenant, limit=paging.limit, after=paging.after
        )
    return JsonResponse(to_list_page([_to_wire(each) for each in page], has_more=page.has_more))


@router.get("/webhook_endpoints/{webhook_endpoint_id}", summary="Look at an endpoint")
async def retrieve_webhook_endpoint(
    webhook_endpoint_id: str, caller: Authenticated
) -> JsonResponse[WebhookEndpoint]:
    """The endpoint, without its secret."""
    endpoints = caller.services.store.webhook_endpoints
    return JsonResponse(_to_wire(await endpoints.get(webhook_endpoint_id, caller.tenant)))


@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}", summary="Change an endpoint, and enable it again"
)
async def update_webhook_endpoint(
    webhook_endpoint_id: str,
    caller: Authenticated,
    asked: Annotated[
        UpdateWebhookEndpoint, Depends(JsonBody(UpdateWebhookEndpoint, may_be_empty=True))
    ],
) -> JsonResponse[WebhookEndpoint]:
    """Change what is given and keep the rest. An endpoint that was disabled is enabled again."""
    await _check(caller, asked.name, asked.url)
    event_types = asked.event_types
    if event_types is not None:
        event_types = list(checked_event_types(event_types, param="event_types"))
    endpoint = await caller.services.store.webhook_endpoints.update(
        webhook_endpoint_id, caller.tenant, name=asked.name, url=asked.url, event_types=event_types
    )
    return JsonResponse(_to_wire(endpoint))


@router.delete("/webhook_endpoints/{webhook_endpoint_id}", summary="Delete an endpoint")
async def delete_webhook_endpoint(
    webhook_endpoint_id: str, caller: Authenticated
) -> JsonResponse[WebhookEndpointDeleted]:
    """Delete the endpoint. Its pending deliveries fail."""
    await caller.services.store.webhook_endpoints.delete(webhook_endpoint_id, caller.tenant)
    return JsonResponse(WebhookEndpointDeleted(id=webhook_endpoint_id))


@router.post(
    "/webhook_endpoints/{webhook_endpoint_id}/rotate_secret", summary="Make a new signing secret"
)
async def rotate_webhook_endpoint_secret(
    webhook_endpoint_id: str, caller: Authenticated, asked: RotateBody
) -> JsonResponse[WebhookEndpointWithSecret]:
    """Sign with a new secret, which is only in this answer."""
    made = await caller.services.store.webhook_endpoints.rotate(
        webhook_endpoint_id, caller.tenant, keep_old=asked.keeps_old()
    )
    return JsonResponse(_with_secret(made))


@router.post("/webhook_endpoints/{webhook_endpoint_id}/test", summary="Send a sample event now")
async def test_webhook_endpoint(
    webhook_endpoint_id: str,
    caller: Authenticated,
    asked: Annotated[TestWebhookEndpoint, Depends(JsonBody(TestWebhookEndpoint))],
) -> JsonResponse[WebhookEndpointTest]:
    """Send one signed sample event now, and return the status of the receiver's answer."""
    (event_type,) = checked_event_types([asked.event_type], param="event_type")
    async with _TEST_TURNS.turn(caller.tenant):
        status_code = await send_test(
            caller.services, webhook_endpoint_id, event_type, tenant=caller.tenant
        )
    return JsonResponse(
        WebhookEndpointTest(
            webhook_endpoint_id=webhook_endpoint_id,
            event_type=event_type,
            status_code=status_code,
        )
    )


@router.get("/webhook_event_types", summary="List event types")
async def list_webhook_event_types(_: Authenticated) -> JsonResponse[WebhookEventTypeList]:
    """The types of events that endpoints can receive."""
    return JsonResponse(WebhookEventTypeList(data=EVENT_TYPES))


@router.post(
    "/webhook_secret", summary="Make a new secret for the URLs that batches name themselves"
)
async def rotate_webhook_secret(
    caller: Authenticated, asked: RotateBody
) -> JsonResponse[WebhookSecret]:
    """Sign events to `webhook_url` with a new secret, which is only in this answer."""
    secret = await caller.services.store.tenants.rotate_webhook_secret(
        caller.tenant, keep_old=asked.keeps_old()
    )
    return JsonResponse(
        WebhookSecret(signing_secret=secret, signing_secret_hint=secret_hint(secret))
    )


async def _check(caller: Caller, name: str | None, url: str | None) -> None:
    if name is not None:
        check_name(name)
    if url is not None:
        await check_webhook_url(url, caller.services.settings, param="url")


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
        "url": _LOST_URL if endpoint.url is None else endpoint.url,
        "event_types": endpoint.event_types,
        "signing_secret_hint": endpoint.secret_hint,
    }
