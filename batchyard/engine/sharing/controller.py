"""How much of a batch may be in flight on an engine that others use too: a pure state machine.

Time is passed in, in seconds by any steady clock; nothing is awaited here. Without an objective the
share is a rule: half of the seats, a quarter where others need more than that, and what is free
while there are no other users. Where nobody says how many seats there are, :mod:`.search` finds
what is free. With an objective the share is found, in tokens in flight: it grows while
latencies are short enough and shrinks when they are not, separately for each level of live load,
so that a burst does not lower the share of calm times. Requests in flight cannot be called back,
so seats that others will probably want before these have ended are left free.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from batchyard.engine.sharing.crowd import MEMORY_SECONDS, Crowd
from batchyard.engine.sharing.search import Search
from batchyard.engine.sharing.share import Share

if TYPE_CHECKING:
    from batchyard.engine.objective import Objective
    from batchyard.engine.sharing.observation import Latencies, Observation

SHARE: Final = 4
"""Without an objective a batch takes one seat of this many, however many others are there and
whatever is known of the engine."""
_BESIDE_OTHERS: Final = 2
"""It takes one seat of this many while it and others together leave a quarter of them free."""
RESERVE: Final = 16
"""One seat of this many is left free, where the operator does not say how many."""
FLOOR: Final = 32
"""With an objective a batch may always have one seat of this many if it is free: it gets on."""
FRESH_SECONDS: Final = 2.0
"""An older observation is stale: one request at a time is sent."""
STALE_SECONDS: Final = 3.0
"""After this nothing is sent: a few looks may fail."""
QUIET: Final = 0.05
"""With fewer live requests than this on average, a batch without an objective takes what is
free."""
QUIET_SECONDS: Final = 10.0
"""The time constant of that average: about 30 s after the last request of others."""
BUSY_SECONDS: Final = 1.0
"""How long a level of live load counts after it was seen: users come back."""
_LEVELS: Final = (0.0, 1 / 8, 1 / 4, 1 / 2)
"""Live requests as shares of the seats: where a level ends and the next begins."""
_FIRST_SHARES: Final = (1.0, 0.75, 0.5, 0.25, 0.125)
"""At each level, as shares of a quarter of the seats: of a busy engine nothing is known yet."""
_SPACING: Final = 3.0
"""A share is refilled this many times as fast as it empties: prompts come in small doses."""
_MARGIN: Final = 0.5
"""A share shrinks at this part of what the objective allows."""
_FULL: Final = 0.8
"""A share of which so much is in use has shown that it is not too much."""
_MOST_SETTLING_SECONDS: Final = 5.0


class _Sent(NamedTuple):
    """One of our requests."""

    tokens: float
    at: float
    level: int
    sequences: int


_NOTHING: Final = _Sent(0.0, 0.0, 0, 0)


class ShareController:
    """``seats``: how many requests the engine runs at once, or a guess (``are_known`` False).

    ``reserve_seats`` of them are always left free; None: one of sixteen. ``live``: how many
    requests of others there were on average before the first observation, at most one. Of a guess
    nothing can be reserved: without an objective and ``reserve_seats``, what a batch may have
    while no others are seen begins with a quarter of it and is found by trying.
    """

    def __init__(
        self,
        seats: int,
        *,
        are_known: bool = True,
        objective: Objective | None = None,
        reserve_seats: int | None = None,
        live: float = 1.0,
    ) -> None:
        self.objective = objective
        self.seats = 0
        self.sent_ever = 0
        """Requests, since the beginning."""
        self.are_known = are_known
        """Whether ``seats`` are no guess."""
        self._given_reserve = reserve_seats
        self.search: Search | None = None
        """What finds how many requests a batch may have; None: that is not to be found."""
        self._in_flight: dict[object, _Sent] = {}
        self.sequences = 0
        """The seats that our requests in flight took when they came."""
        self._sent_at = [0.0] * len(_FIRST_SHARES)
        """The tokens in flight that were sent at each level."""
        self._tokens = 0.0
        self._unit: float | None = None
        """The tokens of one of the first requests, on average. Shares are multiples of it."""
        self._seconds: float | None = None
        """How long an average request takes."""
        self._next_at = -math.inf
        self._observed_at = -math.inf
        self._is_blind = False
        self._live = 0.0
        self._waiting = 0.0
        self._first_mean = self._mean_live = live
        self._is_quiet = False
        self._level = 0
        self._level_at = -math.inf
        self._settled_at = -math.inf
        allowed = 1.0 if objective is None else 1 - objective.quantile
        self._first, self._inter = LatenessBudget(allowed), LatenessBudget(allowed)
        self.set_seats(seats, are_known=are_known)

    def set_seats(self, seats: int, *, are_known: bool = True) -> None:
        """Forget what was found if it is another number than before."""
        is_same = (seats, are_known) == (self.seats, self.are_known) and self.seats > 0
        self.are_known = are_known
        if is_same:
            return
        self.seats = seats
        reserve = self._given_reserve
        self.reserve = max(1, seats // RESERVE) if reserve is None else min(reserve, seats - 1)
        self._crowd = Crowd(seats)
        self._shares = [Share(self.quarter * part) for part in _FIRST_SHARES]
        is_found = not are_known and self.objective is None and self._given_reserve is None
        self.search = Search(self.quarter) if is_found else None
        # A search begins with little, so others need not have been away for long before.
        self._mean_live = 0.0 if is_found else self._first_mean

    @property
    def quarter(self) -> int:
        """Requests in flight on an engine of which only the size is known."""
        return max(1, min(self.seats // SHARE, self.seats - self.reserve))

    @property
    def most(self) -> int:
        """Requests in flight while there are no other users."""
        if self.search is not None:
            return self.search.number
        if self.objective is None and not self.are_known:
            return self.quarter
        return max(1, self.seats - self.reserve)

    @property
    def in_flight(self) -> int:
        """Our requests that are there: the least that we have of those that the engine runs.

        Some of the sequences of a request may have ended. If they were taken for ours, requests of
        others would not be seen.
        """
        return len(self._in_flight)

    # -- what happens -----------------------------------------------------------------------

    def sent(self, now: float, key: object, tokens: float, sequences: int = 1) -> None:
        """A request is on its way; ``tokens``: prompt and answer, by a guess."""
        tokens = max(1.0, tokens)
        if self._unit is None:
            self._unit = tokens
        elif self.sent_ever < self.quarter:
            self._unit += (tokens - self._unit) / (self.sent_ever + 1)
        self._in_flight[key] = _Sent(tokens, now, self._level, sequences)
        self.sequences += sequences
        self._sent_at[self._level] += tokens
        self.sent_ever += 1
        self._tokens += tokens
        if self.search is not None:
            self.search.passes(now, self.sequences)
        if self._seconds is not None:
            part = tokens / (self._unit * max(1.0, self.share(now)))
            self._next_at = now + self._seconds * min(1.0, part / _SPACING)

    def ended(
        self, now: float, key: object, *, is_refused: bool = False, work: float | None = None
    ) -> None:
        """It is no longer there; refused: the engine had no room for it.

        ``work``: in tokens of answers, 0 if its answer does not say it; None: it was none.
        """
        entry = self._in_flight.get(key)
        self._remove(key)
        if is_refused:
            self._shrink(now)
        elif entry is not None:
            took = now - entry.at
            self._seconds = took if self._seconds is None else 0.9 * self._seconds + 0.1 * took
        search = self.search
        if search is None:
            return
        if is_refused and entry is not None:
            search.refused(now, self.sequences, sent_at=entry.at)
        elif work is None or entry is None:
            search.passes(now, self.sequences)
        else:
            search.answered(
                now,
                self.sequences,
                work=work or entry.tokens,
                sent_at=entry.at,
                sequences=entry.sequences,
            )

    def lost(self, now: float, key: object) -> None:
        """It went away without an answer, which says nothing of how long one takes."""
        self._remove(key)
        if self.search is not None:
            self.search.passes(now, self.sequences)

    def _remove(self, key: object) -> None:
        entry = self._in_flight.pop(key, _NOTHING)
        self._sent_at[entry.level] -= entry.tokens
        self.sequences -= entry.sequences
        self._tokens = max(0.0, self._tokens - entry.tokens) if self._in_flight else 0.0

    def observe(self, now: float, seen: Observation) -> None:
        """Take note of what the engine was seen to do."""
        seconds = min(now - self._observed_at, FRESH_SECONDS)
        self._observed_at, self._is_blind = now, False
        self._note_quiet(seconds, seen)
        self._live, self._waiting = seen.live, seen.waiting
        self._crowd.see(now, seen.live, min(self._seconds or 1.0, MEMORY_SECONDS))
        if self.objective is not None:
            self._judge(now, seconds, seen)
        level = sum(seen.live > self.seats * end for end in _LEVELS)
        if level >= self._level or now - self._level_at > BUSY_SECONDS:
            self._level, self._level_at = level, now

    def unobservable(self) -> None:
        """There is nothing to look at, for now: a quarter is all, or what was found by trying."""
        self._is_blind = True

    # -- what follows from it ---------------------------------------------------------------

    def may_send(self, now: float) -> bool:
        """Whether one more request may be sent now."""
        if self._is_blind:
            return self.sequences < self.share(now)
        if now - self._observed_at > STALE_SECONDS:
            return False
        if not self._is_alone and (self._waiting > 0 or now < self._next_at):
            return False
        if self.objective is None:
            return self.sequences < min(self._room, math.floor(self.share(now)))
        unit = self._unit or 1.0
        return self.sequences < self._room and self._tokens < unit * self.share(now)

    def opens_at(self) -> float:
        """Before this moment nothing is sent, whatever is observed."""
        return self._next_at

    def share(self, now: float) -> float:
        """Our part of the engine, in average requests."""
        if self._is_blind:
            return float(self.quarter if self.search is None else self.search.number)
        if now - self._observed_at > FRESH_SECONDS:
            return 1.0
        if self.objective is None:
            return float(self.most if self._is_quiet else self._beside_others)
        return max(self._floor, self._shares[self._level].size)

    @property
    def _beside_others(self) -> float:
        if not self.are_known:
            return min(self.quarter, self.most)
        left = self.seats - self.quarter - self._live
        return max(self.quarter, min(self.seats // _BESIDE_OTHERS, left))

    @property
    def _room(self) -> int:
        """How many requests of ours there are seats for."""
        if self.search is not None:
            return self.most
        free = self.seats - self.reserve - self._live
        if self.objective is not None and self.objective.first_token_seconds is not None:
            free = max(self.seats - self.reserve - self._crowd.expected, self._floor)
        return math.floor(min(self.most, max(1.0, free), self.seats - self._live))

    @property
    def _floor(self) -> float:
        return max(1.0, self.seats / FLOOR)

    @property
    def _is_alone(self) -> bool:
        """Whether what waits is ours, and nobody is delayed by requests that come together.

        How much of it makes a server faster is what is searched.
        """
        return self.search is not None and self._is_quiet

    def _note_quiet(self, seconds: float, seen: Observation) -> None:
        # One request more than ours may be one of ours that has just ended.
        has_company = seen.live >= 2 or min(seen.live, self._live) >= 1
        if self.search is None:
            has_company = has_company or seen.waiting > 0
        weight = 1 - math.exp(-seconds / QUIET_SECONDS)
        self._mean_live += weight * (min(1.0, seen.live) - self._mean_live)
        self._is_quiet = self._mean_live < QUIET and not has_company

    # -- with an objective ------------------------------------------------------------------

    def _judge(self, now: float, seconds: float, seen: Observation) -> None:
        """What was late was sent before now: at the level before this observation, or earlier."""
        self._first.add(now, seen.first_token)
        self._inter.add(now, seen.inter_token)
        late_first, late_inter = seen.first_token.late > 0, seen.inter_token.late > 0
        if (late_first and self._first.used > _MARGIN) or (
            late_inter and self._inter.used > _MARGIN
        ):
            self._shrink(now)
        elif not (late_first or late_inter) and now >= self._settled_at and self._is_measured:
            self._grow(seconds)

    @property
    def _is_measured(self) -> bool:
        """Whether the engine says how long what was promised takes."""
        goal = self.objective
        return goal is not None and all(
            promised is None or budget.is_known
            for promised, budget in (
                (goal.first_token_seconds, self._first),
                (goal.inter_token_seconds, self._inter),
            )
        )

    def _shrink(self, now: float) -> None:
        """Once for each time that what is in flight needs to leave."""
        if now < self._settled_at:
            return
        self._settled_at = now + min(_MOST_SETTLING_SECONDS, max(1.0, self._seconds or 0.0))
        for level in {self._level, self._sent_at.index(max(self._sent_at))}:
            self._shares[level].shrink()
        for quieter, busier in itertools.pairwise(self._shares):
            busier.size = min(busier.size, quieter.size)

    def _grow(self, seconds: float) -> None:
        share = self._shares[self._level]
        if self._tokens >= _FULL * share.size * (self._unit or 1.0):
            share.grow(seconds)
            for quieter in self._shares[: self._level]:
                quieter.size = max(quieter.size, share.size)


HORIZON_SECONDS: Final = 30.0
"""An objective shall hold in each stretch of this length."""


class LatenessBudget:
    """``allowed``: the share that may be late."""

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._seen: deque[tuple[float, Latencies]] = deque()
        self._total = 0.0
        self._late = 0.0

    def add(self, now: float, seen: Latencies) -> None:
        """Count what was seen, and forget what is long ago."""
        if seen.total:
            self._seen.append((now, seen))
            self._total += seen.total
            self._late += seen.late
        while self._seen and self._seen[0][0] < now - HORIZON_SECONDS:
            _, old = self._seen.popleft()
            self._total -= old.total
            self._late -= old.late

    @property
    def is_known(self) -> bool:
        """Whether anything was seen."""
        return self._total > 0

    @property
    def used(self) -> float:
        """1: just as much as is allowed."""
        return self._late / (self._allowed * self._total) if self.is_known else 0.0
