"""Cutting a block short from another task."""

from __future__ import annotations

import asyncio

from batchyard.services.leases.interruption import Interruption
from tests.patience import PATIENCE


async def test_the_block_ends_early_and_in_silence() -> None:
    interruption = Interruption()
    asyncio.get_running_loop().call_soon(interruption.now)
    async with asyncio.timeout(PATIENCE * 5), interruption:
        await asyncio.sleep(3600)
    assert interruption.has_happened


async def test_one_that_comes_before_the_block_ends_it_at_its_first_await() -> None:
    interruption = Interruption()
    interruption.now()
    has_begun = has_gone_on = False
    async with asyncio.timeout(PATIENCE * 5), interruption:
        has_begun = True
        await asyncio.sleep(3600)
        has_gone_on = True
    assert (has_begun, has_gone_on) == (True, False)


async def test_a_second_one_leaves_the_clean_up_alone() -> None:
    """A lease may be lost twice: seen in the database, and claimed again by this process."""
    interruption = Interruption()
    cleaning, cleaned = asyncio.Event(), False

    async def interrupt_twice() -> None:
        interruption.now()
        await cleaning.wait()
        interruption.now()

    twice = asyncio.create_task(interrupt_twice())
    async with asyncio.timeout(PATIENCE * 5), interruption:
        try:
            await asyncio.sleep(3600)
        finally:
            cleaning.set()
            await twice
            cleaned = True
    assert cleaned
    assert interruption.has_happened


async def test_one_that_comes_after_the_block_has_no_effect() -> None:
    interruption = Interruption()
    async with interruption:
        pass
    interruption.now()
    await asyncio.sleep(0)
    assert not interruption.has_happened
