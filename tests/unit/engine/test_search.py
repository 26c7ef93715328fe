"""What to keep in flight, found on servers that are simulated on a clock of their own."""

from __future__ import annotations

import heapq
import random
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import pytest

from batchyard.engine.sharing import search as rules
from batchyard.engine.sharing.search import Search

if TYPE_CHECKING:
    from collections.abc import Callable

FIXED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIRST = 8
PAUSE_SECONDS = 0.5
"""For so long nothing is sent after a refusal, as by the window."""


class Sent(NamedTuple):
    """``ends_at``: how much work each that runs has got when it is done."""

    ends_at: float
    ordinal: int
    work: float
    at: float


class Server:
    """Shares ``speed(n)`` of work in a second among the n requests that it runs.

    It runs ``slots`` of them and the others wait, and refuses what is more than ``most``.
    """

    def __init__(
        self,
        speed: Callable[[int], float],
        *,
        slots: int | None = None,
        most: int | None = None,
        works: tuple[float, ...] = (100.0,),
        sequences: int = 1,
        noise: float = 0.0,
    ) -> None:
        self.speed = speed
        self.slots, self.most = slots or 10_000, most or 10_000
        self.works, self.sequences = works, sequences
        self.chance, self.noise = random.Random(1), noise
        self.now = self.given = self.done = 0.0
        self.running: list[Sent] = []
        self.waiting: deque[tuple[float, float]] = deque()
        self.sent = self.refused = 0
        self.noise_now, self.noise_ends = 1.0, 0.0
        self.lines_left = 10**9

    @property
    def in_flight(self) -> int:
        return (len(self.running) + len(self.waiting)) * self.sequences

    def run(self, seconds: float, number: int | Search) -> float:
        """Work per second, with so much in flight or with what is found."""
        search = number if isinstance(number, Search) else None
        end, before, began, pause_ends = self.now + seconds, self.done, self.now, self.now
        while self.now < end:
            allowed = number if search is None else search.number
            while self.in_flight < allowed and self.now >= pause_ends and self.lines_left:
                if self.in_flight >= self.most * self.sequences:
                    self.refused += 1
                    pause_ends = self.now + PAUSE_SECONDS
                    if search is not None:
                        search.passes(self.now, self.in_flight + self.sequences)
                        search.refused(self.now, self.in_flight, sent_at=self.now)
                    break
                self.lines_left -= 1
                self._take(self.chance.choice(self.works), self.now)
                if search is not None:
                    search.passes(self.now, self.in_flight)
            if not self.running:
                self.now = min(end, max(self.now + 0.01, pause_ends))
                continue
            self._answer(search, pause_ends)
        return (self.done - before) / (self.now - began)

    def _take(self, work: float, at: float) -> None:
        self.sent += 1
        if len(self.running) < self.slots:
            heapq.heappush(self.running, Sent(self.given + work, self.sent, work, at))
        else:
            self.waiting.append((work, at))

    def _answer(self, search: Search | None, pause_ends: float) -> None:
        if self.noise and self.now >= self.noise_ends:
            self.noise_now = max(0.2, self.chance.gauss(1, self.noise))
            self.noise_ends = self.now + self.chance.uniform(0.2, 2)
        count = len(self.running)
        each = self.noise_now * self.speed(count) / count
        seconds = (self.running[0].ends_at - self.given) / each
        if self.now < pause_ends < self.now + seconds:
            # Then more is sent.
            self.given += each * (pause_ends - self.now)
            self.now = pause_ends
            return
        self.now += seconds
        ended = heapq.heappop(self.running)
        self.given = ended.ends_at
        self.done += ended.work
        if self.waiting:
            work, at = self.waiting.popleft()
            heapq.heappush(self.running, Sent(self.given + work, self.sent, work, at))
        if search is not None:
            search.answered(
                self.now,
                self.in_flight,
                work=ended.work,
                sent_at=ended.at,
                sequences=self.sequences,
            )


def one_by_one(_: int) -> float:
    return 1000.0


def by_slots(count: int) -> float:
    return 300.0 * count


def in_batches(count: int) -> float:
    return 6000.0 * count / (count + 20)


def to_a_limit(count: int) -> float:
    return 100.0 * min(count, 64)


def worse_when_full(count: int) -> float:
    return 300.0 * count / (1 + (count / 24) ** 3)


MIXED = (20.0, 50.0, 100.0, 400.0)
SERVERS = {
    "one by one": {"speed": one_by_one, "slots": 1},
    "one that shares itself among all": {"speed": one_by_one},
    "four slots": {"speed": by_slots, "slots": 4},
    "24 slots": {"speed": by_slots, "slots": 24},
    "batches": {"speed": in_batches},
    "batches of 64": {"speed": to_a_limit},
    "full is slower": {"speed": worse_when_full},
    "refuses above 20": {"speed": by_slots, "most": 20},
}


def best_fixed(**server: object) -> float:
    return max(Server(**server).run(60, number) for number in FIXED)  # type: ignore[arg-type]


@pytest.mark.parametrize("works", [(100.0,), MIXED], ids=["same", "mixed"])
@pytest.mark.parametrize("name", SERVERS)
def test_a_batch_is_as_fast_as_with_the_best_fixed_number(
    name: str, works: tuple[float, ...]
) -> None:
    """Over twenty minutes, the search and all later looks included."""
    server = {**SERVERS[name], "works": works}
    assert Server(**server).run(1200, Search(FIRST)) >= 0.95 * best_fixed(**server)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SERVERS)
def test_it_is_nearly_as_fast_where_the_speed_changes_by_itself(name: str) -> None:
    server = {**SERVERS[name], "noise": 0.15}
    assert Server(**server).run(1200, Search(FIRST)) >= 0.9 * best_fixed(**server)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [1, 2, 8, 64])
