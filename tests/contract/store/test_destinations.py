"""Where result files go, and what is known of these places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.batch_error import InputPart
from batchyard.errors import RecordNotFound, TransitionConflict
from batchyard.lifecycle import BatchStatus
from batchyard.store import BatchLocations, BatchOptions, NewFile, UrlFacts
from batchyard.wire import BatchUsage
from tests.contract.store.outbox_samples import raw_rows
from tests.contract.store.samples import batch_in, begun_batch, new_batch

if TYPE_CHECKING:
    from batchyard.store import Store

NEW = "https://bucket.example/new?sign=hunter2"


async def test_a_batch_gets_other_destinations_and_keeps_the_rest(store: Store) -> None:
    batch = await store.batches.create(
        new_batch(
            locations=BatchLocations("in", "out", "error", template="{}"),
            options=BatchOptions(deduplicate=True, urls={"error": UrlFacts(5, "away")}),
        )
    )
    changed = await store.batch_places.redirect(batch.id, {"output": NEW}, {"output": 99})
    assert changed.options.urls == {"error": UrlFacts(5, "away"), "output": UrlFacts(99)}
    assert changed.options.deduplicate
    assert await store.batch_places.locations(batch.id) == BatchLocations(
        "in", NEW, "error", template="{}"
    )
    assert "hunter2" not in str(await raw_rows(store, "batches"))


@pytest.mark.parametrize("status", sorted(set(BatchStatus) - {"validating", "in_progress"}))
async def test_a_batch_whose_files_are_made_keeps_its_destinations(
    store: Store, status: BatchStatus
) -> None:
    batch = await batch_in(store, status)
    before = await store.batch_places.locations(batch.id)
    with pytest.raises(TransitionConflict):
        await store.batch_places.redirect(batch.id, {"output": NEW}, {"output": None})
    assert await store.batch_places.locations(batch.id) == before


async def test_doubts_are_noted_and_taken_back(store: Store) -> None:
    batch = await store.batches.create(
        new_batch(options=BatchOptions(urls={"output": UrlFacts(99)}))
    )
    await store.batch_places.note_doubts(batch.id, {"output": "away", "error": "slow"})
    noted = (await store.batches.get(batch.id)).options.urls
    assert noted == {"output": UrlFacts(99, "away"), "error": UrlFacts(None, "slow")}
    await store.batch_places.note_doubts(batch.id, {"error": "slow"})
    assert (await store.batches.get(batch.id)).options.urls["output"] == UrlFacts(99)
    with pytest.raises(RecordNotFound):
        await store.batch_places.note_doubts("batch_unknown", {})


async def test_the_lines_of_each_file_of_an_input_are_noted(store: Store) -> None:
    options = BatchOptions(deduplicate=True, parts=(InputPart("a"), InputPart("b")))
    batch = await store.batches.create(new_batch(options=options))
    await store.batch_places.note_parts(batch.id, [InputPart("a", 2), InputPart("b", 3)])
    noted = (await store.batches.get(batch.id)).options
    assert noted == BatchOptions(deduplicate=True, parts=(InputPart("a", 2), InputPart("b", 3)))


async def test_a_file_that_is_to_be_tried_again_is_in_the_outbox_as_the_batch_ends(
    store: Store,
) -> None:
    batch = await begun_batch(store)
    await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    output = NewFile(
        purpose="batch_output", filename="o", size_bytes=1, sha256="a" * 64, storage_key="files/o"
    )
    ended = await store.batches.finish(
        batch.id,
        target=BatchStatus.COMPLETED,
        output=output,
        error=None,
        counts=batch.counts,
        usage=BatchUsage(),
        undelivered={"output": "away"},
        again={"output": NEW},
    )
    (delivery,) = [
        each
        for each in await store.deliveries.page(batch_id=batch.id)
        if each.file_id == ended.output_file_id
    ]
    assert delivery.destination == "bucket.example"
    assert [each.message for each in ended.warnings] == ["away"]
