"""The places in which batches of one process are fetched, planned, collected and published.

Their number bounds what a process does at once; what waits for one has its turn by
:mod:`.schedule.turns`. Large batches have places of their own: a file of a million lines takes
minutes to read, and one of unknown size may, so that small batches do not wait for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Final

from batchyard.schedule.turns import Room, Turns

if TYPE_CHECKING:
    from batchyard.schedule.turns import Standing

_SMALL_AT_ONCE: Final = 4
_LARGE_AT_ONCE: Final = 8


class WorkPlaces:
    """The places of one process."""

    def __init__(self) -> None:
        self.small = _Places(_SMALL_AT_ONCE, in_equal_parts=True)
        self.large = _Places(_LARGE_AT_ONCE, in_equal_parts=False)


class WorkPlace:
    """The place of one batch, while it has one."""

    def __init__(self, places: WorkPlaces) -> None:
        self._places = places
        self._taken: tuple[_Places, Standing] | None = None

    async def take(self, standing: Standing) -> None:
        """Wait for the batch's turn; the place that it had goes to another one meanwhile."""
        self.give_back()
        places = self._places.small if standing.is_small else self._places.large
        await places.take(standing)
        self._taken = places, standing

    def give_back(self) -> None:
        """The batch needs no place for now. A second call does nothing."""
        if self._taken is not None:
            (places, standing), self._taken = self._taken, None
            places.give_back(standing)


class _Places:
    """``most`` for a tenant that is by itself; the next one finds some free.

    ``in_equal_parts``: a tenant takes no more than its part, also while others leave theirs free.
    They share processors: what one does not need is for the speed of the others.
    """

    def __init__(self, most: int, *, in_equal_parts: bool) -> None:
        self._in_equal_parts = in_equal_parts
        self._room = Room(most)
        self._turns = Turns(urgent_first=False)
        self._tenants: Counter[str] = Counter()
        """The tenants of all that wait or have a place."""
        self._waiting: dict[asyncio.Future[None], Standing] = {}

    async def take(self, standing: Standing) -> None:
        self._turns.join(standing)
        self._tenants[standing.tenant] += 1
        granted = asyncio.get_running_loop().create_future()
        self._waiting[granted] = standing
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if self._waiting.pop(granted, None) is None:
                self.give_back(standing)
            else:
                self._leave(standing)
            raise

    def give_back(self, standing: Standing) -> None:
        self._room.give_back(standing.tenant)
        self._leave(standing)

    def _leave(self, standing: Standing) -> None:
        self._turns.leave(standing)
        self._tenants[standing.tenant] -= 1
        if not self._tenants[standing.tenant]:
            del self._tenants[standing.tenant]
        self._grant()

    def _grant(self) -> None:
        while waiting := {
            standing: granted
            for granted, standing in self._waiting.items()
            if self._may_take(standing)
        }:
            first = self._turns.next(waiting)
            self._turns.charge(first)
            self._room.take(first.tenant)
            granted = waiting[first]
            del self._waiting[granted]
            # One that is cancelled, and has not noticed yet, gives its place back.
            if not granted.done():
                granted.set_result(None)

    def _may_take(self, standing: Standing) -> bool:
        among = len(self._tenants) if self._in_equal_parts else 1
        return self._room.is_there_for(standing.tenant, among=among)
