"""Fetching: whose file may be run, and how much of it."""

from __future__ import annotations

import gzip
import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from backports import zstd

from batchyard.errors import InputRefused, StorageError, TransitionConflict
from batchyard.files.delete import delete_file
from batchyard.lifecycle import BatchStatus
from batchyard.locations.local_file import LocalFile
from batchyard.locations.location import parse_location
from batchyard.locations.several import Several
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.steps.fetch.input_file import store_input
from batchyard.store import NewFile
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

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


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
async def test_a_compressed_input_runs_as_the_plain_one_does(
    yard: Yard, pack: Callable[[bytes], bytes]
) -> None:
    """What is stored are its lines, to which the plan's offsets belong."""
    lines = b"".join(json.dumps(chat_line(f"id-{n}")).encode() + b"\n" for n in range(3000))
    source = yard.folder / "in.jsonl.gz"
    source.write_bytes(pack(lines))
    batch = await yard.run([], input=str(source), output=str(yard.folder / "out.jsonl"))
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 3000)
    file = await yard.services.store.files.get(batch.input_file_id)
    assert (file.filename, file.size_bytes) == ("in.jsonl", len(lines))
    assert file.sha256 == hashlib.sha256(lines).hexdigest()


async def test_a_compressed_input_is_one_of_several(yard: Yard) -> None:
    one, two = yard.folder / "one.jsonl", yard.folder / "two.jsonl.zst"
    one.write_text(json.dumps(chat_line("one")))
    two.write_bytes(zstd.compress(json.dumps(chat_line("two")).encode()))
    place = Several((LocalFile(one), LocalFile(two)))
    batch = await yard.run([], input=place.text)
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 2)


@pytest.mark.parametrize("client", [False, True], ids=["an operator's", "a client's"])
async def test_an_input_that_decompresses_to_very_much_is_refused_before_it_is_stored(
    yard: Yard, client: bool
) -> None:
    source = yard.folder / "in.jsonl.zst"
    source.write_bytes(zstd.compress(bytes(64 * 1024**2)) * 20)
    place = parse_location(str(source))
    request = BatchRequest(input=place, public_urls=client)
    batch_id = await create_batch(yard.services, request)
    with pytest.raises(StorageError, match="decompress"):
        await fetch_input(yard.services, batch_id)
    assert [key async for key in yard.services.storage.list("files/")] == []


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
