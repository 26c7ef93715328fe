"""Publishing: once, by who holds the batch, and never over the files of somebody else."""

from __future__ import annotations

import gzip
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from backports import zstd

from batchyard.batch_error import BatchError
from batchyard.database.sealed import give_keys, new_sealing_key
from batchyard.errors import EngineStartFailed, InputRefused, LeaseLost, StoreUnavailable
from batchyard.lifecycle import BatchStatus
from batchyard.services.segments.segments import put_bytes, read_object
from batchyard.services.stop_batch import stop_failed
from batchyard.steps.collect import publish
from batchyard.steps.collect.collect import collect_results
from batchyard.steps.collect.publish import publish_results
from batchyard.storage.memory import MemoryStorage
from batchyard.store import Batches
from tests.lifecycle import run_chunks
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchyard.steps.collect.collect import Collected
    from batchyard.store import BatchRecord

MODEL = "stub-model"


async def claimed(yard: Yard, batch_id: str, owner: str) -> int:
    """The epoch of a claim after every earlier one has run out."""

    async def run_out(connection: Any) -> None:
        await connection.exec_driver_sql("UPDATE batches SET lease_expires_at = 1")

    await yard.services.store.database.write(run_out)
    (lease,) = await yard.services.store.batch_leases.claim(
        owner=owner, lease_seconds=60, batch_id=batch_id
    )
    return lease.epoch


async def collected(yard: Yard) -> tuple[str, Collected, Path]:
    """A batch whose files are made under a lease, and where its output is wanted."""
    output = yard.folder / "out.jsonl"
    batch_id = await yard.prepared([chat_line("a")], output=str(output))
    await run_chunks(yard.services, MODEL, batch_id=batch_id)
    epoch = await claimed(yard, batch_id, "me")
    return batch_id, await collect_results(yard.services, batch_id, epoch), output


async def test_one_who_lost_the_batch_does_not_touch_the_users_files(yard: Yard) -> None:
    batch_id, made, output = await collected(yard)
    await claimed(yard, batch_id, "other")
    output.write_text("of the other one")
    with pytest.raises(LeaseLost):
        await publish_results(yard.services, batch_id, made)
    assert output.read_text() == "of the other one"


