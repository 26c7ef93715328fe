"""How far a run is, as the command shows it that waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.services.services import Progress

if TYPE_CHECKING:
    from batchyard.engine.base import StartProgress
    from batchyard.services.services import Services
    from batchyard.wire import RequestCounts


class ShownProgress:
    """Of a runner: how far its engine's start is, and then its batch, if it has only one."""

    def __init__(self, services: Services, batch_id: str | None) -> None:
        self._services = services
        self._batch_id = batch_id
        self._answered_before = 0
        self._total = 0
        self._answered = 0
        self._wait: str | None = None

    def begin(self, counts: RequestCounts) -> None:
        """What the batch has already."""
        self._answered_before = counts.completed + counts.failed
        self._total = counts.total

    def show_loading(self) -> None:
        """The engine is about to be started."""
        self._services.on_progress(Progress(self._batch_id or "", "loading"))

    def show_start(self, start: StartProgress) -> None:
        """How far the engine's start is."""
        done, total = (0, None) if start.fraction is None else (int(start.fraction * 100), 100)
        self._services.on_progress(
            Progress(self._batch_id or "", "loading", done, total, start.message)
        )

    def show_answers(self, answered: int) -> None:
        """How many requests of the batch the runner has answered."""
        self._answered = answered
        if self._batch_id is not None:
            done = min(self._answered_before + answered, self._total)
            wait = self._wait or ""
            self._services.on_progress(Progress(self._batch_id, "running", done, self._total, wait))

    async def show_wait(self, reason: str | None) -> None:
        """Why nothing is answered now; None: something is.

        It is in the batch's row, too. Raises :class:`~batchyard.errors.StoreError`.
        """
        if self._batch_id is None or reason == self._wait:
            return
        self._wait = reason
        self.show_answers(self._answered)
        await self._services.store.batch_schedule.record_wait(self._batch_id, reason)
