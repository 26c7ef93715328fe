"""The reconciler: what the dead have left undone, seen from the database alone.

Everything here is safe to do at any time, by anybody, any number of times.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchyard.steps.services import Services
    from batchyard.store import BatchRecord, RunnerRecord

logger = logging.getLogger(__name__)

_ENDED_RUNNERS_KEPT_SECONDS = 7 * 86_400


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What was found and put right."""

    overdue: tuple[BatchRecord, ...]
    """Batches whose window has ended: they run no more."""
    lost_runners: tuple[RunnerRecord, ...]
    """Runners that have given no sign of life for as long as a lease lasts."""
    chunks_put_back: int
    free_batches: int
    """Batches that wait for somebody to take them up."""


async def reconcile(services: Services) -> Reconciled:
    """Stop overdue batches, put back what the dead had leased, mark dead runners as lost."""
    store = services.store
    overdue = await store.batches.expire_overdue()
    for batch in overdue:
        logger.info("batch.overdue batch=%s status=%s", batch.id, batch.status.value)
    lost = await store.runners.lose(services.settings.lease_seconds)
    for runner in lost:
        logger.warning(
            "runner.lost runner=%s model=%s flow_run=%s",
            runner.id,
            runner.model,
            runner.flow_run_id,
        )
    put_back = await store.chunks.put_back()
    await store.runners.prune(_ENDED_RUNNERS_KEPT_SECONDS)
    return Reconciled(tuple(overdue), tuple(lost), put_back, await store.batch_leases.free_count())
