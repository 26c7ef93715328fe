"""Several runners, models, controls and hundreds of batches: shared without doing it twice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.lifecycle import BatchStatus
from tests.faults.site import lines

if TYPE_CHECKING:
    from tests.faults.nursery import Nursery
    from tests.faults.site import Site


async def test_two_runners_share_one_batch_and_do_nothing_twice(site: Site) -> None:
    engines = [
        StubEngine(max_num_seqs=8, latency=0.05, log_path=site.witness_path) for _ in range(2)
    ]
    async with site.working(*engines):
        asked = await site.create(lines(400))
        assert (await site.ended(asked)).status is BatchStatus.COMPLETED
    await site.check(asked)
    assert site.executions(asked) == Counter(asked.digests)
    assert all(engine.executed >= 100 for engine in engines)


async def test_each_model_is_served_by_its_own_runner(site: Site) -> None:
    engines = [StubEngine(model, max_num_seqs=8, latency=0.02) for model in ("a", "b")]
    async with site.working(*engines):
        asked = {model: await site.create(lines(100, model, model=model)) for model in ("a", "b")}
        for each in asked.values():
            assert (await site.ended(each)).status is BatchStatus.COMPLETED
            await site.check(each)
    for engine in engines:
        assert engine.executed == 100
        assert all(f'"{engine.model}"'.encode() in request.body for request in engine.log)


async def test_a_model_that_nobody_serves_holds_up_no_other(site: Site) -> None:
    async with site.working(StubEngine("served")):
        waits = await site.create(lines(10, model="absent"))
        runs = await site.create(lines(10, model="served"))
        assert (await site.ended(runs)).status is BatchStatus.COMPLETED
        assert (await site.get(waits)).status is not BatchStatus.COMPLETED


# Forty show that four processes that want the same rows at once neither wait for one another
# for ever nor run a request twice; two hundred show the same at the size that one process has.
@pytest.mark.parametrize(
    "count", [40, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.alone])]
)
async def test_many_small_batches_at_once_all_complete(
    either_site: Site, nursery: Nursery, count: int
) -> None:
    site = either_site
    for role in ("control", "control", "runner", "runner"):
        await site.start(nursery, role, max_num_seqs=32, latency=0.01)
    began = time.monotonic()
    asked = await asyncio.gather(*(site.create(lines(5, f"b{n}")) for n in range(count)))
    created = time.monotonic()
    for each in asked:
        assert (await site.ended(each, seconds=90)).status is BatchStatus.COMPLETED
    ended = time.monotonic()
    for each in asked:
        await site.check(each)
    database = "SQLite" if site.services.store.database.is_sqlite else "PostgreSQL"
    print(  # noqa: T201 - the figures are wanted
        f"\n{count} batches on {database}: "
        f"created in {created - began:.1f} s, all ended after {ended - began:.1f} s"
    )
    assert site.executions() == Counter(digest for each in asked for digest in each.digests)
    assert "database is locked" not in site.log()
    assert "deadlock" not in site.log()
    assert "ERROR" not in site.log()


def is_poison(numbers: set[int]) -> Fault:
    marks = [f'"question {number} of id"'.encode() for number in numbers]
    return Fault(FaultKind.DEATH, lambda body: any(mark in body for mark in marks))


async def poison_test(site: Site, numbers: set[int]) -> None:
    engine = StubEngine(
        max_num_seqs=16, latency=0.005, faults=[is_poison(numbers)], log_path=site.witness_path
    )
    async with site.working(engine):
        asked = await site.create(lines(2000))
        assert (await site.ended(asked, seconds=60)).status is BatchStatus.COMPLETED
    batch = await site.check(asked)
    errors = await site.results(batch.error_file_id)
    assert {line["custom_id"] for line in errors} == {f"id-{number}" for number in numbers}
    assert {line["error"]["code"] for line in errors} == {"engine_crash"}
    assert batch.counts.completed == 2000 - len(numbers)
    print(  # noqa: T201
        f"\npoison: {len(numbers)} of 2,000, {engine.starts - 1} deaths, "
        f"{engine.executed - 2000} executed in vain"
    )


async def test_one_request_that_kills_the_engine_costs_one_line(site: Site) -> None:
    await poison_test(site, {700})


async def test_three_requests_that_kill_the_engine_cost_three_lines(site: Site) -> None:
    await poison_test(site, {10, 11, 1500})
