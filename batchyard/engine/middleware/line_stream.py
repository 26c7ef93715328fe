"""Requests in and answers out over one HTTP connection: ASGI middleware for ``vllm serve``.

vLLM loads this file inside the engine's own process (``--middleware line_stream.LineStream``, its
folder on ``PYTHONPATH``). It therefore imports the standard library and its neighbour
``line_frames``, which describes the frames, and nothing else of Batchyard.

Each request of a stream is replayed in-process into the application below, so it meets the same
routes, validation and error handlers as a request of its own would. Its answer goes back as soon
as it is there.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

if TYPE_CHECKING or __package__:
    from batchyard.engine.middleware import line_frames
else:
    # In the engine's process, where this folder is on the path and Batchyard is not.
    import line_frames

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Message = MutableMapping[str, Any]
    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    Application = Callable[[Scope, Receive, Send], Awaitable[None]]

SALT_KEY: Final = "batchyard.cache_salt"
"""Of the scope: the salt that ``direct_routes`` gives to the request; None or absent: none."""
CANCELS_KEY: Final = "batchyard.cancels"
"""Of the scope: what ``direct_routes`` calls if cancelling the request's task ends it in the engine
at once. Absent: the request is no line."""
LINE_PRIORITY_VARIABLE: Final = "BATCHYARD_LINE_PRIORITY"
"""Of the engine's environment: the priority that ``direct_routes`` gives to lines."""

HEALTH_INTERVAL_SECONDS: Final = 0.5
ABORT_GRACE_SECONDS: Final = 1.0


class LineStream:
    """The middleware: answers requests for :data:`line_frames.PATH` and passes on all others."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["path"] == line_frames.PATH
            and scope["method"] == "POST"
        ):
            await _Stream(self._app, scope, receive, send).run()
        else:
            await self._app(scope, receive, send)


class _Stream:
    """One connection: reads frames, replays them, writes answers until both sides are done."""

    def __init__(self, app: Application, scope: Scope, receive: Receive, send: Send) -> None:
        self.app = app
        self._scope = scope
        self._receive = receive
        self._send = send
        headers = dict(scope["headers"])
        self._timeout_seconds = float(headers[line_frames.TIMEOUT_HEADER.encode()])
        self._authorization = headers.get(b"authorization")
        self._in_flight: dict[int, _Replay] = {}
        """In the order in which they came, which is that of their deadlines."""
        self._next_deadline: asyncio.TimerHandle | None = None
        self._unsent: list[bytes] = []
        self._wake = asyncio.Event()
        self._all_received = False
        self._is_dead = False

    async def run(self) -> None:
        # The answer begins at once: the client reads answers while it still sends requests.
        headers = [
            (b"content-type", b"application/octet-stream"),
            (line_frames.SERVER_HEADER.encode(), b"%d" % os.getpid()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        watcher = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            for task in (reader, writer, watcher):
                task.cancel()
            if self._next_deadline is not None:
                self._next_deadline.cancel()
            await self._abort_all()

    async def _read(self) -> None:
        """Admit requests as they arrive; return when the client is gone."""
        frames = line_frames.FrameParser(line_frames.MOST_WORDS)
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return
            for words, body in frames.feed(message.get("body", b"")):
                if words[1] == line_frames.ABORT_URL.encode():
                    self._abort(int(words[0]))
                else:
                    self._admit(words, body)
            if not message.get("more_body", False):
                if not frames.is_between_frames:
                    return
                self._all_received = True
                self._wake.set()

    def _admit(self, words: list[bytes], body: bytes) -> None:
        tag, (url, _, request_id, *more) = int(words[0]), words[1:]
        loop = asyncio.get_running_loop()
        replay = _Replay(self, tag, body, loop.time() + self._timeout_seconds)
        self._in_flight[tag] = replay
        if self._next_deadline is None:
            self._next_deadline = loop.call_at(replay.deadline, self._end_late_ones)
        scope = self._scope_of(url, request_id, len(body), *more[:1])
        scope[SALT_KEY] = more[1].decode() if more[1:] else None
        scope[CANCELS_KEY] = replay.ends_by_cancelling
        if more[2:]:
            scope["headers"].append((b"traceparent", more[2]))
            if scope[SALT_KEY] == line_frames.NO_SALT:
                scope[SALT_KEY] = None
        replay.start(scope)

    def _end_late_ones(self) -> None:
        """One timer for all: one for each request cost as much as its way through the routes."""
        self._next_deadline = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for replay in list(self._in_flight.values()):
            if replay.deadline > now:
                self._next_deadline = loop.call_at(replay.deadline, self._end_late_ones)
                return
            replay.end(line_frames.TIMED_OUT)

    def _abort(self, tag: int) -> None:
        # An answer may have crossed the abort on the way: then there is nothing to end.
        replay = self._in_flight.get(tag)
        if replay is not None:
            replay.end(line_frames.ABORTED)

    def _scope_of(
        self,
        url: bytes,
        request_id: bytes,
        body_bytes: int,
        content_type: bytes = line_frames.JSON.encode(),
    ) -> Scope:
        path, _, query = url.partition(b"?")
        headers = [
            (b"host", b"localhost"),
            (b"content-type", content_type),
            (b"content-length", b"%d" % body_bytes),
            (b"x-request-id", request_id),
        ]
        if self._authorization is not None:
            headers.append((b"authorization", self._authorization))
        return {
            **self._scope,
            "path": unquote(path.decode()),
            "raw_path": path,
            "query_string": query,
            "headers": headers,
            "state": dict(self._scope.get("state", {})),
        }

    def answer(self, replay: _Replay, frame: bytes) -> None:
        """Queue the one answer of a replay."""
        del self._in_flight[replay.tag]
        self._unsent.append(frame)
        self._wake.set()

    async def _write(self) -> None:
        """Send what is queued, all of it in one piece, until nothing more can come."""
        is_open = True
        while is_open:
            await self._wake.wait()
            self._wake.clear()
            frames, self._unsent = self._unsent, []
            is_complete = self._all_received and not self._in_flight
            is_open = not (is_complete or self._is_dead)
            await self._send(
                {"type": "http.response.body", "body": b"".join(frames), "more_body": is_open}
            )

    async def _watch(self) -> None:
        """Notice the engine's death when no answer shows it, and send the client signs of life."""
        silent_seconds = 0.0
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_SECONDS)
            if not await self.is_healthy():
                self.mark_engine_lost()
                return
            silent_seconds += HEALTH_INTERVAL_SECONDS
            if silent_seconds >= line_frames.ALIVE_INTERVAL_SECONDS:
                silent_seconds = 0.0
                self._unsent.append(line_frames.answer_frame(0, line_frames.ALIVE))
                self._wake.set()

    def mark_engine_lost(self) -> None:
        if not self._is_dead:
            self._is_dead = True
            self._unsent.append(line_frames.answer_frame(0, line_frames.ENGINE_DEAD))
            self._wake.set()

    async def is_healthy(self) -> bool:
        """Ask the engine's own ``/health`` in-process; 503 is how vLLM says that it is dead."""
        scope = self._scope_of(b"/health", b"batchyard-health", 0)
        exchange = _Exchange(b"")
        try:
            await self.app({**scope, "method": "GET"}, exchange.receive, exchange.send)
        except Exception:  # noqa: BLE001 - whatever it is, it is not health
            return False
        return exchange.status != 503

    async def _abort_all(self) -> None:
        """End every request in flight in the engine too, and wait until they have ended."""
        tasks = [replay.abort() for replay in self._in_flight.values()]
        self._in_flight.clear()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * ABORT_GRACE_SECONDS)


