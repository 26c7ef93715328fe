"""``/deliveries``: list notifications and result files, look at each attempt, send again."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import WithJsonSchema

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.http.json_body import JsonBody, NoKeys
from batchyard.api.http.json_response import JsonResponse
from batchyard.api.http.pages import AskedPage, ListPage, known_cursor, to_list_page
from batchyard.api.http.route import Route, may_refuse
from batchyard.delivery.webhooks import (
    Delivery,
    DeliveryWithAttempts,
    delivery_object,
    delivery_with_attempts,
)
from batchyard.errors import TransitionConflict
from batchyard.store import DeliveryStatus

router = APIRouter(prefix="/deliveries", route_class=Route)


@router.get("", summary="List deliveries, the newest first")
async def list_deliveries(
    caller: Authenticated,
    paging: AskedPage,
    batch_id: str | None = None,
    webhook_endpoint_id: str | None = None,
    status: Annotated[
        str | None, WithJsonSchema({"type": "string", "enum": list(DeliveryStatus)})
    ] = None,
) -> JsonResponse[ListPage[Delivery]]:
    """One page of the notifications and result files that were sent or are to be sent."""
    with known_cursor(paging):
        page = await caller.services.store.deliveries.page(
            caller.tenant,
            batch_id=batch_id or None,
            endpoint_id=webhook_endpoint_id or None,
            status=_status(status),
            limit=paging.limit,
            after=paging.after,
        )
    return JsonResponse(
        to_list_page([delivery_object(each) for each in page], has_more=page.has_more)
    )


@router.get("/{delivery_id}", summary="Look at a delivery and its attempts")
async def retrieve_delivery(
    delivery_id: str, caller: Authenticated
) -> JsonResponse[DeliveryWithAttempts]:
    """The delivery and the log of its attempts, with the status and the error of each."""
    deliveries = caller.services.store.deliveries
    delivery = await deliveries.get(delivery_id, caller.tenant)
    return JsonResponse(delivery_with_attempts(delivery, await deliveries.attempts(delivery_id)))


@router.post(
    "/{delivery_id}/replay", summary="Deliver it again, from the start", responses=may_refuse(409)
)
async def replay_delivery(
    delivery_id: str,
    request: Request,
    caller: Authenticated,
    _: Annotated[NoKeys, Depends(JsonBody(NoKeys, may_be_empty=True))],
) -> JsonResponse[Delivery]:
    """Send a delivery that has ended once more, under the same id.

    If it is pending, the answer is a 409.
    """
    try:
        delivery = await caller.services.store.deliveries.replay(delivery_id, caller.tenant)
    except TransitionConflict as error:
        raise ApiError(409, str(error)) from None
    request.app.state.request_runner()
    return JsonResponse(delivery_object(delivery))


def _status(text: str | None) -> DeliveryStatus | None:
    if not text:
        return None
    try:
        return DeliveryStatus(text)
    except ValueError:
        offered = ", ".join(DeliveryStatus)
        raise ApiError(
            400, f"'status' must be one of {offered}.", param="status", code="invalid_value"
        ) from None
