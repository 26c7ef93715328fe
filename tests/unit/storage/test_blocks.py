"""Streams cut into blocks of one size."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from batchyard.storage.base import StoredObject
from batchyard.storage.blocks import Tally, blocks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@given(st.lists(st.binary(max_size=40)), st.integers(min_value=1, max_value=16))
async def test_blocks_have_one_size_and_the_same_bytes(parts: list[bytes], size: int) -> None:
    """Every block but the last is full, none is empty, and nothing is lost or moved."""

    async def source() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    cut = [block async for block in blocks(source(), size)]

    assert b"".join(cut) == b"".join(parts)
    assert all(len(block) == size for block in cut[:-1])
    assert all(0 < len(block) <= size for block in cut)


def test_a_tally_counts_and_hashes() -> None:
    """The receipt is that of the whole content."""
    tally = Tally()
    for block in (b"ab", b"", b"c"):
        tally.add(block)

    assert tally.stored("k") == StoredObject("k", 3, hashlib.sha256(b"abc").hexdigest())
