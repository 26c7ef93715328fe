"""Chains in the database: their parts, their counts, and what their tenant does not see."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from batchyard.batch.chains import Stage
from batchyard.errors import LeaseLost, RecordNotFound, TransitionConflict
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.store import BatchRecord, HiddenFor, NewFile, Store, open_store
from batchyard.store.chain import chains
from batchyard.store.tables.chain import ChainPart
from tests.contract.store.outbox_samples import endpoint
from tests.contract.store.samples import begin, finish, new_batch, new_file

STAGE = Stage("/v1/embeddings", "{}")
LOCKED_SECONDS = 0.5
"""Somebody who has not come through after so long waits for a lock."""


async def begun_chain(store: Store) -> BatchRecord:
    batch = await store.batches.create(
        new_batch(tenant="a", then=(STAGE,)), owner="me", lease_seconds=60
    )
    return await begin(store, batch.id)


async def part_of(store: Store, chain: BatchRecord, *, epoch: int = 1) -> str:
    """The id of a new part that has the chain's first and third request."""
    file = new_file(tenant="a", hidden_for=HiddenFor.CHAIN)
    batch = new_batch(
        tenant="a", input_file_id=file.id, hidden_for=HiddenFor.CHAIN, part_of=chain.id
    )
    part = ChainPart(batch_id=batch.id, chain_id=chain.id, stage=1, ordinals=b"\0\0\0\0\2\0\0\0")
    await store.chains.add_part(part, file, batch, epoch=epoch)
    return batch.id


async def test_a_part_is_seen_by_operators_only(store: Store) -> None:
    chain = await begun_chain(store)
    part = await part_of(store, chain)
    assert [each.id for each in await store.batches.page("a")] == [chain.id]
    assert {each.id for each in await store.batches.page()} == {chain.id, part}
    with pytest.raises(RecordNotFound):
        await store.batches.get(part, "a")
    assert (await store.tenants.usage("a")).active_batches == 1
    (found,) = await store.chains.summaries(chain.id)
    assert (found.batch.id, found.stage, found.lines) == (part, 1, 2)


async def test_a_chain_is_open_until_that_is_recorded_under_its_lease(store: Store) -> None:
    chain = await begun_chain(store)
    part = await part_of(store, chain)
    with pytest.raises(LeaseLost):
        await store.chains.record(chain.id, completed=0, failed=0, is_open=False, epoch=2)
    assert (await store.batch_leases.snapshots([chain.id]))[chain.id].is_open
    await store.chains.record(chain.id, completed=7, failed=2, drained=[part], epoch=1)
    counts = (await store.batches.get(chain.id)).counts
    assert (counts.completed, counts.failed) == (7, 2)
    (found,) = await store.chains.parts(chain.id)
    assert found.is_drained


async def test_a_chain_that_has_been_stopped_gets_no_more_parts(store: Store) -> None:
    chain = await begun_chain(store)
    part = await part_of(store, chain)
    await begin(store, part)
    with pytest.raises(LeaseLost):
        await part_of(store, chain, epoch=2)
    await store.batches.cancel(chain.id)
    with pytest.raises(TransitionConflict):
        await part_of(store, chain)
    assert not await store.chains.is_any_leased(chain.id)
    assert await store.chains.cancel_parts(chain.id) == [part]
    assert (await store.batches.get(part)).status is BatchStatus.CANCELLING
    assert await store.chains.cancel_parts(chain.id) == []


async def test_what_steers_a_chain_steers_its_parts(store: Store) -> None:
    chain = await begun_chain(store)
    part = await part_of(store, chain)
    await store.batch_schedule.set_priority(chain.id, 7)
    await store.batch_schedule.pause(chain.id)
    found = await store.batches.get(part)
    assert (found.priority, found.paused_at is not None) == (7, True)


async def test_a_new_part_is_steered_as_its_chain_is_by_now(store: Store) -> None:
    """Whoever makes it need not know."""
    chain = await begun_chain(store)
    await store.batch_schedule.set_priority(chain.id, 7)
    paused = await store.batch_schedule.pause(chain.id)
    part = await part_of(store, chain)
    found = await store.batches.get(part)
    assert found.paused_at is not None
    assert (found.priority, found.paused_at) == (7, paused.paused_at)
    await store.batch_schedule.unpause(chain.id)
    parts = [part, await part_of(store, chain)]
    assert [(await store.batches.get(each)).paused_at for each in parts] == [None, None]


