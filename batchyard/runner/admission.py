"""Which chunk puts the next request into the window.

Chunks of several batches are admitted side by side, at most one of each flow: of a tenant's small
batches one, and of its large ones. Whose turn it is says :mod:`batchyard.turns`. Several requests
of a chunk follow one another, so that they find in the engine's cache what they share. A chunk that
is slow to begin, because its input is far away or its storage does not answer, keeps no other out.
Nothing of a background batch passes while a chunk of another one is at the door.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeVar

from batchyard.errors import StorageUnavailable
from batchyard.turns import Beside, Turns

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Awaitable, Callable, Coroutine

    from batchyard.store import ChunkLease, LeaseKey
    from batchyard.turns import Standing

T = TypeVar("T")

SLOW_SECONDS = 1.0
_MOST_LARGE: Final = 4
"""Chunks of large batches side by side. Each begins anew in the engine's cache at each turn."""
_MOST: Final = 12


class Door:
    """The way into one window, for one request at a time.

    ``turn_requests``: how many requests of a chunk follow one another while others wait.
    """

    def __init__(self, turn_requests: int) -> None:
        self._turn_requests = turn_requests
        self._turns = Turns(urgent_first=True)
        self._at: dict[LeaseKey, Standing] = {}
        self._waiting: dict[LeaseKey, asyncio.Future[None]] = {}
        self._passing: LeaseKey | None = None
        self._last: LeaseKey | None = None
        self._left_of_turn = 0
        self._has_left = asyncio.Event()

    def __contains__(self, key: LeaseKey) -> bool:
        return key in self._at

    @property
    def is_empty(self) -> bool:
        """Whether no chunk is at the door."""
        return not self._at

    @property
    def batches(self) -> set[str]:
        """The batches that have a chunk at the door."""
        return {key.batch_id for key in self._at}

    @property
    def beside(self) -> Beside:
        """What is at the door: of the same flows nothing more may come."""
        at = self._at.values()
        others = [standing for standing in at if not standing.is_background]
        return Beside(
            frozenset(standing.flow for standing in at),
            has_large=sum(not standing.is_small for standing in others) >= _MOST_LARGE,
            keeps_background_out=bool(others) or len(at) >= _MOST_LARGE,
        )

    @property
    def has_room(self) -> bool:
        """Whether another chunk may come. Background batches take no other's place."""
        return sum(not standing.is_background for standing in self._at.values()) < _MOST

    def enter(self, key: LeaseKey, standing: Standing) -> None:
        """A chunk is to be admitted."""
        self._at[key] = standing
        self._turns.join(standing)
        # It may go before the one that has the turn.
        self._left_of_turn = 0

    def leave(self, key: LeaseKey) -> None:
        """All of the chunk is admitted, or no more of it is to be. A second call does nothing."""
        if key in self._at:
            self._turns.leave(self._at.pop(key))
            self._has_left.set()
            if self._waiting:
                # It may have been what background batches waited for.
                asyncio.get_running_loop().call_soon(self._let_next)

    async def until_left(self, seconds: float) -> None:
        """Return when a chunk has left, or after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._has_left.wait()
        except TimeoutError:
            return
        self._has_left.clear()

    def has_to_wait(self, key: LeaseKey) -> bool:
        """Whether the chunk has turns: there are others, and it has not left."""
        return len(self._at) > 1 and key in self._at

    async def begin_pass(self, key: LeaseKey, cost: float) -> None:
        """Wait until it is the turn of the chunk; ``end_pass`` follows when its request is in."""
        if self._passing is None and not self._contenders() and self._may_pass(key):
            self._choose(key)
        else:
            chosen = self._waiting[key] = asyncio.get_running_loop().create_future()
            try:
                await chosen
            except asyncio.CancelledError:
                if self._waiting.get(key) is chosen:
                    del self._waiting[key]
                else:
                    self.end_pass()
                raise
        if key in self._at:
            self._turns.charge(self._at[key], cost)

    def end_pass(self) -> None:
        """The next one may pass."""
        self._passing = None
        if self._waiting:
            # Not at once: the chunk that has just passed is about to come back.
            asyncio.get_running_loop().call_soon(self._let_next)

    def _may_pass(self, key: LeaseKey) -> bool:
        """Whether no chunk at the door keeps this one out; one that has left needs no turn."""
        standing = self._at.get(key)
        return (
            standing is None
            or not standing.is_background
            or all(each.is_background for each in self._at.values())
        )

    def _contenders(self) -> list[LeaseKey]:
        """The chunks that wait, and may pass."""
        return [key for key in self._waiting if self._may_pass(key)]

    def _let_next(self) -> None:
        contenders = self._contenders()
        if self._passing is not None or not contenders:
            return
        key = self._last
        if key not in contenders or self._left_of_turn <= 0:
            at_door = {self._at[each]: each for each in contenders if each in self._at}
            # One that has left meanwhile needs no turn: its request is dropped.
            key = at_door[self._turns.next(at_door)] if at_door else contenders[0]
        assert key is not None  # noqa: S101 - it waits
        chosen = self._waiting.pop(key)
        self._choose(key)
        # One that is cancelled, and has not noticed yet, gives its turn to the next.
        if not chosen.done():
            chosen.set_result(None)

    def _choose(self, key: LeaseKey) -> None:
        if key != self._last or self._left_of_turn <= 0:
            self._last, self._left_of_turn = key, self._turn_requests
        self._left_of_turn -= 1
        self._passing = key


class Admission:
    """One chunk at the door, where it is from the start.

    ``slow`` counts the chunks of each batch that are slow to begin: no more chunks of such a batch
    are leased meanwhile. ``may_return`` says whether the chunk may come back to the door.
    """

    def __init__(
        self,
        door: Door,
        lease: ChunkLease,
        standing: Standing,
        slow: Counter[str],
        *,
        may_return: Callable[[], bool],
    ) -> None:
        self._door = door
        self._key = lease.key
        self._cost = lease.token_estimate / lease.request_count
        self._standing = standing
        self._may_return = may_return
        self._slow = slow

    def leave(self) -> None:
        """Let the next chunk begin. A second call does nothing."""
        self._door.leave(self._key)

    async def submit(self, submitting: Callable[[], Awaitable[None]]) -> None:
        """Do so when it is the chunk's turn."""
        if not self._door.has_to_wait(self._key):
            await submitting()
            return
        await self._door.begin_pass(self._key, self._cost)
        try:
            await submitting()
        finally:
            self._door.end_pass()

    async def until_room(self) -> None:
        """Wait while other batches keep a background batch out, for what takes no turns."""
        if self._standing.is_background:
            await self.submit(_nothing)

    async def unless_slow(self, preparation: Coroutine[Any, Any, T]) -> T:
        """Return what ``preparation`` returns; meanwhile the chunk may be away from the door.

        Raises :class:`~batchyard.errors.StorageUnavailable` if it cannot come back.
        """
        task = asyncio.create_task(preparation)
        try:
            await asyncio.wait((task,), timeout=SLOW_SECONDS)
            if not task.done():
                await self._let_others_go_first(task)
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _let_others_go_first(self, task: asyncio.Task[Any]) -> None:
        batch_id = self._key.batch_id
        self._slow[batch_id] += 1
        self.leave()
        try:
            await asyncio.wait((task,))
        finally:
            self._slow[batch_id] -= 1
            if not self._slow[batch_id]:
                del self._slow[batch_id]
        if not task.cancelled() and task.exception() is None:
            if not self._may_return():
                raise StorageUnavailable("The input came late: others run here by now.")
            self._door.enter(self._key, self._standing)


async def _nothing() -> None:
    pass
