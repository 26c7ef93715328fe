"""Flow runs that wait in a cluster's queue although their model has no work any more.

A job may wait for hours. Its batch may be cancelled meanwhile, or done by another runner: then the
job would get a GPU for nothing, and until then it keeps a place of its pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.dispatch.prefect_api import RUN_CHUNKS
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from collections.abc import Collection

    from batchyard.dispatch.prefect_api import PrefectApi
    from batchyard.settings import Settings

log = event_logger(__name__)


class QueuedRuns:
    """Cancels those that nobody has needed for as long as a runner without work stays."""

    def __init__(self, api: PrefectApi, settings: Settings) -> None:
        self._api = api
        self._settings = settings
        self._unneeded: dict[str, float] = {}
        """Since when each of them is not needed, by flow run."""

    async def cancel_unneeded(self, needed: Collection[str], now: float) -> None:
        """``needed``: the models that have work now or are live. Raises what the API does."""
        queued = [run for run in await self._api.begun((RUN_CHUNKS,)) if run.is_in_queue]
        unneeded = {
            run.id: run.model
            for run in queued
            # A model may have got another pool because this one starts no job of it.
            if run.model not in needed or run.pool != self._settings.pool_of(run.model or "")
        }
        self._unneeded = {id_: min(self._unneeded.get(id_, now), now) for id_ in unneeded}
        for id_, since in self._unneeded.items():
            if now - since >= self._settings.runner_idle_seconds:
                await self._api.cancel(id_)
                log.info("runner.not_needed", model=unneeded[id_], flow_run=id_)
