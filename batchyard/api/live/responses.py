"""``/responses``: create one, live or in the background; look at, cancel, delete the latter.

A request without ``background`` is a live one, and :mod:`batchyard.api.live.live` answers it.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.http.body import parse_large_object, read_within
from batchyard.api.http.errors import FULL_RETRY_AFTER_SECONDS
from batchyard.api.http.json_response import JsonResponse
from batchyard.api.http.pages import (
    DEFAULT_LISTED,
    MOST_LISTED,
    After,
    known_cursor,
    limit_schema,
    read_paging,
)
from batchyard.api.http.route import HEADERS, Route
from batchyard.api.live.live import ANSWERS, BODY, pass_on
from batchyard.batch.responses import (
    ANSWERED,
    ResponseStatus,
    answered_object,
    input_items,
    response_object,
)
from batchyard.errors import (
    ObjectNotFound,
    RecordNotFound,
    RequestRefused,
    StorageLimitExceeded,
    TransitionConflict,
    WindowUnattainable,
)
from batchyard.files.delete import delete_file
from batchyard.files.found_lines import whole_lines
from batchyard.lifecycle import TERMINAL
from batchyard.lines.framing import custom_id_of
from batchyard.logs.printable import printable
from batchyard.processes.tenant_turns import TenantTurns
from batchyard.steps.create.accept_response import accept_response, window_of
from batchyard.wire import result_file_id

if TYPE_CHECKING:
    from batchyard.api.http.auth import Caller
    from batchyard.services.services import Services
    from batchyard.storage.base import Storage
    from batchyard.store import ResponseRecord

_BODIES: Final = TenantTurns(None, of_each=16)
"""Large bodies of one tenant at a time: its others wait, so that none fills everybody's memory.

Whether a request is a live one, and counts as such, is known when its body is parsed.
"""
_SHOWN_CHARS: Final = 100
_OBJECT: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The Response object.",
        "headers": HEADERS,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """What the deletion of a response answers."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


router = APIRouter(prefix="/responses", route_class=Route)


@router.post(
    "",
    summary="Create a response: live, or in the background",
    responses=ANSWERS,
    openapi_extra=BODY,
)
async def create_response(request: Request, caller: Authenticated) -> Response:
    """Have a model answer. With `"background": true` the answer is a response that is `queued`.

    Retrieve it until it has ended, or have a webhook tell you. `background_options` with a
    `completion_window` of `2h` or `8h` gives it more time. Without `background` it is a live
    request: an engine that is live answers at once.
    """
    async with _BODIES.turn(caller.tenant):
        raw = await read_within(request, caller.services.settings.limits.max_line_bytes)
        body = parse_large_object(raw)
        window_of(body)
        if body.get("background"):
            return await _accept(request, caller, body)
    # Its limit of live requests bounds the rest.
    del body
    return await pass_on(request, caller, raw)


@router.get("/{response_id}", summary="Look at a background response", responses=_OBJECT)
async def retrieve_response(
    response_id: str, request: Request, caller: Authenticated, stream: str | None = None
) -> Response:
    """The response as it is now, with the engine's whole answer once it is `completed`."""
    if stream is not None and stream.lower() not in {"", "false", "0"}:
        raise ApiError(
            400,
            "A background response cannot be streamed: retrieve it until it has ended.",
            param="stream",
            code="unsupported_parameter",
        )
    record = await caller.services.store.responses.get(response_id, caller.tenant)
    return JsonResponse(await _object(request, record))


