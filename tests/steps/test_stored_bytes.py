"""The quota of stored bytes, where a batch fetches its input and where it has its results."""

from __future__ import annotations

import gzip
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from batchyard.errors import StorageLimitExceeded
from batchyard.files.complete import complete_upload
from batchyard.files.parts import add_part
from batchyard.lifecycle import BatchStatus
from batchyard.store import NewUpload, Quota
from tests.steps.conftest import chat_line
from tests.steps.test_retry import Written
from tests.unit.storage.web_server import running_web_server

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.steps.conftest import Yard

MIB = 1024**2
LINES = [chat_line("a"), chat_line("b")]


async def test_an_input_that_is_too_large_for_the_quota_fails_its_batch_and_leaves_nothing(
    yard: Yard,
) -> None:
    size = yard.write_input(LINES).stat().st_size
    await yard.services.store.tenants.set_quota("full", Quota(max_stored_bytes=size - 1))
    batch = await yard.run(LINES, tenant="full")
    assert batch.status is BatchStatus.FAILED
    assert batch.errors is not None
    assert [error.code for error in batch.errors] == ["storage_limit_exceeded"]
    assert f"it has 0, and this would add {size}" in batch.errors[0].message
    root = yard.services.settings.home_folder / "objects"
    assert [each for each in root.rglob("*") if each.is_file()] == []


async def test_an_input_at_a_url_is_no_longer_fetched_when_it_is_too_large_for_the_quota(
    yard: Yard,
) -> None:
    """It could fill the disk before it is refused."""
    sent = 0

    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        while sent < 50 * MIB:
            await response.write(bytes(MIB))
            sent += MIB
        return response

    await yard.services.store.tenants.set_quota("full", Quota(max_stored_bytes=MIB))
    async with running_web_server() as server:
        server.answers = [endless]
        batch = await yard.run([], tenant="full", input=server.url())
    assert batch.status is BatchStatus.FAILED
    assert [error.code for error in batch.errors or ()] == ["storage_limit_exceeded"]
    assert sent < 50 * MIB


async def test_an_upload_is_no_longer_decompressed_when_it_is_too_large_for_the_quota(
    yard: Yard,
) -> None:
    """A few kilobytes could fill the disk before they are refused, and many of them at once."""
    packed = gzip.compress(b"{}\n" + b" " * 50 * MIB)
    storage = Written(yard.services.settings.home_folder / "objects")
    services = replace(yard.services, storage=storage)
    quota = Quota(max_stored_bytes=MIB)
    await services.store.tenants.set_quota("full", quota)
    upload = await services.store.uploads.create(
        NewUpload(
            tenant="full", filename="in.jsonl", purpose="batch", bytes=len(packed), mime_type="text"
        ),
        quota=quota,
    )

    async def content() -> AsyncGenerator[bytes]:
        yield packed

    part = await add_part(services, "full", upload.id, content())
    with pytest.raises(StorageLimitExceeded):
        await complete_upload(services, "full", upload.id, [part.id], None)
    assert storage.size_bytes < 10 * MIB
    assert (await services.store.uploads.get(upload.id)).status == "pending"


async def test_results_are_stored_though_they_are_more_than_the_quota_has_room_for(
    yard: Yard,
) -> None:
    """Finished work is never lost; it counts, so that the next input is refused."""
    size = yard.write_input(LINES).stat().st_size
    await yard.services.store.tenants.set_quota("full", Quota(max_stored_bytes=size))
    batch = await yard.run(LINES, tenant="full")
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 2)
    assert len(await yard.results(batch.output_file_id)) == 2
    assert (await yard.services.store.tenants.usage("full")).stored_bytes > size
