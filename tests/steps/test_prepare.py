"""Validating and planning in a thread, and a cancellation that arrives meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import TransitionConflict
from batchyard.lifecycle import BatchStatus
from batchyard.runner.run import Runner
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.steps.prepare import input_reader
from batchyard.steps.prepare.prepare import preparing
from tests.lifecycle import prepare_batch
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from batchyard.lines.lines import RequestLine

LINES = 2000


async def test_the_plan_of_a_lost_lease_changes_nothing_of_a_batch_that_runs(yard: Yard) -> None:
    """It may have another order than that of the chunks, some of which have run already."""
    lines = [chat_line(f"line-{number}", f"{number % 7}") for number in range(40)]
    batch_id = await yard.create(lines)
    await fetch_input(yard.services, batch_id)
    async with preparing(yard.services, batch_id, 1) as stale:
        assert stale is not None
        await stale.validate()
        yard.set(order="input")
        await prepare_batch(yard.services, batch_id, 2)
        async with Runner(yard.services, "stub-model", batch_id=batch_id) as runner:
            first = await anext(runner.leases())
            await runner.run(first.batch_id, first.index)
        with pytest.raises(TransitionConflict):
            await stale.plan()
    batch = await yard.finish(batch_id)
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, len(lines))


async def test_a_cancellation_stops_the_plan_and_leaves_nothing_behind(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has ended, early, when the folder that it writes to is removed."""
    planned: list[RequestLine] = []

    class SlowPlanner(input_reader.Planner):
        def add(self, line: RequestLine) -> None:
            time.sleep(0.005)
            planned.append(line)
            super().add(line)

    monkeypatch.setattr(input_reader, "Planner", SlowPlanner)
    batch_id = await yard.create([chat_line(f"line-{number}") for number in range(LINES)])
    await fetch_input(yard.services, batch_id)
    preparing = asyncio.create_task(prepare_batch(yard.services, batch_id))
    while not planned:  # noqa: ASYNC110 - a thread fills it
        await asyncio.sleep(0.001)

    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing

    count = len(planned)
    assert count < LINES
    await asyncio.sleep(0.1)
    assert len(planned) == count
    assert not list(yard.services.spool.glob("plan-*"))
