"""Server-sent events: an answer that goes on, and how it ends.

It ends when the batch has, when the server stops, when the client leaves or does not read, and
after ten minutes, so that a key that was revoked does not go on to see a batch. A browser's
``EventSource`` then connects again, and says which event it saw last.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from batchyard.api.batches.batch_watch import TooManyWatch
from batchyard.api.http.api_error import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Scope, Send

    from batchyard.api.batches.batch_watch import BatchWatch, Seen, Watcher

KEEP_ALIVE_SECONDS: Final = 15.0
"""Proxies close what is silent for a minute or less."""
_MOST_SECONDS: Final = 600.0
_SEND_SECONDS: Final = 30.0
"""How long a client may take to read what was sent."""
_RETRY_MILLISECONDS: Final = 3000
_FULL_RETRY_AFTER_SECONDS: Final = 30


class Event(NamedTuple):
    """One event. ``id``: what the client says when it connects again; empty: as before."""

    name: str
    data: bytes
    id: str = ""

    def encoded(self) -> bytes:
        """The event as lines of the stream; a line of the data is a line of its own."""
        lines = [f"event: {self.name}".encode()]
        if self.id:
            lines.append(f"id: {self.id}".encode())
        lines += [b"data: " + line for line in self.data.replace(b"\r", b"").split(b"\n")]
        return b"\n".join(lines) + b"\n\n"


def batch_events(seen: Seen) -> Iterable[Event]:
    """The events of the API: the Batch object, and its progress while it runs."""
    yield Event("batch", seen.batch_json, id=event_id(seen.batch_json))
    if not seen.has_ended:
        yield Event("progress", seen.progress_json)


def event_id(data: bytes) -> str:
    """The same for the same data, in every process."""
    return hashlib.sha256(data).hexdigest()[:16]


class EventStream(Response):
    """The events of one batch, as :func:`batch_events` makes them of each new state.

    An event is sent if its data are other than those that were sent under its name before;
    ``last_event_id``: what the client saw last, before it connected again.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        watch: BatchWatch,
        batch_id: str,
        tenant: str,
        *,
        last_event_id: str | None = None,
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )
        del self.headers["content-length"]
        self._watch = watch
        self._batch_id = batch_id
        self._tenant = tenant
        self._last_event_id = last_event_id
        self._sent: dict[str, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a 429 if there are too many streams, else send until the end."""
        with contextlib.ExitStack() as stack:
            try:
                watcher = stack.enter_context(self._watch.watch(self._batch_id, self._tenant))
            except TooManyWatch as error:
                await _too_many(error).to_response()(scope, receive, send)
                return
            await self._stream(watcher, scope, receive, send)

    async def _stream(self, watcher: Watcher, scope: Scope, receive: Receive, send: Send) -> None:
        ends = _Ends(watcher)
        scope["state"]["on_shutdown"] = ends.stop
        leaving = asyncio.create_task(ends.wait_for_leave(receive))
        head = {"status": self.status_code, "headers": self.raw_headers}
        try:
            await send({"type": "http.response.start", **head})
            await _send(send, f"retry: {_RETRY_MILLISECONDS}\n\n".encode())
            stopping = asyncio.get_running_loop().call_later(_MOST_SECONDS, ends.stop)
            try:
                await self._follow(watcher, ends, send)
            finally:
                stopping.cancel()
            await _send(send, b"", more=False)
        except TimeoutError:
            raise ClientDisconnect from None  # it does not read
        finally:
            leaving.cancel()

    async def _follow(self, watcher: Watcher, ends: _Ends, send: Send) -> None:
        while not (ends.are_there or watcher.is_gone):
            watcher.changed.clear()
            seen = watcher.seen
            data = b"" if seen is None else self._news(seen)
            if data:
                await _send(send, data)
            if seen is not None and seen.has_ended:
                return
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    await watcher.changed.wait()
            except TimeoutError:
                await _send(send, b": keep-alive\n\n")

    def _news(self, seen: Seen) -> bytes:
        new = []
        for event in batch_events(seen):
            known = self._sent.get(event.name) == event.data
            # Only at the beginning: afterwards the client has seen what we sent.
            if event.id and event.id == self._last_event_id:
                known = True
            if event.id:
                self._last_event_id = None
            self._sent[event.name] = event.data
            if not known:
                new.append(event.encoded())
        return b"".join(new)


class _Ends:
    """Why a stream ends although its batch has not: the client left, the server stops, the time."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.are_there = False

    def stop(self) -> None:
        self.are_there = True
        self._watcher.changed.set()

    async def wait_for_leave(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        self.stop()


async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
    async with asyncio.timeout(_SEND_SECONDS):
        await send({"type": "http.response.body", "body": data, "more_body": more})


def _too_many(error: TooManyWatch) -> ApiError:
    return ApiError(
        429,
        str(error),
        type="requests",
        code="rate_limit_exceeded",
        headers={"retry-after": str(_FULL_RETRY_AFTER_SECONDS)},
    )
