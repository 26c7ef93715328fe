"""Backpressure: a runner takes no more work while its object store takes no finished lines.

Otherwise a machine that may read but not write would claim one chunk after the other, keep the
answers of all tenants in its memory, and renew their leases, while other machines get nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

from batchyard.logs import event_logger
from batchyard.services.patience import PASSING
from batchyard.services.story.wait_words import TOO_SLOW, why_it_waits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.store import LeaseKey

log = event_logger(__name__)

_MOST_BYTES: Final = 128 * 1024**2
"""Of finished lines in memory, of all chunks: far more than they have before their next flush."""
_SLOW_SECONDS: Final = 10.0
"""A write that takes longer counts as failed until it succeeds."""
_TOLD_SECONDS: Final = 5.0
"""What is over sooner is not told: a slow store may stop the runner for moments, often."""


class Backpressure:
    """Knows which lines of one runner's chunks are in its memory only, and how their writes go.

    It is on while there are too many of them, or the last write of a chunk failed or takes long.
    A write that succeeds shows that the store is well: chunks whose writes failed before then wait
    for their own next write, and hold up no other.
    """

    def __init__(self) -> None:
        self._bytes: dict[LeaseKey, int] = {}
        self._total_bytes = 0
        self._failing: set[LeaseKey] = set()
        self._failing_alone: set[LeaseKey] = set()
        """Their writes failed, and others succeeded since."""
        self._why: dict[LeaseKey, str] = {}
        """How the last write of a chunk failed."""
        self._began_at: float | None = None
        self._is_told = False
        self._changed = asyncio.Event()

    @property
    def is_on(self) -> bool:
        """Whether no chunk may be claimed, and no line admitted."""
        return self._began_at is not None

    @property
    def seconds(self) -> float:
        """How long it has been on; 0: it is off."""
        return 0.0 if self._began_at is None else time.monotonic() - self._began_at

    async def until_off(self) -> None:
        """Return when it is off."""
        while self.is_on:
            await self._next_change()

    async def until_off_for(self, key: LeaseKey) -> None:
        """Return when it is off, and the chunk's own writes do not fail either."""
        while self.holds(key):
            await self._next_change()

    def holds(self, key: LeaseKey) -> bool:
        """Whether it is on, or the chunk's own writes fail."""
        return self.is_on or key in self._failing_alone

    def has_lines_of(self, key: LeaseKey) -> bool:
        """Whether finished lines of the chunk are in memory only."""
        return self._bytes.get(key, 0) > 0

    def keep(self, key: LeaseKey, size_bytes: int) -> None:
        """The chunk has another finished line in memory, of this size."""
        self._add(key, size_bytes)
        self._look()

    @contextlib.contextmanager
    def writing(self, key: LeaseKey, size_bytes: int) -> Iterator[None]:
        """While the block runs, lines of the chunk, ``size_bytes`` in all, become durable."""
        timer = asyncio.get_running_loop().call_later(_SLOW_SECONDS, self._failed, key)
        try:
            yield
        except PASSING as error:
            self._why[key] = why_it_waits(error)
            self._failed(key)
            raise
        finally:
            timer.cancel()
        self._why.pop(key, None)
        self._add(key, -size_bytes)
        self._failing_alone |= self._failing
        self._failing_alone.discard(key)
        self._failing.clear()
        self._look()

    def forget(self, key: LeaseKey) -> None:
        """The chunk has ended."""
        self._total_bytes -= self._bytes.pop(key, 0)
        self._why.pop(key, None)
        self._failing.discard(key)
        self._failing_alone.discard(key)
        self._look()

    def tell(self, runner: str) -> None:
        """Log once that it has been on for a while, and once that it is over."""
        if self.is_on and not self._is_told and self.seconds >= _TOLD_SECONDS:
            self._is_told = True
            log.warning("runner.held_up", runner=runner)
        elif self._is_told and not self.is_on:
            self._is_told = False
            log.info("runner.resumed", runner=runner)

    def trouble_of(self, key: LeaseKey) -> str | None:
        """Why nothing of the chunk goes on, as it was told; None: it does."""
        if self._is_told:
            known = (self._why[each] for each in (key, *self._failing) if each in self._why)
            return next(known, TOO_SLOW)
        return self._why.get(key) if key in self._failing_alone else None

    def _failed(self, key: LeaseKey) -> None:
        if key not in self._failing_alone:
            self._failing.add(key)
            self._look()

    def _add(self, key: LeaseKey, size_bytes: int) -> None:
        self._bytes[key] = self._bytes.get(key, 0) + size_bytes
        self._total_bytes += size_bytes

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _look(self) -> None:
        if self._failing or self._total_bytes > _MOST_BYTES:
            if self._began_at is None:
                self._began_at = time.monotonic()
        else:
            self._began_at = None
        self._changed.set()
