"""One line stream over several API servers of one engine, which listen on one socket.

Of vLLM's servers the one with the fewest connections takes the next one, if it wakes up within
five milliseconds. So connections are opened, and kept, until each server has one; those that a
server has beyond its first are closed then. Each request goes to the server that has the fewest.
All servers hand their requests to one engine core, in the order in which they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from batchyard.engine.base import Abort
from batchyard.errors import EngineLost
from batchyard.logs import event_logger
from batchyard.processes.beside import beside

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable

    from batchyard.engine.base import EngineAnswer, EngineRequest

    Requests = AsyncIterable[EngineRequest | Abort]
    OpenStream = Callable[..., AsyncGenerator[EngineAnswer, None]]

log = event_logger(__name__)

_NO_TAG: Final = 0
"""No request has it: the stream's own frames do."""
_PATIENCE_SECONDS: Final = 10.0
"""For a server that takes no connection: of several that start, the first to listen is ready."""
_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 0.3
"""Before a connection after one that found nothing new: the other servers had no processor."""


async def stream_over(
    open_stream: OpenStream, servers: int, requests: Requests
) -> AsyncGenerator[EngineAnswer, None]:
    """Send each request to one of the servers, and yield the answers of all as they finish.

    ``open_stream`` is :func:`.line_client.stream_lines` with all but the requests and ``on_open``.
    What one of its streams raises, or ``requests``, is raised here, and ends the others: vLLM 0.32
    ends the whole engine if one of its servers has ended.
    """
    answers: asyncio.Queue[EngineAnswer | None] = asyncio.Queue()
    async with contextlib.AsyncExitStack() as stack:
        lanes = await _lanes(open_stream, servers, answers, stack)
        feeding = await stack.enter_async_context(beside(_feed(lanes, requests), name="lanes"))
        feeding.add_done_callback(lambda _: answers.put_nowait(None))
        # Of what has ended each puts None behind its last answer.
        running = len(lanes) + 1
        while running:
            answer = await answers.get()
            if answer is not None:
                yield answer
                continue
            running -= 1
            ended = [task for task in (feeding, *(lane.reading for lane in lanes)) if task.done()]
            for task in ended:
                task.result()
            if not feeding.done():
                raise EngineLost("one of the engine's servers closed its connection")


async def _lanes(
    open_stream: OpenStream,
    servers: int,
    answers: asyncio.Queue[EngineAnswer | None],
    stack: contextlib.AsyncExitStack,
) -> list[_Lane]:
    found: dict[str, _Lane] = {}
    pause = _FIRST_PAUSE_SECONDS
    patience = time.monotonic() + _PATIENCE_SECONDS
    async with contextlib.AsyncExitStack() as spare:
        while len(found) < servers:
            lane = _Lane(answers)
            async with contextlib.AsyncExitStack() as own:
                lane.reading = await own.enter_async_context(
                    beside(lane.read(open_stream), name="lane")
                )
                server = await lane.opened()
                is_new = server not in found
                await (stack if is_new else spare).enter_async_context(own.pop_all())
            if is_new:
                found[server] = lane
                lane.reading.add_done_callback(lambda _: answers.put_nowait(None))
            elif time.monotonic() > patience:
                log.warning("engine.servers_missed", "they took no connection", servers=len(found))
                break
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
    return list(found.values())


async def _feed(lanes: list[_Lane], requests: Requests) -> None:
    async for request in requests:
        if isinstance(request, Abort):
            for lane in lanes:
                if request.tag in lane.in_flight:
                    lane.waiting.put_nowait(request)
        else:
            lane = min(lanes, key=lambda each: len(each.in_flight))
            lane.in_flight.add(request.tag)
            lane.waiting.put_nowait(request)
    for lane in lanes:
        lane.waiting.put_nowait(None)


class _Lane:
    """The stream of one server."""

    reading: asyncio.Task[None]

    def __init__(self, answers: asyncio.Queue[EngineAnswer | None]) -> None:
        self.in_flight: set[int] = set()
        """The tags of the requests that it has."""
        self.waiting: asyncio.Queue[EngineRequest | Abort | None] = asyncio.Queue()
        self._answers = answers
        self._server: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read(self, open_stream: OpenStream) -> None:
        """Until its requests are over and answered. Raises what the stream does."""
        stream = open_stream(self._requests(), on_open=self._server.set_result)
        async with aclosing(stream):
            async for answer in stream:
                self.in_flight.discard(answer.tag)
                self._answers.put_nowait(answer)

    async def opened(self) -> str:
        """The name of its server. Raises what the stream does if there is none."""
        await asyncio.wait((self._server, self.reading), return_when=asyncio.FIRST_COMPLETED)
        if not self._server.done():
            self.reading.result()
        return await self._server

    async def _requests(self) -> AsyncIterator[EngineRequest | Abort]:
        # aiohttp sends the headers with the first bytes of the body, and not before. The end of a
        # request that the server does not have is nothing to it.
        yield Abort(_NO_TAG)
        while (request := await self.waiting.get()) is not None:
            yield request
