"""Request bodies as they arrive: a stream that must keep moving, a JSON object with a cap.

What a refused client still sends is read for a moment, so that it gets to see the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect

from batchyard.api.http.api_error import ApiError
from batchyard.lines.json_depth import MAX_DEPTH, is_deeper_than

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_JSON_BYTES: Final = 1024**2

_MOST_NODES: Final = 400_000
"""Objects, arrays and keys of a large body; their marks in texts count as well. A body that has as
many as it may, and as many values, costs 260 MB and 1.4 s of the event loop until it is parsed,
checked and written again. 32 MiB of ``[],[],…`` would cost 1.8 GB and nine seconds."""
_MOST_VALUES: Final = 1_200_000
"""Commas of a large body. A prompt of a million tokens in one line has as many, and as numbers they
cost 100 MB and half a second."""
_LINGER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class LeastSpeed:
    """The slowest that a client may send: ``least_bytes`` in each ``window_seconds`` of waiting.

    Only the time that we wait for the client counts, not the time that it waits for us.
    """

    window_seconds: float = 60.0
    least_bytes: int = 60 * 1024


LEAST_SPEED: Final = LeastSpeed()
JSON_SECONDS: Final = 60.0


async def body_stream(
    request: Request, least_speed: LeastSpeed | None = None
) -> AsyncGenerator[bytes]:
    """The body as it arrives.

    Raises 415 for an encoded one, 408 for one that is slower than ``least_speed``, and
    :class:`~starlette.requests.ClientDisconnect` when the client leaves in the middle.
    """
    least_speed = least_speed or LEAST_SPEED
    _refuse_encoding(request)
    loop = asyncio.get_running_loop()
    waited_seconds, received_bytes, more = 0.0, 0, True
    while more:
        began = loop.time()
        message: Message | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(least_speed.window_seconds - waited_seconds):
                message = await request.receive()
        waited_seconds += loop.time() - began
        chunk = b""
        if message is not None:
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, more = message.get("body", b""), message.get("more_body", False)
            received_bytes += len(chunk)
        if waited_seconds >= least_speed.window_seconds:
            if more and received_bytes < least_speed.least_bytes:
                raise _too_slow()
            waited_seconds, received_bytes = 0.0, 0
        if chunk:
            yield chunk


async def read_json(request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The body, which is a JSON object of at most 1 MiB; its content type does not matter.

    ``may_be_empty``: no body at all is an empty object. Raises 400, 408, 413 and 415.
    """
    data = await read_within(request, MAX_JSON_BYTES)
    return {} if not data and may_be_empty else parse_object(data)


async def read_within(
    request: Request, most_bytes: int, most_seconds: float | None = None
) -> bytes:
    """The whole body, within a minute unless it may take longer. Raises 408, 413 and 415."""
    data = bytearray()
    try:
        async with (
            asyncio.timeout(most_seconds or JSON_SECONDS),
            contextlib.aclosing(body_stream(request)) as body,
        ):
            async for chunk in body:
                data += chunk
                if len(data) > most_bytes:
                    raise json_too_large(most_bytes)
    except TimeoutError:
        raise _too_slow() from None
    return bytes(data)


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises 400."""
    try:
        values = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        raise not_json() from None
    if not isinstance(values, dict):
        raise ApiError(400, "The body of your request must be a JSON object.")
    refuse_depth(values, data)
    return values


def parse_large_object(data: bytes) -> dict[str, Any]:
    """The JSON object in a body of any size. Raises 400, and 413 for too many values.

    Values need up to fifty times the memory of their text, so they are counted before any is made.
    """
    if has_too_many_values(data):
        raise ApiError(
            413,
            f"A JSON body may have {_MOST_VALUES} values, and {_MOST_NODES} objects, arrays "
            "and keys: send less at a time.",
        )
    return parse_object(data)


def has_too_many_values(data: bytes) -> bool:
    """Whether a process that serves others must not parse this JSON."""
    if len(data) <= MAX_JSON_BYTES:
        return False
    nodes = data.count(b"{") + data.count(b"[") + data.count(b":")
    return nodes > _MOST_NODES or data.count(b",") > _MOST_VALUES


def refuse_depth(values: dict[str, Any], data: bytes) -> None:
    """Raise 400 for ``values``, parsed from ``data``, that are nested too deeply.

    What a request may hold is written again, by recursive code that gives up at a depth of its own.
    """
    may_be_deep = data.count(b"{") + data.count(b"[") > MAX_DEPTH
    if may_be_deep and is_deeper_than(values, MAX_DEPTH):
        message = f"The body is nested deeper than {MAX_DEPTH} levels."
        raise ApiError(400, message, code="invalid_value")


def not_json() -> ApiError:
    """The answer to a body that cannot be parsed."""
    return ApiError(
        400, "We could not parse the JSON body of your request: is it valid JSON in UTF-8?"
    )


def json_too_large(most_bytes: int) -> ApiError:
    """The answer to a body of more bytes."""
    return ApiError(413, f"A JSON body may have {most_bytes} bytes.")


class LingeringClose:
    """Ends a connection whose request was answered before its body had arrived.

    Closed at once, it would be reset, and the client might lose the answer. So what still comes
    is thrown away for a moment. Kept open, it could trickle on for as long as the client likes.
    uvicorn has no setting for either.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _BodyWatch(scope, receive)
        closing = False

        async def send_and_linger(message: Message) -> None:
            nonlocal closing
            if message["type"] == "http.response.start" and not body.ended:
                closing = True
                MutableHeaders(scope=message)["connection"] = "close"
            if closing and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, body.receive, send_and_linger)


class _BodyWatch:
    """Whether the client has something left to send."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        self.ended = (
            headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
        )
        self._waits_for_leave = headers.get(b"expect", b"").lower() == b"100-continue"
        self._receive = receive

    async def receive(self) -> Message:
        message = await self._receive()
        self._waits_for_leave = False
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.ended = True
        return message

    async def discard(self) -> None:
        if self._waits_for_leave:
            return  # it sends nothing before we ask for it
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while not self.ended:
                    await self.receive()


def _refuse_encoding(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        raise ApiError(415, "Content-Encoding is not supported: send the body as it is.")


def _too_slow() -> ApiError:
    return ApiError(408, "The body of your request arrived too slowly.")
