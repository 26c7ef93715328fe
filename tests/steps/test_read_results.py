"""A batch's lines are read while it runs: each once, whole, through collection and clean-up."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.batch_error import BatchError
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import RequestRefused
from batchyard.files import known_lines, read_results
from batchyard.files.cursor import CompletionCursor, Cursor, InputCursor, parse_cursor
from batchyard.files.delete import delete_file
from batchyard.files.found_lines import whole_lines
from batchyard.files.read_results import BOTH, ResultsReader
from batchyard.files.retention import expire_files
from batchyard.lifecycle import BatchStatus
from batchyard.results.results import Outcome, answered
from batchyard.services.keys import file_key, segment_key, segments_prefix
from batchyard.services.segments.segments import encode_entry, put_bytes
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Collection

    from batchyard.files.cursor import Order
    from batchyard.files.read_results import FinishedLine


@dataclass
class Client:
    """Asks page by page, and keeps nothing but the text of the last cursor."""

    yard: Yard
    batch_id: str
    order: Order = "completion"
    outcomes: Collection[Outcome] = BOTH
    limit: int = 1000
    has_more: bool = True
    cursor: str | None = None
    reader: ResultsReader = field(init=False)

    def __post_init__(self) -> None:
        self.restart_server()

    def restart_server(self) -> None:
        """From here on another process answers; it looks at each request."""
        settings = self.yard.services.settings.model_copy(update={"flush_seconds": 0.0})
        self.reader = ResultsReader(replace(self.yard.services, settings=settings))

    async def page(self) -> list[str]:
        """The custom_ids of the next page."""
        return [json.loads(each.line)["custom_id"] for each in await self.lines()]

    async def lines(self) -> list[FinishedLine]:
        batch = await self.yard.services.store.batches.get(self.batch_id)
        page = await self.reader.page(
            batch,
            parse_cursor(self.cursor, self.order),
            limit=self.limit,
            outcomes=self.outcomes,
        )
        found = [each async for each in page.lines()]
        assert sum(len(each.line) for each in found) == page.found.size_bytes
        assert all(each.line.endswith(b"\n") for each in found)
        self.cursor, self.has_more = str(page.next), page.has_more
        return found

    async def rest(self) -> list[str]:
        """All that is left of a batch that has ended."""
        found = []
        while self.has_more:
            found += await self.page()
        return found


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


def ids(*numbers: int) -> list[str]:
    return [f"id-{n}" for n in numbers]


# -- in the order of completion -------------------------------------------------------------------


async def test_lines_are_there_while_the_batch_runs_and_each_once(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(5))
    client = Client(yard, batch_id)
    assert (await client.page(), client.cursor, client.has_more) == ([], "c0.0", True)
    await segment(yard, batch_id, 3, 1)
    assert await client.page() == ids(3, 1)
    assert (await client.page(), client.cursor) == ([], "c2.0")
    await segment(yard, batch_id, 0, n=1)
    assert await client.page() == ids(0)
    assert client.has_more
    await yard.finish(batch_id)
    assert await client.page() == ids(2, 4)
    assert not client.has_more
    assert await client.page() == []


async def test_a_page_ends_in_the_middle_of_a_segment(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(7))
    await segment(yard, batch_id, 6, 5, 4)
    client = Client(yard, batch_id, limit=2)
    assert await client.page() == ids(6, 5)
    await segment(yard, batch_id, 3, n=1)
    assert await client.page() == ids(4, 3)
    await yard.finish(batch_id)
    assert await client.rest() == ids(0, 1, 2)


async def test_all_readers_have_one_order_in_whatever_process(yard: Yard) -> None:
    """The second one looks when there are more segments, which the keys' order puts first."""
    batch_id = await yard.prepared(lines_of(6))
    first, second = Client(yard, batch_id), Client(yard, batch_id)
    await segment(yard, batch_id, 4, epoch=2)
    assert await first.page() == ids(4)
    await segment(yard, batch_id, 2, 5, epoch=1)
    assert await second.page() == ids(4, 2, 5)
    assert await first.page() == ids(2, 5)


