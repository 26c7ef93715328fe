"""How much of a batch may be in flight on an engine that others use too: a pure state machine.

Time is passed in, in seconds by any steady clock; nothing is awaited here. Without an objective the
share is a rule: a quarter of the seats, and more only after a while without anybody else. With one
it is found: it grows slowly while latencies are short enough and shrinks at once when they are not,
for each level of live load apart, so that a burst takes nothing from what is known about the gaps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from batchyard.engine.sharing.budget import Budget
from batchyard.engine.sharing.share import Share

if TYPE_CHECKING:
    from batchyard.engine.sharing.objective import Objective
    from batchyard.engine.sharing.observation import Observation

SHARE: Final = 4
"""Without an objective a batch takes one seat of this many while others are there."""
RESERVE: Final = 8
"""One seat of this many is left free, where the operator does not say how many."""
FRESH_SECONDS: Final = 1.0
"""An older observation is stale: the share falls to the least."""
STALE_SECONDS: Final = 3.0
"""After this nothing new is sent: a few looks may fail."""
QUIET: Final = 0.05
"""With fewer live requests than this, on average, a batch without an objective takes what is
free."""
QUIET_SECONDS: Final = 10.0
"""The time constant of that average: after three times as long without others they are away."""
BUSY_SECONDS: Final = 1.0
"""So long a level of live load counts on after it was seen: users come back."""
_LEVELS: Final = (0.0, 1 / 8, 1 / 4, 1 / 2)
"""Live requests as shares of the seats: where a level ends and the next begins."""
MARGIN: Final = 0.5
_SPACING: Final = 3.0
"""A share is refilled this many times as quickly as it empties."""


class ShareController:
    """``seats``: how many requests the engine runs at once, or a guess (``are_known`` False).

    ``reserve_seats`` of them are always left free; None: one of eight.
    """

    def __init__(
        self,
        seats: int,
        *,
        are_known: bool = True,
        objective: Objective | None = None,
        reserve_seats: int | None = None,
    ) -> None:
        self.objective = objective
        self.seats = 0
        self._are_known = are_known
        self._given_reserve = reserve_seats
        self._in_flight: dict[object, tuple[float, float]] = {}
        """The tokens of each, and when it was sent."""
        self.sent_ever = 0
        """Requests, since the beginning."""
        self._tokens = 0.0
        self._unit: float | None = None
        """The tokens of an average request."""
        self._seconds: float | None = None
        """How long an average request takes."""
        self._next_at = -math.inf
        self._observed_at = -math.inf
        self._is_blind = False
        self._live = 0.0
        self._waiting = 0.0
        self._mean_live = 1.0
        self._is_quiet = False
        self._busy_level = 0
        self._busy_at = -math.inf
        self._looked_at: float | None = None
        allowed = 0.01 if objective is None else 1 - objective.quantile
        self._first, self._inter = Budget(allowed), Budget(allowed)
        self._settled_at = -math.inf
        self.set_seats(seats, are_known=are_known)

    def set_seats(self, seats: int, *, are_known: bool = True) -> None:
        """Begin anew if it is another number than before."""
        self._are_known = are_known
        if seats == self.seats:
            return
        self.seats = seats
        reserve = self._given_reserve
        self.reserve = max(1, seats // RESERVE) if reserve is None else reserve
        self._shares = [Share(self.quarter) for _ in range(len(_LEVELS) + 1)]

    @property
    def quarter(self) -> int:
        """Requests in flight on an engine of which nothing is seen but its size."""
        return max(1, min(self.seats // SHARE, self.seats - self.reserve))

    @property
    def most(self) -> int:
        """Requests in flight where nobody else is there."""
        if self.objective is None and not self._are_known:
            return self.quarter
        return max(1, self.seats - self.reserve)

    # -- what happens -----------------------------------------------------------------------

    def sent(self, now: float, key: object, tokens: float) -> None:
        """A request is on its way; ``tokens``: prompt and answer, by a guess."""
        tokens = max(1.0, tokens)
        self._unit = tokens if self._unit is None else 0.95 * self._unit + 0.05 * tokens
        self._in_flight[key] = (tokens, now)
        self.sent_ever += 1
        self._tokens += tokens
        if self._seconds is not None:
            places = max(1.0, self._share(now))
            pause = self._seconds / (_SPACING * places) * tokens / self._unit
            self._next_at = now + min(pause, self._seconds)

    def ended(self, now: float, key: object, *, is_refused: bool = False) -> None:
        """It is no longer there; refused: the engine has no room for it."""
        tokens, sent_at = self._in_flight.get(key, (0.0, now))
        self.lost(key)
        if is_refused:
            self._shares[self._busy_level].shrink(now, 0.5)
        elif tokens:
            took = now - sent_at
            self._seconds = took if self._seconds is None else 0.9 * self._seconds + 0.1 * took

    def lost(self, key: object) -> None:
        """It went away with its stream, which says nothing of how long it would have taken."""
        tokens, _ = self._in_flight.pop(key, (0.0, 0.0))
        self._tokens = max(0.0, self._tokens - tokens) if self._in_flight else 0.0

    def observe(self, now: float, seen: Observation) -> None:
        """Take note of what the engine was seen to do."""
        self._observed_at, self._is_blind = now, False
        # One request more than ours may be one of ours that has just ended.
        has_company = seen.waiting > 0 or seen.live >= 2 or min(seen.live, self._live) >= 1
        if self._looked_at is not None:
            weight = 1 - math.exp((self._looked_at - now) / QUIET_SECONDS)
            self._mean_live += weight * (min(1.0, seen.live) - self._mean_live)
        self._is_quiet = self._mean_live < QUIET and not has_company
        self._live, self._waiting = seen.live, seen.waiting
        level = self._level_of(seen.live)
        before = self._busy_level
        if level >= before or now - self._busy_at > BUSY_SECONDS:
            self._busy_level, self._busy_at = level, now
        if self.objective is not None:
            self._adapt(now, before, seen)
        self._looked_at = now

    def unobservable(self) -> None:
        """The engine has nothing to look at: a quarter is all, for as long as that is so."""
        self._is_blind = True

    # -- what follows from it ---------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Our requests that are there."""
        return len(self._in_flight)

    def may_send(self, now: float) -> bool:
        """Whether one more request may be sent now."""
        if self._is_blind:
            return len(self._in_flight) < self.quarter
        if now - self._observed_at > STALE_SECONDS or self._waiting > 0 or now < self._next_at:
            return False
        room = max(1, min(self.most, math.floor(self.seats - self.reserve - self._live)))
        share = self._share(now)
        if self._tokens >= share * (self._unit or 1.0) and self._in_flight:
            return False
        return len(self._in_flight) < room

    def opens_at(self) -> float:
        """Before this moment nothing is sent, whatever is observed."""
        return self._next_at

    def _share(self, now: float) -> float:
        """In average requests."""
        if self._is_blind:
            return float(self.quarter)
        if now - self._observed_at > FRESH_SECONDS:
            return 1.0
        if self.objective is None:
            return float(self.most if self._is_quiet else self.quarter)
        return self._shares[self._busy_level].size

    def _level_of(self, live: float) -> int:
        return sum(live > self.seats * end for end in _LEVELS)

    # -- with an objective ------------------------------------------------------------------

    def _adapt(self, now: float, level: int, seen: Observation) -> None:
        """Judge what was seen by the level that it was sent under."""
        looked_at, share = self._looked_at, self._shares[level]
        seconds = 0.0 if looked_at is None else min(now - looked_at, FRESH_SECONDS)
        self._first.add(now, seen.first_token)
        self._inter.add(now, seen.inter_token)
        is_late = (seen.first_token.late > 0 and self._first.used > MARGIN) or (
            seen.inter_token.late > 0 and self._inter.used > MARGIN
        )
        if now < self._settled_at:
            return
        if is_late:
            share.shrink(now)
            self._settled_at = now + max(1.0, min(5.0, self._seconds or 1.0))
            for busier in self._shares[level + 1 :]:
                busier.size = min(busier.size, share.size)
        elif not seen.first_token.late + seen.inter_token.late and self._is_used(share):
            share.grow(seconds, self.most)
            for quieter in self._shares[:level]:
                quieter.size = max(quieter.size, share.size)

    def _is_used(self, share: Share) -> bool:
        return self._tokens >= 0.8 * share.size * (self._unit or 1.0)
