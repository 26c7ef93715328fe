"""Names that nobody answers for hold up no one but those who gave them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web as server_side
from aiohttp.test_utils import RawTestServer

from batchyard.processes.threads import in_thread
from batchyard.web.lookup import Lookups
from batchyard.web.resolver import Resolver
from batchyard.web.session import web_session
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import aiohttp

PATIENT = PATIENCE * 5


@dataclass(slots=True)
class NameServer:
    """Answers for no name below ``dead.example`` before ``answers`` is set."""

    answers: threading.Event = field(default_factory=threading.Event)
    asked: Counter[str] = field(default_factory=Counter)

    def getaddrinfo(self, host: str, *args: Any, **more: Any) -> list[Any]:
        self.asked[host] += 1
        if host.endswith("dead.example"):
            self.answers.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return REAL("127.0.0.1", *args, **more)

    async def is_asked(self, count: int) -> None:
        async with asyncio.timeout(PATIENT):
            while self.asked.total() < count:  # noqa: ASYNC110 - asked by other threads
                await asyncio.sleep(0.005)


REAL = socket.getaddrinfo


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    names = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    try:
        yield names
    finally:
        names.answers.set()


@contextlib.asynccontextmanager
async def asking_for_dead_names(
    session: aiohttp.ClientSession, name_server: NameServer, count: int
) -> AsyncIterator[None]:
    """So many requests to names of their own, which wait for the name server in the block."""

    async def get(number: int) -> None:
        with contextlib.suppress(OSError):
            await session.get(f"http://h{number}.dead.example/")

    tasks = [asyncio.create_task(get(number)) for number in range(count)]
    try:
        await name_server.is_asked(count)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def session() -> aiohttp.ClientSession:
    return web_session(guard=None, connect_seconds=60, read_seconds=60)


async def test_dead_names_hold_no_thread_in_which_files_are_written(
    name_server: NameServer,
) -> None:
    async with session() as theirs, asking_for_dead_names(theirs, name_server, 40):
        async with asyncio.timeout(PATIENT):
            await in_thread(lambda: None)


async def test_dead_names_hold_up_no_request_to_another_name(name_server: NameServer) -> None:
    async def answer(_: server_side.BaseRequest) -> server_side.StreamResponse:
        return server_side.Response(text="here")

    server = RawTestServer(answer)
    await server.start_server()
    async with (
        session() as theirs,
        session() as ours,
        asking_for_dead_names(theirs, name_server, 100),
        asyncio.timeout(PATIENT),
        ours.get(f"http://alive.example:{server.port}/") as response,
    ):
        assert await response.text() == "here"
    await server.close()


async def test_a_name_is_looked_up_once_for_all_who_wait_for_it(name_server: NameServer) -> None:
    """Whatever sessions they have, and after the first of them has given up."""
    resolvers = [Resolver() for _ in range(3)]
    waiting = [asyncio.create_task(each.resolve("x.dead.example", 443)) for each in resolvers]
    await name_server.is_asked(1)
    waiting[0].cancel()
    name_server.answers.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in outcomes] == [
        *(asyncio.CancelledError, socket.gaierror, socket.gaierror)
    ]
    assert name_server.asked == {"x.dead.example": 1}


async def test_a_caller_that_gives_up_before_its_turn_leaves_it_to_the_next(
    name_server: NameServer,
) -> None:
    lookups = Lookups(1)
    first, second, third = (
        asyncio.create_task(lookups.entries(name))
        for name in ("a.dead.example", "b.dead.example", "alive.example")
    )
    await name_server.is_asked(1)
    second.cancel()
    name_server.answers.set()
    async with asyncio.timeout(PATIENT):
        assert (await third)[0][4][0] == "127.0.0.1"
        with pytest.raises(socket.gaierror):
            await first
    assert name_server.asked == {"a.dead.example": 1, "alive.example": 1}


async def test_a_request_that_gives_up_before_its_turn_looks_nothing_up(
    name_server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiohttp would go on to wait for it."""
    monkeypatch.setattr("batchyard.web.resolver.CONNECTIONS", Lookups(1))
    async with session() as ours, asking_for_dead_names(ours, name_server, 1):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ours.get("http://late.example/")
        name_server.answers.set()
        async with asyncio.timeout(PATIENT):
            await Resolver().resolve("alive.example")
    assert name_server.asked == {"h0.dead.example": 1, "alive.example": 1}


async def test_a_lookup_that_all_have_given_up_fails_without_a_word(
    name_server: NameServer, caplog: pytest.LogCaptureFixture
) -> None:
    lookups = Lookups(1)
    asking = asyncio.create_task(lookups.entries("x.dead.example"))
    await name_server.is_asked(1)
    asking.cancel()
    name_server.answers.set()
    async with asyncio.timeout(PATIENT):
        await lookups.entries("alive.example")
    assert caplog.text == ""


async def test_where_no_thread_can_be_started_the_next_lookup_has_its_turn(
    name_server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lookups = Lookups(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(socket.gaierror, match="no thread"):
            await lookups.entries("alive.example")
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENT):
        assert await lookups.entries("alive.example")
    assert name_server.asked == {"alive.example": 1}
