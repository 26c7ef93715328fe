"""A look at a server through its ``/metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batchyard.engine.sharing.gate import LookFailed, NotObservable
from batchyard.engine.sharing.server_load import ServerLook
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.engine.sharing.controller import ShareController
    from batchyard.engine.sharing.observation import Observation
    from batchyard.engine.sharing.server_load import Histogram, ServerLoad

log = event_logger(__name__)

AWAY_STATUSES: Final = frozenset({502, 503, 504})
"""Of a server, or of the gateway before it, that gives no answers now."""
_AS_GOOD_AS: Final = 0.99


class MetricsLook:
    """``read_metrics`` returns HTTP status and body, ``load_of`` what such a page says; None: the
    server's pages say nothing. What the controller has sent is ours."""

    def __init__(
        self,
        where: str,
        read_metrics: Callable[[], Awaitable[tuple[int, bytes]]],
        load_of: Callable[[str], ServerLoad | None],
        controller: ShareController,
    ) -> None:
        self._where = where
        self._read_metrics = read_metrics
        self._load_of = load_of
        self._controller = controller
        self._server = ServerLook(controller.objective)
        self._has_metrics = False
        self._warned: set[str] = set()

    async def __call__(self) -> Observation:
        """What is seen now. Raises what :class:`~batchyard.engine.sharing.gate.ShareGate` says."""
        ours, sent = self._controller.in_flight, self._controller.sent_ever
        status, body = await self._read_metrics()
        load = self._load_of(body.decode(errors="replace")) if status == 200 else None
        if load is None:
            if self._has_metrics or status in AWAY_STATUSES:
                raise LookFailed(f"HTTP {status}")
            if self._controller.objective is not None:
                self._say_once("it has no metrics of its load, so the batch takes a quarter of it")
            raise NotObservable
        if not self._has_metrics:
            self._has_metrics = True
            self._check_bounds(load)
        # What was sent while it answered may be in its numbers, and what has ended as well.
        return self._server.observation(load, ours + self._controller.sent_ever - sent)

    def _check_bounds(self, load: ServerLoad) -> None:
        goal = self._controller.objective
        if goal is not None:
            self._check_bound("time to first token", load.first_token, goal.first_token_seconds)
            self._check_bound("inter-token latency", load.inter_token, goal.inter_token_seconds)

    def _check_bound(self, what: str, counted: Histogram, seconds: float | None) -> None:
        """A histogram only tells what is within one of its bounds."""
        if seconds is None:
            return
        bound = counted.bound_for(seconds)
        if bound is None:
            self._say_once(f"its metrics do not count a {what} of {1000 * seconds:g} ms")
        elif bound < _AS_GOOD_AS * seconds:
            self._say_once(
                f"its metrics count a {what} up to {1000 * bound:g} ms: the objective of "
                f"{1000 * seconds:g} ms is kept as that"
            )

    def _say_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("engine.objective", text, server=self._where)
