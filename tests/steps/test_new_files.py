"""Each file of a folder becomes a batch once, whoever looks, however often."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchyard.errors import ObjectNotFound, RequestRefused
from batchyard.lifecycle import BatchStatus
from batchyard.locations.folder import LocalFolder
from batchyard.services.user_locations import places_of
from batchyard.steps.create import new_files
from batchyard.steps.create.create import BatchRequest
from batchyard.steps.create.new_files import NewFiles, submit_new_files
from batchyard.store import Quota
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from pathlib import Path

    from tests.steps.conftest import Yard

REQUEST = BatchRequest(models=("stub-model",))


def put(yard: Yard, name: str, content: str | None = None, *, age_seconds: float = 60) -> Path:
    """A file in the folder, last written so long ago."""
    path = yard.folder / "in" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chat_line("id-1", name)) + "\n" if content is None else content)
    written = time.time() - age_seconds
    os.utime(path, (written, written))
    return path


async def look(yard: Yard, limit: int = 100, **changes: Any) -> NewFiles:
    """What one run of the flow does."""
    (yard.folder / "out").mkdir(exist_ok=True)
    places = {"source": LocalFolder(yard.folder / "in"), "target": LocalFolder(yard.folder / "out")}
    return await submit_new_files(
        yard.services, **{**places, "request": REQUEST, "limit": limit, **changes}
    )


async def count(yard: Yard) -> int:
    return len(await yard.services.store.batches.page(limit=1000))


async def test_a_file_whose_name_is_not_utf8_leaves_the_others_as_they_are(yard: Yard) -> None:
    put(yard, "a.jsonl")
    put(yard, os.fsdecode(b"b\xff.jsonl"), "{}")
    put(yard, "c.jsonl")
    found = await look(yard)
    assert set(found.batches) == {"a.jsonl", "c.jsonl"}
    assert found.refused == {"b\N{REPLACEMENT CHARACTER}.jsonl": "its name is not UTF-8: rename it"}


async def test_each_file_makes_one_batch_whose_results_have_its_name(yard: Yard) -> None:
    put(yard, "a.jsonl")
    put(yard, "2026/b.jsonl")
    found = await look(yard)
    assert sorted(found.batches) == ["2026/b.jsonl", "a.jsonl"]
    for batch_id in found.batches.values():
        await yard.finish(batch_id)
    out = yard.folder / "out"
    written = sorted(path.relative_to(out) for path in out.rglob("*.jsonl"))
    assert [str(path) for path in written] == ["2026/b.results.jsonl", "a.results.jsonl"]
    again = await look(yard)
    assert (again.batches, again.known) == ({}, 2)


async def test_a_compressed_file_makes_a_batch_whose_results_are_compressed(yard: Yard) -> None:
    put(yard, "a.jsonl")
    packed = put(yard, "a.jsonl.gz")
    content, written = gzip.compress(packed.read_bytes()), packed.stat().st_mtime
    packed.write_bytes(content)
    os.utime(packed, (written, written))
    found = await look(yard)
    assert sorted(found.batches) == ["a.jsonl", "a.jsonl.gz"]
    for batch_id in found.batches.values():
        await yard.finish(batch_id)
    out = yard.folder / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        *("a.results.jsonl", "a.results.jsonl.gz")
    ]
    assert json.loads(gzip.decompress((out / "a.results.jsonl.gz").read_bytes()))


async def test_with_a_template_a_dataset_is_a_new_file_too(yard: Yard) -> None:
    rows = put(yard, "a.parquet", "")
    pq.write_table(pa.table({"question": ["first", "second"]}), rows)
    os.utime(rows, (1.0, 1.0))
    assert not (await look(yard)).batches
    body = (
        '{"model": "stub-model", "messages": [{"role": "user", "content": {{ question|tojson }}}]}'
    )
    found = await look(yard, request=replace(REQUEST, template=body))
    await yard.finish(found.batches["a.parquet"])
    table = pq.read_table(yard.folder / "out" / "a.results.parquet")
    assert table.column("question").to_pylist() == ["first", "second"]
    assert set(table.column("status").to_pylist()) == {"succeeded"}


async def test_without_a_target_the_results_stay_in_the_store(yard: Yard) -> None:
    put(yard, "a.jsonl")
    found = await look(yard, target=None)
    places = await places_of(yard.services, found.batches["a.jsonl"])
    assert (places.output, places.error) == (None, None)


async def test_a_file_that_was_replaced_is_new(yard: Yard) -> None:
    put(yard, "a.jsonl")
    first = await look(yard)
    put(yard, "a.jsonl", age_seconds=50)
    second = await look(yard)
    assert first.batches["a.jsonl"] != second.batches["a.jsonl"]
    assert await count(yard) == 2


async def test_another_request_makes_no_second_batch_of_a_file(yard: Yard) -> None:
    put(yard, "a.jsonl")
    await look(yard)
    again = await look(yard, request=BatchRequest(completion_window="2h"))
    assert (again.batches, again.known) == ({}, 1)


async def test_runs_at_the_same_time_make_one_batch_of_each_file(yard: Yard) -> None:
    for number in range(20):
        put(yard, f"{number}.jsonl")
    found = await asyncio.gather(*(look(yard) for _ in range(3)))
    assert sum(len(each.batches) for each in found) == 20 == await count(yard)
    assert all(len(each.batches) + each.known == 20 for each in found)


@pytest.mark.parametrize("name", [".a.jsonl", ".tmp/a.jsonl", "a.jsonl.part", "a.txt"])
async def test_a_file_with_a_temporary_or_another_name_is_left_alone(yard: Yard, name: str) -> None:
    put(yard, name)
    assert await look(yard) == NewFiles()


async def test_a_file_that_was_just_written_waits(yard: Yard) -> None:
    put(yard, "a.jsonl", age_seconds=5)
    assert await look(yard) == NewFiles(unfinished=1)
    put(yard, "a.jsonl")
    assert list((await look(yard)).batches) == ["a.jsonl"]


async def test_what_is_over_the_limit_is_left_for_the_next_run(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more files than are looked up at once."""
    monkeypatch.setattr(new_files, "_KEYS_AT_ONCE", 2)
    for number in range(7):
        put(yard, f"{number}.jsonl")
    done = [await look(yard, limit=5), await look(yard, limit=5)]
    assert [list(each.batches) for each in done] == [
        [f"{number}.jsonl" for number in range(5)],
        ["5.jsonl", "6.jsonl"],
    ]
    assert done[0].held_back == "5 batches were created, which is the limit of one run."
    assert (done[1].known, done[1].held_back) == (5, None)