@router.get(
    "/{response_id}/input_items",
    summary="List the input of a background response",
    responses={
        200: {
            "description": "One page of input items.",
            "headers": HEADERS,
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
    },
)
async def list_input_items(
    response_id: str,
    caller: Authenticated,
    limit: Annotated[str | None, limit_schema(MOST_LISTED, DEFAULT_LISTED)] = None,
    after: After = None,
    order: Annotated[str | None, Query(description="`asc` or, by default, `desc`.")] = None,
) -> Response:
    """What was given as `input`, as items. A text is one message with the role `user`."""
    asked = {"limit": limit, "after": after, "order": order}
    paging = read_paging(asked, most=MOST_LISTED, default=DEFAULT_LISTED)
    await caller.services.store.responses.get(response_id, caller.tenant)
    async with _BODIES.turn(caller.tenant):
        items = input_items(response_id, await _input_line(caller.services, response_id))
    if paging.order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    with known_cursor(paging):
        start = 0 if paging.after is None else _place_of(paging.after, ids) + 1
    data = items[start : start + paging.limit]
    page = {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + len(data) < len(items),
    }
    # Not msgspec, which cannot write the large integers that it reads.
    return Response(json.dumps(page), media_type="application/json")


@router.post("/{response_id}/cancel", summary="Cancel a background response", responses=_OBJECT)
async def cancel_response(response_id: str, request: Request, caller: Authenticated) -> Response:
    """Cancel the response. One that has ended stays as it is, and is the answer all the same."""
    record = await caller.services.store.responses.cancel(response_id, caller.tenant)
    if record.status is ResponseStatus.CANCELLED and await _is_last(caller.services, record):
        await _stop_batch(request, record)
    return JsonResponse(await _object(request, record))


@router.delete("/{response_id}", summary="Delete a background response")
async def delete_response(
    response_id: str, request: Request, caller: Authenticated
) -> JsonResponse[ResponseDeleted]:
    """Delete the response and its answer. One that has not ended is not run."""
    services = caller.services
    record = await services.store.responses.delete(response_id, caller.tenant)
    if await _is_last(services, record):
        await _stop_batch(request, record)
        await _delete_files(services, record)
    return JsonResponse(ResponseDeleted(id=response_id))


async def _input_line(services: Services, response_id: str) -> bytes:
    """The response as a line of an input file. Raises 404 where it is no longer kept."""
    store = services.store
    # First, because it moves from the row into the file of a batch.
    line = await store.responses.line(response_id)
    if line is None:
        record = await store.responses.get(response_id)
        if record.batch_id is not None:
            batch = await store.batches.get(record.batch_id)
            with contextlib.suppress(RecordNotFound, ObjectNotFound):
                file = await store.files.get(batch.input_file_id)
                line = await _line_of(services.storage, file.storage_key, response_id)
    if line is None:
        raise ApiError(404, f"The input of the response '{response_id}' is no longer kept.")
    return line


async def _line_of(storage: Storage, key: str, custom_id: str) -> bytes | None:
    name = custom_id.encode()
    async with contextlib.aclosing(whole_lines(storage.get(key))) as blocks:
        async for lines in blocks:
            for line in lines:
                # The first is faster, and also finds a prompt that has the name.
                if name in line and custom_id_of(line) == custom_id:
                    return line
    return None


def _place_of(item_id: str, ids: list[str]) -> int:
    if item_id not in ids:
        raise RecordNotFound("There is no such item.")
    return ids.index(item_id)


async def _accept(request: Request, caller: Caller, body: dict[str, Any]) -> Response:
    """Make a response of it that is queued."""
    await _check_model(request, body.get("model"))
    try:
        record = await accept_response(caller.services, caller.tenant, body)
    except StorageLimitExceeded as error:
        raise ApiError(413, str(error), param="input", code=error.code) from None
    except WindowUnattainable as error:
        raise ApiError(
            429,
            str(error),
            type="tokens",
            param=error.param,
            code=error.refusal_code,
            headers={"retry-after": str(FULL_RETRY_AFTER_SECONDS)},
        ) from None
    request.app.state.request_runner()
    return JsonResponse(await _object(request, record))


async def _check_model(request: Request, model: Any) -> None:
    """Raise 404 for a model that nothing serves or ever served, as far as Prefect says.

    What cannot be the name of one is refused with the rest of the body.
    """
    catalogue = request.app.state.catalogue
    if not isinstance(model, str) or "\0" in model:
        return
    if await catalogue.find_again(model) is not None:
        return
    services: Services = request.app.state.services
    if await catalogue.prefect_answers() and not await services.store.rates.knows(model):
        shown = printable(model[:_SHOWN_CHARS], "?")
        message = f"The model '{shown}' does not exist."
        raise ApiError(404, message, param="model", code="model_not_found")


async def _object(request: Request, record: ResponseRecord) -> dict[str, Any]:
    """The Response object. Raises 404 for one whose answer is no longer kept."""
    given = msgspec.json.decode(record.given)
    if record.status not in ANSWERED or record.batch_id is None:
        return response_object(
            given,
            record.status,
            created_at=record.created_at,
            ended_at=record.ended_at,
            error=record.error,
        )
    batch = await request.app.state.services.store.batches.get(record.batch_id)
    try:
        found = await request.app.state.results.find(batch, record.id)
    except RequestRefused as error:
        if error.refusal_code == "result_not_ready":
            # What ended it is not to be seen from here yet.
            return response_object(given, ResponseStatus.IN_PROGRESS, created_at=record.created_at)
        raise ApiError(404, f"Response with id '{record.id}' not found.") from None
    return answered_object(
        given, found.line, record.status, created_at=record.created_at, ended_at=record.ended_at
    )


async def _is_last(services: Services, record: ResponseRecord) -> bool:
    """Whether there is a batch of the response, and no other response of it is open."""
    batch_id = record.batch_id
    return batch_id is not None and not await services.store.responses.has_open(batch_id)


async def _stop_batch(request: Request, record: ResponseRecord) -> None:
    """Cancel the batch that runs the response: its answers are no longer wanted."""
    assert record.batch_id is not None  # noqa: S101 - it has a batch
    with contextlib.suppress(TransitionConflict):
        await request.app.state.services.store.batches.cancel(record.batch_id)
        request.app.state.request_runner()


async def _delete_files(services: Services, record: ResponseRecord) -> None:
    """Those of a batch whose last response was deleted; one that runs does so at its end."""
    assert record.batch_id is not None  # noqa: S101 - it has a batch
    batch = await services.store.batches.get(record.batch_id)
    if batch.status not in TERMINAL or await services.store.responses.has_any(batch.id):
        return
    results = (result_file_id(batch.id, "output"), result_file_id(batch.id, "error"))
    for file_id in (batch.input_file_id, *results):
        with contextlib.suppress(RecordNotFound):
            await delete_file(services, record.tenant, file_id)