async def test_a_cursor_is_valid_after_restarts_two_retries_of_a_chunk_the_end_and_the_clean_up(
    yard: Yard,
) -> None:
    """Three owners of a chunk have run some requests twice; the client has only its cursor."""
    batch_id = await yard.prepared(lines_of(40))
    client, found = Client(yard, batch_id, limit=3), []
    for epoch, ordinals in enumerate([range(12), range(6, 18), range(3, 30)], start=1):
        await segment(yard, batch_id, *ordinals, epoch=epoch)
        client.restart_server()
        found += await client.page()
        found += await client.page()
    await yard.finish(batch_id)
    client.restart_server()
    found += await client.page()
    await sweep(yard, batch_id)
    client.restart_server()
    found += await client.rest()
    assert sorted(found) == sorted(ids(*range(40)))
    assert len(found) == 40


async def test_what_others_find_after_a_reader_saw_the_end_changes_nothing_for_it(
    yard: Yard,
) -> None:
    """Another process looked just before the end, and records what it found just after."""
    batch_id = await yard.prepared(lines_of(9))
    await segment(yard, batch_id, 8, 7)
    client, slow = Client(yard, batch_id, limit=2), Client(yard, batch_id)
    found = await client.page()
    running = await yard.services.store.batches.get(batch_id)
    await yard.finish(batch_id)
    found += await client.page()
    await slow.reader.page(running, CompletionCursor(), limit=1)
    client.restart_server()
    found += await client.rest()
    assert sorted(found) == ids(*range(9))


async def test_a_process_that_has_just_looked_takes_the_cursor_of_another_one(yard: Yard) -> None:
    """Processes of one API answer in turns, and each looks for itself."""
    batch_id = await yard.prepared(lines_of(4))
    batch = await yard.services.store.batches.get(batch_id)
    yard.set(flush_seconds=60.0)
    late = ResultsReader(yard.services)
    await segment(yard, batch_id, 0)
    await late.page(batch, CompletionCursor(), limit=9)
    client = Client(yard, batch_id)
    await segment(yard, batch_id, 1, n=1)
    assert await client.page() == ids(0, 1)
    page = await late.page(batch, parse_cursor(client.cursor, None), limit=9)
    assert (len(page.found.rows), str(page.next)) == (0, client.cursor)


async def test_a_request_that_two_owners_ran_is_returned_once(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(3))
    client = Client(yard, batch_id)
    await segment(yard, batch_id, 0, epoch=2)
    assert await client.page() == ids(0)
    await segment(yard, batch_id, 0, 1, 1, epoch=1)
    assert await client.page() == ids(1)


async def test_lines_that_were_never_run_come_from_the_error_file(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(3))
    client = Client(yard, batch_id)
    await segment(yard, batch_id, 1)
    assert await client.page() == ids(1)
    await yard.services.store.batches.cancel(batch_id)
    await yard.finish(batch_id)
    rest = await client.lines()
    assert [(each.outcome, json.loads(each.line)["custom_id"]) for each in rest] == [
        (Outcome.ERROR, "id-0"),
        (Outcome.ERROR, "id-2"),
    ]


async def test_what_a_damaged_segment_lacks_comes_from_the_files(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(2))
    entry = encode_entry(0, answered("id-0", "req_1", 200, b"{}"))
    await put_bytes(yard.services.storage, segment_key(batch_id, 0, 1, 0), [entry, entry[:-4]])
    assert await Client(yard, batch_id).page() == ids(0)


async def test_a_segment_that_is_deleted_before_it_is_read_is_no_error(yard: Yard) -> None:
    """As after the end: another process has listed it just before."""
    batch_id = await yard.prepared(lines_of(2))
    await segment(yard, batch_id, 0)
    client = Client(yard, batch_id)
    storage = client.reader._services.storage

    class Swept(type(storage)):  # type: ignore[misc]
        async def list(self, prefix: str) -> AsyncIterator[str]:
            async for key in super().list(prefix):
                await self.delete(key)
                yield key

    swept = Swept(yard.services.settings.home_folder / "objects")
    client.reader._services = replace(client.reader._services, storage=swept)
    assert await client.page() == []


