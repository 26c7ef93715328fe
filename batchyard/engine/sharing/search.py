"""How much to have in flight on a server that does not say how much it runs at once.

Pure, on a clock that is passed in: a search is told what was sent and what has ended, and says how
much may be in flight. It compares two numbers at a time, by the work that the server does in a
second with each. The number is doubled for as long as that makes the server faster, and halved for
as long as that makes it hardly slower, or when the server refuses. Then it is kept for a while, and
compared again.

The work per second is what is in flight, on average, times the work per second of one request. So
an answer counts by its length, answers that end together do no harm, and a longer wait in the
server's queue counts against the number.
"""

from __future__ import annotations

from math import inf
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator

MOST: Final = 256
"""Users of a server without metrics are not seen, and wait for longer with each doubling. A window
is twice as large on a server that nobody else uses and that does not say more."""
_GAIN: Final = 1.04
"""A larger number is taken from this gain on."""
_LOSS: Final = 0.97
"""A smaller number is taken up to this loss: users, and our own requests, wait for less long."""
_MARGINS: Final = (0.16, 0.08, 0.06, 0.04, 0.0)
"""Two numbers are compared up to five times, unless they differ by so much more before. Where they
are about as good, that costs nothing."""
_CLEAR: Final = 0.5
"""So much is no chance, whatever it is in favour of."""
_SECONDS: Final = 1.0
_ANSWERS: Final = 6
"""The least that one measurement takes."""
_PAUSE_SECONDS: Final = 1.0
"""So long without a request is no part of a measurement: nobody had one."""
_TURNS: Final = 2
"""So many times as many answers as the number belong to a measurement; to the first one half."""
_FULL: Final = 0.75
"""So much of a number has to be in flight on average, or it was not measured."""
_TRIES: Final = 3
"""Where it is not so full as often, it cannot be."""
_PATIENCE: Final = 5.0
"""A number that takes so many times as long to measure as the best is not as good. Twice as many
requests wait for twice as long where nothing is gained."""
_FIRST_HOLD_SECONDS: Final = 30.0
_LONGEST_HOLD_SECONDS: Final = 480.0
"""How long a number is kept: twice as long each time that it is found to be right. A look at twice
and half of it takes a few seconds, in which half of it may be half as fast."""
_FALLEN: Final = 0.7
"""A server that does less than this part of what it did, twice in a row, is looked at again."""
_NEAR: Final = 1.2
"""Between what a server takes and what it refuses nothing is tried if they differ by less."""


