"""Requests in and answers out over one HTTP connection: ASGI middleware for ``vllm serve``.

This file is loaded twice: by vLLM inside the engine's own process (``--middleware
line_stream.LineStream``, its folder on ``PYTHONPATH``), and by Batchyard for the frames. It
therefore imports the standard library only, and nothing of Batchyard.

One POST to ``/batchyard/stream`` carries any number of requests. Each is replayed in-process into
the application below, so it meets the same routes, validation and error handlers as a request of
its own would, and its answer goes back as soon as it is there. Both directions are frames, a
header line and a body of exactly ``LENGTH`` bytes::

    request   TAG URL LENGTH REQUEST_ID CONTENT_TYPE CACHE_SALT\\n body
              (without the last word: no salt; without the last two: JSON)
    abort     TAG - 0 -\\n
    answer    TAG STATUS LENGTH RETRY_AFTER\\n body       (RETRY_AFTER is ``-`` where there is none)

``STATUS`` is an HTTP status or one of :data:`TIMED_OUT`, :data:`ENGINE_DEAD`, :data:`ALIVE`,
:data:`ABORTED`. How many requests are in flight is the client's business: it sends the next one
when it wants to, each under a tag that none in flight has. Every request has exactly one answer;
an abort for a tag that is not in flight is ignored.

The frames are our own, because one HTTP request per line costs a third of the speed (decision 3),
and whatever brings frames along (HTTP/2, WebSockets) is a package that the engine need not have.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, MutableMapping

    Message = MutableMapping[str, Any]
    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PATH: Final = "/batchyard/stream"
TIMEOUT_HEADER: Final = "x-batchyard-timeout-seconds"

TIMED_OUT: Final = 0
"""The request outlasted its time and was aborted."""
ENGINE_DEAD: Final = 1
"""The engine below has died; nothing else comes on this stream. The tag means nothing."""
ALIVE: Final = 2
"""A sign of life while no answer is due. The tag means nothing."""
ABORTED: Final = 3
"""The client's abort ended the request."""

JSON: Final = "application/json"
SALT_KEY: Final = "batchyard.cache_salt"
"""Of the scope: the salt that ``direct_routes`` gives to the request; None or absent: none."""
MOST_WORDS: Final = 6
ABORT_URL: Final = "-"
"""In place of a URL: the frame aborts the request in flight that has its tag."""

ALIVE_INTERVAL_SECONDS: Final = 5.0
HEALTH_INTERVAL_SECONDS: Final = 0.5
ABORT_GRACE_SECONDS: Final = 1.0
MAX_HEADER_BYTES: Final = 16_384
MAX_DIGITS: Final = 20


class FrameError(ValueError):
    """The bytes are not a sequence of frames."""


def request_frame(
    tag: int,
    url: str,
    body: bytes,
    request_id: str,
    content_type: str = JSON,
    cache_salt: str | None = None,
) -> bytes:
    """One request. Raises :class:`FrameError` for any word with a space in it."""
    if url == ABORT_URL:
        raise FrameError("the URL would make it an abort")
    if not (_is_word(url) and _is_word(request_id) and _is_word(content_type)):
        raise FrameError("the words of a header must be printable ASCII without spaces")
    words = [str(tag), url, str(len(body)), request_id]
    if content_type != JSON or cache_salt is not None:
        words.append(content_type)
    if cache_salt is not None:
        if not _is_word(cache_salt):
            raise FrameError("the words of a header must be printable ASCII without spaces")
        words.append(cache_salt)
    return b"%b\n%b" % (" ".join(words).encode(), body)


def abort_frame(tag: int) -> bytes:
    """The end of one request."""
    return b"%d %s 0 -\n" % (tag, ABORT_URL.encode())


def answer_frame(tag: int, status: int, body: bytes = b"", retry_after: bytes = b"-") -> bytes:
    """One answer; ``retry_after`` is the header's own text."""
    return b"%d %d %d %s\n%b" % (tag, status, len(body), retry_after, body)


