"""Why the lines of a runner's chunks wait, as people are told."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from batchyard.runner.window.gates import gate_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchyard.runner.chunk.backpressure import Backpressure
    from batchyard.runner.chunk.chunk import ChunkRun
    from batchyard.store import LeaseKey

_TOLD_SECONDS: Final = 10.0
"""What is over sooner is not told: each change is a statement, and a turn may take so long."""


class Waits:
    """Of the chunks of one runner. Each is looked at every second or so."""

    def __init__(self, backpressure: Backpressure) -> None:
        self.refusing: str | None = None
        """Why the engine's server takes nothing, in words; None: it does."""
        self._backpressure = backpressure
        self._still: dict[LeaseKey, tuple[int, float]] = {}
        """Of chunks that wait: how much was answered, and since when no more is."""

    def words_of(self, chunk: ChunkRun) -> str | None:
        """Why nothing of the chunk goes on, if that lasts; None: it does."""
        held_up = self._held_up(chunk)
        # What an earlier owner found is true until its own cause is gone.
        before = None if chunk.is_prepared else chunk.lease.trouble
        return self._backpressure.trouble_of(chunk.key) or self.refusing or before or held_up

    def forget(self, key: LeaseKey) -> None:
        """The chunk has ended."""
        self._still.pop(key, None)

    def _held_up(self, chunk: ChunkRun) -> str | None:
        gate = gate_of(chunk)
        if gate is None:
            self._still.pop(chunk.key, None)
            return None
        answered, since = self._still.get(chunk.key, (-1, 0.0))
        if answered != chunk.answered:
            self._still[chunk.key] = chunk.answered, time.monotonic()
            return None
        return gate.words if time.monotonic() - since >= _TOLD_SECONDS else None


def shared_by_all(waits: Iterable[str | None]) -> str | None:
    """Why none of these goes on; None: one does, or there is none."""
    known = [*waits]
    return None if None in known else next(iter(known), None)
