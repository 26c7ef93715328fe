"""``/batches/{batch_id}/results`` and ``/ledger``: the lines of a batch, and what they used."""

from __future__ import annotations

from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import WithJsonSchema

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.http.begun_stream import begun
from batchyard.api.http.json_response import JsonResponse
from batchyard.api.http.pages import limit_schema, read_paging
from batchyard.api.http.route import HEADERS, Route
from batchyard.errors import RecordNotFound, RequestRefused
from batchyard.files.cursor import Order, parse_cursor
from batchyard.files.delete import delete_file
from batchyard.files.read_ledger import ledger_blocks, ledger_file
from batchyard.files.read_results import BOTH, ResultsReader
from batchyard.results.results import Outcome
from batchyard.wire import FileDeleted, result_file_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from batchyard.files.read_results import ResultsPage

router = APIRouter(prefix="/batches", route_class=Route)

_MOST_LINES: Final = 10_000
_LINES: Final = 1_000
_BLOCK_BYTES: Final = 64 * 1024
# Clients would parse what says that it is JSON.
_JSONL: Final = "text/jsonl"
_ORDERS: Final = ("completion", "input")
_KINDS: Final = {
    "all": BOTH,
    "output": frozenset({Outcome.OUTPUT}),
    "error": frozenset({Outcome.ERROR}),
}
_NOT_FOUND: Final = {"result_not_ready", "custom_id_not_found", "results_gone", "no_ledger"}

_PAGE: Final[dict[str, Any]] = {
    "description": "JSON Lines: the lines that the output file and the error file have, or will "
    "have. With `custom_id`, one line.",
    "headers": {
        **HEADERS,
        "X-Next-After": {
            "description": "The `after` of the next request; the same as before if there is "
            "nothing new.",
            "schema": {"type": "string"},
        },
        "X-Has-More": {
            "description": "`false` once the batch has ended and this is its last line.",
            "schema": {"type": "string", "enum": ["true", "false"]},
        },
    },
    "content": {_JSONL: {"schema": {"type": "string"}}},
}
_LEDGER: Final[dict[str, Any]] = {
    "description": "JSON Lines, with `line`, `custom_id`, `stage`, `endpoint`, `model`, `status`, "
    "`error`, tokens, `deduplicated`, `cost` and `currency`.",
    "headers": HEADERS,
    "content": {_JSONL: {"schema": {"type": "string"}}},
}
_LINE: Final[dict[str, Any]] = {
    "description": "The line, as the output file or the error file has it.",
    "headers": HEADERS,
    "content": {"application/json": {"schema": {"type": "object"}}},
}


@router.get(
    "/{batch_id}/results",
    summary="Read results while the batch runs",
    response_class=StreamingResponse,
    responses={200: _PAGE},
)
async def list_results(
    batch_id: str,
    request: Request,
    caller: Authenticated,
    after: Annotated[
        str | None, Query(description="`X-Next-After` of an earlier answer; none: the beginning.")
    ] = None,
    limit: Annotated[str | None, limit_schema(_MOST_LINES, _LINES)] = None,
    order: Annotated[
        str | None,
        WithJsonSchema(
            {
                "type": "string",
                "enum": list(_ORDERS),
                "description": "`completion`, the default: as they are finished. `input`: in the "
                "order of the input, as far as all lines before are finished.",
            }
        ),
    ] = None,
    kind: Annotated[
        str | None,
        WithJsonSchema(
            {
                "type": "string",
                "enum": list(_KINDS),
                "description": "`output`: only lines of the output file; `error`: only those of "
                "the error file; `all`, the default: both.",
            }
        ),
    ] = None,
    custom_id: Annotated[
        str | None,
        Query(
            description="Only the line of this request, or 404; for ids that do not work in a path."
        ),
    ] = None,
    last_event_id: Annotated[
        str | None,
        Header(alias="Last-Event-ID", description="The same as `after`, which goes first."),
    ] = None,
) -> Response:
    """The lines that are finished and were not read yet, each `custom_id` once.

    Ask again with `after` until `X-Has-More` is `false`. If an answer breaks off, ask for it
    again. A cursor is valid as long as the results are kept.
    """
    reader: ResultsReader = request.app.state.results
    batch = await caller.services.store.batches.get(batch_id, caller.tenant)
    with _as_results_say():
        if custom_id is not None:
            line = (await reader.find(batch, custom_id)).line
            return Response(line, media_type=_JSONL, headers=_headers("", has_more=False))
        paging = read_paging({"limit": limit}, most=_MOST_LINES, default=_LINES)
        page = await reader.page(
            batch,
            parse_cursor(after or last_event_id, cast("Order | None", _one_of("order", order))),
            limit=paging.limit,
            outcomes=_KINDS[_one_of("kind", kind) or "all"],
        )
        return StreamingResponse(
            await begun(_blocks(page)),
            media_type=_JSONL,
            headers={
                **_headers(str(page.next), has_more=page.has_more),
                "content-length": str(page.found.size_bytes),
            },
        )


