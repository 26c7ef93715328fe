"""A batch of several files: whose they are, what they become, and where an error is."""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.batch_error import InputPart
from batchyard.errors import (
    InputRefused,
    LocationRefused,
    ObjectNotFound,
    ObjectTooLarge,
    RequestRefused,
)
from batchyard.files.delete import delete_file
from batchyard.files.upload import FileUse, upload_file
from batchyard.locations.local_file import LocalFile
from batchyard.locations.location import parse_location
from batchyard.locations.several import Several
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.steps.retry.retry import retry_batch
from batchyard.wire import RequestCounts
from tests.lifecycle import prepare_batch
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
    return (await upload_file(yard.services, tenant, blocks(), lambda: use, lambda: True)).id


async def created(yard: Yard, *file_ids: str, **request: Any) -> str:
    wanted = BatchRequest(input_file_ids=file_ids, endpoint=CHAT, **request)
    return await create_batch(yard.services, wanted)


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
    three = await created(yard, file_id, file_id, file_id, public_urls=True)
    with pytest.raises(ObjectTooLarge):
        await fetch_input(yard.services, three)


async def test_a_fetch_that_is_repeated_makes_the_same_input(yard: Yard) -> None:
    file_id = await uploaded(yard, line("a"))
    batch_id = await created(yard, file_id)
    await fetch_input(yard.services, batch_id)
    batch = await yard.services.store.batches.get(batch_id)
    await yard.services.store.files.delete(file_id)
    assert await fetch_input(yard.services, batch_id) == len(line("a")) + 1
    assert await yard.services.store.batches.get(batch_id) == batch
    assert [part.lines for part in batch.options.parts] == [1]


# -- places that an operator names -----------------------------------------------------------------


def placed(yard: Yard, **contents: bytes) -> Several:
    for name, content in contents.items():
        (yard.folder / f"{name}.jsonl").write_bytes(content)
    return Several(tuple(LocalFile(yard.folder / f"{name}.jsonl") for name in contents))


async def test_the_lines_at_several_places_are_one_batch(yard: Yard) -> None:
    """None of the limits of a client's file applies."""
    limits = yard.services.settings.limits
    yard.set(limits=limits.model_copy(update={"max_bytes": 1}))
    inputs = placed(
        yard, two=codecs.BOM_UTF8 + line("c") + b"\r\n", one=line("b") + b"\n" + line("a")
    )
    batch = await yard.finish(await create_batch(yard.services, BatchRequest(input=inputs)))
    assert [each["custom_id"] for each in await yard.results(batch.output_file_id)] == [
        *("c", "b", "a")
    ]
    joined = line("c") + b"\r\n" + line("b") + b"\n" + line("a") + b"\n"
    assert await content(yard, batch.input_file_id) == joined
    again = yard.folder / "one.jsonl"
    with pytest.raises(RequestRefused, match=r"the input file of .* and output are the same"):
        await retry_batch(yard.services, batch.id, output=LocalFile(again))


async def test_an_error_names_its_place_and_the_line_there(yard: Yard) -> None:
    inputs = placed(yard, one=line("a"), two=b"\n" + line("b", method="GET"))
    batch_id = await create_batch(yard.services, BatchRequest(input=inputs))
    # As after a crash, before the joined file had its row.
    counted = [InputPart(str(place), 1) for place in inputs.places]
    await yard.services.store.batch_places.note_parts(batch_id, counted)
    await fetch_input(yard.services, batch_id)
    with pytest.raises(InputRefused) as refused:
        await prepare_batch(yard.services, batch_id)
    (error,) = refused.value.entries
    assert error.message == f"{yard.folder / 'two.jsonl'}, line 2: method must be POST."


async def test_a_place_without_a_file_is_named(yard: Yard) -> None:
    inputs = placed(yard, one=line("a"), two=line("b"))
    (yard.folder / "two.jsonl").unlink()
    batch_id = await create_batch(yard.services, BatchRequest(input=inputs))
    with pytest.raises(ObjectNotFound, match=r"two\.jsonl"):
        await fetch_input(yard.services, batch_id)


async def test_results_replace_none_of_the_inputs(yard: Yard) -> None:
    inputs = placed(yard, one=line("a"), two=line("b"))
    with pytest.raises(RequestRefused, match="input and output are the same place"):
        await create_batch(yard.services, BatchRequest(input=inputs, output=inputs.places[1]))
    with pytest.raises(LocationRefused, match="cannot be written to"):
        await create_batch(yard.services, BatchRequest(output=inputs))


def test_several_places_are_kept_as_text_and_shown_without_secrets() -> None:
    texts = ("a b.jsonl", "s3://bucket/key", "https://host.example/in?X-Amz-Signature=hunter2")
    inputs = Several(tuple(map(parse_location, texts)))
    assert parse_location(inputs.text) == inputs
    assert "hunter2" not in str(inputs)
    assert str(inputs).startswith("a b.jsonl, s3://bucket/key, https://host.example/in")
    with pytest.raises(LocationRefused, match="without its places"):
        parse_location("several://x")
