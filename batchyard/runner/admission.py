"""Which chunk may put requests into the window.

Chunks enter it in their order, and a chunk is leased only when there is room for its first
request. So one chunk at a time has the turn. A chunk that is slow to begin, because its input is
far away or its storage does not answer, lets others go first.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from batchyard.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

SLOW_SECONDS = 1.0


class Admission:
    """One chunk's turn, which it has from the start.

    ``slow`` counts the chunks of each batch that let others go first: no more chunks of such a
    batch are leased meanwhile. ``may_return`` says whether the chunk may have its turn back.
    """

    def __init__(
        self,
        turn: asyncio.Lock,
        batch_id: str,
        slow: Counter[str],
        *,
        may_return: Callable[[], bool],
    ) -> None:
        self._turn = turn
        self._may_return = may_return
        self._batch_id = batch_id
        self._slow = slow
        self._has_turn = True

    def leave(self) -> None:
        """Let the next chunk begin. A second call does nothing."""
        if self._has_turn:
            self._has_turn = False
            self._turn.release()

    async def unless_slow(self, preparation: Coroutine[Any, Any, T]) -> T:
        """Return what ``preparation`` returns, with the turn, which others may have had meanwhile.

        Raises :class:`~batchyard.errors.StorageUnavailable` if the turn cannot be had again.
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
        self._slow[self._batch_id] += 1
        self.leave()
        try:
            await asyncio.wait((task,))
        finally:
            self._slow[self._batch_id] -= 1
            if not self._slow[self._batch_id]:
                del self._slow[self._batch_id]
        if not task.cancelled() and task.exception() is None:
            await self._turn.acquire()
            self._has_turn = True
            if not self._may_return():
                raise StorageUnavailable("The input came late: others run here by now.")
