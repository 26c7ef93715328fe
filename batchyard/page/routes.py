"""The page: what it shows. Each part also has a URL of its own, from which it is renewed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response  # noqa: TC002 — FastAPI reads it at run time

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.session import PageCaller, site_of
from batchyard.page.batch_rows import asked_from, query_of, read_page, table_of
from batchyard.page.engine_rows import engine_rows
from batchyard.page.one_batch import BatchPage, batch_page
from batchyard.page.route import PageRoute, shell
from batchyard.page.shared import SharedAnswers
from batchyard.page.tiles import tiles_of

if TYPE_CHECKING:
    from batchyard.api.http.auth import Caller

router = APIRouter(include_in_schema=False, route_class=PageRoute)

_RESULTS: Final = ("output", "error")


@router.get("/")
async def overview(request: Request, caller: PageCaller) -> Response:
    """Tiles, engines and batches."""
    values = await _tiles(request, caller)
    values |= await _engines(request, caller)
    values |= await _batches(request, caller)
    return shell(request, caller, "overview.html", **values)


@router.get("/parts/tiles")
async def tiles(request: Request, caller: PageCaller) -> Response:
    """The figures of now."""
    return shell(request, caller, "parts/tiles.html", **await _tiles(request, caller))


@router.get("/parts/engines")
async def engines(request: Request, caller: PageCaller) -> Response:
    """The engines."""
    return shell(request, caller, "parts/engines.html", **await _engines(request, caller))


@router.get("/parts/batches")
async def batches(request: Request, caller: PageCaller) -> Response:
    """The table of batches. The browser's address becomes that of the page in the same state."""
    values = await _batches(request, caller)
    response = shell(request, caller, "parts/batches.html", **values)
    if (
        request.headers.get("hx-trigger") != "batches-now"
    ):  # the request that the table itself repeats
        response.headers["hx-replace-url"] = f"/{values['table'].query}"
    return response


@router.get("/batches/{batch_id}")
async def one_batch(batch_id: str, request: Request, caller: PageCaller) -> Response:
    """A batch."""
    found = await _batch(request, caller, batch_id)
    return shell(request, caller, "batch.html", batch=found)


@router.get("/batches/{batch_id}/now")
async def one_batch_now(batch_id: str, request: Request, caller: PageCaller) -> Response:
    """The part of a batch's page that changes."""
    found = await _batch(request, caller, batch_id)
    return shell(request, caller, "parts/batch.html", batch=found)


async def _tiles(request: Request, caller: Caller) -> dict[str, Any]:
    store, tenant = caller.services.store, caller.sees_tenant

    async def ask() -> dict[str, Any]:
        work = await store.overview.work(tenant)
        return {"tiles": tiles_of(work, await store.database.now())}

    show = asked_from(request.query_params, tenant).show
    return {**await answers_of(request).get(("tiles", tenant), ask), "show": show}


async def _engines(request: Request, caller: Caller) -> dict[str, Any]:
    store, tenant = caller.services.store, caller.sees_tenant

    async def ask() -> dict[str, Any]:
        found = await store.overview.engines(caller.services.settings.lease_seconds, tenant)
        return {"engines": engine_rows(found, await store.database.now())}

    return await answers_of(request).get(("engines", tenant), ask)


async def _batches(request: Request, caller: Caller) -> dict[str, Any]:
    store, asked = caller.services.store, asked_from(request.query_params, caller.sees_tenant)

    async def ask() -> dict[str, Any]:
        shown, listing = await read_page(store.overview, asked)
        return {"table": table_of(shown, listing, await store.database.now())}

    answers = answers_of(request)
    return await answers.get(("batches", caller.sees_tenant, query_of(asked)), ask)


async def _batch(request: Request, caller: Caller, batch_id: str) -> BatchPage:
    tenant = caller.sees_tenant

    async def ask() -> BatchPage | None:
        return await batch_page(caller.services, batch_id, tenant, site)

    # By address as well: the page shows commands with the one that it was loaded from.
    site = site_of(request)
    question = ("batch", tenant, batch_id, site)
    found = await answers_of(request).get(question, ask)
    if found is None:
        raise ApiError(404, f"No batch found with id '{batch_id}'.")
    return found


def answers_of(request: Request) -> SharedAnswers:
    """What pages of this process share."""
    state = request.app.state
    if not hasattr(state, "page_answers"):
        state.page_answers = SharedAnswers()
    answers: SharedAnswers = state.page_answers
    return answers
