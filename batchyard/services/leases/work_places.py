"""The places in which batches of one process are fetched, planned, collected and published.

Their number bounds what a process does at once; what waits for one has its turn by
:mod:`.schedule.turns`. Large batches have places of their own: a file of a million lines takes
minutes to read, and one of unknown size may, so that small batches do not wait for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Final

from batchyard.schedule.turns import TenantSlots, Turns

if TYPE_CHECKING:
    from batchyard.schedule.turns import QueueEntry

_SMALL_AT_ONCE: Final = 4
_LARGE_AT_ONCE: Final = 8


class WorkSlots:
    """The places of one process."""

    def __init__(self) -> None:
        self.small = _Slots(_SMALL_AT_ONCE, in_equal_parts=True)
        self.large = _Slots(_LARGE_AT_ONCE, in_equal_parts=False)


class WorkSlot:
    """The place of one batch, while it has one."""

    def __init__(self, places: WorkSlots) -> None:
        self._places = places
        self._taken: tuple[_Slots, QueueEntry] | None = None

    async def take(self, entry: QueueEntry) -> None:
        """Wait for the batch's turn; the place that it had goes to another one meanwhile."""
        self.give_back()
        places = self._places.small if entry.is_small else self._places.large
        await places.take(entry)
        self._taken = places, entry

    def give_back(self) -> None:
        """The batch needs no place for now. A second call does nothing."""
        if self._taken is not None:
            (places, entry), self._taken = self._taken, None
            places.give_back(entry)


class _Slots:
    """``most`` for a tenant that is by itself; the next one finds some free.

    ``in_equal_parts``: a tenant takes no more than its part, also while others leave theirs free.
    They share processors: what one does not need is for the speed of the others.
    """

    def __init__(self, most: int, *, in_equal_parts: bool) -> None:
        self._in_equal_parts = in_equal_parts
        self._room = TenantSlots(most)
        self._turns = Turns(urgent_first=False)
        self._tenants: Counter[str] = Counter()
        """The tenants of all that wait or have a place."""
        self._waiting: dict[asyncio.Future[None], QueueEntry] = {}

    async def take(self, entry: QueueEntry) -> None:
        self._turns.join(entry)
        self._tenants[entry.tenant] += 1
        granted = asyncio.get_running_loop().create_future()
        self._waiting[granted] = entry
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if self._waiting.pop(granted, None) is None:
                self.give_back(entry)
            else:
                self._leave(entry)
            raise

    def give_back(self, entry: QueueEntry) -> None:
        self._room.give_back(entry.tenant)
        self._leave(entry)

    def _leave(self, entry: QueueEntry) -> None:
        self._turns.leave(entry)
        self._tenants[entry.tenant] -= 1
        if not self._tenants[entry.tenant]:
            del self._tenants[entry.tenant]
        self._grant()

    def _grant(self) -> None:
        while waiting := {
            entry: granted for granted, entry in self._waiting.items() if self._may_take(entry)
        }:
            first = self._turns.next(waiting)
            self._turns.charge(first)
            self._room.take(first.tenant)
            granted = waiting[first]
            del self._waiting[granted]
            # One that is cancelled, and has not noticed yet, gives its place back.
            if not granted.done():
                granted.set_result(None)

    def _may_take(self, entry: QueueEntry) -> bool:
        among = len(self._tenants) if self._in_equal_parts else 1
        return self._room.is_there_for(entry.tenant, among=among)
