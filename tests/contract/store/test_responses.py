"""Background responses in the database: accepted, collected, ended once, deleted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from batchyard.batch.responses import ResponseEnd, ResponseError, ResponseStatus
from batchyard.errors import (
    QuotaExceeded,
    RecordNotFound,
    StorageLimitExceeded,
    TransitionConflict,
)
from batchyard.store import HiddenFor, NewResponse, Quota, ResponseKind, ResponseRecord, Store
from batchyard.store.response import responses
from tests.contract.store.outbox_samples import endpoint
from tests.contract.store.samples import begin, new_batch, new_file

KIND = ResponseKind("a", "qwen", "soonest")
LOCKED_SECONDS = 0.5
"""What takes so long waits for a lock."""
WHY = ResponseError("server_error", "No.")


async def accepted(
    store: Store, name: str, *, quota: Quota | None = None, window_seconds: int = 60
) -> ResponseRecord:
    new = NewResponse(
        id=name,
        tenant=KIND.tenant,
        model=KIND.model,
        completion_window=KIND.completion_window,
        window_seconds=window_seconds,
        given=b"{}",
        token_estimate=10,
        line=name.encode(),
    )
    return await store.responses.create(new, quota=quota or Quota())


async def collected(store: Store, *names: str) -> str:
    """The id of a new batch that holds these."""
    file = new_file(tenant=KIND.tenant, hidden_for=HiddenFor.RESPONSES)
    batch = new_batch(tenant=KIND.tenant, input_file_id=file.id, hidden_for=HiddenFor.RESPONSES)
    await store.responses.collect(names, file, batch)
    return batch.id


async def test_what_waits_is_counted_by_kind_and_given_in_its_order(store: Store) -> None:
    for name in ("r1", "r2", "r3"):
        await accepted(store, name)
    (waiting,) = await store.responses.waiting()
    assert (waiting.kind, waiting.count, waiting.has_idle_batch) == (KIND, 3, False)
    assert 0 <= waiting.oldest_seconds < 60
    lines = await store.responses.lines(KIND, limit=2, most_bytes=100)
    assert [(each.id, each.line) for each in lines] == [("r1", b"r1"), ("r2", b"r2")]
    (first,) = await store.responses.lines(KIND, limit=2, most_bytes=1)
    assert first.id == "r1"


async def test_a_response_is_in_progress_once_a_runner_has_begun_its_batch(store: Store) -> None:
    await accepted(store, "r1")
    await accepted(store, "r2")
    batch_id = await collected(store, "r1")
    await begin(store, batch_id, model=KIND.model)
    (waiting,) = await store.responses.waiting()
    assert (waiting.count, waiting.has_idle_batch) == (1, True)
    assert (await store.responses.get("r1")).status is ResponseStatus.QUEUED
    assert await store.chunks.claim(model=KIND.model, owner="runner", lease_seconds=60)
    assert (await store.responses.get("r1")).status is ResponseStatus.IN_PROGRESS
    (waiting,) = await store.responses.waiting()
    assert not waiting.has_idle_batch


async def test_a_batch_is_made_of_all_its_responses_or_of_none(store: Store) -> None:
    for name in ("r1", "r2", "r3"):
        await accepted(store, name)
    await store.responses.cancel("r2", "a")
    batch_id = await collected(store, "r1")
    for names in (("r1", "r3"), ("r2", "r3")):
        with pytest.raises(TransitionConflict):
            await collected(store, *names)
    assert (await store.responses.get("r3")).batch_id is None
    assert [each.id for each in await store.batches.page()] == [batch_id]


async def test_a_response_ends_once_and_each_end_is_notified_once(store: Store) -> None:
    wanted = ("response.completed", "response.failed")
    endpoint_id = await endpoint(store, tenant="a", event_types=wanted)
    await endpoint(store, tenant="b", event_types=wanted)
    for name in ("r1", "r2", "r3"):
        await accepted(store, name)
    batch_id = await collected(store, "r1", "r2", "r3")
    done = ResponseEnd("r1", ResponseStatus.COMPLETED)
    assert await store.responses.open_batches() == [batch_id]
    assert await store.responses.end("another", [done]) == []
    assert await store.responses.end(batch_id, [done]) == ["r1"]
    again = ResponseEnd("r1", ResponseStatus.FAILED, WHY)
    assert await store.responses.end(batch_id, [again]) == []
    await store.responses.cancel("r2", "a")
    assert await store.responses.has_open(batch_id)
    assert await store.responses.end_all(batch_id, ResponseStatus.FAILED, WHY) == ["r3"]
    ends = {name: await store.responses.get(name) for name in ("r1", "r2", "r3")}
    assert [each.status.value for each in ends.values()] == ["completed", "cancelled", "failed"]
    assert ends["r3"].error == WHY
    told = await store.deliveries.page("a")
    assert {(each.event_type, each.response_id, each.endpoint_id) for each in told} == {
        ("response.completed", "r1", endpoint_id),
        ("response.failed", "r3", endpoint_id),
    }
    assert len(told) == 2
    assert not await store.responses.are_open()


async def test_one_that_was_not_collected_in_its_window_fails(store: Store) -> None:
    await accepted(store, "r1", window_seconds=-1)
    await accepted(store, "r2")
    assert await store.responses.end_overdue(WHY) == ["r1"]
    assert await store.responses.end_overdue(WHY) == []


async def test_responses_count_for_the_quota_until_their_batch_has_chunks(store: Store) -> None:
    quota = Quota(max_enqueued_requests=11, max_active_batches=0)
    for name in ("r1", "r2"):
        await accepted(store, name, quota=quota)
    assert (await store.tenants.usage("a")).enqueued_tokens == 20
    batch_id = await collected(store, "r1")
    usage = await store.tenants.usage("a")
    assert (usage.active_batches, usage.enqueued_requests) == (0, 2)
    # It has ten lines in its chunk, and is not refused for them: they were counted before.
    await begin(store, batch_id, model=KIND.model, quota=Quota(max_enqueued_requests=1))
    assert (await store.tenants.usage("a")).enqueued_requests == 11
    with pytest.raises(QuotaExceeded):
        await accepted(store, "r3", quota=quota)


async def test_responses_are_stored_bytes_from_the_beginning(store: Store) -> None:
    quota = Quota(max_stored_bytes=5)
    for name in ("r1", "r2"):
        await accepted(store, name, quota=quota)
    assert (await store.tenants.usage("a")).stored_bytes == 4
    with pytest.raises(StorageLimitExceeded):
        await accepted(store, "r3", quota=quota)
    await collected(store, "r1")  # in a file of three bytes
    assert (await store.tenants.usage("a")).stored_bytes == 3 + 2
    await store.responses.cancel("r2", "a")
    await accepted(store, "r3", quota=quota)
    assert (await store.tenants.usage("a")).stored_bytes == 3 + 2


async def test_the_last_open_response_of_a_batch_says_so_as_it_goes(store: Store) -> None:
    for name in ("r1", "r2"):
        await accepted(store, name)
    batch_id = await collected(store, "r1", "r2")
    await store.responses.delete("r1", "a")
    assert await store.responses.has_open(batch_id)
    assert await store.responses.has_any(batch_id)
    await store.responses.delete("r2", "a")
    assert not await store.responses.has_open(batch_id)
    assert not await store.responses.has_any(batch_id)


@pytest.mark.parametrize("way", ["cancel", "delete"])
async def test_of_several_that_go_at_once_one_sees_that_none_is_left(
    store: Store, way: str
) -> None:
    """Or nobody would stop their batch."""
    go = getattr(store.responses, way)

    async def leaves_one_open(name: str, batch_id: str) -> bool:
        await go(name, "a")
        return await store.responses.has_open(batch_id)

    for number in range(10):
        names = [f"r{number}-{each}" for each in range(4)]
        for name in names:
            await accepted(store, name)
        batch_id = await collected(store, *names)
        seen = await asyncio.gather(*(leaves_one_open(name, batch_id) for name in names))
        assert not all(seen)


async def test_a_deletion_says_which_batch_took_the_response_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only then is that batch stopped. Where it waits for the deletion, there is none."""
    await accepted(store, "r1")
    load = responses._load
    collecting: list[asyncio.Task[str]] = []

    async def collect_behind(*asked: Any) -> ResponseRecord:
        found = await load(*asked)
        collecting.append(asyncio.create_task(collected(store, "r1")))
        await asyncio.wait(collecting, timeout=LOCKED_SECONDS)
        return found

    monkeypatch.setattr(responses, "_load", collect_behind)
    deleted = await store.responses.delete("r1", "a")
    (batch_id,) = await asyncio.gather(*collecting, return_exceptions=True)
    assert deleted.batch_id == (None if isinstance(batch_id, TransitionConflict) else batch_id)


async def test_a_response_of_another_tenant_or_that_was_deleted_is_unknown(store: Store) -> None:
    for name in ("r1", "r2"):
        await accepted(store, name)
    await store.responses.delete("r1", "a")
    for tenant, name in (("a", "r1"), ("b", "r2")):
        for ask in (store.responses.get, store.responses.cancel, store.responses.delete):
            with pytest.raises(RecordNotFound):
                await ask(name, tenant)
    assert (await store.responses.get("r2", "a")).status is ResponseStatus.QUEUED


async def test_ended_responses_are_forgotten_in_time(store: Store) -> None:
    await accepted(store, "r1")
    await accepted(store, "r2")
    await store.responses.cancel("r1", "a")
    assert await store.responses.prune(60) == 0
    assert await store.responses.prune(-60) == 1
    assert (await store.responses.get("r2")).status is ResponseStatus.QUEUED