async def test_a_chain_that_is_paused_while_it_gets_a_part_pauses_the_part_too(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pausing: list[asyncio.Task[BatchRecord]] = []
    insert_batch = chains.insert_batch
    async with open_store(database_url) as store, open_store(database_url) as other:
        chain = await begun_chain(store)

        async def insert_later(*args: Any) -> None:
            # Between what was read of the chain and what is written.
            pausing.append(asyncio.create_task(other.batch_schedule.pause(chain.id)))
            await asyncio.wait(pausing, timeout=LOCKED_SECONDS)
            await insert_batch(*args)

        monkeypatch.setattr(chains, "insert_batch", insert_later)
        part = await part_of(store, chain)
        await asyncio.gather(*pausing)
        assert (await store.batches.get(part)).paused_at is not None


async def test_nobody_is_told_of_a_parts_end(store: Store) -> None:
    chain = await begun_chain(store)
    part = await part_of(store, chain)
    await endpoint(store, tenant="a")
    await begin(store, part)
    await store.batches.advance(part, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    await finish(store, part, BatchStatus.COMPLETED)
    assert not await store.deliveries.page("a")
    assert (await store.chains.usage(chain.id)).total_tokens == 0


async def test_a_tenant_that_has_enough_chains_gets_no_more_and_others_do(store: Store) -> None:
    await store.batches.create(new_batch(tenant="a", then=(STAGE,)))
    wanted = {
        (await store.batches.create(new_batch(tenant="a"))).id,
        (await store.batches.create(new_batch(tenant="b", then=(STAGE,)))).id,
    }
    leases = await store.batch_leases.claim(
        owner="me", lease_seconds=60, limit=5, without_parents_of={"a"}
    )
    assert {each.batch_id for each in leases} == wanted


async def end(store: Store, batch_id: str, status: BatchStatus, **files: NewFile) -> BatchRecord:
    is_cancelled = status is BatchStatus.CANCELLED
    ending = BatchStatus.CANCELLING if is_cancelled else BatchStatus.FINALIZING
    await store.batches.advance(batch_id, BatchStatus.IN_PROGRESS, ending)
    return await finish(store, batch_id, status, **files)


async def with_files(store: Store) -> list[str]:
    return await store.chains.ended_with_files(after="", limit=10)


@pytest.mark.parametrize("status", sorted(TERMINAL))
async def test_what_an_ended_chain_needed_only_while_it_ran_can_be_deleted(
    store: Store, status: BatchStatus
) -> None:
    """The input and results of its parts. Its own files, and another chain's, are kept."""
    chain, other = await begun_chain(store), await begun_chain(store)
    part, others = await part_of(store, chain), await part_of(store, other)
    for each in (part, others):
        await begin(store, each)
        results = {
            kind: new_file(tenant="a", hidden_for=HiddenFor.CHAIN) for kind in ("output", "error")
        }
        await end(store, each, status, **results)
    assert await with_files(store) == []
    own = new_file(tenant="a")
    await end(store, chain.id, status, output=own)
    assert await with_files(store) == [chain.id]
    assert await store.chains.ended_with_files(after=chain.id, limit=10) == []
    found = await store.chains.files_of_parts(chain.id)
    assert (len(found.file_ids), found.are_all) == (3, True)
    gone = await store.files.delete_unread(found.file_ids)
    assert sorted(each.id for each in gone) == found.file_ids
    assert await store.files.delete_unread(found.file_ids) == []
    assert (await store.tenants.usage("a")).stored_bytes == 3 + 3 * 3
    assert (await store.files.get(own.id, "a")).id == own.id
    await store.chains.forget_files(chain.id)
    assert await with_files(store) == []


async def test_a_part_that_has_not_ended_keeps_its_files(store: Store) -> None:
    chain = await begun_chain(store)
    ended, running = await part_of(store, chain), await part_of(store, chain)
    for each in (ended, running):
        await begin(store, each)
    output = new_file(tenant="a", hidden_for=HiddenFor.CHAIN)
    record = await end(store, ended, BatchStatus.COMPLETED, output=output)
    await end(store, chain.id, BatchStatus.CANCELLED)
    found = await store.chains.files_of_parts(chain.id)
    assert set(found.file_ids) == {output.id, record.input_file_id}
    assert not found.are_all
    still_read = (await store.batches.get(running)).input_file_id
    assert await store.files.delete_unread([still_read]) == []


async def test_chains_are_left_to_others_by_those_that_have_enough(store: Store) -> None:
    chain = await store.batches.create(new_batch(then=(STAGE,)))
    plain = await store.batches.create(new_batch())
    first = await store.batch_leases.claim(
        owner="me", lease_seconds=60, limit=5, without_parents=True
    )
    assert [each.batch_id for each in first] == [plain.id]
    others = await store.batch_leases.claim(owner="me", lease_seconds=60, limit=5)
    assert [each.batch_id for each in others] == [chain.id]
    assert (await store.batch_leases.entries([chain.id]))[chain.id].is_parent