class _Exchange:
    """The ASGI channels of one replayed request."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._is_gone = asyncio.Event()
        self._parts: list[bytes] = []
        self.status = 0
        self._retry_after = line_frames.NO_RETRY_AFTER

    def answer_frame(self, tag: int) -> bytes:
        return line_frames.answer_frame(tag, self.status, b"".join(self._parts), self._retry_after)

    def fail(self, reason: str) -> None:
        """Answer 500, as the server would for an exception that none of its handlers takes."""
        message = f"the engine failed on this request: {reason}"
        details = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
        self.status = 500
        self._parts = [json.dumps({"error": details}).encode()]

    def disconnect(self) -> None:
        """Tell the application that its client is gone."""
        self._is_gone.set()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            for name, value in message.get("headers", ()):
                if name.lower() == b"retry-after":
                    # One word of the frame's header; a date has spaces.
                    self._retry_after = value.replace(b" ", b"_")
        elif message["type"] == "http.response.body":
            part = message.get("body", b"")
            if part:
                self._parts.append(part)


class _Replay:
    """One request in flight: exactly one answer, whatever comes first."""

    def __init__(self, stream: _Stream, tag: int, body: bytes, deadline: float) -> None:
        self.tag = tag
        self.deadline = deadline
        self._stream = stream
        self._exchange = _Exchange(body)
        self._is_open = True
        self._grace_seconds = ABORT_GRACE_SECONDS

    def start(self, scope: Scope) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(scope))

    def ends_by_cancelling(self) -> None:
        """No task waits for a disconnect: the request runs in our own task."""
        self._grace_seconds = 0.0

    def abort(self) -> asyncio.Task[None]:
        """Abort it in the engine; the task that is returned ends within the grace period.

        The disconnect comes first, because most of vLLM's handlers wait for the answer in a task
        of their own that only a disconnect cancels: cancelling ours would leave it running.
        """
        self._is_open = False
        self._exchange.disconnect()
        asyncio.get_running_loop().call_later(self._grace_seconds, self._task.cancel)
        return self._task

    def end(self, status: int) -> None:
        """Abort it and answer so, unless it has had its answer."""
        if self._is_open:
            self.abort()
            self._stream.answer(self, line_frames.answer_frame(self.tag, status))

    async def _run(self, scope: Scope) -> None:
        exchange = self._exchange
        try:
            await self._stream.app(scope, exchange.receive, exchange.send)
        except Exception as error:  # noqa: BLE001 - one request's failure is its own answer
            exchange.fail(type(error).__name__)
        if not self._is_open:
            return
        if not exchange.status:
            exchange.fail("no response")
        if exchange.status >= 500 and not await self._stream.is_healthy():
            # A dying engine answers all that is in flight with 500. Those are no answers to
            # the requests, which will be run again.
            self._stream.mark_engine_lost()
            return
        if self._is_open:
            self._is_open = False
            self._stream.answer(self, exchange.answer_frame(self.tag))
