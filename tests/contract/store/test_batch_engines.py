"""What a batch remembers of the engines that had lines of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.contract.store.samples import begun_batch

if TYPE_CHECKING:
    from batchyard.store import Store


@pytest.mark.parametrize(
    ("engines", "is_invariant"),
    [([True], True), ([True, True], True), ([True, False], False), ([False, True], False)],
)
async def test_a_batch_is_batch_invariant_only_if_all_of_its_engines_were(
    store: Store, engines: list[bool], is_invariant: bool
) -> None:
    batch = await begun_batch(store)
    for each in engines:
        await store.batch_effects.note_engine(batch.id, is_batch_invariant=each)
    assert (await store.batches.get(batch.id)).options.batch_invariant is is_invariant
