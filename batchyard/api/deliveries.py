"""``/deliveries``: who was told of what, each attempt, and once more from the start."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from batchyard.api.answer import answer
from batchyard.api.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.body import read_json
from batchyard.api.errors import ApiError
from batchyard.api.pages import known_cursor, read_paging, to_list_page
from batchyard.delivery.webhooks import delivery_object, delivery_with_attempts
from batchyard.errors import TransitionConflict
from batchyard.store import DeliveryStatus

router = APIRouter(prefix="/deliveries")

MOST_DELIVERIES: Final = 100
DEFAULT_DELIVERIES: Final = 20


@router.get("")
async def list_deliveries(request: Request, caller: Authenticated) -> Response:
    query = request.query_params
    asked = {key: text for key, text in query.items() if key in {"limit", "after"}}
    paging = read_paging(asked, most=MOST_DELIVERIES, default=DEFAULT_DELIVERIES)
    with known_cursor(paging):
        page = await caller.services.store.deliveries.page(
            caller.tenant,
            batch_id=query.get("batch_id") or None,
            endpoint_id=query.get("webhook_endpoint_id") or None,
            status=_status(query.get("status")),
            limit=paging.limit,
            after=paging.after,
        )
    return answer(to_list_page([delivery_object(each) for each in page], has_more=page.has_more))


@router.get("/{delivery_id}")
async def retrieve_delivery(delivery_id: str, caller: Authenticated) -> Response:
    deliveries = caller.services.store.deliveries
    delivery = await deliveries.get(delivery_id, caller.tenant)
    return answer(delivery_with_attempts(delivery, await deliveries.attempts(delivery_id)))


@router.post("/{delivery_id}/replay")
async def replay_delivery(delivery_id: str, request: Request, caller: Authenticated) -> Response:
    (await read_json(request, may_be_empty=True)).only(set())
    try:
        delivery = await caller.services.store.deliveries.replay(delivery_id, caller.tenant)
    except TransitionConflict as error:
        raise ApiError(409, str(error)) from None
    request.app.state.wake()
    return answer(delivery_object(delivery))


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
