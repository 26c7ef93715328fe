"""A worker that listens to events. Not Prefect's, which asks all the time (ADR 46, 74)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from prefect.settings import PREFECT_WORKER_QUERY_SECONDS

from commands.prefect_worker.announcements import Announcements
from flows.process.prefect_client import ask_as_we_do

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.schemas.objects import FlowRun
    from prefect.workers.base import BaseWorker

    _Worker = BaseWorker[Any, Any, Any]
else:
    # Prefect registers each class that is a worker.
    _Worker = object


def _announcements() -> Announcements:
    return Announcements(PREFECT_WORKER_QUERY_SECONDS.value())


class Listening(_Worker):
    """Before a class of Prefect's workers: it asks when Prefect has announced a flow run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._announcements = _announcements()
        self._listener: asyncio.Task[None] | None = None
        self._heard_pool: UUID | None = None

    async def setup(self) -> None:
        """As Prefect's own. It submits flow runs side by side, by one client."""
        await super().setup()
        ask_as_we_do(self.client)

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """As Prefect's own, which its loop calls at each interval."""
        self._listen()
        return await self._ask() if self._announcements.is_time_to_ask() else []

    async def _ask(self) -> list[FlowRun]:
        found = await super().get_and_submit_flow_runs()
        self._announcements.asked(found=bool(found))
        return found

    def _listen(self) -> None:
        # A worker that has not reached its server yet does not know the pool, and one that was
        # made again after the loss of Prefect's database has another id.
        pool = self._work_pool
        if pool is None or pool.id == self._heard_pool:
            return
        if self._listener is not None:
            self._listener.cancel()
        self._announcements = _announcements()  # the old listener may not have ended yet
        listening = self._announcements.listen(pool.id, self._ask, self._logger.debug)
        self._listener = asyncio.create_task(listening)
        self._heard_pool = pool.id

    async def teardown(self, *exc_info: Any) -> None:
        """Stop listening, and then what Prefect's own does."""
        if self._listener is not None:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener
        await super().teardown(*exc_info)
