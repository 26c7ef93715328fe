"""A batch's lines are read while it runs: each once, whole, through collection and clean-up."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from batchyard.engine.stub import Fault, FaultKind, StubEngine
from batchyard.files.live_results import LiveResults
from batchyard.lifecycle import BatchStatus
from batchyard.results import Outcome, answered
from batchyard.services.keys import segment_key, segments_prefix
from batchyard.services.segments import encode_entry, put_bytes
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    import pytest

    from batchyard.files.live_results import FinishedLine


async def now(results: LiveResults) -> list[FinishedLine]:
    """What one look finds."""
    return [line async for part in results.read() for line in part]


def ids(lines: list[FinishedLine]) -> list[str]:
    for each in lines:
        assert each.line.endswith(b"\n")
        assert json.loads(each.line)["custom_id"] == each.custom_id
    return [each.custom_id for each in lines]


async def segment(yard: Yard, batch_id: str, *ordinals: int, epoch: int = 1, n: int = 0) -> None:
    """What a runner that is here no more has written."""
    entries = [
        encode_entry(ordinal, answered(f"id-{ordinal}", "req_1", 200, b'{"by": %d}' % epoch))
        for ordinal in ordinals
    ]
    key = segment_key(batch_id, 0, epoch, n)
    await put_bytes(yard.services.storage, key, entries)


async def sweep(yard: Yard, batch_id: str) -> None:
    """What a clean-up deletes a day after the end."""
    storage = yard.services.storage
    for key in [key async for key in storage.list(segments_prefix(batch_id))]:
        await storage.delete(key)


def lines_of(count: int) -> list[dict[str, object]]:
    return [chat_line(f"id-{n}", f"question {n}") for n in range(count)]


async def test_lines_are_there_while_the_batch_runs_and_each_once(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(5))
    results = LiveResults(yard.services, batch_id)
    assert await now(results) == []
    await segment(yard, batch_id, 3, 1)
    assert ids(await now(results)) == ["id-3", "id-1"]
    assert await now(results) == []
    await segment(yard, batch_id, 0, n=1)
    assert ids(await now(results)) == ["id-0"]
    assert results.batch is None
    await yard.finish(batch_id)
    assert sorted(ids(await now(results))) == ["id-2", "id-4"]
    assert results.batch is not None
    assert results.batch.status is BatchStatus.COMPLETED


async def test_a_request_that_two_owners_ran_is_returned_once(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(3))
    results = LiveResults(yard.services, batch_id)
    await segment(yard, batch_id, 0, epoch=2)
    assert ids(await now(results)) == ["id-0"]
    await segment(yard, batch_id, 0, 1, epoch=1)
    assert ids(await now(results)) == ["id-1"]


async def test_when_the_segments_are_deleted_the_files_have_the_rest(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(30))
    results = LiveResults(yard.services, batch_id)
    await segment(yard, batch_id, 7, 20)
    first = ids(await now(results))
    await yard.finish(batch_id)
    await sweep(yard, batch_id)
    rest = ids(await now(results))
    assert first == ["id-7", "id-20"]
    assert rest == [f"id-{n}" for n in range(30) if n not in {7, 20}]


async def test_a_segment_that_is_deleted_while_it_is_read_is_no_error(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(3))
    await segment(yard, batch_id, 0)
    await segment(yard, batch_id, 1, n=1)
    results = LiveResults(yard.services, batch_id)
    found = []
    async for part in results.read():
        found += ids(part)
        await sweep(yard, batch_id)
    assert found == ["id-0"]


async def test_lines_that_were_never_run_come_from_the_error_file(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(3))
    results = LiveResults(yard.services, batch_id)
    await segment(yard, batch_id, 1)
    assert ids(await now(results)) == ["id-1"]
    await yard.services.store.batches.cancel(batch_id)
    await yard.finish(batch_id)
    rest = await now(results)
    assert [(each.outcome, each.custom_id) for each in rest] == [
        (Outcome.ERROR, "id-0"),
        (Outcome.ERROR, "id-2"),
    ]


async def test_a_later_reader_continues_after_the_lines_that_an_earlier_one_had(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(12))
    await segment(yard, batch_id, 5, 6)
    had = ids(await now(LiveResults(yard.services, batch_id)))
    await segment(yard, batch_id, 2, n=1)
    later = LiveResults(yard.services, batch_id, had)
    assert ids(await now(later)) == ["id-2"]
    await yard.finish(batch_id)
    await sweep(yard, batch_id)
    again = LiveResults(yard.services, batch_id, had)
    assert sorted([*had, *ids(await now(again))]) == sorted(f"id-{n}" for n in range(12))


async def test_what_a_damaged_segment_lacks_comes_from_the_files(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(2))
    entry = encode_entry(0, answered("id-0", "req_1", 200, b"{}"))
    await put_bytes(yard.services.storage, segment_key(batch_id, 0, 1, 0), [entry, entry[:-4]])
    assert ids(await now(LiveResults(yard.services, batch_id))) == ["id-0"]


async def test_what_a_reader_has_had_is_remembered_for_many_lines(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most ids are in a sorted array, and only the last ones in a set."""
    monkeypatch.setattr("batchyard.files.live_results._RECENT", 4)
    batch_id = await yard.prepared(lines_of(30))
    results = LiveResults(yard.services, batch_id)
    await segment(yard, batch_id, *range(11))
    assert len(await now(results)) == 11
    await segment(yard, batch_id, *range(13), epoch=2)
    assert ids(await now(results)) == ["id-11", "id-12"]


async def test_readers_of_a_run_get_what_its_files_have(yard: Yard) -> None:
    """Also if the engine crashes in the middle, and a request is refused."""
    faults = [
        Fault(FaultKind.DEATH, skip=20, times=1),
        Fault(FaultKind.ANSWER, lambda body: b"question 7" in body, status=400),
    ]
    yard.use(StubEngine(max_num_seqs=8, latency=0.02, faults=faults))
    batch_id = await yard.create(lines_of(60))

    async def read() -> list[FinishedLine]:
        results, found = LiveResults(yard.services, batch_id), []
        while results.batch is None:
            found += await now(results)
            await asyncio.sleep(0.01)
        return found

    readers = [asyncio.create_task(read()) for _ in range(3)]
    batch = await yard.finish(batch_id)
    assert batch.counts.completed == 59
    files = {
        (outcome, json.dumps(line))
        for outcome, file_id in (
            (Outcome.OUTPUT, batch.output_file_id),
            (Outcome.ERROR, batch.error_file_id),
        )
        for line in await yard.results(file_id)
    }
    assert len(files) == 60
    for found in await asyncio.gather(*readers):
        assert len(found) == 60
        assert {(each.outcome, json.dumps(json.loads(each.line))) for each in found} == files