@router.get(
    "/{batch_id}/results/{custom_id:path}",
    summary="Read the result of one request",
    responses={200: _LINE},
)
async def retrieve_result(
    batch_id: str, custom_id: str, request: Request, caller: Authenticated
) -> Response:
    """The result line of this `custom_id`, percent-encoded; 404 while it is not finished."""
    reader: ResultsReader = request.app.state.results
    batch = await caller.services.store.batches.get(batch_id, caller.tenant)
    with _as_results_say():
        found = await reader.find(batch, custom_id)
    return Response(
        found.line, media_type="application/json", headers={"cache-control": "no-store"}
    )


@router.get(
    "/{batch_id}/ledger",
    summary="Read what each line used and cost",
    response_class=StreamingResponse,
    responses={200: _LEDGER},
)
async def read_ledger(batch_id: str, caller: Authenticated) -> Response:
    """A row for each line of a batch that has ended and was created with `ledger`.

    The rows are in the order of the input; with `then`, those of one stage after the other. The
    sums over all rows are the batch's `usage` and its cost: what no line used is a last row
    without `line`.
    """
    services = caller.services
    batch = await services.store.batches.get(batch_id, caller.tenant)
    with _as_results_say():
        rows = await begun(ledger_blocks(services, batch))
    return StreamingResponse(rows, media_type=_JSONL, headers={"cache-control": "no-store"})


@router.delete("/{batch_id}/ledger", summary="Delete the ledger")
async def delete_ledger(batch_id: str, caller: Authenticated) -> JsonResponse[FileDeleted]:
    """Delete what each line of a batch used and cost: a file that no list of files has.

    Its bytes count towards the tenant's stored bytes until it is deleted or expires.
    """
    services = caller.services
    batch = await services.store.batches.get(batch_id, caller.tenant)
    with _as_results_say():
        file = await ledger_file(services, batch)
    if file is not None:
        with suppress(RecordNotFound):
            await delete_file(services, file.tenant, file.id)
    return JsonResponse(FileDeleted(id=result_file_id(batch.id, "ledger")))


def _headers(after: str, *, has_more: bool) -> dict[str, str]:
    return {
        "x-next-after": after,
        "x-has-more": "true" if has_more else "false",
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
    }


async def _blocks(page: ResultsPage) -> AsyncGenerator[bytes]:
    block = bytearray()
    async with aclosing(page.lines()) as lines:
        async for each in lines:
            block += each.line
            if len(block) >= _BLOCK_BYTES:
                yield bytes(block)
                block.clear()
    if block:
        yield bytes(block)


@contextmanager
def _as_results_say() -> Iterator[None]:
    try:
        yield
    except RequestRefused as error:
        if error.refusal_code not in _NOT_FOUND:
            raise
        raise ApiError(404, str(error), param=error.param, code=error.refusal_code) from None


def _one_of(param: str, text: str | None) -> str | None:
    offered = {"order": _ORDERS, "kind": tuple(_KINDS)}[param]
    if text and text not in offered:
        words = ", ".join(f"'{each}'" for each in offered)
        raise ApiError(400, f"'{param}' must be one of {words}.", param=param, code="invalid_value")
    return text or None
