"""Costly requests of one tenant, and those of another one that comes after them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from batchyard.api.batches import batches
from batchyard.api.batches.retry_body import RetryBatch
from batchyard.api.http.auth import Caller
from batchyard.page import actions, new_batch
from batchyard.page.shared import SharedAnswers
from batchyard.store import NewFile
from tests.contract.store.samples import begun_batch
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import pytest

    from batchyard.services.services import Services


class Work:
    """What the costly part of a request does here: it notes its tenant, and goes on until told."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Semaphore(0)

    async def do(self, tenant: str) -> None:
        self.began.append(tenant)
        self.has_begun.set()
        await self.may_end.acquire()

    async def order_of(self, requests: list[Coroutine[Any, Any, Any]]) -> list[str]:
        """The tenants in the order in which their ``requests`` had their turn."""
        tasks = [asyncio.create_task(each) for each in requests]
        async with asyncio.timeout(PATIENCE * 10):
            await self.has_begun.wait()
            # All of them wait by now: what they ask the database for takes less.
            await asyncio.sleep(0.3)
            for _ in tasks:
                self.may_end.release()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self.began


def caller_of(services: Services, tenant: str) -> Caller:
    return Caller(tenant, services, "key", is_operator=False, may_write=True)


def request() -> Any:
    state = SimpleNamespace(page_answers=SharedAnswers(), request_runner=lambda: None)
    form: dict[str, str] = {}
    return SimpleNamespace(app=SimpleNamespace(state=state), state=SimpleNamespace(form=form))


async def test_a_tenants_retries_delay_no_retry_of_another_tenant(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work()

    async def accept(*_: Any, caller: Any, **__: Any) -> None:
        await work.do(caller.tenant)

    monkeypatch.setattr(batches, "accept_retry", accept)
    asked = [
        batches.retry_batch("batch_1", request(), caller_of(services, tenant), RetryBatch())
        for tenant in ("one", "one", "one", "other")
    ]
    assert (await work.order_of(asked))[1] == "other"


async def test_retries_on_the_page_have_the_same_turns(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One retry at a time, whichever way it came."""
    work = Work()

    async def accept(*_: Any, caller: Any, **__: Any) -> None:
        await work.do(caller.tenant)

    async def retry(_: Services, batch_id: str, **__: Any) -> str:
        await work.do("one")
        return batch_id

    monkeypatch.setattr(batches, "accept_retry", accept)
    monkeypatch.setattr(actions, "retry_batch", retry)
    batch = await begun_batch(services.store, tenant="one")
    over_the_api = batches.retry_batch(
        "batch_1", request(), caller_of(services, "other"), RetryBatch()
    )
    on_the_page = actions.retry(batch.id, request(), caller_of(services, "one"))
    tasks = [asyncio.create_task(each) for each in (over_the_api, on_the_page)]
    await asyncio.sleep(0.3)
    assert len(work.began) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_tenants_estimates_delay_no_estimate_of_another_tenant(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work()
    files = {}
    for name, tenant in (("a", "one"), ("b", "one"), ("c", "one"), ("d", "other")):
        new = NewFile(
            tenant=tenant,
            purpose="batch",
            filename=name,
            size_bytes=1,
            sha256="0" * 64,
            storage_key=name,
        )
        files[await services.store.files.create(new)] = tenant

    async def estimate(_: Services, file: Any) -> None:
        await work.do(file.tenant)

    monkeypatch.setattr(new_batch, "estimate_of", estimate)
    asked = [
        new_batch.estimate(file.id, request(), caller_of(services, tenant))
        for file, tenant in files.items()
    ]
    assert (await work.order_of(asked))[1] == "other"
