"""How much of a live engine batches may use: what its live requests leave.

The runner passes the live requests itself, so it sees each one come and go, and how long its users
wait. So nothing is asked of the engine and nothing is guessed: the share is set anew in the moment
in which a request arrives. What is in the engine by then is finished.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from batchyard.engine.sharing.controller import SHARE, ShareController
from batchyard.engine.sharing.gate import ShareGate
from batchyard.engine.sharing.observation import Latencies, Observation
from batchyard.engine.sharing.request_size import expected_tokens

if TYPE_CHECKING:
    from batchyard.engine.base import Engine, LivePromise

_BETWEEN_SECONDS: Final = 0.05
"""Between two observations: thousands of live requests may come in a second."""


class LiveShare:
    """Counts the live requests in an engine, and has the gate for requests of batches.

    Of its seats a quarter always stays free for them, or with an objective as many as a
    :class:`ShareController` leaves by itself, unless ``promise`` says how many.
    """

    def __init__(self, engine: Engine, promise: LivePromise) -> None:
        seats, objective = engine.max_num_seqs, promise.objective
        reserve_seats = promise.reserve_seats
        if reserve_seats is None and objective is None:
            reserve_seats = seats // SHARE
        self.in_flight = 0
        """Live requests that are here now, without those that may wait."""
        self.flex = 0
        """Requests that may wait and are in the engine now. Batches make no room for them."""
        self._controller = ShareController(
            seats, objective=objective, reserve_seats=reserve_seats, live=0.0
        )
        self._first = _Promise(None if objective is None else objective.first_token_seconds)
        self._inter = _Promise(None if objective is None else objective.inter_token_seconds)
        self._timer: asyncio.TimerHandle | None = None
        self._is_noted = True
        self.gate = ShareGate(engine.model, self._controller, self._look, expected_tokens)

    def came(self) -> None:
        """A live request is here."""
        self.in_flight += 1
        self._note()

    def left(self) -> None:
        """Note that a request has gone."""
        self.in_flight -= 1
        self._note()

    @property
    def has_seat_to_spare(self) -> bool:
        """Whether a request that may wait can go, and others still find seats: half of those that
        batches leave to live requests."""
        controller = self._controller
        taken = self.in_flight + self.flex + controller.sequences
        return controller.seats - taken > controller.reserve // 2

    def first_bytes(self, seconds: float) -> None:
        """A live answer has begun so long after its request."""
        self._first.add(seconds)

    def next_bytes(self, seconds: float) -> None:
        """A live answer went on so long after what came before."""
        self._inter.add(seconds)

    def _note(self) -> None:
        """Observe at once what has changed, or a moment after the last observation."""
        self._is_noted = self._timer is None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_BETWEEN_SECONDS, self._note_rest)
            self.gate.observe(self._seen())

    def _note_rest(self) -> None:
        self._timer = None
        if not self._is_noted:
            self._note()

    async def _look(self) -> Observation:
        return self._seen()

    def _seen(self) -> Observation:
        over = self.in_flight + self.flex + self._controller.sequences - self._controller.seats
        # Without a live request only lines of batches wait for a place, which they may.
        waiting = max(0, over) if self.in_flight else 0
        return Observation(self.in_flight, waiting, self._first.take(), self._inter.take())


class _Promise:
    """How many latencies there were since the last look, and how many were too long."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._total = self._late = 0

    def add(self, seconds: float) -> None:
        self._total += 1
        self._late += self._seconds is not None and seconds > self._seconds

    def take(self) -> Latencies:
        taken = Latencies(self._total, self._late)
        self._total = self._late = 0
        return taken
