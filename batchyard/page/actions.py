"""The page: what its buttons do, and the files that it gives. Each answer leads back to a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from batchyard.api.batches.batches import RETRY_TURNS, accepted_before, as_batches_say
from batchyard.api.files.files import file_response
from batchyard.api.http.api_error import ApiError
from batchyard.api.http.session import PageCaller, read_form
from batchyard.errors import TransitionConflict
from batchyard.page.form_key import key_of
from batchyard.page.route import PageRoute
from batchyard.page.routes import answers_of
from batchyard.steps.create.create import MAX_PRIORITY
from batchyard.steps.retry.retry import RetryCaller, retry_batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.api.http.auth import Caller
    from batchyard.store import BatchRecord

router = APIRouter(include_in_schema=False, route_class=PageRoute)

_SEE_OTHER: Final = 303


@router.post("/batches/{batch_id}/pause")
async def pause(batch_id: str, request: Request, caller: PageCaller) -> Response:
    """Start no more of its requests until it is unpaused."""
    return await _steer(request, caller, batch_id, caller.services.store.batch_schedule.pause)


@router.post("/batches/{batch_id}/unpause")
async def unpause(batch_id: str, request: Request, caller: PageCaller) -> Response:
    """Continue the paused batch."""
    return await _steer(request, caller, batch_id, caller.services.store.batch_schedule.unpause)


@router.post("/batches/{batch_id}/priority")
async def set_priority(batch_id: str, request: Request, caller: PageCaller) -> Response:
    """Set its priority."""
    text = (await read_form(request)).get("priority", "").strip()
    try:
        priority = int(text)
    except ValueError:
        raise ApiError(400, "The priority must be a whole number.") from None
    if abs(priority) > MAX_PRIORITY:
        raise ApiError(400, f"The priority must be from -{MAX_PRIORITY:,} to {MAX_PRIORITY:,}.")
    schedule = caller.services.store.batch_schedule
    return await _steer(
        request, caller, batch_id, lambda each: schedule.set_priority(each, priority)
    )


@router.post("/batches/{batch_id}/cancel")
async def cancel(batch_id: str, request: Request, caller: PageCaller) -> Response:
    """Cancel the batch; finished lines are kept."""
    response = await _steer(request, caller, batch_id, caller.services.store.batches.cancel)
    request.app.state.request_runner()
    return response


@router.post("/batches/{batch_id}/retry")
async def retry(batch_id: str, request: Request, caller: PageCaller) -> Response:
    """Make a new batch of its lines that failed, and go there.

    A form that is sent twice makes one batch, and leads there both times.
    """
    services = caller.services
    batch = await services.store.batches.get(batch_id, caller.sees_tenant)
    key = key_of(f"POST /batches/{batch_id}/retry", await read_form(request))
    asking = RetryCaller(idempotency=key)
    if not caller.is_operator:
        pace = services.settings.quota.batches_per_hour
        asking = RetryCaller(tenant=caller.tenant, batches_per_hour=pace, idempotency=key)
    async with RETRY_TURNS.turn(caller.tenant):
        with as_batches_say():
            # Within the turn: of two clicks, the second one waits for the batch of the first one.
            # Keys are kept by tenant, and the new batch is of the old one's tenant.
            earlier = await accepted_before(services.store, batch.tenant, key)
            if earlier is None:
                new_id = await retry_batch(services, batch_id, caller=asking)
            else:
                new_id = earlier.id
    request.app.state.request_runner()
    return _back(request, new_id)


@router.post("/batches/{batch_id}/deliveries/{delivery_id}/replay")
async def replay(batch_id: str, delivery_id: str, request: Request, caller: PageCaller) -> Response:
    """Send a delivery that has ended once more."""
    try:
        await caller.services.store.deliveries.replay(delivery_id, caller.sees_tenant)
    except TransitionConflict as error:
        raise ApiError(409, str(error)) from None
    request.app.state.request_runner()
    return _back(request, batch_id)


@router.get("/batches/{batch_id}/files/{kind}")
async def download(batch_id: str, kind: str, caller: PageCaller) -> Response:
    """One of its files, to be saved: a browser must not show what a model has written as a page."""
    batch = await caller.services.store.batches.get(batch_id, caller.sees_tenant)
    ids = {
        "input": batch.input_file_id,
        "output": batch.output_file_id,
        "error": batch.error_file_id,
    }
    file_id = ids.get(kind)
    if file_id is None:
        raise ApiError(404, "The batch has no such file.")
    file = await caller.services.store.files.get(file_id, batch.tenant)
    return await file_response(caller, file)


async def _steer(
    request: Request,
    caller: Caller,
    batch_id: str,
    change: Callable[[str], Awaitable[BatchRecord]],
) -> Response:
    # The change itself does not check the tenant.
    await caller.services.store.batches.get(batch_id, caller.sees_tenant)
    try:
        await change(batch_id)
    except TransitionConflict as error:
        raise ApiError(409, str(error)) from None
    return _back(request, batch_id)


def _back(request: Request, batch_id: str) -> Response:
    answers_of(request).forget()
    return RedirectResponse(f"/batches/{batch_id}", status_code=_SEE_OTHER)
