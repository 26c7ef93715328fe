"""``/batches/{batch_id}/events``: a batch's changes as server-sent events."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from batchyard.api.batches.event_stream import EventStream, event_id
from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.http.route import HEADERS, Route, may_refuse
from batchyard.lifecycle import TERMINAL
from batchyard.wire import to_json

router = APIRouter(prefix="/batches", route_class=Route)

_STREAM = {
    "description": "`text/event-stream`: an event `batch` with the Batch object when it changes, "
    "and an event `progress` with counts, speed and forecast while it runs.",
    "headers": HEADERS,
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


@router.get(
    "/{batch_id}/events",
    summary="Follow a batch",
    responses={
        200: _STREAM,
        204: {"description": "The batch has ended, and `Last-Event-ID` is its last event."},
        **may_refuse(429),
    },
)
async def batch_event_stream(
    batch_id: str,
    request: Request,
    caller: Authenticated,
    last_event_id: Annotated[
        str | None,
        Header(
            alias="Last-Event-ID",
            description="The `id` of the last event, when a client connects again.",
        ),
    ] = None,
) -> Response:
    """Send the batch's changes as they happen, until it has ended.

    An operator's key may follow the batches of all tenants.
    """
    batch = await caller.services.store.batches.get(batch_id, caller.sees_tenant)
    if batch.status in TERMINAL and last_event_id == event_id(to_json(batch.to_wire())):
        # With any other answer an EventSource would connect again and again.
        return Response(status_code=204)
    return EventStream(
        request.app.state.batch_watch, batch_id, caller.tenant, last_event_id=last_event_id
    )
