"""What is unexpected in one batch costs that batch what it must, and other batches nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.stub import StubEngine
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.steps import admission, patience, run
from batchyard.steps.keeper import BatchKeeper
from batchyard.steps.keys import file_key
from batchyard.steps.process import bare_steps, process
from batchyard.steps.segments import put_bytes, read_object
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.store import BatchRecord

SOON_SECONDS = 30.0


def lines(count: int, name: str) -> list[dict[str, Any]]:
    return [chat_line(f"{name}-{n}", f"question {n} of {name}") for n in range(count)]


def poison(custom_id: str, key: str = "custom_id") -> bytes:
    """A line that readers of JSON accept, and a typed decoder refuses."""
    line = json.dumps(chat_line(custom_id))
    return (f'{{"{key}":5,' + line[1:] + "\n").encode()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(run, "PUT_OFF_SECONDS", 0.05)
    monkeypatch.setattr(admission, "SLOW_SECONDS", 0.1)


async def with_line(yard: Yard, batch_id: str, number: int, line: bytes) -> None:
    """Put ``line`` in the place of one of the batch, behind the validator's back."""
    storage = yard.services.storage
    key = file_key((await yard.services.store.batches.get(batch_id)).input_file_id)
    old = (await read_object(storage, key)).splitlines(keepends=True)
    assert len(line) <= len(old[number]), "give the line that it replaces more text"
    old[number] = line[:-1].ljust(len(old[number]) - 1) + b"\n"
    await put_bytes(storage, key, old)


@contextlib.asynccontextmanager
async def working(yard: Yard) -> AsyncIterator[asyncio.Task[int]]:
    """One runner for every batch, and a control that takes each to its end."""
    services = yard.services

    async def control() -> None:
        async with BatchKeeper(services) as keeper, asyncio.TaskGroup() as group:
            steps = bare_steps(services, keeper.until_run)
            while True:
                for batch_id in await keeper.claim(8):
                    group.create_task(process(services, keeper, batch_id, steps))
                await asyncio.sleep(0.02)

    serving = asyncio.create_task(run.run_chunks(services, "stub-model"))
    controlling = asyncio.create_task(control())
    try:
        yield serving
        assert not serving.done(), f"the runner ended: {serving}"
        assert not controlling.done(), f"the control ended: {controlling}"
    finally:
        for task in (serving, controlling):
            task.cancel()
        await asyncio.wait([serving, controlling])


async def ended(yard: Yard, batch_id: str) -> BatchRecord:
    async with asyncio.timeout(SOON_SECONDS):
        while True:
            batch = await yard.services.store.batches.get(batch_id)
            if batch.status in TERMINAL:
                return batch
            await asyncio.sleep(0.02)


async def check_whole(yard: Yard, batch: BatchRecord, name: str, count: int) -> None:
    """Every line of the batch succeeded, once."""
    assert batch.status is BatchStatus.COMPLETED, batch.errors
    output = await yard.results(batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"{name}-{n}" for n in range(count)]
    assert (batch.counts.completed, batch.counts.failed) == (count, 0)


# -- one line -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["custom_id", "url"])
async def test_a_line_that_cannot_be_read_costs_that_line_and_nobody_elses(
    yard: Yard, key: str
) -> None:
    yard.use(StubEngine(max_num_seqs=8, latency=0.01))
    hers, his = await yard.prepared(lines(25, "a")), await yard.prepared(lines(25, "b"))
    replaced = chat_line("a-7", "question 7 of a" + " " * 40)
    hers = await yard.prepared([*lines(7, "a"), replaced, *lines(25, "a")[8:]])
    await with_line(yard, hers, 7, poison("a-7", key))
    async with working(yard):
        batch, other = await ended(yard, hers), await ended(yard, his)
    await check_whole(yard, other, "b", 25)
    assert batch.status is BatchStatus.COMPLETED
    (error,) = await yard.results(batch.error_file_id)
    assert (error["custom_id"], error["response"]) == ("a-7", None)
    assert error["error"]["code"] == "server_error"
    assert "question" not in error["error"]["message"]
    assert batch.counts.completed == 24
