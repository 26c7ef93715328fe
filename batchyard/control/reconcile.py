"""The reconciler: cleans up after crashed processes. It needs only the database.

Any process may run it at any time, any number of times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.intervals import DAY_SECONDS
from batchyard.logs import event_logger
from batchyard.services.leases.overdue import stop_overdue
from batchyard.services.restore.clock_steps import make_up_for_clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, RunnerRecord

log = event_logger(__name__)

_ENDED_RUNNERS_KEPT_SECONDS = 7 * DAY_SECONDS
_OVERDUE_AT_ONCE = 200
"""After an outage there may be thousands: what else is to be cleaned up does not wait for all."""
_RENEWED_LATE_SECONDS = 2.0
"""A busy process may renew its leases this much later than it should."""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What was found and cleaned up."""

    overdue: tuple[BatchRecord, ...]
    """Batches whose window has ended and that were stopped."""
    lost_runners: tuple[RunnerRecord, ...]
    """Runners without a heartbeat for as long as a lease lasts."""
    chunks_put_back: int
    free_batches: int
    """Batches that have not ended and that no process has leased."""


class Watch:
    """Since when the passes of one process have followed each other.

    While the database is away, no runner can send a heartbeat or renew a lease. Each one has to be
    given the time for that afterwards, or the pass that comes first would end all engines, and free
    what they run.
    """

    def __init__(self, *, every_seconds: float) -> None:
        self._every_seconds = every_seconds
        self._since = self._last = -math.inf

    def covers(self, seconds: float, now: float) -> bool:
        """Whether passes go back for so long, without a gap that may have silenced a runner.

        ``now`` is the time of this pass by the database's clock, in Unix seconds.
        """
        most = max(seconds / 2, 2 * self._every_seconds)
        if not 0 <= now - self._last <= most:
            self._since = now
        self._last = now
        return now - self._since >= seconds


async def reconcile(services: Services, watch: Watch | None = None) -> Reconciled:
    """Stop overdue batches, free the chunks of expired leases, mark silent runners as lost.

    Before that, make up for a clock of the database that was set back.

    With a ``watch``, runners are lost and chunks are freed only if it covers the time that their
    processes were silent for.
    """
    store, silent_seconds = services.store, services.settings.lease_seconds
    await make_up_for_clock(services)
    overdue = await stop_overdue(store, await store.batches.overdue(_OVERDUE_AT_ONCE))
    lost: Sequence[RunnerRecord] = ()
    put_back = 0
    if watch is None or watch.covers(silent_seconds, await store.database.now()):
        lost = await store.runners.lose(silent_seconds)
        put_back = await store.chunks.put_back()
    for runner in lost:
        log.warning(
            "runner.lost", runner=runner.id, model=runner.model, flow_run=runner.flow_run_id
        )
    await store.runners.prune(_ENDED_RUNNERS_KEPT_SECONDS)
    return Reconciled(tuple(overdue), tuple(lost), put_back, await store.batch_leases.free_count())


async def unrenewed_lease_seconds(services: Services) -> float | None:
    """How long the lease of a batch still runs that its owner should have renewed by now.

    None: there is no such lease. Owners renew when a third of a lease is over.
    """
    seconds = await services.store.batch_leases.next_end_seconds()
    least = services.settings.batch_lease_seconds * 2 / 3 - _RENEWED_LATE_SECONDS
    return seconds if seconds is not None and seconds < least else None