# -- in the order of the input --------------------------------------------------------------------


async def test_lines_are_read_in_the_order_of_the_input_as_far_as_they_are_finished(
    yard: Yard,
) -> None:
    batch_id = await yard.prepared(lines_of(6))
    client = Client(yard, batch_id, order="input")
    await segment(yard, batch_id, 3, 1)
    assert (await client.page(), client.cursor) == ([], "i0")
    await segment(yard, batch_id, 0, n=1)
    assert (await client.page(), client.cursor) == (ids(0, 1), "i2")
    await segment(yard, batch_id, 2, n=2)
    assert await client.page() == ids(2, 3)
    await yard.finish(batch_id)
    await sweep(yard, batch_id)
    client.restart_server()
    assert await client.rest() == ids(4, 5)


async def mixed(yard: Yard) -> str:
    """An ended batch of nine lines, every third of which failed, with blank lines between."""
    refused = Fault(FaultKind.ANSWER, lambda body: b"refused" in body, status=400)
    yard.use(StubEngine(faults=[refused]))
    texts = ["refused" if n % 3 == 1 else "good" for n in range(9)]
    lines = [chat_line(f"id-{n}", text) for n, text in enumerate(texts)]
    path = yard.write_input(lines, "mixed.jsonl")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\n \n"))
    batch_id = await yard.create([], input=str(path))
    assert (await yard.finish(batch_id)).counts.failed == 3
    return batch_id


async def test_answers_and_errors_of_an_ended_batch_are_in_the_order_of_the_input(
    yard: Yard,
) -> None:
    batch_id = await mixed(yard)
    client = Client(yard, batch_id, order="input", limit=4)
    assert await client.page() == ids(0, 1, 2, 3)
    client.restart_server()
    assert await client.rest() == ids(4, 5, 6, 7, 8)
    answers = Client(yard, batch_id, order="input", outcomes={Outcome.OUTPUT}, limit=3)
    assert await answers.page() == ids(0, 2, 3)
    assert await answers.rest() == ids(5, 6, 8)


async def test_without_the_input_only_the_order_of_completion_is_left(yard: Yard) -> None:
    batch_id = await mixed(yard)
    batch = await yard.services.store.batches.get(batch_id)
    await yard.services.storage.delete(file_key(batch.input_file_id))
    with pytest.raises(RequestRefused, match="use order=completion") as refused:
        await Client(yard, batch_id, order="input").page()
    assert refused.value.refusal_code == "input_gone"
    assert len(await Client(yard, batch_id).rest()) == 9


# -- kinds, pages, the end ------------------------------------------------------------------------


async def test_one_kind_of_lines_is_read_with_the_cursor_of_all(yard: Yard) -> None:
    batch_id = await mixed(yard)
    errors = Client(yard, batch_id, outcomes={Outcome.ERROR}, limit=2)
    assert await errors.page() == ids(1, 4)
    errors.outcomes = BOTH
    assert await errors.rest() == ids(7)


async def test_a_batch_that_failed_before_its_first_line_was_finished_has_no_lines(
    yard: Yard,
) -> None:
    batch_id = await yard.prepared(lines_of(3))
    await yard.services.store.batches.stop_early(batch_id, [BatchError("server_error", "No.")])
    batch = await yard.finish(batch_id)
    assert (batch.output_file_id, batch.error_file_id, batch.counts.total) == (None, None, 3)
    await yard.services.storage.delete(file_key(batch.input_file_id))
    client = Client(yard, batch_id, order="input")
    assert (await client.page(), client.has_more) == ([], False)