def test_it_is_found_from_wherever_it_begins(first: int) -> None:
    search = Search(first)
    server = Server(by_slots, slots=24)
    server.run(120, search)
    assert server.run(600, search) >= 0.95 * 24 * 300


def settled(server: Server, search: Search, seconds: float = 300.0) -> set[int]:
    """The numbers at the end of each second of the last half of this time."""
    server.run(seconds / 2, search)
    numbers = []
    for _ in range(int(seconds / 2)):
        server.run(1, search)
        numbers.append(search.number)
    return {number for number in numbers if numbers.count(number) > len(numbers) / 4}


def test_of_numbers_that_are_as_good_it_takes_the_smallest() -> None:
    assert settled(Server(by_slots, slots=4), Search(16)) == {4}


def test_there_is_a_most() -> None:
    server, search, most = Server(lambda count: 100.0 * count), Search(FIRST), 0
    for _ in range(200):
        server.run(1, search)
        most = max(most, search.number)
    assert most == rules.MOST == search.number


def test_what_a_server_refuses_is_tried_seldom() -> None:
    """After twenty minutes each look costs a few refusals, and there are few looks."""
    server, search = Server(by_slots, most=20), Search(FIRST)
    server.run(1200, search)
    before = server.refused
    server.run(600, search)
    assert server.refused - before <= 8


def test_a_server_that_takes_less_than_before_gets_less() -> None:
    server, search = Server(by_slots, most=40), Search(FIRST)
    server.run(120, search)
    assert search.number > 16
    server.most = 5
    server.run(30, search)
    assert search.number <= 5


def test_one_that_refuses_single_requests_says_nothing_of_the_number() -> None:
    search = Search(FIRST)
    for now in range(1, 50):
        search.passes(now, 1)
        search.refused(now, 0, sent_at=now)
    assert search.number == FIRST


def test_refusals_of_what_was_sent_before_are_not_counted_again() -> None:
    """All that a server had in its queue is refused at one moment."""
    search = Search(FIRST)
    for left in range(FIRST - 1, -1, -1):
        search.refused(10.0, left, sent_at=9.0)
    assert search.number == FIRST * 3 // 4


def test_a_server_that_becomes_slower_with_as_much_is_looked_at_at_once() -> None:
    """Not only at the end of the time for which a number is kept, which may be minutes."""
    server, search = Server(to_a_limit), Search(FIRST)
    server.run(1000, search)
    server.speed = worse_when_full
    server.run(60, search)
    assert server.run(60, search) >= 0.9 * worse_when_full(16)


def test_too_few_lines_do_not_count_against_a_number() -> None:
    """A batch at its end has less and less in flight."""
    server, search = Server(to_a_limit), Search(FIRST)
    server.run(100, search)
    server.lines_left = 40
    server.run(100, search)
    server.lines_left = 10**9
    server.run(5, search)
    assert server.run(60, search) >= 0.95 * to_a_limit(64)


def test_a_number_with_which_a_server_is_much_slower_is_left_soon() -> None:
    """Not only when all requests that were sent with it have been answered, and as many again."""
    search = Search(FIRST)
    server = Server(lambda count: 100.0 * count if count <= FIRST else 5.0 * count)
    server.now = 10_000.0
    server.run(28, search)
    assert search.number <= FIRST
    assert server.now - 10_000 < 35


def test_a_number_that_was_as_good_twice_and_then_stands_still_is_left() -> None:
    """As at the end of a batch, with one long answer. The search goes on behind it."""
    search, seen = Search(FIRST), []
    server = Server(lambda count: 100.0 * (FIRST if count <= FIRST else 1.045 * FIRST))
    measured = search._go_on

    def go_on(now: float, in_flight: int, one: rules._Seen | None) -> None:
        measured(now, in_flight, one)
        seen.append(search.number)

    search._go_on = go_on  # type: ignore[method-assign]
    while seen.count(2 * FIRST) < 3:
        server.run(0.1, search)
    assert search.number == 2 * FIRST
    speed, server.speed = server.speed, lambda _: 2.0
    server.run(400, search)
    server.speed = speed
    server.run(100, search)
    assert search.number <= FIRST


def test_requests_of_more_sequences_than_may_be_in_flight_do_not_stop_the_search() -> None:
    """One of them runs alone with the first number: twice that would still be one."""
    server = Server(lambda count: 300.0 * min(count, 4), sequences=32)
    search = Search(FIRST)
    server.run(100, search)
    assert search.number >= 4 * 32


def test_answers_that_end_together_are_no_faster_than_others() -> None:
    """The work of a second is not what has happened to end in it."""
    search = Search(FIRST)
    speeds = []
    measured = search._go_on

    def go_on(now: float, in_flight: int, seen: rules._Seen | None) -> None:
        assert seen is not None
        speeds.append(seen.speed)
        measured(now, in_flight, seen)

    search._go_on = go_on  # type: ignore[method-assign]
    Server(lambda count: 25.0 * count).run(100, search)
    assert speeds[0] == pytest.approx(25 * FIRST, rel=0.02)


def test_batches_with_pauses_between_them_keep_the_number_that_was_found() -> None:
    """It is looked at again after so much work, not after so much time without any."""
    server, search = Server(to_a_limit), Search(FIRST)
    server.run(60, search)
    numbers = {search.number}
    for _ in range(4):
        server.run(1, search)
        server.lines_left = 0
        server.run(600, search)
        server.lines_left = 64 * 5
        for _ in range(3):
            server.run(1, search)
            numbers.add(search.number)
        server.lines_left = 10**9
    assert numbers == {64}
