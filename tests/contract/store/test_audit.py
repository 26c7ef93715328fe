"""The audit log: what operators did, in the transaction that did it, without secrets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from batchyard.errors import RecordNotFound, TransitionConflict
from batchyard.lifecycle import BatchStatus
from batchyard.store import Quota, acting_as
from tests.contract.store.samples import batch_in

if TYPE_CHECKING:
    from batchyard.store import Store


async def actions(store: Store) -> list[tuple[str, str, str]]:
    """The oldest first; those of one second in any order."""
    found = await store.audit.newest(limit=100)
    return sorted((each.actor, each.action, each.subject) for each in found)


async def test_what_an_operator_does_is_recorded_and_what_others_do_is_not(store: Store) -> None:
    batch = await batch_in(store, BatchStatus.IN_PROGRESS, tenant="a")
    other = await batch_in(store, BatchStatus.IN_PROGRESS, tenant="a")
    with acting_as("ada@desk"):
        key = await store.api_keys.create("a", "laptop", may_write=False)
        await store.api_keys.revoke(key.record.id)
        await store.tenants.set_quota("a", Quota(max_active_batches=5))
        await store.tenants.set_notify_email("a", "ada@example.org")
        await store.batch_schedule.pause(batch.id)
        await store.batch_schedule.unpause(batch.id)
        await store.batch_schedule.set_priority(batch.id, 7)
        await store.batches.cancel(batch.id)
    await store.api_keys.create("a", "another")
    await store.batches.cancel(other.id)
    assert await actions(store) == [
        ("ada@desk", "batch.cancelled", batch.id),
        ("ada@desk", "batch.paused", batch.id),
        ("ada@desk", "batch.priority", batch.id),
        ("ada@desk", "batch.unpaused", batch.id),
        ("ada@desk", "key.created", key.record.id),
        ("ada@desk", "key.revoked", key.record.id),
        ("ada@desk", "tenant.email", "a"),
        ("ada@desk", "tenant.quota", "a"),
    ]
    details = {each.action: each.details for each in await store.audit.newest(limit=100)}
    assert details["key.created"] == {
        "tenant": "a",
        "name": "laptop",
        "is_operator": False,
        "may_write": False,
        "expires_at": None,
    }
    assert details["tenant.quota"]["max_active_batches"] == 5
    assert details["batch.priority"] == {"tenant": "a", "priority": 7}
    shown = msgspec.json.encode([each.model_dump() for each in await store.audit.newest(limit=100)])
    assert key.secret.encode() not in shown
    assert b"ada@example.org" not in shown


async def test_what_could_not_be_done_is_not_recorded(store: Store) -> None:
    batch = await batch_in(store, BatchStatus.COMPLETED)
    with acting_as("ada"):
        with pytest.raises(TransitionConflict):
            await store.batch_schedule.pause(batch.id)
        with pytest.raises(TransitionConflict):
            await store.batches.cancel(batch.id)
        with pytest.raises(RecordNotFound):
            await store.api_keys.revoke("key_0")
    assert await actions(store) == []


async def test_each_task_acts_as_its_own_operator(store: Store) -> None:
    async def create(name: str) -> None:
        with acting_as(name):
            await asyncio.sleep(0)
            await store.api_keys.create(name, name)

    await asyncio.gather(*(create(name) for name in ("a", "b", "c")))
    for each in await store.audit.newest(limit=10):
        assert each.details["tenant"] == each.actor


async def test_the_log_is_read_by_action_and_number(store: Store) -> None:
    with acting_as("ada"):
        for action in ("key.created", "key.revoked", "key_created", "login"):
            await store.audit.note(action, "x")
    assert len(await store.audit.newest(limit=2)) == 2
    found = await store.audit.newest(limit=9, action="key.")
    assert {each.action for each in found} == {"key.created", "key.revoked"}
    assert {each.action for each in await store.audit.newest(limit=9, action="key_")} == {
        "key_created"
    }
