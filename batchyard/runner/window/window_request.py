"""One request of the window."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.engine.base import NO_TRAITS, EngineRequest
from batchyard.logs import event_logger
from batchyard.results.results import new_request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from batchyard.engine.base import BatchTraits, EngineAnswer
    from batchyard.results.results import ResultLine

log = event_logger(__name__)


@dataclass(slots=True, eq=False)
class WindowRequest:
    """A request on its way. ``deliver`` takes its result, once, unless ``owner`` withdraws it."""

    ordinal: int
    custom_id: str
    url: str
    body: bytes
    deliver: Callable[[int, ResultLine], None]
    owner: Hashable
    content_type: str = "application/json"
    of_batch: BatchTraits = NO_TRAITS
    file_bytes: int = 0
    """How much of the window's room for files it has reserved, until it leaves."""
    room_bytes: int = 0
    """What it has taken of the window's room for bodies, until it leaves."""
    sequences: int = 1
    """How many the engine makes of it."""
    room_sequences: int = 0
    """What it has taken of the window's room for sequences, until it leaves."""
    unshared_tokens: int = 0
    """See :class:`batchyard.runner.meters.seats.Seated`, as for the next two."""
    seated_at: float | None = None
    read_before: int = 0
    request_id: str = ""
    sent_at: float = 0.0
    """By the monotonic clock, of the attempt that is in the engine."""
    attempts: int = 0
    """The attempts that count: see :mod:`batchyard.runner.window.refusals`."""
    refusals: int = 0
    """How often in a row the server has said that it takes no request now, the time at which the
    first of these attempts was sent, and that of the last refusal that was judged."""
    first_refused_at: float = 0.0
    refused_at: float = 0.0
    doubts: int = 0
    """How many of them were its own fault, as the answers to others show."""
    strikes: int = 0
    is_suspect: bool = False
    fail: Callable[[Exception], None] | None = None
    """Takes what ``deliver`` raised: the request has left the window and has no result."""
    again: Callable[[EngineAnswer], bool] | None = None
    """Whether a final answer is not the last one: the request, which it may change, is sent once
    more. It raises nothing."""

    def hand_over(self, result: ResultLine) -> None:
        """Give the result to the owner, with what it raises."""
        try:
            self.deliver(self.ordinal, result)
        except Exception as error:  # noqa: BLE001 - other owners' requests are on the same stream
            log.warning("result.not_accepted", type(error).__name__, owner=self.owner)
            if self.fail is not None:
                self.fail(error)

    def sent(self, tag: int) -> EngineRequest:
        """The next attempt, which is sent now."""
        self.request_id = new_request_id()
        self.sent_at = time.monotonic()
        return EngineRequest(
            tag,
            self.url,
            self.body,
            self.request_id,
            self.content_type,
            self.of_batch,
            self.sequences,
        )
