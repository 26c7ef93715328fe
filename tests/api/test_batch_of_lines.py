"""Batches whose lines come with the request: the file that they become."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.api.batch_of_lines import accept_batch_of
from batchyard.errors import IdempotencyConflict, RequestRefused
from batchyard.steps.create import BatchRequest
from batchyard.store import IdempotencyKey
from tests.api.conftest import LINE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.services.services import Services

REQUEST = BatchRequest(tenant="one", endpoint="/v1/completions")
KEY = IdempotencyKey(route="POST /v1/x", key="k", fingerprint="f")


async def lines() -> AsyncIterator[bytes]:
    yield LINE


async def stored(services: Services) -> list[str]:
    return [key async for key in services.storage.list("files/")]


async def test_lines_become_an_input_file_of_the_tenant_and_a_batch_of_it(
    services: Services,
) -> None:
    batch = await accept_batch_of(services, lines(), REQUEST)
    file = await services.store.files.get(batch.input_file_id, tenant="one")
    assert (file.purpose, file.size_bytes, batch.tenant) == ("batch", len(LINE), "one")
    assert file.expires_at is not None
    assert await stored(services) == [file.storage_key]


async def test_a_batch_that_is_refused_leaves_no_file(services: Services) -> None:
    with pytest.raises(RequestRefused):
        await accept_batch_of(services, lines(), REQUEST, batches_per_hour=0)
    assert (await services.store.files.page("one", limit=10)) == []
    assert await stored(services) == []


async def test_a_request_that_is_repeated_leaves_one_file(services: Services) -> None:
    first = await accept_batch_of(services, lines(), REQUEST, idempotency=KEY)
    again = await accept_batch_of(services, lines(), REQUEST, idempotency=KEY)
    other = IdempotencyKey(route=KEY.route, key=KEY.key, fingerprint="another")
    with pytest.raises(IdempotencyConflict):
        await accept_batch_of(services, lines(), REQUEST, idempotency=other)
    assert again.id == first.id
    assert [file.id for file in await services.store.files.page("one", limit=10)] == [
        first.input_file_id
    ]
    assert len(await stored(services)) == 1
