"""The gate of a server that says "not now": how much it is sent, and whose fault a refusal is.

429, 503, a gateway's 502 or 504 and a broken connection say something about the server, so they use
up no attempt of a line. After one the gate is closed for a pause. Then what the server still has in
it may go on, and one request is sent as a probe. Each further one that the server takes makes room
for another, so the number doubles with each round. See ADR 69, also for when a refusal is the
fault of its line nevertheless.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from batchyard.engine.base import NoAnswer
from batchyard.logs import event_logger
from batchyard.logs.time_words import duration, moment
from batchyard.runner.window.retry_policy import honoured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from batchyard.engine.base import EngineAnswer
    from batchyard.runner.window.retry_policy import RetryPolicy
    from batchyard.runner.window.window_request import WindowRequest

log = event_logger(__name__)

REFUSAL_STATUSES: Final = frozenset({429, 502, 503, 504, 529, *range(520, 525), 530})
"""From 520 on they are those of Anthropic (529) and of Cloudflare, for a server behind it. A 500 is
none: it may be the line's own, and a batch in which each line gets one has to end."""
_PROOF_SECONDS: Final = 600.0
"""For so long after the server has taken a line that it had refused, no refusal is the line's.
A line that gets 429, which names the cause, must also have been refused for so long."""
_UNDECIDED_SECONDS: Final = 3600.0
"""After this time a line counts as refused for itself if others that were sent at the same moment
were served, and no others are left that could show more."""
_SAME_MOMENT_SECONDS: Final = 1.0
_LEAST_TAKEN_SECONDS: Final = 2.0
"""A request that has been in the server for so long, and for longer than refusals take, is taken:
an answer of a language model may need minutes."""
_TOLD_SECONDS: Final = 5.0
"""What is over sooner is not reported."""
_TOLD_AGAIN_SECONDS: Final = 600.0


def is_refusal(answer: EngineAnswer) -> bool:
    """Whether the answer says that the server takes no request now, whatever it asks."""
    return answer.status in REFUSAL_STATUSES or answer.no_answer is NoAnswer.CONNECTION_LOST


@dataclass(frozen=True, slots=True)
class Refusing:
    """What a server answers that takes nothing now."""

    since: float
    """Unix time of the first refusal after which nothing was taken."""
    last: str
    """What it said to the last request: status and ``Retry-After``, never a body."""

    def words(self) -> str:
        """For everyone who may see a batch that waits for it."""
        return f"the engine's server has taken no requests since {moment(self.since)} ({self.last})"


