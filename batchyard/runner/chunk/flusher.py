"""When finished lines of a chunk become durable: every few seconds, and when all are there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from batchyard.services.patience import patiently

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.runner.chunk.copies import Copies
    from batchyard.runner.chunk.finished_lines import FinishedLines

_MOST_BYTES: Final = 4 * 1024**2
"""Finished lines in memory that are flushed before their time is up."""


class Flusher:
    """Makes what is finished of a chunk of ``request_count`` requests durable.

    ``make_copies`` takes some of the ``copies`` and adds their lines to those in ``finished``. That
    is done as they are written, and under ``turn``, a lock of all chunks: the lines of all copies
    at once would fill the memory.
    """

    def __init__(
        self,
        finished: FinishedLines,
        copies: Copies,
        make_copies: Callable[[], Awaitable[None]],
        *,
        turn: asyncio.Lock,
        request_count: int,
    ) -> None:
        self._finished = finished
        self._copies = copies
        self._make_copies = make_copies
        self._turn = turn
        self._request_count = self._awaited = request_count
        self.is_awaited = False
        """Whether no more is admitted before what there is is durable."""
        self._due = asyncio.Event()
        self._flushed = asyncio.Event()

    def look(self) -> None:
        """Flush soon, if all that is waited for is finished, or much is in memory."""
        finished, copies = self._finished, self._copies
        is_all_there = finished.tally.answered + copies.count >= self._awaited
        if is_all_there or finished.unflushed_bytes + copies.size_bytes >= _MOST_BYTES:
            self._due.set()

    async def until_durable(self, admitted: int) -> None:
        """Return when so many requests are finished and durable. No more are admitted meanwhile."""
        self._awaited, self.is_awaited = admitted, True
        self.look()
        while self._finished.tally.answered < admitted or not self._finished.are_durable:
            self._flushed.clear()
            await self._flushed.wait()
        self._awaited, self.is_awaited = self._request_count, False

    async def run(self, every_seconds: float) -> None:
        """Make finished lines durable at least so often, and once more when all are there.

        Raises :class:`~batchyard.errors.LeaseLost` and what is wrong with the chunk; what passes is
        waited for.
        """
        while self._finished.tally.answered < self._request_count:
            try:
                async with asyncio.timeout(every_seconds):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()
            await self._flush()
        await self._flush()

    async def make_durable(self) -> None:
        """Write the lines of the copies whose answer is there, and make all of it durable.

        Raises as :meth:`FinishedLines.flush`, and what making a copy's line raises.
        """
        if self._copies.count:
            if self._turn.locked():
                # What is finished must not wait for other chunks.
                await self._finished.flush()
            async with self._turn:
                await self._write_copies()
        await self._finished.flush()

    async def _flush(self) -> None:
        await patiently(self.make_durable, "finished lines")
        self._flushed.set()

    async def _write_copies(self) -> None:
        while self._copies.count:
            # Before others are made: each time that this fails, it is tried again from the start.
            if self._finished.unflushed_bytes >= _MOST_BYTES:
                await self._finished.flush()
            await self._make_copies()
