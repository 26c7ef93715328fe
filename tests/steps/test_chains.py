"""Chains: each line goes from stage to stage, and what comes out is one batch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from batchyard.api.batches.stages import stages_of
from batchyard.batch.chains import Stage
from batchyard.control.chains import chain_parts, chain_relay
from batchyard.control.chains.renderer import Renderer
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import RequestRefused, StorageUnavailable, StoreUnavailable
from batchyard.files import retention
from batchyard.files.cursor import CompletionCursor
from batchyard.files.read_results import ResultsReader
from batchyard.files.retention import Expired, expire_files, sweep_orphans
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.lines.lines import embedding_inputs
from batchyard.results.results import answered
from batchyard.services.keys import segment_key, segments_prefix
from batchyard.services.segments import new_lines
from batchyard.services.segments.segments import encode_entry, put_bytes, read_object
from batchyard.steps.collect import collect
from batchyard.steps.collect.collect import DAMAGED
from batchyard.steps.retry.retry import retry_batch
from batchyard.store.chain.chains import Chains
from batchyard.store.tables.batch import BATCHES
from tests.faults import actor
from tests.lifecycle import run_chunks
from tests.steps.conftest import CHAT, Yard, chat_line, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.engine.base import EngineAnswer, EngineRequest
    from batchyard.lines.templates import BodyNotMade
    from batchyard.storage.base import Storage
    from batchyard.store import BatchRecord

JUDGE = Stage(
    CHAT,
    '{"max_tokens": 4, "messages": {{ (request.messages + [{"role": "assistant", "content": '
    'content}, {"role": "user", "content": "good? " ~ custom_id}]) | tojson }}}',
)
EMBED = Stage(
    "/v1/embeddings",
    '{"input": {{ (first.messages[0].content ~ " " ~ content) | tojson }}}',
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_parts, "LEAST_LINES", 8)
    monkeypatch.setattr(chain_parts, "PATIENCE_SECONDS", 0.1)


def lines(count: int) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"question {n * 7919 % count}") for n in range(count)]


@contextlib.asynccontextmanager
async def working(yard: Yard) -> AsyncIterator[None]:
    """A process that runs batches, and one with the engine."""
    yard.set(runner_idle_seconds=3600.0)
    tasks = [
        asyncio.create_task(actor.control(yard.services)),
        asyncio.create_task(actor.runner(yard.services, "stub-model")),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def ended(yard: Yard, batch_id: str) -> BatchRecord:
    async def has_ended() -> bool:
        return (await yard.services.store.batches.get(batch_id)).status in TERMINAL

    await until(has_ended)
    return await yard.services.store.batches.get(batch_id)


async def overdue(connection: AsyncConnection) -> None:
    await connection.execute(BATCHES.update().values(expires_at=1))


async def run(
    yard: Yard, requests: list[dict[str, Any]], *then: Stage, **asked: Any
) -> BatchRecord:
    async with working(yard):
        return await ended(yard, await yard.create(requests, then=then, **asked))


async def test_the_results_are_the_last_stages_answers_in_the_order_of_the_input(
    yard: Yard,
) -> None:
    batch = await run(yard, lines(40), JUDGE, EMBED)
    assert batch.status is BatchStatus.COMPLETED, batch.errors
    results = await yard.results(batch.output_file_id)
    assert [each["custom_id"] for each in results] == [f"id-{n}" for n in range(40)]
    assert {each["response"]["body"]["object"] for each in results} == {"list"}
    assert (batch.counts.completed, batch.counts.failed) == (40, 0)


async def test_lines_of_the_first_stage_that_cannot_be_read_fail_by_themselves(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their segment is truncated. The others go on, and the window has not ended."""
    first_stage = "batches/none/"

    async def truncated(storage: Storage, key: str) -> bytes:
        segment = await read_object(storage, key)
        return segment[:-1] if key.startswith(first_stage) else segment

    monkeypatch.setattr(new_lines, "read_object", truncated)
    async with working(yard):
        batch_id = await yard.create(lines(4), then=(EMBED,))
        first_stage = segments_prefix(batch_id)
        batch = await ended(yard, batch_id)
    assert batch.status is BatchStatus.COMPLETED
    assert batch.counts.failed >= 1
    assert batch.counts.completed + batch.counts.failed == 4
    errors = [each["error"] for each in await yard.results(batch.error_file_id)]
    assert {each["code"] for each in errors} == {"batch_failed"}
    assert "could not be read from the object store" in errors[0]["message"]


