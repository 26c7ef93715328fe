"""Has Prefect start a runner of batches for the API: in the background, once for many batches.

No request waits for it or fails with it: the batch is in the database, and the reconciler asks
for a runner too.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from batchyard.dispatch import PrefectApi, ensure_batch_runner
from batchyard.errors import BatchyardError, SettingsError
from batchyard.logs import event_logger
from batchyard.processes.beside import beside

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

    from batchyard.services.services import Services

log = event_logger(__name__)

_GATHER_SECONDS = 0.05
_PAUSE_SECONDS = 1.0
"""A flow run takes seconds to start: asking more often changes nothing."""
_RETRY_SECONDS = 10.0


class RunnerStarter:
    """Asks Prefect for a runner, once for all calls of :meth:`request` in the meantime."""

    def __init__(self, prefect: PrefectApi, services: Services) -> None:
        self._prefect = prefect
        self._services = services
        self._wanted = asyncio.Event()
        self._failure: str | None = None

    def request(self) -> None:
        """Ask for a runner, because a batch has no owner. Returns at once."""
        self._wanted.set()

    async def run(self) -> None:
        """Ask whenever it is requested. Does not return: cancel it."""
        while True:
            await self._wanted.wait()
            await asyncio.sleep(_GATHER_SECONDS)
            self._wanted.clear()
            await asyncio.sleep(_PAUSE_SECONDS if await self._ask() else _RETRY_SECONDS)

    async def _ask(self) -> bool:
        lease_seconds = self._services.settings.batch_lease_seconds
        try:
            await ensure_batch_runner(
                self._prefect, self._services.store, silent_seconds=lease_seconds
            )
        except BatchyardError as error:
            self._failed(str(error))
            return False
        except Exception as error:  # noqa: BLE001 - an answer that cannot be read must not end this task
            self._failed(type(error).__name__)
            return False
        self._failure = None
        return True

    def _failed(self, reason: str) -> None:
        self._wanted.set()
        if reason != self._failure:
            log.warning("runner.not_started", reason)
        self._failure = reason


@asynccontextmanager
async def starting_runners(app: FastAPI) -> AsyncIterator[None]:
    """The router's lifespan: ``app.state.request_runner`` exists while the application runs."""
    try:
        prefect = PrefectApi.from_environment()
    except SettingsError as error:
        log.warning(
            "runner.not_started", f"{error} Batches wait until a runner is started in another way."
        )
        app.state.request_runner = lambda: None
        yield
        return
    async with prefect:
        starter = RunnerStarter(prefect, app.state.services)
        app.state.request_runner = starter.request
        async with beside(starter.run(), name="start runners"):
            yield
