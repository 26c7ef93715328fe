"""What keeps the batches of a runner from being faster, from one look to the next.

A look names one thing for each chunk: the gate at which its lines wait; else, if the engine has as
many requests as it takes, the engine, its front end or this process; else that there are too few.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
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
"""A thread that wants this share of a processor is as fast as it gets."""
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
    chunk: ChunkState,
    *,
    seats: int,
    occupancy: Occupancy | None,
    own_share: float,
    has_claimed_all: bool = True,
) -> Bound | None:
    """What the chunk's lines wait for now; None: for the end of a fault.

    ``own_share``: how much of a processor this thread wants. ``has_claimed_all``: there is no
    further chunk for the engine.
    """
    window = chunk.window
    own = Bound.PROCESS if own_share >= _BUSY else None
    limit = min(window.refusals.limit, window.crashes.limit)
    # Lines with several answers or prompts fill the engine with fewer requests.
    if window.sequences < min(seats, _FULL * limit):
        gate = gates.closed_gate(window) or gates.gate_before_window(chunk)
        if gate is None and not gates.RETRY.is_open(chunk):
            gate = gates.RETRY
        if gate is not None:
            return _OF_GATES.get(gate)
        has_more = chunk.without_slot or window.backlog.queue or not has_claimed_all
        return own or (Bound.INPUT if has_more else Bound.TOO_FEW)
    if limit < seats:
        return Bound.REFUSALS if window.refusals.limit == limit else None
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
        processor: Callable[[], float] | None = None,
    ) -> None:
        self._services = services
        self._clock = clock
        self._processor = processor or _wanted_seconds
        self._before = clock(), self._processor()
        self._of_batches: dict[str, dict[str, float]] = {}

    def look(
        self,
        chunks: Iterable[ChunkState],
        *,
        seats: int,
        occupancy: Occupancy | None,
        has_claimed_all: bool,
    ) -> None:
        """Count the time since the last look for what holds now.

        A batch counts once: its chunk that has the most lines without a slot.
        """
        before, self._before = self._before, (self._clock(), self._processor())
        seconds, used = (now - then for now, then in zip(self._before, before, strict=True))
        if seconds <= 0:
            return
        own_share = used / seconds
        fullest = sorted(chunks, key=lambda chunk: chunk.without_slot)
        first = {chunk.batch_id: chunk for chunk in fullest}
        # Of others no chunk runs, so nothing of them would ever be written.
        self._of_batches = {name: seen for name, seen in self._of_batches.items() if name in first}
        for batch_id, chunk in first.items():
            bound = bound_of(
                chunk,
                seats=seats,
                occupancy=occupancy,
                own_share=own_share,
                has_claimed_all=has_claimed_all,
            )
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


def _wanted_seconds() -> float:
    """How long this thread has run, or could have, if the machine had had a processor for it."""
    try:
        run, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        # Not Linux, or one that does not count it.
        return time.thread_time()
    return (int(run) + int(waited)) / 1e9
