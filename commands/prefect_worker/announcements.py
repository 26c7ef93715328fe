"""When a worker asks for flow runs. Not Prefect's: its own asks every ten seconds (ADR 46, 74).

A batch would wait for that. A worker that asks each second costs the server 20 ms of processor time
each second, more than all batches do when they are large. The server announces each change of a
flow run by an event, so the worker listens, asks when Prefect has announced one, and now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventAnyResourceFilter, EventFilter, EventNameFilter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

HEARTBEAT_SECONDS: Final = 10.0
"""How often a worker asks although nothing was announced."""
_HEARTBEAT_INTERVALS: Final = 10
"""The same in intervals, where these are short: after 30 of them a worker counts as stuck."""
SETTLED_SECONDS: Final = 2.0
"""How long after an event the worker asks each time: the event may come before the change."""
_RECONNECT_SECONDS: Final = 5.0
_BETWEEN_SECONDS: Final = 0.2
"""Between two calls, although there are events all the time: one call answers many."""
_SCHEDULED: Final = (
    "Scheduled",
    "Rescheduled",
    "Late",
    "AwaitingRetry",
    "AwaitingConcurrencySlot",
    "Resuming",
)
_ENDED: Final = ("Completed", "Failed", "Crashed", "Cancelled")
"""After these there is a place for a flow run that waited for the pool's limit."""
HEARD_OF: Final = (*_SCHEDULED, *_ENDED)
"""The names of the states after which a worker asks. One that stands by has another name."""


class Announcements:
    """What the server has announced of one work pool, for a worker that looks at each interval.

    ``clock`` counts seconds.
    """

    def __init__(
        self, interval_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._heartbeat = min(HEARTBEAT_SECONDS, _HEARTBEAT_INTERVALS * interval_seconds)
        self._clock = clock
        self._asked = float("-inf")
        self._settled = float("-inf")
        self._is_listening = False

    def is_time_to_ask(self) -> bool:
        """Always true while the server cannot be heard."""
        now = self._clock()
        return not self._is_listening or now < self._settled or now - self._asked >= self._heartbeat

    def asked(self, *, found: bool) -> None:
        """Note an answer. Where flow runs were found there may be more, or no place for them."""
        self._asked = self._clock()
        if found:
            self._expect()

    def _expect(self) -> None:
        self._settled = self._clock() + SETTLED_SECONDS

    async def listen(
        self, pool_id: object, ask: Callable[[], Awaitable[Any]], note: Callable[[str], None]
    ) -> None:
        """Await ``ask`` after events, until cancelled. ``note`` gets why nothing is heard.

        What ``ask`` raises is left to the worker's own loop, which asks again at its next interval.
        """
        is_new = asyncio.Event()
        asking = asyncio.create_task(_ask_when(is_new, ask))
        try:
            while True:
                try:
                    await self._hear(pool_id, is_new)
                except Exception as error:  # noqa: BLE001 - the worker asks each time meanwhile
                    note(f"Prefect's events cannot be received ({type(error).__name__}).")
                await asyncio.sleep(_RECONNECT_SECONDS)
        finally:
            asking.cancel()

    async def _hear(self, pool_id: object, is_new: asyncio.Event) -> None:
        events = get_events_subscriber(_events_of(pool_id), reconnection_attempts=0)
        try:
            async with events:
                self._is_listening = True
                async for _ in events:
                    self._expect()
                    is_new.set()
        finally:
            self._is_listening = False


async def _ask_when(is_new: asyncio.Event, ask: Callable[[], Awaitable[Any]]) -> None:
    while True:
        await is_new.wait()
        is_new.clear()
        with contextlib.suppress(Exception):
            await ask()
        await asyncio.sleep(_BETWEEN_SECONDS)


def _events_of(pool_id: object) -> EventFilter:
    names = [f"prefect.flow-run.{name}" for name in HEARD_OF]
    return EventFilter(
        event=EventNameFilter(name=names),
        any_resource=EventAnyResourceFilter(id=[f"prefect.work-pool.{pool_id}"]),
    )
