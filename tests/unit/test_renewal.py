"""Leases are renewed beside what needs them, and what has lost its lease is stopped."""

from __future__ import annotations

import asyncio

import pytest

from batchyard.errors import LeaseLost, StoreUnavailable
from batchyard.services.renewal import renewing
from tests.patience import PATIENCE


async def test_a_renewal_that_fails_is_not_the_last() -> None:
    renewals = 0
    renewed_often = asyncio.Event()

    async def renew() -> None:
        nonlocal renewals
        renewals += 1
        if renewals == 1:
            raise StoreUnavailable("The database is away.")
        if renewals == 2:
            raise ValueError("a defect")
        renewed_often.set()

    async with asyncio.timeout(PATIENCE * 10), renewing(renew, every_seconds=0.001, what="it"):
        await renewed_often.wait()


async def test_a_lost_lease_ends_the_block_and_lets_it_clean_up() -> None:
    is_clean = False

    async def renew() -> None:
        raise LeaseLost("Another has it.")

    async def work() -> None:
        nonlocal is_clean
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            is_clean = True

    with pytest.raises(LeaseLost, match="Another has it"):
        async with renewing(renew, every_seconds=0.001, what="it"):
            await work()
    assert is_clean


async def test_a_time_limit_of_the_block_is_not_a_lost_lease() -> None:
    async def renew() -> None: ...

    with pytest.raises(TimeoutError):
        async with renewing(renew, every_seconds=60, what="it"), asyncio.timeout(0.001):
            await asyncio.sleep(60)


async def test_nothing_is_renewed_after_the_block() -> None:
    renewals = 0

    async def renew() -> None:
        nonlocal renewals
        renewals += 1

    async with renewing(renew, every_seconds=0.001, what="it"):
        await asyncio.sleep(0.01)
    before = renewals
    await asyncio.sleep(0.01)
    assert renewals == before > 0
