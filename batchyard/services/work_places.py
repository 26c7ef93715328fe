"""The places in which batches of one process are fetched, planned, collected and published.

Their number bounds what a process does at once; what waits for one has its turn by
:mod:`batchyard.turns`. Large batches have places of their own: a file of a million lines takes
minutes to read, and small batches do not wait for it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from batchyard.turns import Room, Turns

if TYPE_CHECKING:
    from batchyard.turns import Standing

_SMALL_AT_ONCE: Final = 4
"""They wait for little but processors, so more of them at a time would only all be slower."""
_LARGE_AT_ONCE: Final = 8
"""Of one tenant. Reading an input from far away, or one of unknown size, counts as large."""


class WorkPlaces:
    """A place for each batch that is worked on."""

    def __init__(self) -> None:
        # The two never wait for each other.
        self._small = _Places(_SMALL_AT_ONCE, is_shared=False)
        self._large = _Places(_LARGE_AT_ONCE, is_shared=True)
        self._taken: dict[str, tuple[_Places, Standing]] = {}

    async def take(self, standing: Standing) -> None:
        """Wait for the batch's turn; the place that it had goes to another one meanwhile."""
        self.give_back(standing.batch_id)
        places = self._small if standing.is_small else self._large
        await places.take(standing)
        self._taken[standing.batch_id] = places, standing

    def give_back(self, batch_id: str) -> None:
        """The batch needs its place no more, if it has one."""
        if batch_id in self._taken:
            places, standing = self._taken.pop(batch_id)
            places.give_back(standing)

    def has(self, batch_id: str) -> bool:
        """Whether the batch has a place."""
        return batch_id in self._taken


class _Places:
    """``is_shared``: no tenant may have all of them, because each may take long."""

    def __init__(self, most: int, *, is_shared: bool) -> None:
        self._most = most
        self._taken = 0
        self._room = Room(most) if is_shared else None
        self._turns = Turns(urgent_first=False)
        self._waiting: dict[Standing, asyncio.Future[None]] = {}

    async def take(self, standing: Standing) -> None:
        self._turns.join(standing)
        granted = self._waiting[standing] = asyncio.get_running_loop().create_future()
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if standing in self._waiting:
                self._stop_waiting(standing)
            else:
                self.give_back(standing)
            raise

    def give_back(self, standing: Standing) -> None:
        self._taken -= 1
        if self._room is not None:
            self._room.give_back(standing.tenant)
        self._grant()

    def _grant(self) -> None:
        while waiting := [each for each in self._waiting if self._may_take(each)]:
            first = self._turns.next(waiting)
            self._turns.charge(first)
            self._taken += 1
            if self._room is not None:
                self._room.take(first.tenant)
            self._stop_waiting(first).set_result(None)

    def _stop_waiting(self, standing: Standing) -> asyncio.Future[None]:
        self._turns.leave(standing)
        return self._waiting.pop(standing)

    def _may_take(self, standing: Standing) -> bool:
        if self._room is None:
            return self._taken < self._most
        return self._room.is_there_for(standing.tenant)
