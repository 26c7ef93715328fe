"""Owners that withdraw their requests from the window."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Departure:
    in_flight: int
    callers: int = 0
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class Departures(dict[Hashable, _Departure]):
    """By owner, each until none of its requests is in flight. A dictionary: ``in`` it is looked for
    each request."""

    async def until_gone(self, owner: Hashable, in_flight: int) -> None:
        """The owner withdraws; return when all these requests have left, or at the end."""
        departure = self.setdefault(owner, _Departure(in_flight))
        departure.callers += 1
        try:
            await departure.is_over.wait()
        finally:
            departure.callers -= 1
            self._forget_if_gone(owner)

    def left(self, owner: Hashable) -> None:
        """A request of an owner that withdraws has left."""
        departure = self[owner]
        departure.in_flight -= 1
        if not departure.in_flight:
            departure.is_over.set()
        self._forget_if_gone(owner)

    def end(self) -> None:
        """The window has ended, and with it every request."""
        for departure in self.values():
            departure.is_over.set()
        self.clear()

    def _forget_if_gone(self, owner: Hashable) -> None:
        # Not before until_gone() goes on: a submission that waits for a slot may get one of those
        # that have just become free, and must find that its owner is leaving.
        departure = self.get(owner)
        if departure is not None and not (departure.in_flight or departure.callers):
            del self[owner]
