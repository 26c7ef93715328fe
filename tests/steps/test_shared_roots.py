"""Batches that begin alike, through real runners: one walk of the tree, and every answer once."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.lifecycle import BatchStatus
from batchyard.runner.run import Runner
from batchyard.store.tables.batch_roots import BATCH_ROOTS
from tests.patience import PATIENCE
from tests.steps.conftest import HeldEngine, Yard, chat_line

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.engine.stub.stub import StubEngine


SOON_SECONDS = 60.0
MODEL = "stub-model"
DOCUMENTS = 40
LINES = 2 * DOCUMENTS
WINDOW = 4


def questions(name: str) -> list[dict[str, Any]]:
    """Two on each of the same documents, shuffled."""
    lines = [
        chat_line(f"{document}-{name}-{number}", f"{document:04} {'text ' * 300}{name}{number}?")
        for document in range(DOCUMENTS)
        for number in range(2)
    ]
    random.Random(name).shuffle(lines)
    return lines


async def served(yard: Yard, engine: HeldEngine, batches: list[str], *, at_once: int) -> None:
    """Run the batches to their last answer; none is given before so many have requests waiting."""
    yard.use(engine)
    yard.set(runner_idle_seconds=0.0)

    async with Runner(yard.services, MODEL) as runner, asyncio.timeout(PATIENCE * SOON_SECONDS):
        serving = asyncio.create_task(runner.serve())
        # A chunk that is leased may still be reading its input.
        while submitting(runner) < at_once:  # noqa: ASYNC110 - the chunks tell nobody
            await asyncio.sleep(0.01)
        engine.may_answer.set()
        await serving
    summaries = [await yard.services.store.chunks.summary(each) for each in batches]
    assert all(each.done for each in summaries)


def submitting(runner: Runner) -> int:
    """How many chunks have read their input and come to their first request."""
    return sum(chunk._admitted > 0 for chunk in runner._held.running.values())


def documents_of(engine: StubEngine) -> list[str]:
    texts = [json.loads(request.body)["messages"][-1]["content"] for request in engine.log]
    return [text[:4] for text in texts]


def visits(documents: list[str]) -> int:
    """How often the engine came to a document that it was not at."""
    return len(list(groupby(documents)))


@pytest.mark.parametrize("window", ["24h", "background"])
async def test_batches_about_the_same_documents_run_as_one(yard: Yard, window: str) -> None:
    yard.set(chunk_requests=LINES)
    batches = [await yard.prepared(questions(name), completion_window=window) for name in "abc"]
    engine = HeldEngine(max_num_seqs=WINDOW // 2)
    await served(yard, engine, batches, at_once=3)
    documents = documents_of(engine)
    assert len(documents) == len({request.body for request in engine.log}) == 3 * LINES
    # What the first one has in the window before the others are there, they repeat.
    assert visits(documents) <= DOCUMENTS + 2 * WINDOW
    for batch_id in batches:
        ended = await yard.finish(batch_id)
        assert ended.status is BatchStatus.COMPLETED
        assert ended.counts.completed == LINES


async def test_batches_of_which_it_is_not_known_run_one_after_the_other(yard: Yard) -> None:
    yard.set(chunk_requests=LINES)
    batches = [await yard.prepared(questions(name)) for name in "abc"]

    async def forget(connection: AsyncConnection) -> None:
        await connection.execute(BATCH_ROOTS.delete())

    await yard.services.store.database.write(forget)
    engine = HeldEngine(max_num_seqs=WINDOW // 2)
    await served(yard, engine, batches, at_once=1)
    assert visits(documents_of(engine)) == 3 * DOCUMENTS


async def test_another_tenant_is_let_in_before_batches_that_begin_alike(yard: Yard) -> None:
    """However many there are: it has its turns beside the first one."""
    own = [await yard.prepared(questions(name), tenant="a") for name in "abc"]
    other = await yard.prepared([chat_line("x")], tenant="b")
    engine = HeldEngine(max_num_seqs=WINDOW // 2)
    yard.use(engine)
    async with Runner(yard.services, MODEL) as runner, asyncio.timeout(PATIENCE * SOON_SECONDS):
        serving = asyncio.create_task(runner.serve())
        claimed: list[str] = []
        while len(claimed) < len(own) + 1:
            for batch_id in (*own, other):
                summary = await yard.services.store.chunks.summary(batch_id)
                if summary.leased and batch_id not in claimed:
                    claimed.append(batch_id)
            if other not in claimed:
                # Whoever is claimed before it: the first one, and no company of that.
                assert len(claimed) <= 1
            await asyncio.sleep(0)
        engine.may_answer.set()
        serving.cancel()
        await asyncio.wait([serving])


async def test_tenants_with_caches_of_their_own_are_not_mixed(yard: Yard) -> None:
    """Each has its turns, as it has with any other: nothing is gained by another order."""
    batches = [await yard.prepared(questions(name), tenant=name) for name in "ab"]
    one, other = [await yard.services.store.chunks.entry(each) for each in batches]
    assert one.roots is not None
    assert other.roots is not None
    assert one.roots.part_in(other.roots) == 0


async def test_tenants_that_share_a_cache_are_seen_to_begin_alike(yard: Yard) -> None:
    yard.set(cache_shared_by="all")
    batches = [await yard.prepared(questions(name), tenant=name) for name in "ab"]
    one, other = [await yard.services.store.chunks.entry(each) for each in batches]
    assert one.roots is not None
    assert other.roots is not None
    assert one.roots.is_worth_joining(other.roots)


async def test_a_batch_in_the_order_of_its_file_has_no_roots(yard: Yard) -> None:
    yard.set(order="input")
    batch_id = await yard.prepared(questions("a"))
    assert (await yard.services.store.chunks.entry(batch_id)).roots is None
