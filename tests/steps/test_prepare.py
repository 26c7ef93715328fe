"""Validating and planning in a thread, and a cancellation that arrives meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from batchyard.steps import input_reader
from batchyard.steps.fetch import fetch_input
from tests.lifecycle import prepare_batch
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from batchyard.lines import RequestLine

LINES = 2000


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