class Refusals:
    """Those of one server, by all requests of its window.

    ``others`` gives the requests that are in the window now, less the one whose answer is handled.
    ``on_open`` is called when something may be sent again. Create it in an event loop.
    """

    def __init__(
        self,
        size: int,
        policy: RetryPolicy,
        *,
        in_flight: Callable[[], int],
        others: Callable[[], Iterable[WindowRequest]],
        on_open: Callable[[], object],
    ) -> None:
        self.limit = size
        """Requests in the server, at most, while it is not closed."""
        self.refusing: Refusing | None = None
        """None: the last that is known is that it takes requests."""
        self._size = size
        self._policy = policy
        self._in_flight = in_flight
        self._others = others
        self._on_open = on_open
        self._opening: asyncio.TimerHandle | None = None
        self._growing: asyncio.TimerHandle | None = None
        self._closed_until = 0.0
        self._opened_at = 0.0
        self._slowed_at = 0.0
        self._rounds = 0
        """Pauses in a row after which nothing was taken; halved by each request that is."""
        self._step = 1
        self._refusal_seconds = 0.0
        self._taken_sent_at = 0.0
        """When the last request was sent that the server has served."""
        self._proved_at = -_PROOF_SECONDS
        self._told_at = -_TOLD_AGAIN_SECONDS
        self._is_told = False

    def resize(self, size: int) -> None:
        """So many may be in the server where it has not refused any."""
        self.limit = min(self.limit, size) if self.limit < self._size else size
        self._size = size

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent now."""
        return self._opening is None and self._in_flight() < self.limit

    @property
    def seconds(self) -> float:
        """How long the server has taken nothing; 0: it takes requests."""
        return 0.0 if self.refusing is None else max(0.0, time.time() - self.refusing.since)

    def told(self) -> str | None:
        """That the server takes nothing, in words, if it lasts; None: it takes requests.

        Logs the beginning and the end. Call it every second or so.
        """
        if self._opening is None and not any(True for _ in self._others()):
            # Nothing waits, so it is not known whether the server still refuses.
            self.refusing = None
        if self.refusing is None:
            if self._is_told:
                self._is_told = False
                log.info("engine.accepting")
            return None
        if self.seconds < _TOLD_SECONDS:
            return None
        words = self.refusing.words()
        # A limit of requests a minute is met every minute.
        if not self._is_told and time.monotonic() - self._told_at >= _TOLD_AGAIN_SECONDS:
            self._is_told, self._told_at = True, time.monotonic()
            log.warning("engine.refusing", f"{words}. Batches wait for it; no line fails.")
        return words

    def answered(self, request: WindowRequest, answer: EngineAnswer) -> bool:
        """Take note of an answer; whether it uses up an attempt of its line."""
        if is_refusal(answer):
            return self._refused(request, answer)
        if answer.status is not None and answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            self._taken(request)
        return True

    def not_reached(self) -> None:
        """The server was lost, and is not there yet."""
        self._refuses("it cannot be reached, or is not ready")

    def end(self) -> None:
        """Nothing more is sent."""
        for timer in filter(None, (self._opening, self._growing)):
            timer.cancel()

    # -- how much is sent -------------------------------------------------------------------

    def _taken(self, request: WindowRequest) -> None:
        self._taken_sent_at = max(self._taken_sent_at, request.sent_at)
        if request.refusals:
            self._proved_at = time.monotonic()
            request.refusals = request.doubts = 0
        is_news = self._opening is None and request.sent_at >= self._opened_at
        if is_news and (self.refusing is not None or self.limit < self._size):
            self._takes(1)

    def _refuses(self, said: str) -> None:
        since = time.time() if self.refusing is None else self.refusing.since
        self.refusing = Refusing(since, said)

    def _takes(self, more: int) -> None:
        """The server has taken a request since the gate was opened."""
        self.refusing = None
        self._rounds //= 2
        self.limit = min(self._size, self.limit + more)

    def _refused(self, request: WindowRequest, answer: EngineAnswer) -> bool:
        now = time.monotonic()
        asked = honoured(answer.retry_after_seconds)
        said = "its connections break" if answer.status is None else f"HTTP {answer.status}"
        self._refuses(f"{said}, Retry-After {duration(asked)}" if asked else said)
        self._refusal_seconds = now - request.sent_at
        if not request.doubts:
            pause = asked or 0.0
            if request.sent_at >= self._slowed_at:
                # The others that were sent before the last pause tell nothing new.
                self._rounds += 1
                self._slowed_at = now
                pause = self._policy.pause_seconds(self._rounds, asked)
            self.limit = max(1, min(self.limit, self._in_flight()))
            self._close(now + pause)
        return self._is_of_line(request, answer, now)

    def _close(self, until: float) -> None:
        if until <= max(self._closed_until, time.monotonic()):
            return
        self.end()
        self._closed_until, self._growing = until, None
        self._opening = asyncio.get_running_loop().call_later(until - time.monotonic(), self._open)

    def _open(self) -> None:
        self._opening = None
        self._opened_at = time.monotonic()
        # What it has in it, it has taken; one more is the probe.
        self.limit = min(self._size, self._in_flight() + 1)
        self._step = 1
        self._grow_later()
        self._on_open()

    def _grow_later(self) -> None:
        seconds = max(_LEAST_TAKEN_SECONDS, 2 * self._refusal_seconds)
        self._growing = asyncio.get_running_loop().call_later(seconds, self._grow)

    def _grow(self) -> None:
        self._growing = None
        if self._in_flight() >= self.limit:
            self._takes(self._step)
            self._step *= 2
        if self.limit < self._size:
            self._grow_later()
        self._on_open()

    # -- whose fault it is ------------------------------------------------------------------

    def _is_of_line(self, request: WindowRequest, answer: EngineAnswer, now: float) -> bool:
        """Whether the refusal counts as an attempt of the line."""
        if not request.refusals:
            request.first_refused_at = request.sent_at
            request.refused_at = now
        request.refusals += 1
        is_rate = answer.status == HTTPStatus.TOO_MANY_REQUESTS
        refused_for = now - request.first_refused_at
        if now - self._proved_at < _PROOF_SECONDS or (is_rate and refused_for < _PROOF_SECONDS):
            request.refused_at = now
            return False
        if self._taken_sent_at > request.refused_at:
            # Another one was sent between two refusals of the line, and was served. It may have
            # taken longer than the line's pause, so the earlier one need not be the last.
            request.refused_at = now
            request.doubts += 1
            return True
        if is_rate or answer.retry_after_seconds or not self._was_passed(request):
            return False
        # One answer shows it once: a server that is full takes one of two, too.
        is_likely = request.doubts > 1 or refused_for >= _UNDECIDED_SECONDS
        return is_likely and all(map(self._was_passed, self._others()))

    def _was_passed(self, request: WindowRequest) -> bool:
        """Whether the line was refused while one that was sent with it was served."""
        earliest = request.first_refused_at - _SAME_MOMENT_SECONDS
        return request.refusals > 0 and self._taken_sent_at >= earliest