async def test_a_line_that_fails_in_any_stage_is_an_error_line_that_names_its_stage(
    yard: Yard,
) -> None:
    yard.use(
        StubEngine(
            max_num_seqs=8,
            faults=[
                Fault(FaultKind.ANSWER, lambda body: b"bad first" in body, status=400),
                Fault(FaultKind.ANSWER, lambda body: b"good? id-2" in body, status=400),
            ],
        )
    )
    texts = ["bad first", "fine", "fine too", "no template"]
    requests = [chat_line(f"id-{n}", text) for n, text in enumerate(texts)]
    failing = Stage(
        "/v1/embeddings",
        '{% if custom_id == "id-3" %}{{ first.no_such_key }}{% endif %}'
        '{"input": {{ content | tojson }}}',
    )
    batch = await run(yard, requests, JUDGE, failing)
    errors = await yard.results(batch.error_file_id)
    assert [(each["custom_id"], each["stage"]) for each in errors] == [
        ("id-0", 1),
        ("id-2", 2),
        ("id-3", 3),
    ]
    assert errors[2]["error"]["code"] == "template_failed"
    assert [each["custom_id"] for each in await yard.results(batch.output_file_id)] == ["id-1"]
    assert (batch.counts.completed, batch.counts.failed) == (1, 3)


async def test_a_stage_starts_before_the_one_before_has_ended(yard: Yard) -> None:
    yard.use(StubEngine(max_num_seqs=2, latency=0.05))
    async with working(yard):
        batch_id = await yard.create(lines(60), then=(JUDGE,))
        await until(lambda: yard.services.store.chains.summaries(batch_id))
        chunks = await yard.services.store.chunks.summary(batch_id)
        assert chunks.pending + chunks.leased
        batch = await ended(yard, batch_id)
        parts = await yard.services.store.chains.summaries(batch_id)
    assert len(parts) > 1
    assert sum(each.lines for each in parts) == batch.counts.completed == 60
    # In another class of urgency they would wait for all of the first stage.
    assert all(abs(each.batch.expires_at - batch.expires_at) < 10 for each in parts)


class HeldEngine(StubEngine):
    """Answers nothing until ``may_answer`` is set."""

    def __init__(self) -> None:
        super().__init__(max_num_seqs=8)
        self.may_answer = asyncio.Event()
        self.asked = 0

    async def answer(self, request: EngineRequest, *, timeout_seconds: float) -> EngineAnswer:
        self.asked += 1
        await self.may_answer.wait()
        return await super().answer(request, timeout_seconds=timeout_seconds)