async def test_a_batch_that_ended_without_files_has_no_lines(yard: Yard) -> None:
    batch_id = await yard.create([{"no": "request"}])
    batch = await yard.finish(batch_id)
    assert batch.status is BatchStatus.FAILED
    for order in ("completion", "input"):
        client = Client(yard, batch_id, order=order)
        assert (await client.page(), client.has_more) == ([], False)


@pytest.mark.parametrize("kind", ["output", "error"])
async def test_results_that_were_deleted_are_gone(yard: Yard, kind: str) -> None:
    batch_id = await mixed(yard)
    client = Client(yard, batch_id, limit=1)
    await client.page()
    batch = await yard.services.store.batches.get(batch_id)
    await delete_file(yard.services, batch.tenant, str(getattr(batch, f"{kind}_file_id")))
    for again in (client, Client(yard, batch_id)):
        with pytest.raises(RequestRefused, match="no longer kept") as refused:
            await again.page()
        assert refused.value.refusal_code == "results_gone"


async def test_what_was_recorded_of_the_order_goes_with_the_results(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(2))
    await segment(yard, batch_id, 0)
    await Client(yard, batch_id).page()
    completions = yard.services.store.completions
    await expire_files(yard.services)
    batch = await yard.finish(batch_id)
    await expire_files(yard.services)
    assert len(await completions.of(batch_id)) == 1
    await delete_file(yard.services, batch.tenant, str(batch.output_file_id))
    await expire_files(yard.services)
    assert await completions.of(batch_id) == []


@pytest.mark.parametrize("text", ["c5.0", "c9999999999.0"])
async def test_a_cursor_of_more_lines_than_are_known_is_refused(yard: Yard, text: str) -> None:
    """As after the restore of an older backup. It must not skip lines without a word."""
    batch_id = await yard.prepared(lines_of(6))
    await segment(yard, batch_id, 0)
    client = Client(yard, batch_id, cursor=text)
    with pytest.raises(RequestRefused, match="begin again"):
        await client.page()
    await yard.finish(batch_id)
    with pytest.raises(RequestRefused, match="begin again"):
        await client.page()


@pytest.mark.parametrize("text", ["x", "c1", "c1.2.3", "i-1", "c1.1 ", "i" + "9" * 11, "ｉ1"])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(RequestRefused, match="X-Next-After"):
        parse_cursor(text, None)


@pytest.mark.parametrize("cursor", [CompletionCursor(3, 4), InputCursor(5)])
def test_a_cursor_has_its_order_in_it(cursor: Cursor) -> None:
    order: Order = "input" if isinstance(cursor, InputCursor) else "completion"
    other: Order = "completion" if order == "input" else "input"
    assert parse_cursor(str(cursor), order) == parse_cursor(str(cursor), None) == cursor
    with pytest.raises(RequestRefused, match="the other order"):
        parse_cursor(str(cursor), other)


# -- one line -------------------------------------------------------------------------------------


async def test_one_line_is_found_while_the_batch_runs_and_afterwards(yard: Yard) -> None:
    strange = "a/b?c=d&e#f %2F\u2028.."
    batch_id = await yard.prepared([chat_line(strange), *lines_of(2)])
    reader = Client(yard, batch_id).reader

    async def find(custom_id: str) -> Any:
        batch = await yard.services.store.batches.get(batch_id)
        return json.loads((await reader.find(batch, custom_id)).line)["custom_id"]

    for custom_id, code in ((strange, "result_not_ready"), ("other", "custom_id_not_found")):
        with pytest.raises(RequestRefused) as refused:
            await find(custom_id)
        assert refused.value.refusal_code == code
    line = answered(strange, "req_1", 200, b"{}")
    key = segment_key(batch_id, 0, 1, 0)
    await put_bytes(yard.services.storage, key, [encode_entry(0, line)])
    assert await find(strange) == strange
    await yard.finish(batch_id)
    assert [await find(each) for each in (strange, *ids(0, 1))] == [strange, *ids(0, 1)]
    with pytest.raises(RequestRefused, match="no request with this custom_id"):
        await find("other")


