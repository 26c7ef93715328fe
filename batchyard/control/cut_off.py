"""A control process for which Prefect makes no flow runs, while it answers another process.

Its heartbeat goes to the database, so it counts as alive, and no other process is started. Each
batch that it leases would wait for it without end.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from batchyard.errors import FlowRunNotMade
from batchyard.store.leases import SCHEDULER_LEASE

if TYPE_CHECKING:
    from batchyard.store import Store

_PATIENCE_SECONDS: Final = 60.0


class CutOff:
    """Whether this process, which schedules as ``owner``, is to leave the batches to others."""

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._since: float | None = None

    def note(self, error: Exception | None, *, began_at: float) -> None:
        """Note what became of a batch that was taken up at ``began_at``, by the monotonic clock."""
        if isinstance(error, FlowRunNotMade):
            self._since = self._since or began_at
        elif self._since is not None and began_at >= self._since:
            self._since = None

    async def is_alone(self, *, worked_at: float = -math.inf) -> bool:
        """Whether Prefect has made no flow run here for a minute, and answers another process.

        While it answers nobody, nothing is gained by another process. ``worked_at``: when work on
        a batch last began, by the monotonic clock. There was a flow run for it, which may not be
        noted for days. Raises :class:`~batchyard.errors.StoreError`.
        """
        if self._since is not None and worked_at >= self._since:
            self._since = None
        if self._since is None or time.monotonic() - self._since < _PATIENCE_SECONDS:
            return False
        return await self._store.leases.owner_of(SCHEDULER_LEASE) not in {None, self._owner}