async def test_what_a_paused_chain_hands_on_waits_with_it(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was in the engine makes full parts, which are not kept in memory."""
    monkeypatch.setattr(chain_parts, "MOST_LINES", 1)
    engine, store = HeldEngine(), yard.services.store
    yard.use(engine)
    async with working(yard):
        batch_id = await yard.create(lines(8), then=(JUDGE,))

        async def are_all_asked() -> bool:
            return engine.asked == 8

        async def are_all_handed_on() -> bool:
            parts = await store.chains.summaries(batch_id)
            began = [each for each in parts if each.batch.status is not BatchStatus.VALIDATING]
            return sum(each.lines for each in began) == 8

        await until(are_all_asked)
        paused = await store.batch_schedule.pause(batch_id)
        engine.may_answer.set()
        await until(are_all_handed_on)
        parts = await store.chains.summaries(batch_id)
        assert {each.batch.paused_at for each in parts} == {paused.paused_at}
        assert engine.asked == 8
        await store.batch_schedule.unpause(batch_id)
        batch = await ended(yard, batch_id)
    assert (batch.status, batch.counts.completed, engine.asked) == (BatchStatus.COMPLETED, 8, 16)


async def test_lines_that_are_left_for_later_are_rendered_too(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group with large bodies only some are made at once."""
    original = Renderer.render
    calls = []

    async def one_of_them(
        renderer: Renderer, variables: list[dict[str, Any]]
    ) -> list[bytes | BodyNotMade]:
        calls.append(len(variables))
        return await original(renderer, variables[:1])

    monkeypatch.setattr(Renderer, "render", one_of_them)
    batch = await run(yard, lines(20), EMBED)
    assert len(calls) == 20
    results = await yard.results(batch.output_file_id)
    assert [each["custom_id"] for each in results] == [f"id-{n}" for n in range(20)]
    assert batch.counts.failed == 0


async def test_its_tenant_sees_and_pays_for_one_batch(yard: Yard) -> None:
    batch = await run(yard, lines(12), JUDGE, tenant="a")
    store = yard.services.store
    assert [each.id for each in await store.batches.page("a", limit=10)] == [batch.id]
    files = await store.files.page("a", limit=10)
    assert {each.id for each in files} == {batch.input_file_id, batch.output_file_id}
    parts = await store.chains.summaries(batch.id)
    ids = [batch.id, *(each.batch.id for each in parts)]
    counted = [each for one in ids for each in await store.usage.of_batch(one)]
    assert sum(each.requests for each in counted) == 24
    assert sum(each.total_tokens for each in counted) == batch.usage.total_tokens
    assert batch.usage.output_tokens == 24 * 4


async def used(yard: Yard, tenant: str) -> tuple[int, int]:
    """Bytes that count for its quota, and those of the files that it can list or is told of."""
    store = yard.services.store
    files = {each.id: each for each in await store.files.page(tenant, limit=100)}
    for batch in await store.batches.page(tenant, limit=100):
        for stage in await stages_of(yard.services, batch):
            if stage.output_file_id is not None:
                files[stage.output_file_id] = await store.files.get(stage.output_file_id, tenant)
    counted = (await store.tenants.usage(tenant)).stored_bytes
    return counted, sum(each.size_bytes for each in files.values())


async def test_after_a_chain_only_files_that_its_tenant_knows_are_stored(yard: Yard) -> None:
    fault = Fault(FaultKind.ANSWER, lambda body: b"good? id-1" in body, status=400, times=1)
    yard.use(StubEngine(faults=[fault]))
    batch = await run(yard, lines(12), JUDGE, EMBED, tenant="a")
    counted, known = await used(yard, "a")
    assert counted > known
    parts = await yard.services.store.chains.summaries(batch.id)
    expired = await expire_files(yard.services)
    assert expired.files == expired.objects > 2 * len(parts)
    assert await used(yard, "a") == (known, known)
    stored = [each async for each in yard.services.storage.listing("files/")]
    assert sum(each.size_bytes for each in stored) == known
    # Nothing that can be asked for was among them.
    assert len(await yard.results(batch.output_file_id)) == 11
    assert len(await yard.results(batch.error_file_id)) == 1
    page = await ResultsReader(yard.services).page(batch, CompletionCursor(), limit=100)
    assert len([each async for each in page.lines()]) == 12
    stages = await stages_of(yard.services, batch)
    assert [len(await yard.results(each.output_file_id)) for each in stages] == [12, 11, 11]
    assert [each.request_counts.completed for each in stages] == [12, 11, 11]
    async with working(yard):
        again = await ended(yard, await retry_batch(yard.services, batch.id))
    assert again.counts.completed == 1
    assert await expire_files(yard.services) != Expired(0, 0, 0)
    assert await expire_files(yard.services) == Expired(0, 0, 0)


async def test_files_of_a_chain_that_runs_are_kept(yard: Yard) -> None:
    """Though parts have ended, and its window is over."""
    yard.use(StubEngine(faults=[Fault(FaultKind.HANG, lambda body: b"good? id-1" in body)]))
    async with working(yard):
        batch_id = await yard.create(lines(30), then=(JUDGE, EMBED))

        async def has_ended_parts() -> bool:
            parts = await yard.services.store.chains.summaries(batch_id)
            return any(each.batch.status in TERMINAL for each in parts)

        await until(has_ended_parts)
        assert await expire_files(yard.services) == Expired(0, 0, 0)
        await yard.services.store.batches.cancel(batch_id)
        batch = await ended(yard, batch_id)
        for part in await yard.services.store.chains.summaries(batch_id):
            await ended(yard, part.batch.id)
    assert (await expire_files(yard.services)).files
    counted, known = await used(yard, batch.tenant)
    assert counted == known
    output, errors = [
        await yard.results(each) for each in (batch.output_file_id, batch.error_file_id)
    ]
    assert len(output) + len(errors) == 30


async def test_files_that_a_part_gets_after_its_chain_has_ended_are_deleted_later(
    yard: Yard,
) -> None:
    store = yard.services.store
    yard.use(StubEngine(faults=[Fault(FaultKind.HANG, lambda body: b"good? id-1" in body)]))
    async with working(yard):
        batch_id = await yard.create(lines(3), then=(JUDGE,))
        await until(lambda: store.chains.summaries(batch_id))
    # No process is there to end the part with the chain.
    await store.batches.stop_early(batch_id, [DAMAGED])
    batch = await yard.finish(batch_id)
    parts = [each.batch.id for each in await store.chains.summaries(batch_id)]
    assert {(await store.batches.get(each)).status for each in parts} == {BatchStatus.CANCELLING}
    assert await expire_files(yard.services) == Expired(0, 0, 0)
    for each in parts:
        await yard.finish(each)
    assert (await expire_files(yard.services)).files
    counted, known = await used(yard, batch.tenant)
    assert counted == known


async def test_a_clean_up_that_stopped_halfway_is_continued(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the rows of some files were marked, and before any bytes were deleted."""
    batch = await run(yard, lines(12), JUDGE, EMBED)

    async def away(_: str) -> None:
        raise StorageUnavailable("The object store is away.")

    monkeypatch.setattr(retention, "_ROWS_AT_ONCE", 1)
    with monkeypatch.context() as broken:
        broken.setattr(yard.services.storage, "delete", away)
        with pytest.raises(StorageUnavailable):
            await expire_files(yard.services)
    assert (await expire_files(yard.services)).files
    counted, known = await used(yard, batch.tenant)
    assert counted == known
    await sweep_orphans(yard.services, 0)
    stored = [each async for each in yard.services.storage.listing("files/")]
    assert sum(each.size_bytes for each in stored) == known


async def test_a_cancelled_chain_keeps_what_is_finished(yard: Yard) -> None:
    yard.use(StubEngine(max_num_seqs=4, latency=0.05))
    async with working(yard):
        batch_id = await yard.create(lines(60), then=(JUDGE,))

        async def completed() -> int:
            return (await yard.services.store.batches.get(batch_id)).counts.completed

        await until(completed)
        await yard.services.store.batches.cancel(batch_id)
        batch = await ended(yard, batch_id)
        for part in await yard.services.store.chains.summaries(batch_id):
            assert (await ended(yard, part.batch.id)).status in TERMINAL
    assert batch.status is BatchStatus.CANCELLED
    output = await yard.results(batch.output_file_id)
    errors = await yard.results(batch.error_file_id)
    assert 0 < len(output) == batch.counts.completed < 60
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert len(output) + len(errors) == 60


async def test_the_parts_of_a_cancelled_chain_are_cancelled(yard: Yard) -> None:
    """Their requests may take hours."""
    begun: list[bytes] = []

    def latency(body: bytes) -> float:
        if b"good?" not in body:
            return 0.0
        begun.append(body)
        return 3600.0

    yard.use(StubEngine(max_num_seqs=4, latency=latency))
    async with working(yard):
        batch_id = await yard.create(lines(4), then=(JUDGE,))

        async def has_begun() -> bool:
            return bool(begun)

        await until(has_begun)
        await yard.services.store.batches.cancel(batch_id)
        batch = await ended(yard, batch_id)
        parts = await yard.services.store.chains.summaries(batch_id)
        assert {(await ended(yard, part.batch.id)).status for part in parts} == {
            BatchStatus.CANCELLED
        }
    assert (batch.status, batch.counts.completed) == (BatchStatus.CANCELLED, 0)


async def test_a_part_that_fails_ends_its_own_lines_only(yard: Yard) -> None:
    nobody = replace(JUDGE, endpoint="/v1/score")
    batch = await run(yard, lines(5), nobody)
    errors = await yard.results(batch.error_file_id)
    assert batch.status is BatchStatus.COMPLETED
    assert {each["stage"] for each in errors} == {2}


async def test_what_may_not_have_been_recorded_is_handed_on_once(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the end of a process between the bytes of a part and its row, or behind that."""
    calls = 0
    add_part = Chains.add_part

    async def away_at_times(chains: Chains, *given: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        if calls != 1:
            await add_part(chains, *given, **named)
        if calls <= 2:
            raise StoreUnavailable("The database is away.")

    monkeypatch.setattr(Chains, "add_part", away_at_times)
    batch = await run(yard, lines(20), JUDGE)
    assert calls >= 2
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 20)
    parts = await yard.services.store.chains.summaries(batch.id)
    assert sum(each.lines for each in parts) == 20


async def test_a_damaged_segment_costs_a_chain_only_what_it_holds(yard: Yard) -> None:
    no_such_line = encode_entry(99, answered("id-99", "req_x", 200, b"{}"))
    async with working(yard):
        batch_id = await yard.create(lines(3), then=(JUDGE,))
        key = segment_key(batch_id, 0, 9, 0)
        await put_bytes(yard.services.storage, key, [no_such_line])
        batch = await ended(yard, batch_id)
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 3)


class ListsLater:
    """``storage``, in whose listings each object is missing the first time."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: set[str] = set()

    async def list(self, prefix: str) -> AsyncIterator[str]:
        async for key in self._storage.list(prefix):
            if key in self._known:
                yield key
            self._known.add(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def list_later(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Swift at times."""
    monkeypatch.setattr(collect, "LISTED_AGAIN_SECONDS", (0.0, 0.0))
    storage: Any = ListsLater(yard.services.storage)
    yard.services = dataclasses.replace(yard.services, storage=storage)


async def test_what_is_listed_late_is_waited_for_in_each_stage(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else finished lines would have no result, and the chain would end as expired."""
    list_later(yard, monkeypatch)
    batch = await run(yard, lines(5), JUDGE)
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 5), batch.errors
    assert len(await yard.results(batch.output_file_id)) == 5


async def test_a_chain_that_is_stopped_keeps_what_is_listed_late(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.use(
        StubEngine(faults=[Fault(FaultKind.ANSWER, lambda body: b"question 0" in body, status=400)])
    )
    batch_id = await yard.prepared(lines(3), then=(JUDGE,))
    await run_chunks(yard.services, "stub-model", batch_id=batch_id)
    monkeypatch.setattr(chain_relay, "LISTED_AGAIN_SECONDS", (0.0, 0.0))
    list_later(yard, monkeypatch)
    await yard.services.store.batches.cancel(batch_id)
    batch = await yard.finish(batch_id)
    assert (batch.status, batch.counts.failed) == (BatchStatus.CANCELLED, 1)


async def test_a_chain_whose_window_ends_keeps_what_is_finished(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.HANG, lambda body: b"good? id-1" in body)]))
    async with working(yard):
        batch_id = await yard.create(lines(3), then=(JUDGE,))

        async def completed() -> bool:
            return (await yard.services.store.batches.get(batch_id)).counts.completed == 2

        await until(completed)
        await yard.services.store.database.write(overdue)
        batch = await ended(yard, batch_id)
    assert (batch.status, batch.counts.completed) == (BatchStatus.EXPIRED, 2)
    (error,) = await yard.results(batch.error_file_id)
    assert (error["custom_id"], error["error"]["code"]) == ("id-1", "batch_expired")


async def test_too_many_errors_in_any_stage_stop_the_chain(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.HANG, lambda body: b"question 0" in body)]))
    no_request = replace(JUDGE, template='{"a": {{ first.nothing }}}')
    batch = await run(yard, lines(9), no_request, error_threshold="5")
    assert batch.status is BatchStatus.FAILED
    assert [each.code for each in batch.errors or ()] == ["error_threshold_reached"]
    assert batch.counts.failed == 8


async def test_a_retry_runs_its_lines_through_all_stages(yard: Yard) -> None:
    fault = Fault(FaultKind.ANSWER, lambda body: b"good? id-1" in body, status=400, times=1)
    yard.use(StubEngine(faults=[fault]))
    batch = await run(yard, lines(3), JUDGE, EMBED)
    assert batch.counts.failed == 1
    async with working(yard):
        again = await ended(yard, await retry_batch(yard.services, batch.id))
    (result,) = await yard.results(again.output_file_id)
    assert (result["custom_id"], result["response"]["body"]["object"]) == ("id-1", "list")


async def test_a_retry_does_not_merge(yard: Yard) -> None:
    """The answers are not to the lines that are in its input."""
    batch = await run(yard, lines(2), JUDGE)
    with pytest.raises(RequestRefused, match="cannot merge"):
        await retry_batch(yard.services, batch.id, merges=True)


async def test_lines_that_share_an_answer_of_the_last_stage_are_counted(yard: Yard) -> None:
    fault = Fault(FaultKind.ANSWER, lambda body: b'"input":"bad' in body, status=400)
    yard.use(StubEngine(max_num_seqs=8, faults=[fault]))
    embed = replace(EMBED, template='{"input": {{ first.messages[0].content | tojson }}}')
    texts = ["same", "same", "other", "same", "bad", "bad"]
    requests = [chat_line(f"id-{n}", text) for n, text in enumerate(texts)]
    batch = await run(yard, requests, embed, deduplicate=True)
    assert (batch.counts.completed, batch.counts.failed) == (4, 2)
    # One part has all of them.
    assert batch.to_wire().usage.deduplicated_requests == 3


async def test_a_request_that_a_template_made_badly_is_no_bad_line_of_the_input(
    yard: Yard,
) -> None:
    """Validation refuses it, and the line can be tried again."""
    without_messages = Stage(
        CHAT,
        '{% if custom_id == "id-2" %}{"max_tokens": 4}{% else %}'
        '{"max_tokens": 4, "messages": {{ request.messages | tojson }}}{% endif %}',
    )
    batch = await run(yard, lines(4), without_messages)
    (error,) = await yard.results(batch.error_file_id)
    assert (error["custom_id"], error["stage"]) == ("id-2", 2)
    assert "messages" in error["error"]["message"]
    assert "Line" not in error["error"]["message"]
    again = await retry_batch(yard.services, batch.id)
    retried = await yard.services.store.batches.get(again)
    sent = await yard.results(retried.input_file_id)
    assert [each["custom_id"] for each in sent] == ["id-2"]


async def test_no_part_is_larger_than_an_input_may_be(yard: Yard) -> None:
    """A request that is so large by itself is a line that failed."""
    limits = yard.services.settings.limits.model_copy(update={"max_bytes": 20_000})
    yard.set(limits=limits)
    large = Stage(
        "/v1/embeddings", '{"input": "{{ "x" * (21000 if custom_id == "id-7" else 4000) }}"}'
    )
    batch = await run(yard, lines(12), large)
    assert (batch.counts.completed, batch.counts.failed) == (11, 1)
    (error,) = await yard.results(batch.error_file_id)
    assert (error["custom_id"], error["error"]["code"]) == ("id-7", "template_failed")


async def test_no_part_has_more_embedding_inputs_than_a_file_may_have(yard: Yard) -> None:
    """A request that has more by itself fails by itself."""
    limits = yard.services.settings.limits.model_copy(update={"max_embedding_inputs": 100})
    yard.set(limits=limits)
    pieces = Stage(
        "/v1/embeddings",
        '{"input": {{ (["x"] * (101 if custom_id == "id-7" else 30)) | tojson }}}',
    )
    batch = await run(yard, lines(12), pieces, public_urls=True)
    assert (batch.counts.completed, batch.counts.failed) == (11, 1)
    (error,) = await yard.results(batch.error_file_id)
    assert error["custom_id"] == "id-7"
    assert "more than 100 embedding inputs" in error["error"]["message"]


@pytest.mark.parametrize(
    "given", ["text", "a, b", [1, 2, 3], [], ["a"], ["a", "b, c"], [[1, 2], [-3]], {"a": 1}, None]
)
def test_inputs_are_counted_as_validation_counts_them(given: Any) -> None:
    line = json.dumps({"custom_id": "a", "body": {"input": given}}).encode()
    counted = chain_parts.inputs_of("/v1/embeddings", line, 100)
    assert counted == embedding_inputs(given)
    assert chain_parts.inputs_of("/v1/embeddings", line, 1) == 1
    assert chain_parts.inputs_of(CHAT, line, 100) == 0


async def test_of_a_key_that_is_repeated_the_last_value_counts_in_each_stage(yard: Yard) -> None:
    path = yard.write_input(lines(2), "repeated.jsonl")
    path.write_text(
        path.read_text().replace('"custom_id": "id-1"', '"custom_id": 1, "custom_id": "id-1"')
    )
    async with working(yard):
        batch_id = await yard.create([], input=str(path), then=(EMBED,))
        batch = await ended(yard, batch_id)
    assert batch.counts.completed == 2
    results = await yard.results(batch.output_file_id)
    assert [each["custom_id"] for each in results] == ["id-0", "id-1"]
