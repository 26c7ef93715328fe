"""Fetching: whose file may be run, and how much of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import InputRefused, StorageError, TransitionConflict
from batchyard.files.delete import delete_file
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.steps.fetch.input_file import store_input
from batchyard.store import NewFile
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from batchyard.store import FileRecord


async def uploaded(yard: Yard, **changes: Any) -> FileRecord:
    values = {"purpose": "batch", "filename": "in.jsonl", "size_bytes": 3, "sha256": ""}
    return await yard.services.store.files.create(
        NewFile(**{**values, "storage_key": "files/one", **changes})
    )


async def fetch(yard: Yard, file: FileRecord) -> int:
    request = BatchRequest(input_file_id=file.id)
    return await fetch_input(yard.services, await create_batch(yard.services, request))


async def test_the_tenants_own_file_is_run(yard: Yard) -> None:
    assert await fetch(yard, await uploaded(yard)) == 3


async def test_the_file_of_another_tenant_is_as_unknown_as_none(yard: Yard) -> None:
    with pytest.raises(InputRefused, match="Cannot find file"):
        await fetch(yard, await uploaded(yard, tenant="other"))


async def test_a_file_that_had_expired_is_unknown(yard: Yard) -> None:
    with pytest.raises(InputRefused, match="Cannot find file"):
        await fetch(yard, await uploaded(yard, lifetime_seconds=-1))


async def test_a_file_that_was_uploaded_for_something_else_is_refused(yard: Yard) -> None:
    with pytest.raises(InputRefused, match="purpose 'batch_output'"):
        await fetch(yard, await uploaded(yard, purpose="batch_output"))


async def test_an_owner_that_lost_its_lease_replaces_no_input(yard: Yard) -> None:
    """The place had other bytes when the next owner read it, which has planned them."""
    batch_id = await yard.create([chat_line("a"), chat_line("b")])
    batch = await yard.services.store.batches.get(batch_id)

    async def late() -> AsyncGenerator[bytes]:
        yield b"{}\n"
        await fetch_input(yard.services, batch_id)

    with pytest.raises(TransitionConflict):
        await store_input(yard.services, batch, late())
    assert (await yard.finish(batch_id)).counts.completed == 2


async def test_an_input_that_was_fetched_and_then_deleted_is_not_fetched_again(yard: Yard) -> None:
    """The batch waits, or begins again in another process, and its tenant tidies up meanwhile."""
    batch_id = await yard.create([chat_line("a"), chat_line("b")])
    await fetch_input(yard.services, batch_id)
    batch = await yard.services.store.batches.get(batch_id)
    await delete_file(yard.services, batch.tenant, batch.input_file_id)
    yard.write_input([])
    await fetch_input(yard.services, batch_id)
    assert (await yard.finish(batch_id)).counts.completed == 2


async def test_an_input_over_the_limit_is_refused(yard: Yard) -> None:
    limits = yard.services.settings.limits.model_copy(update={"max_bytes": 100})
    yard.set(limits=limits)
    batch_id = await yard.create([chat_line("a"), chat_line("b")], public_urls=True)
    with pytest.raises(StorageError, match="larger than 100 bytes"):
        await fetch_input(yard.services, batch_id)
