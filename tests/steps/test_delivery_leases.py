"""The leases of a deliverer: which it renews, which it lets end, and whose attempts count."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.delivery import deliver
from batchyard.delivery.deliver import Delivered, Deliverer
from batchyard.errors import LeaseLost, StoreUnavailable
from batchyard.store import NewBatch
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from tests.steps.conftest import Yard


@pytest.fixture
async def _due(yard: Yard) -> None:
    """One e-mail that is due; there is no mail server, so that each attempt is put off."""
    new = NewBatch(endpoint="/v1/embeddings", notify_email="ada@example.org")
    batch = await yard.services.store.batches.create(new)
    await yard.services.store.batches.fail(batch.id, [])


@pytest.mark.usefixtures("_due")
async def test_what_a_claim_without_an_answer_has_leased_is_not_renewed(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody works on it: under the name that it was leased to, nothing more is claimed."""
    deliveries = yard.services.store.deliveries
    claim = deliveries.claim
    owners: list[str] = []

    async def answer_once(owner: str, **wanted: Any) -> Any:
        owners.append(owner)
        claimed = await claim(owner, **wanted)
        if len(owners) == 1:
            raise StoreUnavailable("The connection was lost after the commit.")
        return claimed

    monkeypatch.setattr(deliveries, "claim", answer_once)
    async with Deliverer(yard.services) as deliverer:
        with pytest.raises(StoreUnavailable):
            await deliverer.deliver_due()
        await deliveries.release(owners[0])  # as the end of its lease would
        assert await deliverer.deliver_due() == Delivered(to_try_again=1)
    assert owners[1] != owners[0]


async def test_attempts_under_an_earlier_name_keep_their_leases(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver, "_RENEW_SECONDS", 0.01)
    renewed: list[str] = []

    async def note(owner: str, _: float) -> None:
        renewed.append(owner)

    monkeypatch.setattr(yard.services.store.deliveries, "renew", note)
    async with Deliverer(yard.services, owner="earlier") as deliverer:
        attempt = asyncio.create_task(asyncio.sleep(3600))
        deliverer._in_flight[attempt] = "earlier"
        attempt.add_done_callback(deliverer._forget)
        deliverer._let_leases_end()
        async with asyncio.timeout(PATIENCE * 10):
            while not renewed:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.01)
    assert set(renewed) == {"earlier"}


@pytest.mark.usefixtures("_due")
async def test_an_attempt_whose_lease_was_lost_does_not_count(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one makes it, and counts it."""

    async def refuse(*_: Any, **__: Any) -> None:
        raise LeaseLost("Another has it.")

    monkeypatch.setattr(yard.services.store.deliveries, "record", refuse)
    async with Deliverer(yard.services) as deliverer:
        assert await deliverer.deliver_due(1) == Delivered()


@pytest.mark.usefixtures("_due")
async def test_one_that_drains_begins_nothing(yard: Yard) -> None:
    async with Deliverer(yard.services) as deliverer:
        deliverer.drain()
        deliverer.start()
        await asyncio.sleep(0.2)
        assert deliverer.counts == Delivered()
        assert not deliverer.is_busy
