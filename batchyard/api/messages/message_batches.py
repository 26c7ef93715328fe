"""``/messages/batches``: Anthropic's Message Batches, which are batches of ``/v1/messages``.

Only the shapes are other ones: a Message Batch is validated, planned, run and kept as any batch.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from batchyard.api.batches.batch_of_lines import accept_batch_of
from batchyard.api.batches.batches import as_batches_say
from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.http.json_body import AnyKeys, JsonBody
from batchyard.api.http.json_response import JsonResponse
from batchyard.api.http.message_errors import MESSAGES
from batchyard.api.http.pages import limit_schema, read_paging
from batchyard.api.http.route import HEADERS, Route, may_refuse
from batchyard.api.messages.message_requests import CUSTOM_ID_PATTERN, read_lines
from batchyard.api.messages.message_results import open_results
from batchyard.api.messages.message_shapes import (
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchList,
    batch_id_of,
    to_message_batch,
)
from batchyard.batch.batch_options import OnInvalid
from batchyard.errors import RecordNotFound, TransitionConflict
from batchyard.files.delete import delete_file
from batchyard.lifecycle import TERMINAL
from batchyard.steps.create.create import BatchRequest
from batchyard.wire import result_file_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.api.http.auth import Caller
    from batchyard.store import BatchRecord

router = APIRouter(prefix="/messages/batches", route_class=Route)

_MOST_LISTED: Final = 1000
_LISTED: Final = 20
_WINDOW: Final = "24h"
# Clients would parse what says that it is JSON.
_JSONL: Final = "application/x-jsonl"

_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "requests": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "custom_id": {"type": "string", "pattern": CUSTOM_ID_PATTERN},
                    "params": {
                        "type": "object",
                        "description": f"The body of a request to `{MESSAGES}`.",
                    },
                },
                "required": ["custom_id", "params"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["requests"],
    "additionalProperties": False,
}
_RESULTS: Final[dict[str, Any]] = {
    "description": "JSON Lines, one for each request: its `custom_id` and its `result`, whose "
    "`type` is `succeeded`, `errored`, `canceled` or `expired`. In no particular order.",
    "headers": HEADERS,
    "content": {_JSONL: {"schema": {"type": "string"}}},
}


@router.post(
    "",
    summary="Create a Message Batch",
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": _BODY}}}
    },
    responses=may_refuse(429, for_messages=True),
)
async def create_message_batch(
    request: Request, caller: Authenticated
) -> JsonResponse[MessageBatch]:
    """Create a batch of requests to `/v1/messages`, which all come with this one.

    All must name the same model. A request whose `params` are not valid ends as `errored`.
    """
    services = caller.services
    async with read_lines(request, services, caller.tenant) as lines:
        with as_batches_say():
            batch = await accept_batch_of(
                services,
                lines.parts(),
                BatchRequest(
                    tenant=caller.tenant,
                    endpoint=MESSAGES,
                    completion_window=_WINDOW,
                    public_urls=True,
                    on_invalid=OnInvalid.ERROR_FILE,
                    message_requests=lines.count,
                    traceparent=request.headers.get("traceparent"),
                ),
                batches_per_hour=services.settings.quota.batches_per_hour,
            )
    request.app.state.request_runner()
    return await _answer(caller, batch)


@router.get("", summary="List Message Batches, the newest first")
async def list_message_batches(
    caller: Authenticated,
    limit: Annotated[str | None, limit_schema(_MOST_LISTED, _LISTED)] = None,
    after_id: Annotated[
        str | None, Query(description="The id after which the page begins.")
    ] = None,
    before_id: Annotated[
        str | None, Query(description="Instead of `after_id`: the id before which the page ends.")
    ] = None,
) -> JsonResponse[MessageBatchList]:
    """One page of your Message Batches. Other batches are not among them."""
    paging = read_paging({"limit": limit}, most=_MOST_LISTED, default=_LISTED)
    if after_id and before_id:
        raise ApiError(400, "Give 'after_id' or 'before_id', not both.")
    services = caller.services
    try:
        page = await services.store.message_batches.page(
            caller.tenant,
            limit=paging.limit,
            after=batch_id_of(after_id) if after_id else None,
            before=batch_id_of(before_id) if before_id else None,
        )
    except RecordNotFound:
        raise ApiError(400, "'after_id' and 'before_id' must be ids of Message Batches.") from None
    now = await services.store.database.now()
    data = [to_message_batch(each, now=now) for each in page]
    return JsonResponse(
        MessageBatchList(
            data=data,
            has_more=page.has_more,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
        )
    )


@router.get("/{message_batch_id}", summary="Look at a Message Batch")
async def retrieve_message_batch(
    message_batch_id: str, caller: Authenticated
) -> JsonResponse[MessageBatch]:
    """The Message Batch. Its counts are those of its end; until then all are processing."""
    return await _answer(caller, await _found(caller, message_batch_id))


@router.post("/{message_batch_id}/cancel", summary="Cancel a Message Batch")
async def cancel_message_batch(
    message_batch_id: str,
    request: Request,
    caller: Authenticated,
    _: Annotated[AnyKeys, Depends(JsonBody(AnyKeys, may_be_empty=True))],
) -> JsonResponse[MessageBatch]:
    """Stop it: requests that are answered keep their results, all others are canceled."""
    batch = await _found(caller, message_batch_id)
    with _if_ended_otherwise("It cannot be canceled: it has ended."):
        batch = await caller.services.store.batches.cancel(batch.id, caller.tenant)
    # A batch without an owner needs a runner that ends it.
    request.app.state.request_runner()
    return await _answer(caller, batch)


@router.delete("/{message_batch_id}", summary="Delete a Message Batch")
async def delete_message_batch(
    message_batch_id: str, caller: Authenticated
) -> JsonResponse[DeletedMessageBatch]:
    """Delete one that has ended, with its requests and results."""
    batch = await _found(caller, message_batch_id)
    services = caller.services
    if batch.status in TERMINAL:
        # First, so that a deletion that breaks off can be repeated.
        results = (batch.output_file_id, batch.error_file_id, result_file_id(batch.id, "ledger"))
        for file_id in (batch.input_file_id, *results):
            if file_id is not None:
                with suppress(RecordNotFound):
                    await delete_file(services, caller.tenant, file_id)
    with _if_ended_otherwise("It cannot be deleted before it has ended: cancel it first."):
        await services.store.message_batches.delete(batch.id, caller.tenant)
    return JsonResponse(DeletedMessageBatch(id=message_batch_id))


@router.get(
    "/{message_batch_id}/results",
    summary="Read the results of a Message Batch",
    response_class=StreamingResponse,
    responses={200: _RESULTS},
)
async def stream_message_results(message_batch_id: str, caller: Authenticated) -> StreamingResponse:
    """The results of one that has ended."""
    batch = await _found(caller, message_batch_id)
    if batch.status not in TERMINAL:
        raise ApiError(404, f"{message_batch_id} has no results yet: it has not ended.")
    return StreamingResponse(
        await open_results(caller.services, batch),
        media_type=_JSONL,
        headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
    )


async def _answer(caller: Caller, batch: BatchRecord) -> JsonResponse[MessageBatch]:
    now = await caller.services.store.database.now()
    return JsonResponse(to_message_batch(batch, now=now))


async def _found(caller: Caller, message_batch_id: str) -> BatchRecord:
    """Raises 404 as well for another tenant's, and for a batch that is no Message Batch."""
    store = caller.services.store
    try:
        return await store.message_batches.get(batch_id_of(message_batch_id), caller.tenant)
    except RecordNotFound:
        message = f"No Message Batch found with id '{message_batch_id}'."
        raise ApiError(404, message) from None


@contextmanager
def _if_ended_otherwise(message: str) -> Iterator[None]:
    try:
        yield
    except TransitionConflict:
        raise ApiError(400, message) from None
