"""What keeps a batch from being faster: what one look names, and what it adds up to."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest

from batchyard.batch.bounds import Bound, bound_words
from batchyard.engine.base import Occupancy
from batchyard.runner.bounds import Bounds, _wanted_seconds, bound_of

if TYPE_CHECKING:
    from collections.abc import Mapping

SEATS = 64
BUSY, IDLE = 0.97, 0.2


def window(in_flight: int = 2 * SEATS, **more: Any) -> SimpleNamespace:
    """One of twice the seats at which no gate is closed."""
    return SimpleNamespace(
        **{
            "in_flight": in_flight,
            "sequences": in_flight,
            "is_full": in_flight >= 2 * SEATS,
            "is_streaming": True,
            "may_send": lambda: True,
            "shared": None,
            "refusals": SimpleNamespace(is_open=True, limit=2 * SEATS),
            "crashes": SimpleNamespace(limit=2 * SEATS),
            "backlog": SimpleNamespace(queue=[], has_only_pausing=lambda _: False),
            **more,
        }
    )


def chunk(of: SimpleNamespace, **more: Any) -> Any:
    """One with lines that have no slot yet, and that waits for nothing else."""
    return SimpleNamespace(
        **{
            "window": of,
            "batch_id": "batch_1",
            "key": "chunk",
            "is_prepared": True,
            "awaits_group": False,
            "is_held_up": False,
            "awaits_files": False,
            "admission": SimpleNamespace(lacks_room=False, lacks_turn=False, is_submitting=True),
            "without_slot": 5000,
            **more,
        }
    )


def named(of: Any, occupancy: Occupancy | None = None, *, own_share: float = IDLE) -> Bound | None:
    return bound_of(of, seats=SEATS, occupancy=occupancy, own_share=own_share)


@pytest.mark.parametrize("occupancy", [Occupancy(64, 60), Occupancy(40, 70, 0.99), None])
def test_an_engine_that_runs_all_it_can_is_what_bounds(occupancy: Occupancy | None) -> None:
    """Its seats or its cache are full; or it says nothing, and has all that it is given."""
    assert named(chunk(window()), occupancy) is Bound.ENGINE
    assert named(chunk(window()), occupancy, own_share=BUSY) is Bound.ENGINE


def test_lines_with_several_answers_fill_an_engine_with_fewer_requests() -> None:
    """There is no room for more of them, and no other user of the engine is why."""
    full = window(SEATS // 4, sequences=2 * SEATS, shared=SimpleNamespace(is_open=False))
    queue = SimpleNamespace(lacks_room=True, lacks_turn=False, is_submitting=False)
    assert named(chunk(full, admission=queue), Occupancy(64, 64)) is Bound.ENGINE


def test_requests_that_the_core_does_not_have_are_in_the_front_end_or_here() -> None:
    assert named(chunk(window()), Occupancy(9, 0)) is Bound.FRONT_END
    assert named(chunk(window()), Occupancy(9, 0), own_share=BUSY) is Bound.PROCESS


@pytest.mark.parametrize("gate", [{"is_prepared": False}, {"awaits_files": True}])
def test_lines_that_are_not_read_yet_are_the_input(gate: Mapping[str, bool]) -> None:
    assert named(chunk(window(3), **gate), Occupancy(3, 0)) is Bound.INPUT


@pytest.mark.parametrize(("left", "has_claimed_all"), [(5000, True), (0, False)])
def test_a_process_that_cannot_send_as_fast_is_what_bounds(
    left: int, *, has_claimed_all: bool
) -> None:
    """Lines of its chunks, or those of chunks that it has not claimed yet."""
    found = bound_of(
        chunk(window(3), without_slot=left),
        seats=SEATS,
        occupancy=Occupancy(3, 0),
        own_share=BUSY,
        has_claimed_all=has_claimed_all,
    )
    assert found is Bound.PROCESS


def test_a_server_that_refuses_is_what_bounds() -> None:
    """While it takes nothing, and while it takes less than it has seats."""
    closed = window(0, refusals=SimpleNamespace(is_open=False, limit=1))
    assert named(chunk(closed)) is Bound.REFUSALS
    slow = window(8, refusals=SimpleNamespace(is_open=False, limit=8))
    assert named(chunk(slow), Occupancy(8, 0)) is Bound.REFUSALS


def test_lines_that_pause_after_an_error_wait_for_the_server() -> None:
    pausing = SimpleNamespace(queue=[], has_only_pausing=lambda _: True)
    assert named(chunk(window(0, backlog=pausing), without_slot=0)) is Bound.REFUSALS


def test_too_few_requests_are_the_end_of_a_batch_or_a_server_with_more_seats() -> None:
    assert named(chunk(window(3), without_slot=0), Occupancy(3, 0)) is Bound.TOO_FEW
    assert named(chunk(window()), Occupancy(2 * SEATS, 0)) is Bound.TOO_FEW


def test_other_batches_and_a_slow_object_store_are_told_apart() -> None:
    queue = SimpleNamespace(lacks_room=False, lacks_turn=True, is_submitting=False)
    assert named(chunk(window(3), admission=queue)) is Bound.OTHERS
    assert named(chunk(window(3), is_held_up=True)) is Bound.STORAGE


def test_what_follows_a_fault_is_no_measure_of_speed() -> None:
    """An engine that starts again, and lines that run in small groups after a crash."""
    assert named(chunk(window(0, is_streaming=False))) is None
    assert named(chunk(window(2, crashes=SimpleNamespace(limit=2)))) is None


class Clock:
    """Seconds, and those of a processor."""

    def __init__(self) -> None:
        self.now = self.used = 0.0

    def bounds(self, add: AsyncMock) -> Bounds:
        store = SimpleNamespace(batch_effects=SimpleNamespace(add_bounds=add))
        services: Any = SimpleNamespace(store=store)
        return Bounds(services, clock=lambda: self.now, processor=lambda: self.used)


def look(bounds: Bounds, clock: Clock, *chunks: Any, seconds: float = 2.0) -> None:
    clock.now += seconds
    bounds.look(chunks, seats=SEATS, occupancy=Occupancy(64, 60), has_claimed_all=True)


def test_a_thread_that_computes_wants_a_whole_processor_also_where_others_have_it() -> None:
    """What it waited for one counts, so that it makes no difference how busy the machine is."""
    wanted, wall = _wanted_seconds(), time.monotonic()
    while time.monotonic() < wall + 0.2:
        pass
    share = (_wanted_seconds() - wanted) / (time.monotonic() - wall)
    assert 0.85 < share < 1.1


async def test_the_time_between_looks_is_added_to_the_batch_when_it_is_enough() -> None:
    clock, add = Clock(), AsyncMock()
    bounds = clock.bounds(add)
    look(bounds, clock, chunk(window()), chunk(window()))
    await bounds.write("batch_1")
    add.assert_not_awaited()
    look(bounds, clock, chunk(window()))
    look(bounds, clock, chunk(window(3), without_slot=0))
    await bounds.write("batch_1")
    add.assert_awaited_once_with("batch_1", {Bound.ENGINE: 4.0, Bound.TOO_FEW: 2.0})
    await bounds.write("batch_1")
    add.assert_awaited_once()


async def test_a_database_that_is_away_costs_a_batch_nothing() -> None:
    clock, add = Clock(), AsyncMock(side_effect=OSError("away"))
    bounds = clock.bounds(add)
    look(bounds, clock, chunk(window()), seconds=9)
    await bounds.write("batch_1")
    add.assert_awaited_once()


async def test_nothing_is_kept_of_batches_that_have_no_chunk_here() -> None:
    clock, add = Clock(), AsyncMock()
    bounds = clock.bounds(add)
    look(bounds, clock, chunk(window()), seconds=9)
    look(bounds, clock)
    await bounds.write("batch_1")
    add.assert_not_awaited()


def test_the_sentence_names_what_held_longest_and_says_what_to_change() -> None:
    words = bound_words({"engine": 2.0, "front_end": 7.5, "too_few": 0.5})
    assert words.startswith("75% of the time by the engine's front end")
    assert "--api-server-count" in words


def test_of_a_few_seconds_nothing_is_said() -> None:
    assert bound_words({"engine": 4.9}) == ""
    assert bound_words({}) == ""
