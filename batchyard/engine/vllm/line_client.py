"""Our side of the line stream: one connection, requests out and answers in at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import aiohttp

from batchyard.engine.base import Abort, EngineAnswer, NoAnswer, http_answer
from batchyard.engine.middleware import line_frames
from batchyard.errors import EngineLost
from batchyard.web.retry_after import retry_after_seconds

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterable,
        AsyncIterator,
        Callable,
        Iterator,
        Mapping,
    )

    from batchyard.engine.base import EngineRequest

_NO_ANSWERS = {
    line_frames.TIMED_OUT: NoAnswer.TIMEOUT,
    line_frames.ABORTED: NoAnswer.ABORTED,
}
SILENCE_SECONDS = 12 * line_frames.ALIVE_INTERVAL_SECONDS
"""The engine shows a sign of life twelve times as often; a silent one hangs."""
MAX_UNSENT_BYTES = 4 << 20


async def stream_lines(
    session: aiohttp.ClientSession,
    base_url: str,
    requests: AsyncIterable[EngineRequest | Abort],
    *,
    timeout_seconds: float,
    headers: Mapping[str, str],
    on_open: Callable[[str], None] = lambda _: None,
) -> AsyncGenerator[EngineAnswer, None]:
    """Send ``requests`` as they come and yield the answers as they finish.

    ``on_open`` gets the name of the server that answers, before the first answer.
    Raises :class:`~batchyard.errors.EngineLost` when the connection breaks, the engine says
    that it is dead or falls silent; whatever ``requests`` raises is raised here. Closing the
    iterator closes the connection, on which the engine aborts what is in flight.
    """
    outgoing = _Outgoing(requests)
    answers = _Answers(outgoing.owed)
    try:
        async with session.post(
            base_url + line_frames.PATH,
            data=outgoing.chunks(),
            headers={**headers, line_frames.TIMEOUT_HEADER: repr(timeout_seconds)},
            timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENCE_SECONDS),
        ) as response:
            if response.status != 200:
                raise EngineLost(f"the engine refused the line stream: HTTP {response.status}")
            outgoing.on_failure(response.close)
            on_open(response.headers.get(line_frames.SERVER_HEADER, ""))
            async for data in response.content.iter_any():
                for answer in answers.feed(data):
                    yield answer
            outgoing.raise_failure()
            if answers.is_dead:
                raise EngineLost("the engine reported that it crashed")
            if not answers.parser.is_between_frames or answers.count < outgoing.count:
                raise EngineLost("the engine closed the connection with requests in flight")
    except (aiohttp.ClientError, OSError, line_frames.FrameError) as error:
        outgoing.raise_failure()
        raise EngineLost(f"lost the engine: {type(error).__name__}: {error}") from error
    finally:
        await outgoing.close()


class _Outgoing:
    """Pulls requests as fast as the caller yields them and sends what has gathered in one piece."""

    def __init__(self, requests: AsyncIterable[EngineRequest | Abort]) -> None:
        self.count = 0
        """Requests, each of which is owed one answer; an abort is owed none."""
        self.owed: set[int] = set()
        """The tags of those that have none yet."""
        self._requests = requests
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._is_complete = False
        self._failure: Exception | None = None
        self._break_off: Callable[[], None] = lambda: None
        # Its own task, so that the requests that are ready at once travel together.
        self._puller = asyncio.create_task(self._pull())

    async def _pull(self) -> None:
        try:
            async for request in self._requests:
                frame = self._frame(request)
                self._unsent.append(frame)
                self._unsent_bytes += len(frame)
                self._wake.set()
                if self._unsent_bytes > MAX_UNSENT_BYTES:
                    self._room.clear()
                    await self._room.wait()
        except Exception as error:  # noqa: BLE001 - raised again where the answers are read
            self._failure = error
            self._break_off()
        finally:
            self._is_complete = True
            self._wake.set()

    def _frame(self, request: EngineRequest | Abort) -> bytes:
        if isinstance(request, Abort):
            return line_frames.abort_frame(request.tag)
        frame = line_frames.request_frame(
            request.tag,
            request.url,
            request.body,
            request.request_id,
            request.content_type,
            cache_salt=request.of_batch.cache_salt,
            traceparent=request.of_batch.traceparent,
        )
        self.count += 1
        self.owed.add(request.tag)
        return frame

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body of the POST. Fails, and so breaks the connection, as ``requests`` fails."""
        while not self._is_complete or self._unsent:
            await self._wake.wait()
            self._wake.clear()
            frames, self._unsent, self._unsent_bytes = self._unsent, [], 0
            self._room.set()
            if frames:
                yield b"".join(frames)
            self.raise_failure()

    def on_failure(self, break_off: Callable[[], None]) -> None:
        """Call ``break_off`` when ``requests`` fails: nothing else wakes the reader of answers."""
        self.raise_failure()
        self._break_off = break_off

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Stop pulling; ``requests`` sees a cancellation if it still waits."""
        self._puller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._puller


class _Answers:
    """Turns the bytes of the response into answers."""

    def __init__(self, owed: set[int]) -> None:
        self.parser = line_frames.FrameParser()
        self.count = 0
        self.is_dead = False
        self._owed = owed

    def feed(self, data: bytes) -> Iterator[EngineAnswer]:
        for (tag, status, _, retry_after), body in self.parser.feed(data):
            code = _number(status)
            if code == line_frames.ALIVE:
                continue
            if code == line_frames.ENGINE_DEAD:
                self.is_dead = True
                return
            self.count += 1
            yield self._answer(_number(tag), code, body, retry_after)

    def _answer(self, tag: int, code: int, body: bytes, retry_after: bytes) -> EngineAnswer:
        if tag not in self._owed:
            raise line_frames.FrameError("an answer that no request waits for")
        self._owed.remove(tag)
        if code in _NO_ANSWERS:
            return EngineAnswer(tag, None, no_answer=_NO_ANSWERS[code])
        seconds = None
        if retry_after != line_frames.NO_RETRY_AFTER:
            seconds = retry_after_seconds(retry_after.decode(errors="replace").replace("_", " "))
        return http_answer(tag, code, body, seconds)


def _number(word: bytes) -> int:
    try:
        return int(word)
    except ValueError:
        raise line_frames.FrameError("a word that should be a number") from None
