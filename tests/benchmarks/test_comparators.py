"""The comparators do what they are named for."""

from __future__ import annotations

import asyncio

import pytest

from batchyard.engine.stub.stub import StubEngine
from benchmarks.comparators import barriers, exchange, one_window
from tests.patience import PATIENCE

BODIES = [b"%d" % number for number in range(20)]


class Server:
    """Answers after one turn of the loop; ``begun`` and ``ended`` at the start of each."""

    def __init__(self) -> None:
        self.at_once = 0
        self.peak = 0
        self.starts: list[tuple[int, int]] = []
        self.begun = self.ended = 0

    async def send(self, body: bytes) -> bytes:
        self.starts.append((self.begun, self.ended))
        self.begun += 1
        self.peak = max(self.peak, self.begun - self.ended)
        await asyncio.sleep(0.001 * (1 + int(body) % 3))
        self.ended += 1
        return body + b"!"


@pytest.mark.parametrize("way", [one_window, barriers])
async def test_every_body_is_answered_in_its_place(way: type) -> None:
    server = Server()
    assert await way(server.send, BODIES, 4) == [body + b"!" for body in BODIES]
    assert server.peak == 4


async def test_a_window_takes_the_next_request_as_soon_as_one_is_answered() -> None:
    server = Server()
    await one_window(server.send, BODIES, 4)
    assert any(begun - ended == 3 for begun, ended in server.starts[4:])


async def test_a_barrier_lets_nothing_in_before_its_chunk_is_answered() -> None:
    server = Server()
    await barriers(server.send, BODIES, 4)
    assert all(ended == 4 * (begun // 4) for begun, ended in server.starts)


async def test_an_exchange_gives_each_request_its_own_answer_and_ends_with_the_block() -> None:
    engine = StubEngine("m", latency=0.001)
    await engine.start()
    body = b'{"model": "m", "messages": [], "max_tokens": %d}'
    async with asyncio.timeout(PATIENCE * 10), exchange(engine) as send:
        one, two, again = await asyncio.gather(*(send(body % number) for number in (1, 2, 1)))
    assert one == again
    assert one != two
