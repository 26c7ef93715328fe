"""One live request on its way: to an engine that takes it, and its answer back as it comes.

A client that leaves or does not read ends its request in the engine. An answer that breaks off in
the middle of a stream ends with an error event, as OpenAI's do.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import aiohttp
import msgspec
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from batchyard.api.http.api_error import INVALID_REQUEST, ApiError
from batchyard.api.http.errors import SERVER_ERROR
from batchyard.api.http.message_errors import is_for_messages, message_error
from batchyard.api.live.live_engines import session_to
from batchyard.engine.live_answers import (
    FLEX_HEADER,
    HIDE_USAGE_HEADER,
    RETRY_AFTER_SECONDS,
    TENANT_HEADER,
)
from batchyard.logs import event_logger
from batchyard.processes.beside import beside

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import Receive, Scope, Send

    from batchyard.api.live.live_engines import LiveDirectory
    from batchyard.store import LiveEngine

log = event_logger(__name__)

_SEND_SECONDS: Final = 60.0
"""How long a client may take to read what was sent."""
_MAX_ERROR_BYTES: Final = 64 * 1024
_NOT_TAKEN: Final = frozenset({401, 503})
"""The runner has no room, its engine is not there, or it is not the runner any more."""
_ENGINE_LOST: Final = 502
"""The engine ended with the request in it, which may be why: no other one gets it."""
_TIMED_OUT: Final = 504
_BUSY: Final = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """A request that was checked. ``body`` is what the engine gets."""

    path: str
    model: str
    tenant: str
    body: bytes
    hides_usage: bool
    is_flex: bool
    request_id: str
    timeout_seconds: float

    @property
    def headers(self) -> dict[str, str]:
        """Those of the request to the runner, less its secret."""
        headers = {
            "content-type": "application/json",
            "x-request-id": self.request_id,
            # A tenant's name may have any character.
            TENANT_HEADER: quote(self.tenant, safe=""),
        }
        headers |= {FLEX_HEADER: "1"} if self.is_flex else {}
        return headers | ({HIDE_USAGE_HEADER: "1"} if self.hides_usage else {})


class _NotReached(Exception):
    """The engine did not take the request, so another one may."""


class LiveExchange(Response):
    """The answer to ``request``, from one of the engines of ``directory``.

    ``on_end`` is called in any case.
    """

    def __init__(
        self, request: LiveRequest, directory: LiveDirectory, on_end: Callable[[], None]
    ) -> None:
        super().__init__()
        self._request = request
        self._directory = directory
        self._on_end = on_end
        self._has_begun = False
        self._is_stream = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Answer, unless the client leaves first. Raises 503, and what the engine refuses."""
        try:
            async with (
                beside(_until_left(receive)) as leaving,
                beside(self._from_some_engine(send)) as answering,
            ):
                await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    raise ClientDisconnect
                answering.result()
        finally:
            self._on_end()

    async def _from_some_engine(self, send: Send) -> None:
        for engine in await self._directory.engines(self._request.model):
            try:
                with self._directory.using(engine):
                    await self._from(engine, send)
            except _NotReached:
                continue
            return
        raise unavailable(self._request.model)

    async def _from(self, engine: LiveEngine, send: Send) -> None:
        try:
            async with self._asked(engine) as answer:
                if answer.status in _NOT_TAKEN:
                    raise _NotReached
                if answer.status == _ENGINE_LOST:
                    raise _lost()
                if answer.status == _TIMED_OUT:
                    raise _timed_out()
                if answer.status >= 400:
                    raise await _refusal(answer, self._request.path)
                self._is_stream = answer.content_type == "text/event-stream"
                if self._is_stream:
                    await self._stream(answer, send)
                else:
                    await self._pass_whole(answer, send)
        except (aiohttp.ClientError, OSError) as error:
            # A time-out is an OSError too.
            if not self._has_begun and isinstance(
                error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError
            ):
                self._directory.forget(engine)
                raise _NotReached from error
            log.warning("live.broken_off", type(error).__name__, model=self._request.model)
            broken = _timed_out() if isinstance(error, TimeoutError) else _lost()
            if not self._has_begun:
                raise broken from error
            if self._is_stream:
                await _send(send, _error_event(broken, self._request), more=False)
            # Otherwise the server closes the connection in the middle of the answer.

    @contextlib.asynccontextmanager
    async def _asked(self, engine: LiveEngine) -> AsyncIterator[aiohttp.ClientResponse]:
        request = self._request
        async with (
            session_to(engine, request.timeout_seconds) as session,
            session.post(
                request.path, data=request.body, headers=request.headers, allow_redirects=False
            ) as answer,
        ):
            yield answer

    async def _stream(self, answer: aiohttp.ClientResponse, send: Send) -> None:
        await self._begin(
            answer, send, (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")
        )
        async for data in answer.content.iter_any():
            await _send(send, data)
        await _send(send, b"", more=False)

    async def _pass_whole(self, answer: aiohttp.ClientResponse, send: Send) -> None:
        # The first bytes come when the engine has all of it; what breaks off then is cut short.
        parts = answer.content.iter_any()
        data = await anext(parts, b"")
        await self._begin(answer, send)
        await _send(send, data)
        async for data in parts:
            await _send(send, data)
        await _send(send, b"", more=False)

    async def _begin(
        self, answer: aiohttp.ClientResponse, send: Send, *more: tuple[bytes, bytes]
    ) -> None:
        content_type = answer.headers.get("content-type", "application/json").encode()
        headers = [(b"content-type", content_type), *more]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        self._has_begun = True


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
    try:
        async with asyncio.timeout(_SEND_SECONDS):
            await send({"type": "http.response.body", "body": data, "more_body": more})
    except OSError:
        raise ClientDisconnect from None  # it does not read, or is gone


def unavailable(model: str) -> ApiError:
    """No engine takes live requests for the model at this moment."""
    return ApiError(
        503,
        f"No engine takes live requests for the model '{model}' at this moment; try again later.",
        type=SERVER_ERROR,
        code="engine_unavailable",
        headers={"retry-after": str(RETRY_AFTER_SECONDS)},
    )


def _lost() -> ApiError:
    return ApiError(
        503,
        "The engine was lost before its answer was complete; send the request again.",
        type=SERVER_ERROR,
        code="engine_lost",
        headers={"retry-after": str(RETRY_AFTER_SECONDS)},
    )


def _timed_out() -> ApiError:
    return ApiError(
        _TIMED_OUT,
        "The engine did not finish this request within its time limit; ask for less at a time.",
        type=SERVER_ERROR,
        code="request_timeout",
        # The SDKs would have the engine work on it for as long again, twice.
        headers={"x-should-retry": "false"},
    )


def _error_event(error: ApiError, request: LiveRequest) -> bytes:
    if is_for_messages(request.path):
        said = message_error(error.status, error.message, request.request_id)
        return b"\n\nevent: error\ndata: %b\n\n" % msgspec.json.encode(said)
    details = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    # What came before it may have ended in the middle of an event.
    return b"\n\ndata: %b\n\n" % msgspec.json.encode({"error": details})


async def _refusal(answer: aiohttp.ClientResponse, path: str) -> ApiError:
    """The engine's own error, in the shape of ours."""
    data = bytearray()
    async for part in answer.content.iter_any():
        data += part
        if len(data) > _MAX_ERROR_BYTES:
            break
    said: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        said = msgspec.json.decode(data)
    details = said.get("error") if isinstance(said, dict) else None
    if not isinstance(details, dict) or not isinstance(details.get("message"), str):
        if answer.status == 404:
            return ApiError(404, f"The model's engine does not serve {path}.")
        details = {"message": f"The engine answered with HTTP status {answer.status}."}
    param, code = details.get("param"), details.get("code")
    kind = INVALID_REQUEST if answer.status < 500 else SERVER_ERROR
    wait = answer.headers.get("retry-after")
    return ApiError(
        answer.status,
        details["message"],
        type="requests" if answer.status == _BUSY else kind,
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
        headers={} if wait is None else {"retry-after": wait},
    )