async def test_a_bad_file_fails_alone(yard: Yard) -> None:
    for name, content in {"bad": "no json\n", "empty": "", "good": None}.items():
        put(yard, f"{name}.jsonl", content)
    found = await look(yard)
    ended = {name: (await yard.finish(batch)).status for name, batch in found.batches.items()}
    assert ended == {
        "bad.jsonl": BatchStatus.FAILED,
        "empty.jsonl": BatchStatus.FAILED,
        "good.jsonl": BatchStatus.COMPLETED,
    }


async def test_a_file_whose_results_have_no_place_is_refused_and_the_others_go_on(
    yard: Yard,
) -> None:
    put(yard, "a.jsonl")
    put(yard, "b.jsonl")
    (yard.folder / "out" / "a.results.jsonl").mkdir(parents=True)
    found = await look(yard)
    assert list(found.batches) == ["b.jsonl"]
    assert "is a directory" in found.refused["a.jsonl"]
    (yard.folder / "out" / "a.results.jsonl").rmdir()
    assert list((await look(yard)).batches) == ["a.jsonl"]


async def test_files_over_the_tenants_quota_wait(yard: Yard) -> None:
    put(yard, "a.jsonl")
    put(yard, "b.jsonl")
    await yard.services.store.tenants.set_quota("default", Quota(max_active_batches=1))
    found = await look(yard)
    assert list(found.batches) == ["a.jsonl"]
    assert found.held_back is not None
    await yard.finish(found.batches["a.jsonl"])
    assert list((await look(yard)).batches) == ["b.jsonl"]


async def test_a_request_that_can_never_be_run_is_refused_at_once(yard: Yard) -> None:
    put(yard, "a.jsonl")
    with pytest.raises(RequestRefused, match="priority must be"):
        await look(yard, request=BatchRequest(priority=10**9))


async def test_results_must_not_become_new_files(yard: Yard) -> None:
    put(yard, "a.jsonl")
    with pytest.raises(RequestRefused, match="results would be new files"):
        await look(yard, target=LocalFolder(yard.folder / "in" / "out"))


async def test_a_folder_that_is_missing_is_said(yard: Yard) -> None:
    with pytest.raises(ObjectNotFound, match="does not exist"):
        await look(yard)
