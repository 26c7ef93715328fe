"""The room in an engine's KV cache: what is expected, and what the engine's own figures change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from batchyard.engine.base import CacheState
from batchyard.engine.stub import StubEngine
from batchyard.errors import EngineLost
from batchyard.lengths import LengthHistory
from batchyard.plan.records import PlannedRequest
from batchyard.runner.chunk_order import ChunkOrder
from batchyard.runner.kv_room import KvRoom
from batchyard.runner.learning import BatchLengths, TenantLengths
from batchyard.runner.window_request import WindowRequest

if TYPE_CHECKING:
    from batchyard.results import ResultLine


def deliver(ordinal: int, result: ResultLine) -> None: ...


def request(tokens: int, answer: int = 0) -> WindowRequest:
    """One that holds ``tokens``, of which its answer has so many."""
    found = WindowRequest(0, "id", "/v1/completions", b"", deliver, "owner")
    found.expected_tokens, found.expected_growth = tokens, answer
    return found


def unbounded(tokens: int = 1000) -> KvRoom:
    """Of an engine that has thrown out nothing so far."""
    found = KvRoom(StubEngine())
    found.see(CacheState(tokens, used=0.0, preemptions=0.0))
    return found


def room(tokens: int = 1000) -> KvRoom:
    """Of an engine that has just begun to throw out requests."""
    found = unbounded(tokens)
    found.see(CacheState(tokens, used=1.0, preemptions=1.0))
    return found


def answered(kv: KvRoom, count: int) -> None:
    for _ in range(count):
        kv.take(request(1))
        kv.give_back(request(1))


def crowd(kv: KvRoom) -> None:
    """A request had to wait."""
    kv.take(request(1))
    assert not kv.is_there_for(request(10**9))
    kv.give_back(request(1))


def test_an_engine_that_does_not_tell_of_its_cache_has_room_for_all() -> None:
    kv = KvRoom(StubEngine())
    kv.take(request(10**9))
    kv.see(None)
    assert kv.limit == math.inf
    assert kv.is_there_for(request(10**9))


def test_requests_that_hold_mostly_prompts_have_no_bound() -> None:
    """While the engine throws out none: it begins none whose prompt has no room."""
    kv = unbounded()
    kv.take(request(10**9))
    for _ in range(20):
        kv.see(CacheState(1000, used=1.0, preemptions=0.0))
    assert kv.is_there_for(request(10**9))


def test_requests_that_hold_mostly_answers_have_a_bound_from_the_first_on() -> None:
    kv = unbounded()
    kv.take(request(500, answer=300))
    assert kv.is_there_for(request(500, answer=300))
    assert not kv.is_there_for(request(501, answer=300))
    assert kv.is_there_for(request(10_000, answer=300))


def test_prompts_are_bound_once_many_were_thrown_out() -> None:
    kv = unbounded()
    answered(kv, 100)
    kv.see(CacheState(1000, used=1.0, preemptions=4.0))
    kv.take(request(1))
    assert kv.is_there_for(request(10**9))
    kv.give_back(request(1))
    answered(kv, 100)
    kv.see(CacheState(1000, used=1.0, preemptions=10.0))
    kv.take(request(1))
    assert not kv.is_there_for(request(10**9))


def test_requests_are_sent_while_what_they_will_hold_has_room() -> None:
    kv = room(1000)
    kv.take(request(400))
    assert kv.is_there_for(request(350))
    kv.take(request(350))
    assert not kv.is_there_for(request(1))
    kv.give_back(request(400))
    assert kv.is_there_for(request(400))
    assert not kv.is_there_for(request(401))


def test_one_that_needs_more_than_there_is_runs_alone() -> None:
    kv = room(1000)
    assert kv.is_there_for(request(5000))
    kv.take(request(5000))
    assert not kv.is_there_for(request(1))


def test_requests_that_were_thrown_out_make_the_room_smaller() -> None:
    kv = room()
    before = kv.limit
    answered(kv, 100)
    kv.see(CacheState(1000, used=1.0, preemptions=3.0))
    little = kv.limit
    assert 0.8 * before < little < before
    answered(kv, 100)
    kv.see(CacheState(1000, used=1.0, preemptions=41.0))
    assert kv.limit < 0.8 * little


def test_one_of_very_many_that_was_thrown_out_changes_nothing() -> None:
    kv = room()
    before = kv.limit
    answered(kv, 1000)
    kv.see(CacheState(1000, used=1.0, preemptions=2.0))
    assert kv.limit == before


def test_an_engine_that_was_started_again_counts_from_zero() -> None:
    kv = room()
    kv.see(CacheState(1000, used=0.0, preemptions=500.0))
    before = kv.limit
    kv.see(CacheState(1000, used=0.0, preemptions=0.0))
    assert kv.limit == before < 750


def test_the_room_grows_while_requests_wait_and_the_cache_is_not_full() -> None:
    kv = room()
    before = kv.limit
    for _ in range(20):
        crowd(kv)
        kv.see(CacheState(1000, used=0.4, preemptions=0.0))
    assert kv.limit > 1.2 * before


def test_a_cache_that_was_full_for_a_moment_has_no_more_room() -> None:
    kv = room()
    before = kv.limit
    for look in range(20):
        crowd(kv)
        kv.see(CacheState(1000, used=0.95 if look % 4 == 0 else 0.4, preemptions=0.0))
    assert kv.limit == before


def test_a_window_that_is_not_full_says_nothing_of_the_cache() -> None:
    kv = room()
    before = kv.limit
    for _ in range(20):
        kv.see(CacheState(1000, used=0.1, preemptions=0.0))
    assert kv.limit == before


def test_a_request_holds_at_least_a_token() -> None:
    """However few tokens prompts turn out to have, and none is planned for its answer."""
    lengths = BatchLengths(TenantLengths(LengthHistory()))
    for _ in range(20):
        lengths.count_prompt(planned=1000, tokens=1)
    nothing = PlannedRequest(0, 0, 0, 0, 0, 0, 0, 0)
    assert ChunkOrder(lengths, sorts=False).held_tokens(nothing) == (1, 0)


def test_an_answer_may_be_longer_than_expected() -> None:
    lengths = BatchLengths(TenantLengths(LengthHistory()))
    planned = PlannedRequest(0, 0, 0, 100, 90, 0, 0, 0)
    assert ChunkOrder(lengths, sorts=False).held_tokens(planned) == (235, 135)


async def test_an_engine_that_gives_no_answer_leaves_the_room_as_it_is() -> None:
    class Lost(StubEngine):
        async def cache_state(self) -> CacheState | None:
            raise EngineLost("it is away")

    kv = KvRoom(Lost())
    kv.see(CacheState(1000, used=0.0, preemptions=0.0))
    kv.see(CacheState(1000, used=0.0, preemptions=1.0))
    before = kv.limit
    await kv.look()
    assert kv.limit == before < math.inf
