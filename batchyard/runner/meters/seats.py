"""Which requests an engine runs now, and how much of their answers is there. Estimates only.

An engine runs as many requests as it has seats, first come, first served; the others wait in it.
How fast an answer comes is measured from the moment at which its request had a seat, so it does not
matter which lengths are being written at the time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from batchyard.runner.meters.prompt_cost import PromptCost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_HORIZON_ANSWERS: Final = 200
"""The weight of an answer fades to a third with as many later ones."""


class Seated(Protocol):
    """The part of a request that this module uses. Two are equal only if they are the same."""

    unshared_tokens: int
    """Of its prompt, what the request before does not share."""

    seated_at: float | None
    """Since when the engine probably runs it; None: it does not yet. Is written here, like the
    next one."""
    read_before: int
    """:attr:`Seats.read` when it got its seat."""


class Seats:
    """The ``count`` seats of one engine, and the requests that were sent to it."""

    def __init__(self, count: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.read = 0
        """Tokens of prompts of all requests that had a seat up to now, by the plan."""
        self.prompt_cost = PromptCost()
        self._count = self._free = count
        self._clock = clock
        self._waiting: OrderedDict[Seated, None] = OrderedDict()
        self._tokens = self._seconds = 0.0

    def resize(self, count: int) -> None:
        """It has so many from now on. Requests that have one keep it."""
        self._free += count - self._count
        self._count = count
        while self._free > 0 and self._waiting:
            self._free -= 1
            self._seat(self._waiting.popitem(last=False)[0])

    @property
    def answer_speed(self) -> float | None:
        """Tokens per second of one answer; None: none has come."""
        return self._tokens / self._seconds if self._tokens and self._seconds else None

    def take(self, request: Seated) -> None:
        """The request is sent."""
        request.seated_at = None
        if self._free > 0:
            self._free -= 1
            self._seat(request)
        else:
            self._waiting[request] = None

    def leave(self, request: Seated) -> None:
        """The request is not in the engine any more."""
        if request.seated_at is None:
            self._waiting.pop(request, None)
        elif self._waiting and self._free >= 0:
            self._seat(self._waiting.popitem(last=False)[0])
        else:
            self._free += 1

    def count(self, request: Seated, tokens: int) -> None:
        """Count an answer that has just come, of so many tokens."""
        if request.seated_at is None or not tokens:
            return
        kept = 1 - 1 / _HORIZON_ANSWERS
        seconds = self._clock() - request.seated_at
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds
        read = self.read - request.read_before
        self.prompt_cost.count(tokens, seconds, read=read, busy=self._count - self._free)

    def _seat(self, request: Seated) -> None:
        request.seated_at = self._clock()
        request.read_before = self.read
        self.read += request.unshared_tokens

    def written(self, request: Seated) -> float:
        """Tokens of its answer by now."""
        if request.seated_at is None:
            return 0.0
        return (self.answer_speed or 0.0) * (self._clock() - request.seated_at)

    def all_written(self, requests: Iterable[Seated]) -> float:
        """Tokens of all their answers by now."""
        return sum(map(self.written, requests))
