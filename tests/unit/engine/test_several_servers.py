"""One stream over several servers: who gets a request, and what ends it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.base import Abort, EngineAnswer, EngineRequest, NoAnswer
from batchyard.engine.vllm import several_servers
from batchyard.engine.vllm.several_servers import stream_over
from batchyard.errors import EngineLost

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable


class Servers:
    """Some servers on one socket. ``opened``: the server that each new connection reaches."""

    def __init__(self, opened: list[str]) -> None:
        self.opened = opened
        self.got: dict[str, list[int]] = {}
        self.aborted: list[tuple[str, int]] = []
        self.answers = asyncio.Event()
        self.closed: list[str] = []
        self.lost = asyncio.Event()
        self.late = ""

    async def open(
        self, requests: AsyncIterator[Any], *, on_open: Callable[[str], None]
    ) -> AsyncGenerator[EngineAnswer, None]:
        name = self.opened.pop(0)
        on_open(name)
        waiting: list[int] = []
        try:
            async for request in requests:
                if isinstance(request, Abort):
                    if request.tag not in waiting:
                        continue
                    self.aborted.append((name, request.tag))
                    waiting.remove(request.tag)
                    yield EngineAnswer(request.tag, None, no_answer=NoAnswer.ABORTED)
                    continue
                self.got.setdefault(name, []).append(request.tag)
                waiting.append(request.tag)
                if self.lost.is_set() and name == "b":
                    raise EngineLost("b has ended")
            await self.answers.wait()
            if name == self.late:
                await asyncio.sleep(0.01)
            for tag in waiting:
                yield EngineAnswer(tag, 200, b"{}")
        finally:
            self.closed.append(name)


async def tagged(*tags: int) -> AsyncIterator[EngineRequest | Abort]:
    for tag in tags:
        await asyncio.sleep(0)
        yield Abort(-tag) if tag < 0 else EngineRequest(tag, "/v1/completions", b"{}", f"r{tag}")


async def tags_of(servers: Servers, requests: AsyncIterator[Any], count: int = 2) -> list[int]:
    async with asyncio.timeout(10):
        return [answer.tag async for answer in stream_over(servers.open, count, requests)]


async def test_each_server_has_one_connection_and_half_of_the_requests() -> None:
    servers = Servers(["a", "a", "a", "b"])
    servers.answers.set()
    assert sorted(await tags_of(servers, tagged(*range(10)))) == list(range(10))
    assert sorted(map(len, servers.got.values())) == [5, 5]
    assert servers.closed[:2] == ["a", "a"], "those that were opened in vain"


async def test_answers_that_are_read_late_are_all_there() -> None:
    """Both streams have ended before the first answer is taken."""
    servers = Servers(["a", "b"])
    servers.answers.set()
    servers.late = "b"
    found: list[int] = []
    async for answer in stream_over(servers.open, 2, tagged(*range(10))):
        await asyncio.sleep(0 if found else 0.1)
        found.append(answer.tag)
    assert sorted(found) == list(range(10))


async def test_a_server_that_gets_no_connection_is_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(several_servers, "_PATIENCE_SECONDS", 0.2)
    servers = Servers(["a"] * 99)
    servers.answers.set()
    assert sorted(await tags_of(servers, tagged(*range(4)))) == list(range(4))
    assert servers.got == {"a": [0, 1, 2, 3]}


async def test_an_abort_goes_where_its_request_is() -> None:
    servers = Servers(["a", "b"])
    servers.answers.set()
    await tags_of(servers, tagged(1, 2, 3, 4, -2, -3))
    places = {(name, tag) for name, tags in servers.got.items() for tag in tags}
    assert {tag for _, tag in servers.aborted} == {2, 3}
    assert set(servers.aborted) <= places


async def test_the_loss_of_one_server_is_raised_and_ends_the_other_stream() -> None:
    servers = Servers(["a", "b"])
    servers.lost.set()

    async def requests() -> AsyncIterator[EngineRequest | Abort]:
        async for each in tagged(1, 2):
            yield each
        await asyncio.Event().wait()

    with pytest.raises(EngineLost, match="b has ended"):
        await tags_of(servers, requests())
    assert sorted(servers.closed) == ["a", "b"]


async def test_what_the_requests_raise_is_raised() -> None:
    servers = Servers(["a", "b"])

    async def requests() -> AsyncIterator[EngineRequest | Abort]:
        async for each in tagged(1):
            yield each
        raise KeyError("no such line")

    with pytest.raises(KeyError, match="no such line"):
        await tags_of(servers, requests())
    assert sorted(servers.closed) == ["a", "b"]


async def test_an_engine_that_opens_no_stream_is_lost() -> None:
    async def refuses(*_: Any, **__: Any) -> AsyncGenerator[EngineAnswer, None]:
        raise EngineLost("refused")
        yield  # pragma: no cover - a generator

    with pytest.raises(EngineLost, match="refused"):
        async for _ in stream_over(refuses, 2, tagged(1)):
            pass
