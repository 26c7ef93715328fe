"""How much of an engine that others use a batch takes: the controller, on a clock of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.engine.objective import Objective
from batchyard.engine.sharing import controller as rules
from batchyard.engine.sharing.controller import ShareController
from batchyard.engine.sharing.observation import Latencies, Observation
from batchyard.engine.sharing.share import Share
from batchyard.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

SEATS = 64
LOOK = 0.25
TOKENS = 100.0
FIRST = Objective(first_token_seconds=0.25)
GOOD, BAD = Latencies(20, 0), Latencies(20, 20)


class Clock:
    """A controller whose requests take ``seconds`` each, looked at four times a second."""

    def __init__(self, objective: Objective | None = None, **options: Any) -> None:
        self.controller = ShareController(SEATS, objective=objective, **options)
        self.now = 0.0
        self.seconds = 1.0
        self.sequences = 1
        self.sent: list[tuple[float, object]] = []
        self.most = 0

    def run(
        self,
        seconds: float,
        *,
        live: float = 0,
        waiting: float = 0,
        first: Callable[[int], Latencies] | Latencies = GOOD,
    ) -> int:
        """The most requests that were in flight at once; ``first`` by how many are."""
        self.most, end = 0, self.now + seconds
        while self.now < end:
            ours = self.controller.in_flight
            seen = first(ours) if callable(first) else first
            self.controller.observe(self.now, Observation(live, waiting, seen))
            self.send_until(self.now + LOOK)
        return self.most

    def send_until(self, end: float) -> None:
        """Time passes without a look."""
        while self.now < end:
            while self.sent and self.sent[0][0] <= self.now:
                self.controller.ended(self.now, self.sent.pop(0)[1], work=TOKENS)
            while self.controller.may_send(self.now):
                key = object()
                self.controller.sent(self.now, key, TOKENS, self.sequences)
                self.sent.append((self.now + self.seconds, key))
            self.most = max(self.most, self.controller.in_flight)
            self.now += 0.01


# -- without an objective -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("live", "share"),
    [(3, SEATS // 2), (SEATS // 4, SEATS // 2), (SEATS // 4 + 5, SEATS // 2 - 5)],
)
def test_beside_others_a_batch_has_half_of_the_seats_and_a_quarter_stays_free(
    live: int, share: int
) -> None:
    assert Clock().run(60, live=live) == share


def test_a_quarter_of_the_seats_is_left_to_a_batch_where_others_leave_as_many() -> None:
    assert Clock().run(60, live=SEATS // 2 + 5) == SEATS // 4


def test_when_nobody_else_was_there_for_a_while_it_takes_what_is_free_and_gives_it_back() -> None:
    clock = Clock()
    clock.run(5, live=3)
    assert clock.run(10) == SEATS // 2
    assert clock.run(60) == SEATS - SEATS // rules.RESERVE
    clock.run(clock.seconds + 0.5, live=2)
    assert clock.run(5, live=2) == SEATS // 2


def test_one_request_that_is_seen_once_may_be_our_own() -> None:
    clock = Clock()
    clock.run(60)
    clock.run(LOOK, live=1)
    assert clock.run(5) > SEATS // 2


@pytest.mark.parametrize("objective", [None, FIRST])
def test_each_sequence_of_a_request_takes_a_seat(objective: Objective | None) -> None:
    clock = Clock(objective, reserve_seats=SEATS // 2)
    clock.sequences = 4
    assert clock.run(400) == SEATS // 2 // 4


def test_a_request_of_more_sequences_than_there_are_seats_for_runs_alone() -> None:
    clock = Clock()
    clock.sequences = 10 * SEATS
    assert clock.run(60, live=3) == 1
    clock.controller.unobservable()
    clock.send_until(clock.now + 10)
    assert clock.controller.in_flight == 1


def test_the_sequences_of_a_request_that_has_ended_take_no_seats() -> None:
    clock = Clock()
    clock.sequences = 4
    clock.run(10)
    for _, key in clock.sent:
        clock.controller.lost(clock.now, key)
        clock.controller.lost(clock.now, key)
    assert clock.controller.sequences == 0


def test_sequences_that_may_have_ended_do_not_hide_the_requests_of_others() -> None:
    """Of those that an engine runs, so many as we have requests are certainly ours."""
    clock = Clock()
    clock.sequences = 4
    clock.run(10)
    assert clock.controller.in_flight == len(clock.sent)


def test_of_seats_that_are_a_guess_a_quarter_is_taken_at_first() -> None:
    assert Clock(are_known=False).run(1.5) == SEATS // 4


def test_of_seats_that_are_a_guess_what_is_fastest_is_found_while_nobody_else_is_there() -> None:
    """Here each request takes a second, however many there are."""
    assert Clock(are_known=False).run(300) > SEATS


def test_beside_others_no_more_than_a_quarter_of_a_guess_is_taken() -> None:
    clock = Clock(are_known=False)
    clock.run(300)
    clock.run(clock.seconds + 0.5, live=3)
    assert clock.run(60, live=3) == SEATS // 4
    assert clock.run(60, live=10 * SEATS) == SEATS // 4
    assert clock.run(120) > SEATS


def test_a_guess_may_have_requests_that_wait_while_nobody_else_is_there() -> None:
    """They are its own: how many make the engine faster is what is found."""
    clock = Clock(are_known=False)
    assert clock.run(300, waiting=5) > SEATS
    clock.run(clock.seconds + 0.5, live=3, waiting=5)
    assert clock.run(5, live=3, waiting=5) == 0


def test_requests_follow_one_another_only_where_others_are_there() -> None:
    """A third of a request's time would be lost each time that all of them end together."""
    clock = Clock(are_known=False)
    clock.run(10)
    number = clock.controller.most
    clock.controller.ended(clock.now, clock.sent.pop(0)[1], work=TOKENS)
    clock.controller.ended(clock.now, clock.sent.pop(0)[1], work=TOKENS)
    assert clock.controller.most == number
    for _ in range(2):
        assert clock.controller.may_send(clock.now)
        key = object()
        clock.controller.sent(clock.now, key, TOKENS)
        clock.sent.append((clock.now + clock.seconds, key))
    clock.controller.observe(clock.now, Observation(live=3))
    for _ in range(clock.controller.in_flight - 2):
        clock.controller.ended(clock.now, clock.sent.pop(0)[1], work=TOKENS)
    assert clock.controller.may_send(clock.now + 1)
    clock.controller.sent(clock.now, object(), TOKENS)
    assert not clock.controller.may_send(clock.now)


