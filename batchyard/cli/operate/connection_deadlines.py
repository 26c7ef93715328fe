"""Connections that uvicorn would keep: those that send no request, those whose client does not
read its answer, and those that stream for long.

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
READ_SECONDS = 60.0
LEAST_READ_BYTES = 60 * 1024
"""A client must read so much of an answer in :data:`READ_SECONDS`, as slowly as it may send a body.

If it reads nothing, its download holds memory and an open file until the connection ends.
"""


class DeadlineProtocol(H11Protocol):
    """uvicorn's, with limits on the time that a request's header and the reader may take."""

    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

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
        """End the time limits."""
        self._stop_expecting()
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start to watch whether the client reads what is in the buffer."""
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        """The client has read it."""
        self._stop_watching()
        super().resume_writing()

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

    def _watch_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(READ_SECONDS, self._abort_unless_read, unread)

    def _stop_watching(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _abort_unless_read(self, unread_before: int) -> None:
        if unread_before - self.transport.get_write_buffer_size() >= LEAST_READ_BYTES:
            self._watch_reading()
        else:
            # To close it would wait until the client has read the rest.
            self.transport.abort()

    def _close_if_idle(self) -> None:
        self._deadline = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()
