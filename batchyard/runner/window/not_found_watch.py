"""Stop a batch whose lines the engine answers with 404, 401, or with redirects, one and all.

Such a server has another address, the endpoint is not there, or it refuses our key, though it may
list its models to anybody. The lines are not wrong, and without this a batch of any size would end
with nothing but errors.
"""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from batchyard.errors import EngineError
from batchyard.logs import event_logger
from batchyard.services.stop_batch import stop_failed

if TYPE_CHECKING:
    from batchyard.results.results import ResultLine
    from batchyard.services.services import Services

log = event_logger(__name__)

FIRST_ANSWERS: Final = 100
"""If all of these are such answers, the batch is stopped."""
_NOT_OF_LINES: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND})
_MOST_BATCHES: Final = 512
"""That are remembered: a runner may live for months."""


class NotFoundWatch:
    """Counts the first answers of each batch that one runner serves."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._statuses: dict[str, list[int] | None] = {}
        """Of the first answers, by batch; None: there was another one."""
        self._to_stop: dict[str, list[int]] = {}
        self._found = asyncio.Event()

    def saw(self, batch_id: str, result: ResultLine) -> None:
        """Note the result of a line. What is not an answer of the engine's counts nothing."""
        status = result.engine_status
        if status is None:
            return
        if batch_id not in self._statuses:
            while len(self._statuses) >= _MOST_BATCHES:
                del self._statuses[next(iter(self._statuses))]
            self._statuses[batch_id] = []
        statuses = self._statuses[batch_id]
        if statuses is None:
            return
        if status not in _NOT_OF_LINES and not 300 <= status < 400:
            self._statuses[batch_id] = None
            return
        statuses.append(status)
        if len(statuses) == FIRST_ANSWERS:
            self._statuses[batch_id] = None
            self._to_stop[batch_id] = statuses
            self._found.set()

    async def until_found(self, seconds: float) -> None:
        """Return when a batch is to be stopped, and after so many seconds at the latest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._found.wait()
        self._found.clear()

    async def look(self) -> None:
        """Stop what is to be stopped, unless other runners had other answers, or earlier ones."""
        for batch_id, statuses in list(self._to_stop.items()):
            batch = await self._services.store.batches.get(batch_id)
            if batch.counts.completed == 0:
                error = EngineError(_words(statuses))
                log.warning("batch.stopped", error, batch=batch_id, error_code=error.code)
                await stop_failed(self._services, batch_id, error)
            del self._to_stop[batch_id]


def _words(statuses: list[int]) -> str:
    told = ", ".join(str(status) for status in sorted(set(statuses)))
    kind = "not found" if told == "404" else "not found or redirects"
    cause = "it has another address, or lacks the endpoint or the model"
    if HTTPStatus.UNAUTHORIZED in statuses:
        kind, cause = "refusals", f"it refuses our API key, or {cause}"
    return (
        f"All of the first {len(statuses)} answers of the engine were {kind} (HTTP {told}): "
        f"{cause}. The error file says what it answered. The other lines were not run."
    )