async def test_two_ids_with_one_hash_are_told_apart(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchyard.files.found_lines.id_of", lambda _: 7)
    monkeypatch.setattr("batchyard.files.read_results.id_of", lambda _: 7)
    batch_id = await yard.prepared(lines_of(2))
    await segment(yard, batch_id, 0, 1)
    batch = await yard.services.store.batches.get(batch_id)
    found = await Client(yard, batch_id).reader.find(batch, "id-1")
    assert json.loads(found.line)["custom_id"] == "id-1"


# -- what it costs --------------------------------------------------------------------------------


async def test_readers_of_one_process_share_a_look(yard: Yard) -> None:
    batch_id = await yard.prepared(lines_of(3))
    await segment(yard, batch_id, 0)
    yard.set(flush_seconds=60.0)
    reader = ResultsReader(yard.services)
    batch = await yard.services.store.batches.get(batch_id)

    async def read() -> int:
        return len((await reader.page(batch, CompletionCursor(), limit=9)).found.rows)

    assert await asyncio.gather(read(), read(), read()) == [1, 1, 1]
    await segment(yard, batch_id, 1, n=1)
    assert await read() == 1


async def test_what_a_process_remembers_is_bounded(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_results, "_REMEMBERED_BYTES", 100)
    clients = [Client(yard, await yard.prepared(lines_of(4))) for _ in range(3)]
    shared = clients[0].reader
    for client in clients:
        client.reader = shared
        await segment(yard, client.batch_id, 0, 2)
        assert await client.page() == ids(0, 2)
    assert len(shared._known) == 1
    for client in clients:
        await segment(yard, client.batch_id, 1, n=1)
        assert await client.page() == ids(1)


async def test_many_segments_are_recorded_in_several_transactions(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_lines, "_SEGMENTS_AT_ONCE", 2)
    batch_id = await yard.prepared(lines_of(7))
    for n in range(7):
        await segment(yard, batch_id, n, (n + 1) % 7, n=n)
    assert await Client(yard, batch_id).page() == ids(*range(7))
    assert len(await yard.services.store.completions.of(batch_id)) == 7


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
async def test_lines_are_whole_however_their_blocks_are_cut(size: int) -> None:
    data = b"a\n\nbcd\nefghij\nk"

    async def blocks() -> AsyncGenerator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    found = [line async for lines in whole_lines(blocks()) for line in lines]
    assert found == [b"a\n", b"\n", b"bcd\n", b"efghij\n", b"k"]


async def test_the_stream_of_lines_is_closed_where_a_reader_stops() -> None:
    is_closed = False

    async def blocks() -> AsyncGenerator[bytes]:
        nonlocal is_closed
        try:
            yield b"a\nb\n"
            yield b"c\n"
        finally:
            is_closed = True

    async with aclosing(whole_lines(blocks())) as lines:
        assert await anext(lines) == [b"a\n", b"b\n"]
    assert is_closed


async def test_readers_of_a_run_get_what_its_files_have(yard: Yard) -> None:
    """Also if the engine crashes in the middle, and a request is refused."""
    faults = [
        Fault(FaultKind.DEATH, skip=20, times=1),
        Fault(FaultKind.ANSWER, lambda body: b"question 7" in body, status=400),
    ]
    yard.use(StubEngine(max_num_seqs=8, latency=0.02, faults=faults))
    batch_id = await yard.create(lines_of(60))

    async def read(order: Order) -> list[FinishedLine]:
        client, found = Client(yard, batch_id, order=order, limit=7), []
        while client.has_more:
            client.restart_server()
            found += await client.lines()
            await asyncio.sleep(0.01)
        return found

    orders: list[Order] = ["completion", "input", "completion"]
    readers = [asyncio.create_task(read(order)) for order in orders]
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
    for order, found in zip(orders, await asyncio.gather(*readers), strict=True):
        assert len(found) == 60
        assert {(each.outcome, json.dumps(json.loads(each.line))) for each in found} == files
        if order == "input":
            names = [json.loads(each.line)["custom_id"] for each in found]
            assert names == ids(*range(60))
