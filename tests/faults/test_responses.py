"""Background responses while the processes that run them are killed: each ends once."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

import pytest

from batchyard.batch.responses import ResponseStatus
from batchyard.steps.create.accept_response import accept_response
from tests.contract.store.outbox_samples import endpoint
from tests.faults.site import MODEL
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.faults.nursery import Nursery
    from tests.faults.site import Site

WAVE = 20
TENANT = "search"


@pytest.fixture
def lease_seconds() -> float:
    return 2.0


async def accept_wave(site: Site, name: str) -> list[str]:
    bodies = [
        {"model": MODEL, "input": f"question {n} of {name}", "background": True}
        for n in range(WAVE)
    ]
    accepted = [await accept_response(site.services, TENANT, body) for body in bodies]
    return [each.id for each in accepted]


async def until(is_true: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + PATIENCE * 60
    while not await is_true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def until_ended(site: Site, ids: list[str], count: int) -> None:
    """Return when so many of them have ended."""

    async def have() -> bool:
        found = [await site.services.store.responses.get(each) for each in ids]
        return sum(each.ended_at is not None for each in found) >= count

    await until(have)


async def test_whatever_is_killed_every_response_ends_once(site: Site, nursery: Nursery) -> None:
    store = site.services.store
    await endpoint(store, tenant=TENANT, event_types=("response.completed",))
    ids = await accept_wave(site, "one")  # nothing that could run them is there yet
    control = await site.start(nursery, "control")
    runner = await site.start(nursery, "runner", latency=0.2, max_num_seqs=4)

    async def is_collected() -> bool:
        return bool(await store.responses.open_batches())

    await until(is_collected)
    await nursery.signal(control, signal.SIGKILL)
    ids += await accept_wave(site, "two")
    control = await site.start(nursery, "control")
    await until_ended(site, ids, 5)
    await nursery.signal(runner, signal.SIGKILL)
    await nursery.signal(control, signal.SIGKILL)
    await site.start(nursery, "control")
    await site.start(nursery, "runner", max_num_seqs=4)
    await until_ended(site, ids, len(ids))

    ends = [await store.responses.get(each) for each in ids]
    assert {each.status for each in ends} == {ResponseStatus.COMPLETED}, site.log_tail()
    told = await store.deliveries.page(TENANT, limit=3 * len(ids))
    assert sorted(str(each.response_id) for each in told) == sorted(ids)
