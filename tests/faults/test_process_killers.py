"""A line that kills the process of its runner each time is found, and costs that line."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from batchyard.lifecycle import TERMINAL, BatchStatus
from tests.faults.site import lines

if TYPE_CHECKING:
    from tests.faults.nursery import Actor, Nursery
    from tests.faults.site import Asked, Site


@pytest.fixture
def lease_seconds() -> float:
    return 1.0


async def keep_alive_until_ended(
    site: Site, nursery: Nursery, actors: list[Actor], *asked: Asked, seconds: float
) -> int:
    """How often a runner had to be started again until every batch had ended."""
    restarts = 0
    give_up_at = time.monotonic() + seconds
    while not all([(await site.get(each)).status in TERMINAL for each in asked]):
        assert time.monotonic() < give_up_at, site.log_tail()
        for index, actor in enumerate(actors):
            if not nursery.is_alive(actor):
                restarts += actor.role == "runner"
                actors[index] = await nursery.start(actor.role, actor.parts)
        await asyncio.sleep(0.02)
    return restarts


async def test_a_line_that_kills_its_runner_costs_that_line_and_harms_no_other_batch(
    site: Site, nursery: Nursery
) -> None:
    hers, his = await site.create(lines(60, "a")), await site.create(lines(60, "b"))
    actors = [
        await site.start(nursery, "control"),
        await site.start(nursery, "runner", latency=0.01, kills='"question 17 of a"'),
    ]
    restarts = await keep_alive_until_ended(site, nursery, actors, hers, his, seconds=120)
    batch, other = await site.check(hers), await site.check(his)
    assert other.status is BatchStatus.COMPLETED
    assert (other.counts.completed, other.counts.failed) == (60, 0)
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.counts.completed, batch.counts.failed) == (59, 1)
    (error,) = await site.results(batch.error_file_id)
    assert (error["custom_id"], error["error"]["code"]) == ("a-17", "server_error")
    assert error["error"]["message"] == "The process that ran this request ended 7 times."
    # In company twice, then its chunk alone: all of it, 64 requests, 8, and twice it alone.
    assert 7 <= restarts <= 9
