"""What keeps the batches of a runner from being faster, from one look to the next.

A look names one thing for each chunk: the gate at which its lines wait; else, if the engine has as
many requests as it takes, the engine, its front end or this process; else that there are too few.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from batchyard.batch.bounds import LEAST_SECONDS, Bound
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.runner.window import gates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batchyard.engine.base import Occupancy
    from batchyard.runner.window.gates import ChunkState
    from batchyard.services.services import Services

log = event_logger(__name__)

_PATIENCE_SECONDS: Final = 5.0
_BUSY: Final = 0.85
"""With this share of a processor this process is as fast as it gets."""
_FULL: Final = 0.9
_OF_GATES: Final = {
    gates.INPUT: Bound.INPUT,
    gates.FILES: Bound.INPUT,
    gates.ROOM: Bound.INPUT,
    gates.STORAGE: Bound.STORAGE,
    gates.TURN: Bound.OTHERS,
    gates.SLOT: Bound.OTHERS,
    gates.SHARED: Bound.OTHERS,
    gates.RETRY: Bound.REFUSALS,
    gates.REFUSALS: Bound.REFUSALS,
}
"""Others are closed after a fault, which is no measure of speed."""


def bound_of(
    chunk: ChunkState, *, seats: int, occupancy: Occupancy | None, own_share: float
) -> Bound | None:
    """What the chunk's lines wait for now; None: for the end of a fault.

    ``own_share``: how much of a processor this process uses.
    """
    window = chunk.window
    closed = gates.closed_gate(window)
    if closed is not None:
        return _OF_GATES.get(closed)
    own = Bound.PROCESS if own_share >= _BUSY else None
    is_fed = window.in_flight >= min(seats, _FULL * window.limit)
    if not is_fed:
        gate = gates.gate_before_window(chunk)
        if gate is not None:
            return _OF_GATES.get(gate)
        has_more = chunk.without_slot or window.backlog.queue
        return (own or Bound.INPUT) if has_more else Bound.TOO_FEW
    if window.limit < seats:
        return Bound.REFUSALS
    if occupancy is None:
        return Bound.ENGINE
    if occupancy.running + occupancy.waiting < window.in_flight / 2:
        return own or Bound.FRONT_END
    # It runs all at once that it gets, and would run more.
    has_room = occupancy.waiting < 1 and occupancy.running >= _FULL * window.in_flight
    return Bound.TOO_FEW if has_room and window.in_flight > seats else Bound.ENGINE


class Bounds:
    """Of all batches that one runner has: the seconds for which each bound held."""

    def __init__(
        self,
        services: Services,
        *,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self._services = services
        self._clock = clock
        self._processor = processor
        self._before = clock(), processor()
        self._of_batches: dict[str, dict[str, float]] = {}

    def look(
        self, chunks: Iterable[ChunkState], *, seats: int, occupancy: Occupancy | None
    ) -> None:
        """Count the time since the last look for what holds now. A batch counts once."""
        before, self._before = self._before, (self._clock(), self._processor())
        seconds, used = (now - then for now, then in zip(self._before, before, strict=True))
        if seconds <= 0:
            return
        own_share = used / seconds
        first = {chunk.batch_id: chunk for chunk in reversed([*chunks])}
        # Of others no chunk runs, so nothing of them would ever be written.
        self._of_batches = {name: seen for name, seen in self._of_batches.items() if name in first}
        for batch_id, chunk in first.items():
            bound = bound_of(chunk, seats=seats, occupancy=occupancy, own_share=own_share)
            if bound is not None:
                seen = self._of_batches.setdefault(batch_id, {})
                seen[bound] = seen.get(bound, 0.0) + seconds

    async def write(self, batch_id: str) -> None:
        """Add what was seen to the batch's row, if it is enough. Raises nothing."""
        seen = self._of_batches.get(batch_id)
        if seen is None or sum(seen.values()) < LEAST_SECONDS:
            return
        del self._of_batches[batch_id]
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._services.store.batch_effects.add_bounds(batch_id, seen)
        except Exception as error:  # noqa: BLE001 - no line depends on it
            log.warning("bounds.not_written", describe(error), batch=batch_id)
