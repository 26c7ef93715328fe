"""How much of a live engine batches may use, by what live requests do."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

import pytest

from batchyard.runner.live_gate import QUIET_SECONDS, LiveGate


@dataclass
class Live:
    """As much of the live requests as the gate looks at."""

    in_flight: int = 0
    last_at: float = -math.inf
    has_changed: asyncio.Event = field(default_factory=asyncio.Event)


def limit(seats: int, live: Live) -> int:
    return LiveGate(live, seats, lambda: 0).limit  # type: ignore[arg-type]


@pytest.mark.parametrize(("seats", "most"), [(1, 1), (2, 2), (4, 3), (8, 6), (256, 192)])
def test_without_live_requests_a_batch_leaves_a_quarter_free(seats: int, most: int) -> None:
    assert limit(seats, Live()) == most


@pytest.mark.parametrize(
    ("seats", "in_flight", "most"),
    [(256, 1, 64), (256, 128, 64), (256, 150, 42), (256, 192, 0), (256, 500, 0), (1, 1, 0)],
)
def test_beside_live_requests_it_has_a_quarter_and_less_where_they_need_more(
    seats: int, in_flight: int, most: int
) -> None:
    assert limit(seats, Live(in_flight)) == most


def test_after_the_last_live_request_it_waits_before_it_takes_more() -> None:
    now = time.monotonic()
    assert limit(8, Live(last_at=now)) == 2
    assert limit(8, Live(last_at=now - QUIET_SECONDS)) == 6


async def test_the_gate_tells_when_a_live_request_has_left() -> None:
    """The batch does not wait until one of its own is answered."""
    live = Live(in_flight=1)
    gate = LiveGate(live, 1, lambda: 0)  # type: ignore[arg-type]
    opened = asyncio.Event()
    watch = asyncio.create_task(gate.watch(opened.set, lambda: True))
    await asyncio.sleep(0.01)
    assert not opened.is_set()
    live.in_flight = 0
    live.has_changed.set()
    await asyncio.wait_for(opened.wait(), 5)
    watch.cancel()