def _is_word(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def _is_number(word: bytes) -> bool:
    return word.isdigit() and len(word) <= MAX_DIGITS


class FrameParser:
    """Cuts a stream of bytes, however it is sliced, into frames of four words.

    ``most_words`` 6: a frame may have two more.
    """

    def __init__(self, most_words: int = 4) -> None:
        self._most_words = most_words
        self._buffer = bytearray()
        self._header: list[bytes] | None = None
        self._body_bytes = 0

    @property
    def is_between_frames(self) -> bool:
        """Whether the stream may end here."""
        return not self._buffer and self._header is None

    def feed(self, data: bytes) -> Iterator[tuple[list[bytes], bytes]]:
        """Yield the words and the body of each frame that ``data`` completes.

        Raises ``FrameError`` when the bytes are no frame.
        """
        buffer = self._buffer
        buffer += data
        while True:
            if self._header is None:
                end = buffer.find(b"\n", 0, MAX_HEADER_BYTES)
                if end < 0:
                    if len(buffer) >= MAX_HEADER_BYTES:
                        raise FrameError("header line too long")
                    return
                self._header = self._parse_header(bytes(buffer[:end]))
                del buffer[: end + 1]
            if len(buffer) < self._body_bytes:
                return
            body = bytes(buffer[: self._body_bytes])
            del buffer[: self._body_bytes]
            header, self._header = self._header, None
            yield header, body

    def _parse_header(self, line: bytes) -> list[bytes]:
        words = line.split(b" ")
        if not 4 <= len(words) <= self._most_words or not (
            _is_number(words[0]) and _is_number(words[2])
        ):
            raise FrameError("not a frame header")
        self._body_bytes = int(words[2])
        return words


class LineStream:
    """The middleware: takes :data:`PATH` for itself and leaves every other path alone."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST":
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
        self._timeout_seconds = float(headers[TIMEOUT_HEADER.encode()])
        self._authorization = headers.get(b"authorization")
        self._in_flight: dict[int, _Replay] = {}
        self._unsent: list[bytes] = []
        self._wake = asyncio.Event()
        self._all_received = False
        self._is_dead = False

    async def run(self) -> None:
        # The answer begins at once: the client reads answers while it still sends requests.
        headers = [(b"content-type", b"application/octet-stream")]
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
            await self._abort_all()

    async def _read(self) -> None:
        """Admit requests as they arrive; return when the client is gone."""
        frames = FrameParser(MOST_WORDS)
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return
            for words, body in frames.feed(message.get("body", b"")):
                if words[1] == ABORT_URL.encode():
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
        replay = _Replay(self, tag, body)
        self._in_flight[tag] = replay
        scope = self._scope_of(url, request_id, len(body), *more[:1])
        scope[SALT_KEY] = more[1].decode() if more[1:] else None
        replay.start(scope, self._timeout_seconds)

    def _abort(self, tag: int) -> None:
        # An answer may have crossed the abort on the way: then there is nothing to end.
        replay = self._in_flight.get(tag)
        if replay is not None:
            replay.end(ABORTED)

    def _scope_of(
        self, url: bytes, request_id: bytes, body_bytes: int, content_type: bytes = JSON.encode()
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
        """Notice the engine's death when no answer tells of it, and show the client we live."""
        silent_seconds = 0.0
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_SECONDS)
            if not await self.is_healthy():
                self.declare_dead()
                return
            silent_seconds += HEALTH_INTERVAL_SECONDS
            if silent_seconds >= ALIVE_INTERVAL_SECONDS:
                silent_seconds = 0.0
                self._unsent.append(answer_frame(0, ALIVE))
                self._wake.set()

    def declare_dead(self) -> None:
        if not self._is_dead:
            self._is_dead = True
            self._unsent.append(answer_frame(0, ENGINE_DEAD))
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
        self._retry_after = b"-"

    def answer_frame(self, tag: int) -> bytes:
        return answer_frame(tag, self.status, b"".join(self._parts), self._retry_after)

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

    def __init__(self, stream: _Stream, tag: int, body: bytes) -> None:
        self.tag = tag
        self._stream = stream
        self._exchange = _Exchange(body)
        self._is_open = True

    def start(self, scope: Scope, timeout_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(scope))
        self._timer = loop.call_later(timeout_seconds, self.end, TIMED_OUT)

    def abort(self) -> asyncio.Task[None]:
        """Abort it in the engine; the task that is returned ends within the grace period.

        The disconnect comes first, because vLLM's handlers wait for the answer in a task of
        their own that only a disconnect cancels: cancelling ours would leave it running.
        """
        self._close()
        self._exchange.disconnect()
        asyncio.get_running_loop().call_later(ABORT_GRACE_SECONDS, self._task.cancel)
        return self._task

    def _close(self) -> None:
        self._is_open = False
        self._timer.cancel()

    def end(self, status: int) -> None:
        """Abort it and answer so, unless it has had its answer."""
        if self._is_open:
            self.abort()
            self._stream.answer(self, answer_frame(self.tag, status))

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
            self._stream.declare_dead()
            return
        if self._is_open:
            self._close()
            self._stream.answer(self, exchange.answer_frame(self.tag))