class Search:
    """The number begins at ``first``. It counts sequences, of which a request has one or more."""

    def __init__(self, first: int) -> None:
        self._best = first
        self._of_best: list[float] = []
        """The speeds that were measured with it since the last look began."""
        self._best_seconds = 0.0
        """How long it took to measure it."""
        self._turns = 1
        self._trial = _Trial(0, 0.0, first, 0.0)
        self._steps = self._search()
        self.number = next(self._steps)
        """What may be in flight now."""
        self._changed_at = 0.0

    # -- what happens -----------------------------------------------------------------------

    def passes(self, now: float, in_flight: int) -> None:
        """So many sequences are in flight from now on: one was sent, or lost without an answer."""
        self._trial.passes(now, in_flight)

    def answered(
        self, now: float, in_flight: int, *, work: float, sent_at: float, sequences: int = 1
    ) -> None:
        """A request was answered; ``in_flight`` are left. ``work``: what it was, in any unit."""
        self._trial.answered(now, in_flight, work=work, sent_at=sent_at, sequences=sequences)
        if (seen := self._trial.seen(now, self.number, self._turns)) is not None:
            self._go_on(now, in_flight, seen)

    def refused(self, now: float, in_flight: int, *, sent_at: float) -> None:
        """A request was refused; ``in_flight`` are left.

        It says something of the number only if it was sent with it, and if others were there: a
        server that is away refuses each.
        """
        self.passes(now, in_flight)
        if sent_at >= self._changed_at and in_flight > 0:
            self._go_on(now, in_flight, None)

    def _go_on(self, now: float, in_flight: int, seen: _Seen | None) -> None:
        number = self._steps.send(seen)
        if number != self.number:
            self.number, self._changed_at = number, now
        most = inf if number == self._best else _PATIENCE * max(_SECONDS, self._best_seconds)
        self._trial = _Trial(
            in_flight,
            now,
            max(in_flight, self._turns * number),
            self._changed_at,
            most_seconds=most,
        )

    # -- what follows from it ---------------------------------------------------------------

    def _search(self) -> _Steps[None]:
        seconds = 0.0
        ways = up_first = [self._go_up, self._go_down]
        while True:
            before = self._best
            try:
                for way in ways:
                    if self._best == before:
                        yield from way()
                seconds = 2 * seconds if self._best == before else 0.0
                seconds = min(_LONGEST_HOLD_SECONDS, max(_FIRST_HOLD_SECONDS, seconds))
                has_fallen = yield from self._hold(seconds)
                ways = up_first[::-1] if has_fallen else up_first
            except _Refused:
                self._best = max(1, self.number * 3 // 4)
                seconds, ways = 0.0, []
            self._of_best = []

    def _go_up(self) -> _Steps[None]:
        """Double the number while that is better; below a refusal, try what lies between."""
        refused: int | None = None
        yield from self._measure_best()
        while True:
            other = 2 * self._best if refused is None else (self._best + refused) // 2
            other = min(MOST, other)
            if other < _NEAR * self._best:
                return
            try:
                if not (yield from self._is_as_good(other, _GAIN)):
                    return
            except _Refused:
                if self.number != other:
                    raise
                refused = other

    def _go_down(self) -> _Steps[None]:
        while self._best > 1 and (yield from self._is_as_good(self._best // 2, _LOSS)):
            pass

    def _is_as_good(self, other: int, gain: float) -> _Steps[bool]:
        """Whether it has this gain over the best, and is the best from now on."""
        of_other: list[float] = []
        for margin in _MARGINS:
            self._turns = _TURNS if of_other else 1
            if len(self._of_best) <= len(of_other):
                yield from self._measure_best()
            seen = yield from self._measure(other)
            if not seen.speed:
                return False  # it took too long, however good it was before
            of_other.append(seen.speed)
            difference = median(of_other) / median(self._of_best) - gain
            # One bad moment is to cost little: having fewer may be half as fast, more is hardly
            # ever slower.
            favours_more = (difference > 0) == (other > self._best)
            if abs(difference) >= _CLEAR:
                break
            if abs(difference) >= margin and (favours_more or len(of_other) > 2):
                break
        if difference >= 0:
            self._best, self._of_best = other, of_other[-1:]
            self._best_seconds = seen.seconds
        return difference >= 0

    def _measure(self, other: int) -> _Steps[_Seen]:
        """The last of a few measurements, unless an earlier one was full."""
        for _ in range(_TRIES):
            seen = yield from _measured(other)
            if not seen.speed or seen.in_flight >= _FULL * other:
                break
        return seen

    def _measure_best(self) -> _Steps[None]:
        while True:
            seen = yield from _measured(self._best)
            # Otherwise there were too few lines, or a gate was closed.
            if seen.in_flight >= _FULL * self._best:
                break
        # A request of more sequences than may be in flight runs alone.
        self._best = max(self._best, min(MOST, round(seen.in_flight)))
        self._of_best.append(seen.speed)
        self._best_seconds = seen.seconds

    def _hold(self, seconds: float) -> _Steps[bool]:
        """Return after so much work, or when the server has become slower, and whether it has.

        The time between two batches is not counted: each of many short ones would begin with a
        comparison.
        """
        if not self._of_best:
            yield from self._measure_best()
        of_best, held, falls = median(self._of_best), 0.0, 0
        while falls < 2:
            seen = yield from _measured(self._best)
            held += seen.seconds
            if held >= seconds:
                return False
            has_fallen = seen.in_flight >= _FULL * self._best and seen.speed < _FALLEN * of_best
            falls = falls + 1 if has_fallen else 0
        return True


class _Refused(Exception):
    """The server has refused a request at the number that was tried."""


class _Seen(NamedTuple):
    """One measurement."""

    speed: float
    """Work per second; 0: so little that it took too long."""
    in_flight: float
    """Sequences, on average."""
    seconds: float
    """How long it took."""


if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")
    _Steps = Generator[int, _Seen | None, T]
    """Yields the number to try, and gets what was seen; None: the server has refused."""


def _measured(number: int) -> _Steps[_Seen]:
    seen = yield number
    if seen is None:
        raise _Refused
    return seen


class _Trial:
    """One measurement, of requests that are sent after ``earlier`` sequences were answered.

    Those that were sent before were there together with fewer, or with more.
    """

    def __init__(
        self, in_flight: int, now: float, earlier: int, since: float, *, most_seconds: float = inf
    ) -> None:
        self._earlier, self._since = earlier, since
        self._created = self._began = self._at = now
        self._most_seconds = most_seconds
        self._in_flight = in_flight
        self._sequence_seconds = 0.0
        self._answers = self._sequences = 0
        self._work = self._seconds = 0.0

    def passes(self, now: float, in_flight: int) -> None:
        """So many are in flight from now on."""
        pause = now - self._at
        if not self._in_flight and (pause > _PAUSE_SECONDS or not self._sequences):
            # Nothing was there to be measured.
            self._created += pause
            self._began += pause
        self._sequence_seconds += self._in_flight * (now - self._at)
        self._in_flight, self._at = in_flight, now

    def answered(
        self, now: float, in_flight: int, *, work: float, sent_at: float, sequences: int
    ) -> None:
        """See :meth:`Search.answered`."""
        self.passes(now, in_flight)
        if self._earlier > 0:
            self._earlier -= sequences
            if self._earlier <= 0:
                self._began, self._sequence_seconds = now, 0.0
        else:
            self._sequences += sequences
            if sent_at >= self._since:
                self._answers += 1
                self._work += work
                self._seconds += sequences * (now - sent_at)

    def seen(self, now: float, number: int, turns: int) -> _Seen | None:
        """What was measured; None: that takes longer."""
        seconds, whole = now - self._began, now - self._created
        if whole > self._most_seconds:
            return _Seen(0.0, 0.0, whole)
        is_enough = self._answers >= _ANSWERS and self._sequences >= turns * number
        if not is_enough or seconds < turns * _SECONDS or self._seconds <= 0:
            return None
        mean = self._sequence_seconds / seconds
        return _Seen(mean * self._work / self._seconds, mean, whole)
