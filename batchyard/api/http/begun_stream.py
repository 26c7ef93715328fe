"""Streams of which the first block is read before an answer has its status."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


async def begun(blocks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The same blocks, the first of them read already.

    So an object that is gone is no 200. Raises what reading the first block raises.
    """
    first = await anext(blocks, b"")

    async def all_blocks() -> AsyncGenerator[bytes]:
        async with aclosing(blocks):
            yield first
            async for block in blocks:
                yield block

    return all_blocks()