def test_without_a_look_at_the_engine_it_is_found_as_well() -> None:
    clock = Clock(are_known=False)
    clock.controller.unobservable()
    clock.send_until(300)
    assert clock.controller.in_flight > 2 * SEATS


@pytest.mark.parametrize("options", [{"objective": FIRST}, {"reserve_seats": 3}, {}])
def test_nothing_is_searched_where_somebody_says_what_a_batch_may_have(
    options: dict[str, Any],
) -> None:
    """An objective, seats to leave free, or how many there are."""
    controller = ShareController(SEATS, are_known=not options, **options)
    assert controller.search is None


def test_what_an_engine_refuses_is_not_kept_in_flight() -> None:
    clock = Clock(are_known=False)
    clock.run(300)
    before = clock.controller.most
    clock.controller.sent(clock.now, "refused", TOKENS)
    clock.controller.ended(clock.now, "refused", is_refused=True)
    assert clock.controller.most < before


def test_answers_of_errors_do_not_count_as_work() -> None:
    controller = ShareController(SEATS, are_known=False)
    controller.unobservable()
    for second in range(200):
        while controller.may_send(second):
            controller.sent(second, object(), TOKENS)
        for key in list(controller._in_flight):
            controller.ended(second + 0.5, key, work=None)
    assert controller.most == SEATS // 4


def test_what_was_found_stays_when_the_same_seats_are_told_again() -> None:
    """At each new start of the engine."""
    controller = ShareController(SEATS, are_known=False)
    search = controller.search
    controller.set_seats(SEATS, are_known=False)
    assert controller.search is search
    controller.set_seats(SEATS, are_known=True)
    assert controller.search is None


def test_seats_that_others_have_are_not_free() -> None:
    assert Clock(reserve_seats=8).run(30, live=SEATS - 8 - 5) == 5


