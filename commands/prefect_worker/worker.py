"""Prefect's process worker, changed: it forks our flow runs and listens to events (ADR 74)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from prefect.settings import PREFECT_WORKER_QUERY_SECONDS
from prefect.utilities.processutils import command_to_string
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

from commands.prefect_worker import forked_run
from commands.prefect_worker.announcements import Announcements
from flows.process.prefect_client import ask_as_we_do
from flows.process.stop_signal import STOP

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse

_OUR_FLOWS = "flows."


def _announcements() -> Announcements:
    return Announcements(PREFECT_WORKER_QUERY_SECONDS.value())


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it takes the place of Prefect's own is meant

    class BatchyardWorker(ProcessWorker):
        """Asks for flow runs when Prefect has announced some, and otherwise seldom."""

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


def use_fork_server(name: str) -> None:
    """Let flow runs of ours be forked by the server of this name."""
    words = [sys.executable, "-I", "-S", forked_run.__file__, name, str(int(STOP))]

    class Configuration(ProcessJobConfiguration):
        def prepare_for_flow_run(
            self,
            flow_run: FlowRun,
            deployment: DeploymentResponse | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            # Flows of others may have pull steps or requirements, which Prefect sees to.
            entrypoint = None if deployment is None else deployment.entrypoint
            if self.command is None and (entrypoint or "").startswith(_OUR_FLOWS):
                self.command = command_to_string(words)
            super().prepare_for_flow_run(flow_run, deployment, *args, **kwargs)

    BatchyardWorker.job_configuration = Configuration
