"""Connections that uvicorn would keep: those that send no request, and those that stream for long.

Its own keep-alive limit begins after the first answer and ends with the first byte after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

HEADER_SECONDS = 20.0
"""For the whole header, from the connection or, behind another request, from its first byte."""


class HeaderDeadlineProtocol(H11Protocol):
    """uvicorn's, with a limit on the time that a request's header may take."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn's
        """Start the time limit of the first header."""
        super().connection_made(transport)
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        """End the time limit when a header is complete; start it for the next one."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_expecting()
        elif self._deadline is None:
            self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the time limit."""
        self._stop_expecting()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Tell a request that would go on for long that the server stops, if it has asked for that.

        It has put a function into its scope's state, as ``on_shutdown``.
        """
        super().shutdown()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            on_shutdown = cycle.scope.get("state", {}).get("on_shutdown")
            if on_shutdown is not None:
                on_shutdown()

    def _expect_header(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._close_if_idle)

    def _stop_expecting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_if_idle(self) -> None:
        self._deadline = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()