@pytest.mark.parametrize("objective", [None, FIRST])
def test_reserved_seats_stay_free(objective: Objective | None) -> None:
    assert Clock(objective, reserve_seats=40).run(400) == SEATS - 40


def test_nothing_is_sent_to_a_full_engine() -> None:
    assert Clock().run(30, live=SEATS) == 0
    assert Clock(FIRST).run(30, live=SEATS) == 0


@pytest.mark.parametrize("objective", [None, FIRST])
def test_nothing_is_sent_while_requests_wait(objective: Objective | None) -> None:
    clock = Clock(objective)
    assert clock.run(10, waiting=1) == 0
    assert clock.run(10) > 0


# -- what was not seen ----------------------------------------------------------------------


@pytest.mark.parametrize("objective", [None, FIRST])
def test_a_stale_observation_allows_one_request_and_soon_none(objective: Objective | None) -> None:
    clock = Clock(objective)
    clock.run(120)
    assert clock.controller.in_flight > 1
    seen_at = clock.now - LOOK
    clock.send_until(seen_at + rules.FRESH_SECONDS + clock.seconds + 0.1)
    assert clock.controller.in_flight == 1
    clock.send_until(seen_at + rules.STALE_SECONDS + clock.seconds + 0.1)
    assert clock.controller.in_flight == 0


def test_before_the_first_look_nothing_is_sent() -> None:
    assert not ShareController(SEATS).may_send(0.0)


def test_an_engine_that_cannot_be_seen_gets_a_quarter() -> None:
    clock = Clock(FIRST)
    clock.controller.unobservable()
    clock.send_until(100)
    assert clock.most == SEATS // 4


def test_without_latencies_an_objective_gives_no_more_than_a_quarter() -> None:
    assert Clock(FIRST).run(300, first=Latencies(0, 0)) <= SEATS // 4


# -- with an objective ----------------------------------------------------------------------


def test_a_share_is_found_and_kept() -> None:
    """More than 30 at once are too much here: it stays below, near it, and seldom tries more."""
    clock = Clock(FIRST)
    looks: list[int] = []

    def first(ours: int) -> Latencies:
        looks.append(ours)
        return BAD if ours > 30 else GOOD

    clock.run(180, first=first)
    looks.clear()
    clock.run(600, first=first)
    assert sum(looks) / len(looks) > 0.75 * 30
    assert sum(ours > 30 for ours in looks) < 0.06 * len(looks)


def test_in_a_burst_it_shrinks_and_after_it_it_is_back_within_two_seconds() -> None:
    clock = Clock(FIRST)

    def first(ours: int) -> Latencies:
        return BAD if ours > 3 else GOOD

    clock.run(200, live=4)
    clock.run(20, live=40, first=first)
    clock.run(60, live=4)
    before = clock.controller.in_flight
    assert before > SEATS // 4
    clock.run(20, live=40, first=first)
    assert clock.controller.in_flight <= 3
    clock.run(2, live=4)
    assert clock.controller.in_flight >= 0.8 * before


def test_it_shrinks_once_for_what_was_in_flight_together() -> None:
    clock = Clock(FIRST)
    clock.run(5, live=4)
    before = clock.controller.share(clock.now)
    clock.run(1.0, live=4, first=BAD)
    assert clock.controller.share(clock.now) == pytest.approx(0.8 * before, rel=0.05)


def test_a_few_that_are_late_are_within_the_objective() -> None:
    clock = Clock(FIRST)
    clock.run(60, first=Latencies(1000, 2))
    assert clock.controller.share(clock.now) >= SEATS // 4
    clock.run(20, first=Latencies(1000, 30))
    assert clock.controller.share(clock.now) < SEATS // 4


def test_requests_are_spread_over_time() -> None:
    """Their prompts would all be read in one step, and every user's next token would wait."""
    clock = Clock(FIRST)
    clock.run(20)
    clock.run(4, waiting=1)
    assert clock.controller.in_flight == 0
    began = clock.controller.sent_ever
    clock.controller.observe(clock.now, Observation(0))
    clock.send_until(clock.now + 0.05)
    assert 1 <= clock.controller.sent_ever - began <= 4


