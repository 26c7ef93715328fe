"""A look at a server through the ``/metrics`` that vLLM has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.engine.progress_metrics import load_of
from batchyard.engine.sharing.gate import LookFailed, NotObservable
from batchyard.engine.sharing.server_load import ServerLook

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.engine.sharing.controller import ShareController
    from batchyard.engine.sharing.observation import Observation


class MetricsLook:
    """``read_metrics`` returns HTTP status and body. What the controller has sent is ours."""

    def __init__(
        self,
        read_metrics: Callable[[], Awaitable[tuple[int, bytes]]],
        controller: ShareController,
    ) -> None:
        self._read_metrics = read_metrics
        self._controller = controller
        self._server = ServerLook(controller.objective)
        self._has_metrics = False

    async def __call__(self) -> Observation:
        """What is seen now. Raises what :class:`~batchyard.engine.sharing.gate.ShareGate` says."""
        ours, sent = self._controller.in_flight, self._controller.sent_ever
        status, body = await self._read_metrics()
        load = load_of(body.decode(errors="replace")) if status == 200 else None
        if load is None:
            if self._has_metrics or status >= 500:
                raise LookFailed(f"HTTP {status}")
            raise NotObservable
        self._has_metrics = True
        # What was sent while it answered may be in its numbers, and what has ended as well.
        return self._server.observation(load, ours + self._controller.sent_ever - sent)
