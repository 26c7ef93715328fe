"""Live requests: the endpoints that take JSON, answered at once by an engine that is also live.

Here it is decided who may send what; :mod:`batchyard.api.live.live_exchange` does the rest.
"""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response  # noqa: TC002 — FastAPI reads it at run time

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.http.body import parse_large_object, read_within
from batchyard.api.http.errors import missing
from batchyard.api.http.message_errors import MESSAGES, is_for_messages
from batchyard.api.http.route import HEADERS, Route, may_refuse
from batchyard.api.live.live_engines import LiveDirectory
from batchyard.api.live.live_exchange import LiveExchange, LiveRequest, unavailable
from batchyard.batch.responses import ENDPOINT as RESPONSES
from batchyard.engine.live_answers import asking_for_usage, hides_usage, is_flex
from batchyard.engine.middleware.cache_salt import spliced
from batchyard.lines.endpoints import COUNT_TOKENS, LIVE
from batchyard.logs.printable import printable
from batchyard.services.cache_salt import cache_salt_of
from batchyard.services.quotas import default_quota

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

    from batchyard.api.http.auth import Caller
    from batchyard.dispatch import OfferedModel
    from batchyard.services.services import Services

PREFIX: Final = "/v1"
_BUSY_RETRY_AFTER_SECONDS: Final = 1
_SHOWN_CHARS: Final = 100


class LiveState:
    """What one process knows of live requests. ``in_flight``: by tenant."""

    def __init__(self, services: Services) -> None:
        self.directory = LiveDirectory(services)
        self.in_flight: Counter[str] = Counter()

    def take(self, tenant: str, limit: int) -> None:
        """Count one more of the tenant. Raises 403 and 429."""
        if limit == 0:
            raise ApiError(
                403,
                "You have insufficient permissions for this operation: live requests are not "
                "allowed for you. Ask your operator, or send a batch.",
                code="insufficient_permissions",
            )
        if self.in_flight[tenant] >= limit:
            raise ApiError(
                429,
                f"You have {limit:,} live requests in flight, which is your limit: wait until one "
                "is answered, or send a batch.",
                type="requests",
                code="rate_limit_exceeded",
                headers={"retry-after": str(_BUSY_RETRY_AFTER_SECONDS)},
            )
        self.in_flight[tenant] += 1

    def give_back(self, tenant: str) -> None:
        """One of the tenant's has ended."""
        self.in_flight[tenant] -= 1
        if not self.in_flight[tenant]:
            del self.in_flight[tenant]


@asynccontextmanager
async def _live_state(app: FastAPI) -> AsyncIterator[None]:
    app.state.live = LiveState(app.state.services)
    yield


router = APIRouter(lifespan=_live_state, route_class=Route)


async def answer_live(request: Request, caller: Authenticated) -> Response:
    """Pass the request to an engine that is live, and its answer back as it comes.

    The body is the engine's to understand, within the rules for lines of batches. With
    `"stream": true` the answer is a stream of server-sent events.
    """
    return await pass_on(request, caller)


async def pass_on(request: Request, caller: Caller, raw: bytes | None = None) -> Response:
    """Answer as :func:`answer_live` does; ``raw`` is the body, if it was read already."""
    state: LiveState = request.app.state.live
    quota = (await caller.services.store.tenants.quota(caller.tenant)).over(
        default_quota(caller.services)
    )
    # Before the body is read, so that the limit bounds what waits in memory.
    state.take(caller.tenant, quota.max_live_requests or 0)
    is_taken = True
    try:
        checked = await _checked(request, caller, raw)
        if not await state.directory.engines(checked.model):
            catalogue = request.app.state.catalogue
            offered = await catalogue.find(checked.model)
            if offered is None or not await state.directory.engines(offered.name):
                # Its block may have been changed since: that is what is said.
                offered = await catalogue.find_again(checked.model)
                raise await _no_engine(request, checked.model, offered)
            # It names an adapter, which the engine of its model has.
            checked = replace(checked, model=offered.name)
        is_taken = False
        return LiveExchange(checked, state.directory, lambda: state.give_back(caller.tenant))
    finally:
        if is_taken:
            state.give_back(caller.tenant)


async def _checked(request: Request, caller: Caller, raw: bytes | None) -> LiveRequest:
    """The request, if a line of a client's batch could say the same. Raises 400, 408, 413, 415."""
    services = caller.services
    settings = services.settings
    path = request.url.path
    if raw is None:
        raw = await read_within(request, settings.limits.max_line_bytes)
    body = parse_large_object(raw)
    model = _check_body(services, path, raw, body)
    hides = hides_usage(path, body)
    data = asking_for_usage(raw, body) if hides else raw
    cache_salt = await cache_salt_of(services, caller.tenant)
    if cache_salt is not None:
        data = spliced(data, cache_salt)
    return LiveRequest(
        path=path,
        model=model,
        tenant=caller.tenant,
        body=data,
        hides_usage=hides and data is not raw,
        is_flex=is_flex(path, body),
        request_id=request.state.request_id,
        timeout_seconds=settings.request_timeout_seconds,
    )


def _check_body(services: Services, path: str, raw: bytes, body: dict[str, Any]) -> str:
    """The model. Raises 400."""
    model = body.get("model")
    if model is None:
        raise missing("model")
    if not isinstance(model, str) or not model:
        raise ApiError(
            400,
            "Invalid type for 'model': it must be a string.",
            param="model",
            code="invalid_type",
        )
    policy = services.settings.bodies.to_policy()
    # Its prompt is a message's, for which the same rules hold.
    path = MESSAGES if path == COUNT_TOKENS else path
    # As within a line, which has one brace more.
    braces, brackets = raw.count(b"{") + 1, raw.count(b"[")
    for refusal in policy.refusals(path, body, len(raw), braces, brackets):
        raise ApiError(
            400,
            refusal.message.removeprefix("body."),
            param=refusal.param.removeprefix("body."),
            code=refusal.code,
        )
    return model


async def _no_engine(request: Request, model: str, offered: OfferedModel | None) -> ApiError:
    shown = printable(model[:_SHOWN_CHARS], "?")
    if offered is not None and offered.is_live:
        return unavailable(shown)
    if await request.app.state.catalogue.prefect_answers() is False:
        # It may have been offered since Prefect answered last.
        return unavailable(shown)
    message = f"The model '{shown}' does not exist."
    if offered is not None:
        message = f"The model '{shown}' is for batches only: its engine takes no live requests."
    return ApiError(404, message, param="model", code="model_not_found")


ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The engine's answer.",
        "headers": HEADERS,
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    },
    **may_refuse(404, 429, 504),
}
_REQUEST: Final = {
    "type": "object",
    "properties": {"model": {"type": "string"}},
    "required": ["model"],
}
BODY: Final[dict[str, Any]] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _REQUEST}}}
}


def _add_routes() -> None:
    for path in LIVE:
        if path == RESPONSES:
            continue  # it has a way into the background as well, and a module of its own
        router.add_api_route(
            path.removeprefix(PREFIX),
            answer_live,
            methods=["POST"],
            name="answer_live_" + "_".join(path.removeprefix(f"{PREFIX}/").split("/")),
            summary=f"Live request: {path.removeprefix(f'{PREFIX}/').replace('/', ' ')}",
            responses={**ANSWERS, **may_refuse(404, 429, 504, for_messages=is_for_messages(path))},
            openapi_extra=BODY,
        )


_add_routes()
