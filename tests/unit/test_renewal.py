"""Leases are renewed beside what needs them, and what has lost its lease is stopped."""

from __future__ import annotations

import asyncio

import pytest

from batchyard.errors import LeaseLost, StoreUnavailable
from batchyard.services.leases import renewal
from batchyard.services.leases.renewal import Renewals, renewing
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


async def test_a_renewal_that_fails_is_soon_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the database is back, the lease may have run out, and others may claim it."""
    real_sleep = asyncio.sleep
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real_sleep(0)

    async def renew() -> None:
        if len(pauses) <= 2:
            raise StoreUnavailable("The database is away.")

    monkeypatch.setattr(asyncio, "sleep", sleep)
    async with asyncio.timeout(PATIENCE * 10), renewing(renew, every_seconds=20, what="it"):
        while len(pauses) < 4:
            await real_sleep(0)
    assert pauses[:4] == [20, 1, 1, 20]


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


LEASE_SECONDS = 60.0


class Process:
    """One whose renewals take the time that the test says, and what it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.takes_seconds = 0.0
        self.calls: list[str] = []
        monkeypatch.setattr(renewal, "clocks", lambda: (self.now, self.now))
        self.renewals = Renewals(self._renew, self._look, lease_seconds=LEASE_SECONDS)

    async def _renew(self) -> None:
        self.now += self.takes_seconds
        self.calls.append("renew")

    async def _look(self) -> None:
        self.calls.append("look")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


async def test_before_a_claim_a_late_renewal_is_made_up_for(process: Process) -> None:
    """What was lost meanwhile is known then, and no longer runs."""
    process.now += LEASE_SECONDS / 3
    await process.renewals.before_claim()
    assert process.calls == []
    process.now += LEASE_SECONDS / 3
    await process.renewals.before_claim()
    assert process.calls == ["renew", "look"]


async def test_a_process_that_renews_in_time_may_take_what_has_expired(process: Process) -> None:
    for _ in range(3):
        assert process.renewals.may_take_expired
        process.now += LEASE_SECONDS / 3
        await process.renewals.renew()


async def test_a_process_that_could_not_renew_leaves_what_has_expired_for_a_while(
    process: Process,
) -> None:
    """So could its owner not: the claim may take long, and the renewal come late during it."""
    process.now += LEASE_SECONDS * 0.6
    assert not process.renewals.may_take_expired
    await process.renewals.renew()
    assert not process.renewals.may_take_expired
    process.now += LEASE_SECONDS * 0.4
    assert process.renewals.may_take_expired


async def test_a_renewal_that_took_long_may_have_been_made_when_it_began(process: Process) -> None:
    process.takes_seconds = LEASE_SECONDS * 0.4
    await process.renewals.renew()
    process.now += LEASE_SECONDS * 0.2
    assert not process.renewals.may_take_expired