async def test_one_who_loses_the_batch_while_it_delivers_does_not_end_it(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id, made, _ = await collected(yard)
    write = publish.write_location

    async def write_slowly(*args: Any, **options: Any) -> None:
        await write(*args, **options)
        await claimed(yard, batch_id, "other")

    monkeypatch.setattr(publish, "write_location", write_slowly)
    with pytest.raises(LeaseLost):
        await publish_results(yard.services, batch_id, made)
    assert (await yard.services.store.batches.get(batch_id)).status is BatchStatus.FINALIZING


@pytest.mark.parametrize(
    ("suffix", "unpack"), [(".gz", gzip.decompress), (".zst", zstd.decompress)]
)
async def test_a_place_whose_name_says_so_gets_a_compressed_file(
    yard: Yard, suffix: str, unpack: Callable[[bytes], bytes]
) -> None:
    output, errors = yard.folder / f"out.jsonl{suffix}", yard.folder / f"err.jsonl{suffix}"
    lines = [chat_line("a"), chat_line("b") | {"body": {"model": MODEL}}]
    batch = await yard.run(lines, output=str(output), error=str(errors), on_invalid="error_file")
    assert not batch.undelivered
    for path, file_id in ((output, batch.output_file_id), (errors, batch.error_file_id)):
        file = await yard.services.store.files.get(str(file_id))
        stored = await read_object(yard.services.storage, file.storage_key)
        assert unpack(path.read_bytes()) == stored
        assert stored.startswith(b"{")
    assert list(yard.services.spool.glob("packed-*")) == []


async def test_no_copy_of_a_file_stays_on_the_disk(yard: Yard) -> None:
    """Of an object store without local files: a control process may run for weeks."""
    yard.services = replace(yard.services, storage=MemoryStorage())
    batch_id = await yard.prepared([chat_line("a")], error=str(yard.folder / "errors.jsonl"))
    await yard.services.store.batches.cancel(batch_id)
    epoch = await claimed(yard, batch_id, "me")
    made = await collect_results(yard.services, batch_id, epoch)
    assert (await publish_results(yard.services, batch_id, made)).undelivered is None
    assert list(yard.services.spool.iterdir()) == []


async def test_a_file_that_is_made_again_is_written_as_it_is_now(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch could not be ended, and a runner has finished a line meanwhile."""
    yard.services = replace(yard.services, storage=MemoryStorage())
    batch_id, made, output = await collected(yard)
    assert made.output is not None

    async def away(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(Batches, "finish", away)
        with pytest.raises(StoreUnavailable):
            await publish_results(yard.services, batch_id, made)
    await put_bytes(yard.services.storage, made.output.storage_key, [b"other lines\n"])
    await publish_results(yard.services, batch_id, made)
    assert output.read_bytes() == b"other lines\n"


async def test_results_do_not_wait_for_a_place_that_no_key_opens(yard: Yard) -> None:
    """The key was lost, and the operator goes on with another one."""
    batch_id, made, output = await collected(yard)
    give_keys(yard.services.store.database._engine.dialect, [new_sealing_key()])
    batch = await publish_results(yard.services, batch_id, made)
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 1)
    assert len(await yard.results(batch.output_file_id)) == 1
    why = "The output file could not be written: no key opens the place where it was wanted"
    assert batch.undelivered == {"output": why}
    assert not output.exists()


async def test_what_has_ended_is_not_delivered_again(yard: Yard) -> None:
    """The user may have moved the file away since."""
    batch_id, made, output = await collected(yard)
    ended = await publish_results(yard.services, batch_id, made)
    output.unlink()
    assert await publish_results(yard.services, batch_id, made) == ended
    assert not output.exists()


async def test_results_of_an_earlier_run_do_not_stay_where_there_are_none_now(yard: Yard) -> None:
    stale = yard.folder / "errors.jsonl"
    stale.write_text("of an earlier run")
    batch_id = await yard.create(
        [chat_line("b")], output=str(yard.folder / "b.jsonl"), error=str(stale)
    )
    ended = await yard.finish(batch_id)
    assert (ended.status, ended.error_file_id) == (BatchStatus.COMPLETED, None)
    assert not stale.exists()


async def test_one_who_lost_the_batch_does_not_make_it_fail(yard: Yard) -> None:
    batch_id = await yard.create([chat_line("a")])
    epoch = await claimed(yard, batch_id, "me")
    await claimed(yard, batch_id, "other")
    refused = InputRefused([BatchError("empty_file", "The file has no request lines.")])
    with pytest.raises(LeaseLost):
        await stop_failed(yard.services, batch_id, refused, epoch)
    assert (await yard.services.store.batches.get(batch_id)).status is BatchStatus.VALIDATING


async def test_one_who_lost_a_batch_in_progress_does_not_stop_it(yard: Yard) -> None:
    batch_id = await yard.prepared([chat_line("a")])
    epoch = await claimed(yard, batch_id, "me")
    await claimed(yard, batch_id, "other")
    with pytest.raises(LeaseLost):
        await stop_failed(yard.services, batch_id, EngineStartFailed("no GPU"), epoch)
    assert (await yard.services.store.batches.get(batch_id)).status is BatchStatus.IN_PROGRESS


async def test_a_batch_that_is_cancelled_as_it_is_stopped_stays_cancelled(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = yard.services.store.batches
    batch_id = await yard.prepared([chat_line("a")])
    read = batches.get

    async def cancelled_meanwhile(batch_id: str) -> BatchRecord:
        batch = await read(batch_id)
        await batches.cancel(batch_id)
        return batch

    monkeypatch.setattr(batches, "get", cancelled_meanwhile)
    stopped = await stop_failed(yard.services, batch_id, EngineStartFailed("no GPU"))
    assert stopped.status is BatchStatus.CANCELLING
