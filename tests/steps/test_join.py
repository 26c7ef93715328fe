"""A batch of several files: whose they are, what they become, and where an error is."""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import InputRefused, ObjectTooLarge
from batchyard.files.delete import delete_file
from batchyard.files.upload import FileUse, upload_file
from batchyard.steps.create import BatchRequest, create_batch
from batchyard.steps.fetch import fetch_input
from batchyard.steps.prepare import prepare_batch
from batchyard.wire import RequestCounts
from tests.steps.conftest import CHAT, Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def line(custom_id: str, **changes: Any) -> bytes:
    return json.dumps({**chat_line(custom_id), **changes}).encode()


async def uploaded(yard: Yard, content: bytes, tenant: str = "default") -> str:
    async def blocks() -> AsyncIterator[bytes]:
        yield content[:1]
        yield content[1:]

    use = FileUse("in.jsonl", "batch")
    return (await upload_file(yard.services, tenant, blocks(), lambda: use)).id


async def created(yard: Yard, *file_ids: str) -> str:
    return await create_batch(yard.services, BatchRequest(input_file_ids=file_ids, endpoint=CHAT))


async def content(yard: Yard, file_id: str) -> bytes:
    file = await yard.services.store.files.get(file_id)
    return b"".join([part async for part in yard.services.storage.get(file.storage_key)])


async def test_the_lines_of_all_files_are_one_batch_in_their_order(yard: Yard) -> None:
    one = await uploaded(yard, codecs.BOM_UTF8 + line("b") + b"\n" + line("a"))
    two = await uploaded(yard, codecs.BOM_UTF8 + line("c") + b"\r\n")
    batch = await yard.finish(await created(yard, two, one))
    assert batch.counts == RequestCounts(3, 3, 0)
    results = await yard.results(batch.output_file_id)
    assert [each["custom_id"] for each in results] == ["c", "b", "a"]
    joined = line("c") + b"\r\n" + line("b") + b"\n" + line("a") + b"\n"
    assert await content(yard, batch.input_file_id) == joined


async def test_an_error_names_its_file_and_the_line_there(yard: Yard) -> None:
    one = await uploaded(yard, b"\n" + line("a") + b"\n" + line("b", method="GET"))
    two = await uploaded(yard, line("c") + b"\n" + line("a") + b"\n")
    batch_id = await created(yard, one, two)
    await fetch_input(yard.services, batch_id)
    with pytest.raises(InputRefused) as refused:
        await prepare_batch(yard.services, batch_id)
    assert [(each.code, each.line, each.message) for each in refused.value.entries] == [
        ("invalid_method", 3, f"{one}, line 3: method must be POST."),
        (
            "duplicate_custom_id",
            5,
            f"{two}, line 2: This custom_id was used on an earlier line.",
        ),
    ]


async def test_a_file_that_may_not_be_read_is_named(yard: Yard) -> None:
    own, others = await uploaded(yard, line("a")), await uploaded(yard, line("b"), "other")
    with pytest.raises(InputRefused, match=f"Cannot find file {others}"):
        await fetch_input(yard.services, await created(yard, own, others))
    await delete_file(yard.services, "default", own)
    with pytest.raises(InputRefused, match=f"Cannot find file {own}"):
        await fetch_input(yard.services, await created(yard, own))


async def test_the_limit_is_that_of_all_files_together(yard: Yard) -> None:
    file_id = await uploaded(yard, line("a"))
    limits = yard.services.settings.limits
    yard.set(limits=limits.model_copy(update={"max_bytes": 2 * len(line("a")) + 1}))
    with pytest.raises(ObjectTooLarge):
        await fetch_input(yard.services, await created(yard, file_id, file_id, file_id))


async def test_a_fetch_that_is_repeated_makes_the_same_input(yard: Yard) -> None:
    file_id = await uploaded(yard, line("a"))
    batch_id = await created(yard, file_id)
    await fetch_input(yard.services, batch_id)
    batch = await yard.services.store.batches.get(batch_id)
    await yard.services.store.files.delete(file_id)
    assert await fetch_input(yard.services, batch_id) == len(line("a")) + 1
    assert await yard.services.store.batches.get(batch_id) == batch
    assert [part.lines for part in batch.options.parts] == [1]