def test_longer_requests_are_fewer_at_once() -> None:
    """The share is counted in tokens: of requests eight times as long, not sixteen go."""
    clock = Clock(FIRST)
    clock.run(2)
    clock.run(clock.seconds + 2, waiting=1)
    now = clock.now
    clock.controller.observe(now, Observation(0))
    for _ in range(100):
        now += 0.2
        clock.controller.observe(now, Observation(0, 0, Latencies(0, 0)))
        if clock.controller.may_send(now):
            clock.controller.sent(now, object(), 8 * TOKENS)
    assert 2 <= clock.controller.in_flight <= 4


def test_an_engine_that_refuses_gets_less() -> None:
    clock = Clock(FIRST)
    clock.run(5)
    before = clock.controller.share(clock.now)
    for _ in range(5):
        clock.controller.ended(clock.now, clock.sent.pop(0)[1], is_refused=True)
    assert clock.controller.share(clock.now) == pytest.approx(0.8 * before)


def test_two_batches_on_one_engine_share_it() -> None:
    """Each takes the other's requests for those of users. Together they do not fill it."""
    clocks = Clock(FIRST), Clock(FIRST)
    total = [0, 0]
    for step in range(4000):
        counts = [clock.controller.in_flight for clock in clocks]
        seen = BAD if sum(counts) > 30 else GOOD
        for clock, others in zip(clocks, reversed(counts), strict=True):
            clock.controller.observe(clock.now, Observation(others, 0, seen))
            clock.send_until(clock.now + LOOK)
        if step > 400:
            total = [
                one + clock.controller.in_flight for one, clock in zip(total, clocks, strict=True)
            ]
    assert sum(total) / 3600 < 33
    assert min(total) > 0.1 * sum(total)


def test_other_seats_than_before_begin_anew() -> None:
    controller = ShareController(32, are_known=False, objective=FIRST)
    controller.set_seats(96)
    assert (controller.quarter, controller.most) == (24, 90)


@given(
    seats=st.integers(1, 300),
    reserve=st.none() | st.integers(0, 300),
    has_objective=st.booleans(),
    looks=st.lists(
        st.tuples(
            st.integers(0, 300),
            st.sampled_from([0, 0, 0, 2]),
            st.tuples(st.integers(1, 50), st.floats(0, 1)),
            st.floats(0.01, 5),
        ),
        max_size=60,
    ),
)
def test_whatever_is_seen_seats_are_left_free(
    seats: int, reserve: int | None, has_objective: bool, looks: list[Any]
) -> None:
    """What is admitted after a look leaves the reserve free, but for a first request."""
    objective = FIRST if has_objective else None
    controller = ShareController(seats, objective=objective, reserve_seats=reserve)
    now = 0.0
    for live, waiting, (total, late), pause in looks:
        now += pause
        controller.observe(now, Observation(live, waiting, Latencies(total, late * total)))
        while controller.may_send(now):
            assert waiting == 0
            assert live + controller.in_flight < seats
            floor = max(1.0, seats / rules.FLOOR) if has_objective else 1.0
            free = max(floor, seats - controller.reserve - live)
            assert controller.in_flight < min(free, controller.most)
            controller.sent(now, object(), TOKENS)
        assert controller.share(now) >= 1


# -- a share --------------------------------------------------------------------------------


def test_a_share_returns_to_what_was_safe_waits_and_then_tries_more() -> None:
    share = Share(100.0)
    share.shrink()
    assert share.size == 80
    seconds = []
    while share.size < 110:
        share.grow(0.25)
        seconds.append(share.size)
    assert sum(size < 90 for size in seconds) < sum(90 <= size < 100 for size in seconds)


def test_what_is_too_much_again_and_again_is_tried_less_often() -> None:
    share, pauses = Share(20.0), []
    for _ in range(5):
        looks = 0
        while share.size <= 20:
            share.grow(0.25)
            looks += 1
        share.shrink()
        pauses.append(looks)
    assert pauses[-1] > 2 * pauses[1]


# -- an objective ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [(None, None), (0.0, None), (None, -1.0), (float("inf"), None), (0.2, None, 1.0)]
)
def test_an_objective_that_promises_nothing_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(SettingsError):
        Objective(*values)


def test_milliseconds_of_an_operator_become_an_objective() -> None:
    assert Objective.of(250, None, 0.9) == Objective(0.25, None, 0.9)
    assert Objective.of(None, None, 0.9) is None
