"""A worker that hears of flow runs asks for them when there are some, and otherwise seldom."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from commands.prefect_worker import announcements
from commands.prefect_worker.announcements import (
    HEARTBEAT_SECONDS,
    SETTLED_SECONDS,
    Announcements,
)
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Events:
    """A server's events, one for each item of ``queue``; None ends the connection."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[object] = asyncio.Queue()
        self.connections = 0
        self.is_away = False

    async def __aenter__(self) -> Events:
        if self.is_away:
            raise ConnectionRefusedError
        self.connections += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> object:
        event = await self.queue.get()
        if event is None:
            raise StopAsyncIteration
        return event


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    made = Events()
    monkeypatch.setattr(announcements, "get_events_subscriber", lambda *_, **__: made)
    monkeypatch.setattr(announcements, "_RECONNECT_SECONDS", 0.01)
    monkeypatch.setattr(announcements, "_BETWEEN_SECONDS", 0.01)
    return made


class Listening:
    """A worker that listens, at the time ``now``."""

    def __init__(self, interval_seconds: float) -> None:
        self.now = 0.0
        self.asked = 0
        self.fails = False
        self.notes: list[str] = []
        self.announcements = Announcements(interval_seconds, lambda: self.now)

    async def ask(self) -> None:
        self.asked += 1
        if self.fails:
            raise RuntimeError
        self.announcements.asked(found=False)

    def is_time_to_ask(self) -> bool:
        return self.announcements.is_time_to_ask()


@asynccontextmanager
async def listening(interval_seconds: float = 1.0) -> AsyncIterator[Listening]:
    worker = Listening(interval_seconds)
    listen = worker.announcements.listen("pool", worker.ask, worker.notes.append)
    task = asyncio.create_task(listen)
    try:
        yield worker
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE * 10):
        while not condition():  # noqa: ASYNC110 - the worker tells nobody
            await asyncio.sleep(0.001)


async def test_an_event_is_followed_by_a_call_at_once(events: Events) -> None:
    async with listening() as worker:
        await until(lambda: events.connections)
        assert not worker.asked
        events.queue.put_nowait("Scheduled")
        await until(lambda: worker.asked == 1)


async def test_a_worker_that_hears_asks_seldom(events: Events) -> None:
    async with listening() as worker:
        await until(lambda: events.connections)
        await worker.ask()
        worker.now += HEARTBEAT_SECONDS - 1
        assert not worker.is_time_to_ask()
        worker.now += 1
        assert worker.is_time_to_ask()


async def test_a_short_interval_makes_the_heartbeat_short(events: Events) -> None:
    """Prefect's check of a worker's health counts intervals."""
    async with listening(interval_seconds=0.1) as worker:
        await until(lambda: events.connections)
        await worker.ask()
        worker.now += 1
        assert worker.is_time_to_ask()


async def test_what_an_event_came_before_is_found_a_moment_later(events: Events) -> None:
    async with listening() as worker:
        events.queue.put_nowait("Scheduled")
        await until(lambda: worker.asked == 1)
        worker.now += SETTLED_SECONDS / 2
        assert worker.is_time_to_ask()
        worker.now += SETTLED_SECONDS
        assert not worker.is_time_to_ask()


async def test_a_worker_that_got_flow_runs_asks_for_more(events: Events) -> None:
    async with listening() as worker:
        await until(lambda: events.connections)
        worker.announcements.asked(found=True)
        assert worker.is_time_to_ask()


async def test_many_events_are_few_calls(events: Events) -> None:
    async with listening() as worker:
        for number in range(100):
            events.queue.put_nowait(number)
        await until(lambda: events.queue.empty() and worker.asked)
        await asyncio.sleep(0.05)
        assert worker.asked <= 3


async def test_a_worker_that_hears_nothing_asks_each_time(events: Events) -> None:
    events.is_away = True
    async with listening() as worker:
        await until(lambda: worker.notes)
        await worker.ask()
        assert worker.is_time_to_ask()
    assert worker.notes[0] == "Prefect's events cannot be received (ConnectionRefusedError)."


async def test_a_connection_that_ends_is_made_again(events: Events) -> None:
    async with listening() as worker:
        await until(lambda: events.connections)
        events.queue.put_nowait(None)
        await until(lambda: events.connections == 2)
        await worker.ask()
        assert not worker.is_time_to_ask()


async def test_a_call_that_fails_is_not_the_last_one(events: Events) -> None:
    async with listening() as worker:
        worker.fails = True
        for number in (1, 2):
            events.queue.put_nowait("Scheduled")
            await until(lambda number=number: worker.asked == number)
