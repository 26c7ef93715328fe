"""``/batches``: create, list, look at, cancel, retry, deliver the results again."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

from fastapi import APIRouter, Depends, Header, Request
from pydantic import WithJsonSchema

from batchyard.api.batches.batch_body import CreateBatch, DeliverResults
from batchyard.api.batches.batch_of_lines import accept_batch_of
from batchyard.api.batches.retry_body import RetryBatch
from batchyard.api.batches.runner_starter import starting_runners
from batchyard.api.batches.stages import stages_of
from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.http.errors import FULL_RETRY_AFTER_SECONDS
from batchyard.api.http.json_body import AnyKeys, JsonBody
from batchyard.api.http.json_response import JsonResponse
from batchyard.api.http.pages import AskedPage, ListPage, known_cursor, to_list_page
from batchyard.api.http.request_lines import KEY
from batchyard.api.http.route import Route, may_refuse
from batchyard.batch.chains import BatchStages
from batchyard.delivery.redeliver import ask_for_delivery, redirect
from batchyard.delivery.webhooks import Delivery, delivery_object
from batchyard.errors import (
    BatchRateExceeded,
    IdempotencyConflict,
    ObjectTooLarge,
    RequestRefused,
    TransitionConflict,
    WindowUnattainable,
)
from batchyard.lifecycle import STOPPABLE
from batchyard.locations.location import parse_location
from batchyard.processes.tenant_turns import TenantTurns
from batchyard.steps.create.create import accept_batch
from batchyard.steps.create.destinations import check_destinations
from batchyard.steps.retry.retry import RetryCaller, accept_retry
from batchyard.store import IdempotencyKey
from batchyard.wire import Batch  # noqa: TC001 — FastAPI reads it at run time

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from batchyard.delivery.redeliver import Kind
    from batchyard.locations.access import Location
    from batchyard.services.services import Services
    from batchyard.steps.create.create import BatchRequest
    from batchyard.store import BatchRecord, Store

router = APIRouter(prefix="/batches", lifespan=starting_runners, route_class=Route)

MAX_KEY_CHARS: Final = 255

_ROUTE = "POST /v1/batches"
RETRY_TURNS: Final = TenantTurns(1)
"""Retries that this process prepares: each reads whole files."""
_PARAMS = {"input": "input_url", "output": "output_url", "error": "error_url", "file": KEY}


IdempotencyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="For 24 hours, the same key and body give the same batch.",
    ),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS}),
]


@router.post("", summary="Create a batch", responses=may_refuse(409, 429))
async def create_batch(
    request: Request,
    caller: Authenticated,
    asked: Annotated[CreateBatch, Depends(JsonBody(CreateBatch, has_lines=True))],
    idempotency_key: IdempotencyHeader = None,
) -> JsonResponse[Batch]:
    """Create a batch from an uploaded file, from `input_url`, or from the lines in `requests`."""
    key = await _idempotency_key(_ROUTE, idempotency_key, asked)
    services = caller.services
    with as_batches_say():
        batch = await accepted_before(caller.services.store, caller.tenant, key)
        if batch is None:
            wanted = replace(
                await asked.to_request(caller.tenant, services.settings),
                traceparent=request.headers.get("traceparent"),
            )
            batch = await _accept(services, asked, wanted, key)
    request.app.state.request_runner()
    return JsonResponse(batch.to_wire())


@router.get("", summary="List batches, the newest first")
async def list_batches(caller: Authenticated, paging: AskedPage) -> JsonResponse[ListPage[Batch]]:
    """One page of your batches. To get the next page, pass the last id as `after`."""
    with known_cursor(paging):
        page = await caller.services.store.batches.page(
            caller.tenant, limit=paging.limit, after=paging.after
        )
    return JsonResponse(to_list_page([batch.to_wire() for batch in page], has_more=page.has_more))


@router.get("/{batch_id}", summary="Look at a batch")
async def retrieve_batch(batch_id: str, caller: Authenticated) -> JsonResponse[Batch]:
    """The batch with its status, its counts up to now, its usage and the ids of its files."""
    batch = await caller.services.store.batches.get(batch_id, caller.tenant)
    return JsonResponse(batch.to_wire())


@router.get("/{batch_id}/stages", summary="Look at the stages of a batch")
async def list_stages(batch_id: str, caller: Authenticated) -> JsonResponse[BatchStages]:
    """Its stages in their order, with counts up to now; a batch without `then` has one.

    A stage's `output_file_id` names its answers once the batch has ended.
    """
    services = caller.services
    batch = await services.store.batches.get(batch_id, caller.tenant)
    return JsonResponse(BatchStages(data=tuple(await stages_of(services, batch))))


@router.post("/{batch_id}/cancel", summary="Cancel a batch", responses=may_refuse(409))
async def cancel_batch(
    batch_id: str,
    request: Request,
    caller: Authenticated,
    _: Annotated[AnyKeys, Depends(JsonBody(AnyKeys, may_be_empty=True))],
) -> JsonResponse[Batch]:
    """Stop the batch: it is `cancelling` at once, and `cancelled` when its files are written.

    Finished lines keep their results. If the batch has ended already, the answer is a 409.
    """
    try:
        batch = await caller.services.store.batches.cancel(batch_id, caller.tenant)
    except TransitionConflict as error:
        raise ApiError(409, str(error)) from None
    # A batch without an owner needs a runner that ends it.
    request.app.state.request_runner()
    return JsonResponse(batch.to_wire())


@router.post(
    "/{batch_id}/retry",
    summary="Run lines of a batch again",
    responses=may_refuse(409, 429),
)
async def retry_batch(
    batch_id: str,
    request: Request,
    caller: Authenticated,
    asked: Annotated[RetryBatch, Depends(JsonBody(RetryBatch, may_be_empty=True))],
    idempotency_key: IdempotencyHeader = None,
) -> JsonResponse[Batch]:
    """Create a batch from lines of one that has ended: the failed ones, or those that you choose.

    `set` and `unset` change their bodies. The first batch stays as it is. If it has not ended, or
    no line is chosen, the answer is a 409.
    """
    services = caller.services
    key = await _idempotency_key(f"{_ROUTE}/{batch_id}/retry", idempotency_key, asked)
    asking = RetryCaller(
        tenant=caller.tenant,
        batches_per_hour=services.settings.quota.batches_per_hour,
        idempotency=key,
    )
    with as_batches_say(), _as_retries_say():
        batch = await accepted_before(services.store, caller.tenant, key)
        if batch is None:
            async with RETRY_TURNS.turn(caller.tenant):
                batch = await accept_retry(
                    services,
                    batch_id,
                    choice=asked.choice,
                    patch=asked.patch(),
                    completion_window=asked.completion_window,
                    merges=bool(asked.merge),
                    caller=asking,
                )
    request.app.state.request_runner()
    return JsonResponse(batch.to_wire())


# A deliverer sends it, and not this process: a file may have gigabytes.
@router.post(
    "/{batch_id}/results",
    summary="Write the results to other URLs",
    responses=may_refuse(409),
)
async def deliver_results(
    batch_id: str,
    request: Request,
    caller: Authenticated,
    asked: Annotated[DeliverResults, Depends(JsonBody(DeliverResults))],
) -> JsonResponse[ListPage[Delivery]]:
    """Send the output file, the error file or both to URLs. Each is one of your deliveries.

    For a batch that has not ended, these replace the URLs that it had, and the list is empty. The
    answer is a 409 while its files are made, and if too many deliveries of them are pending.
    """
    services = caller.services
    batch = await services.store.batches.get(batch_id, caller.tenant)
    places = await asked.places(services.settings)
    with as_batches_say():
        await _check_places(services, batch, places)
    try:
        if batch.status in STOPPABLE:
            await redirect(services, batch, places)
            return JsonResponse(to_list_page([], has_more=False))
        deliveries = await ask_for_delivery(services, batch, places)
    except TransitionConflict as error:
        raise ApiError(409, str(error)) from None
    except RequestRefused as error:
        if error.refusal_code == "batch_not_ended":
            raise ApiError(409, str(error), code=error.refusal_code) from None
        raise
    request.app.state.request_runner()
    return JsonResponse(
        to_list_page([delivery_object(each) for each in deliveries], has_more=False)
    )


async def _check_places(
    services: Services, batch: BatchRecord, places: Mapping[Kind, Location]
) -> None:
    """Check the URL by the rules for URLs that come with a batch. Raises ``RequestRefused``.

    Of a batch that has not ended, the URL that stays must not be the new one of the other file.
    """
    staying = {}
    if batch.status in STOPPABLE:
        wanted = await services.store.batch_places.destinations(batch.id)
        staying = {kind: text for kind, text in wanted.items() if text and kind not in places}
    await check_destinations(
        places.get("output"),
        places.get("error"),
        taken={kind: parse_location(text) for kind, text in staying.items()},
    )


async def accepted_before(
    store: Store, tenant: str, key: IdempotencyKey | None
) -> BatchRecord | None:
    """The batch of a request that is repeated: it is not checked again, its URLs may have expired.

    None for a request that is new.
    """
    if key is None:
        return None
    earlier = await store.idempotency.find(tenant, key)
    return None if earlier is None else await store.batches.get(earlier, tenant)


async def _accept(
    services: Services, asked: CreateBatch, wanted: BatchRequest, key: IdempotencyKey | None
) -> BatchRecord:
    pace = services.settings.quota.batches_per_hour
    if asked.requests is None:
        return await accept_batch(services, wanted, batches_per_hour=pace, idempotency=key)
    try:
        return await accept_batch_of(
            services, asked.requests.parts(), wanted, batches_per_hour=pace, idempotency=key
        )
    except ObjectTooLarge as error:
        raise ApiError(413, str(error), param=KEY, code=error.code) from None


async def _idempotency_key(
    route: str, key: str | None, asked: CreateBatch | RetryBatch
) -> IdempotencyKey | None:
    if key is None:
        return None
    if not key or len(key) > MAX_KEY_CHARS:
        raise ApiError(
            400,
            f"An Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters.",
            param="Idempotency-Key",
            code="invalid_value",
        )
    return IdempotencyKey(route=route, key=key, fingerprint=await asked.fingerprint())


@contextmanager
def _as_retries_say() -> Iterator[None]:
    """What the state of the first batch does not allow is a conflict."""
    try:
        yield
    except RequestRefused as error:
        if error.param != "batch_id":
            raise
        raise ApiError(409, str(error), code=error.refusal_code) from None


@contextmanager
def as_batches_say() -> Iterator[None]:
    """Errors that only the creation of a batch raises, as answers."""
    try:
        yield
    except IdempotencyConflict as error:
        raise ApiError(409, str(error), code=error.code) from None
    except BatchRateExceeded as error:
        seconds = min(error.retry_after_seconds, FULL_RETRY_AFTER_SECONDS)
        raise _too_many(error, "requests", seconds) from None
    except WindowUnattainable as error:
        raise _too_many(error, "tokens", FULL_RETRY_AFTER_SECONDS) from None
    except RequestRefused as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise


def _too_many(error: RequestRefused, kind: str, retry_after_seconds: int) -> ApiError:
    return ApiError(
        429,
        str(error),
        type=kind,
        param=error.param,
        code=error.refusal_code,
        headers={"retry-after": str(retry_after_seconds)},
    )
