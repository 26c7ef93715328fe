"""A runner learns how long answers are, and uses it: for the order, estimates and later batches."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from batchyard.engine.base import EngineAnswer
from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import StoreUnavailable
from batchyard.lifecycle import BatchStatus
from batchyard.runner.meters import learning
from tests.lifecycle import run_chunks
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.engine.base import EngineRequest

MODEL = "stub-model"
SOON_SECONDS = 30.0


class Writer(StubEngine):
    """Its answers have as many tokens as the first of ``tokens`` that their request names says."""

    def __init__(self, tokens: Mapping[str, int], **options: Any) -> None:
        super().__init__(MODEL, **{"max_num_seqs": 4, "latency": 0.0005, **options})
        self._tokens = tokens

    def _answer_well(self, request: EngineRequest) -> EngineAnswer:
        found = [count for word, count in self._tokens.items() if word.encode() in request.body]
        usage = {"prompt_tokens": 20, "completion_tokens": found[0], "total_tokens": 20 + found[0]}
        return EngineAnswer(request.tag, 200, msgspec.json.encode({"usage": usage}))


def lines(kind: str, count: int, **body: Any) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": f"{kind}: answer."}]
    return [
        chat_line(
            f"{kind}-{number}",
            messages=[*messages, {"role": "user", "content": f"question {number}"}],
            **{"max_tokens": 1000, **body},
        )
        for number in range(count)
    ]


def kinds_run(engine: StubEngine) -> list[str]:
    """Of each request, in the order of execution."""
    return ["short" if b"short" in request.body else "verbose" for request in engine.log]


async def estimates(yard: Yard, batch_id: str) -> float:
    (work,) = [
        each
        for each in await yard.services.store.batch_schedule.open_work()
        if each.batch_id == batch_id
    ]
    return work.remaining_tokens


async def test_the_long_answers_of_a_batch_go_first_once_they_are_known(yard: Yard) -> None:
    """By its prefixes, the short ones are first in the plan; each request allows the same."""
    yard.set(chunk_requests=2000)
    engine = Writer({"short": 4, "verbose": 900})
    yard.use(engine)
    batch = await yard.run([*lines("short", 300), *lines("verbose", 300)])
    assert batch.counts.completed == 600
    ran = kinds_run(engine)
    assert ran[18:22] == ["verbose"] * 4  # some of each at first
    assert ran[-200:] == ["short"] * 200


async def test_in_the_order_of_the_file_nothing_is_moved(yard: Yard) -> None:
    yard.set(chunk_requests=2000, order="input")
    engine = Writer({"short": 4, "verbose": 900})
    yard.use(engine)
    await yard.run([*lines("short", 300), *lines("verbose", 300)])
    assert kinds_run(engine) == ["short"] * 300 + ["verbose"] * 300


async def test_an_engine_that_says_nothing_of_tokens_teaches_nothing(yard: Yard) -> None:
    engine = Writer({"short": 0, "verbose": 0})
    yard.use(engine)
    batch = await yard.run(lines("short", 30))
    assert batch.status is BatchStatus.COMPLETED
    assert (await yard.services.store.lengths.of("default", MODEL)).known == {}


async def test_the_next_batch_is_planned_with_what_was_learned(yard: Yard) -> None:
    yard.use(Writer({"short": 4, "verbose": 900}))
    before = await yard.prepared([*lines("short", 20), *lines("verbose", 20)])
    assert await estimates(yard, before) > 40 * 1000
    await yard.finish(before)
    after = await yard.prepared([*lines("short", 20), *lines("verbose", 20)])
    assert await estimates(yard, after) < 40 * 600
    claim = await yard.services.store.chunks.claim(model=MODEL, owner="o", lease_seconds=60)
    assert claim[0].outputs is not None
    requests, tokens = claim[0].outputs.popitem()[1]
    assert tokens / requests > 700


async def test_another_tenants_batch_is_planned_without_it(yard: Yard) -> None:
    yard.use(Writer({"short": 4}))
    await yard.run(lines("short", 20), tenant="one")
    assert await estimates(yard, await yard.prepared(lines("short", 20), tenant="two")) > 20 * 1000
    one = await yard.services.store.lengths.of("one", MODEL)
    assert {round(each.mean) for each in one.known.values()} == {4}
    assert (await yard.services.store.lengths.of("two", MODEL)).known == {}


async def test_after_enough_answers_the_rest_of_a_batch_is_estimated_anew(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any history. Its last lines are never answered here."""
    monkeypatch.setattr(learning, "FIRST_ESTIMATE_LINES", 20)
    yard.set(chunk_requests=50)
    yard.use(
        Writer(
            {"short": 4},
            max_num_seqs=8,
            latency=lambda body: 3600 if b"question 9" in body else 0.001,
        )
    )
    batch_id = await yard.prepared(lines("short", 100))
    planned = await estimates(yard, batch_id)
    running = asyncio.create_task(run_chunks(yard.services, MODEL, batch_id=batch_id))
    try:
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            while await estimates(yard, batch_id) > planned / 10:  # noqa: ASYNC110 - the database tells nobody
                await asyncio.sleep(0.02)
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize("failing", ["of", "classes_of", "record"])
async def test_lengths_that_cannot_be_read_or_written_cost_no_batch_anything(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    asked = 0

    async def broken(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise StoreUnavailable("The database is away.")

    monkeypatch.setattr(yard.services.store.lengths, failing, broken)
    yard.use(Writer({"short": 4}))
    batch = await yard.run(lines("short", 50))
    assert asked
    assert batch.status is BatchStatus.COMPLETED
    assert batch.counts.completed == 50


@pytest.mark.parametrize("failing", ["of", "classes_of"])
async def test_lengths_that_cannot_be_read_in_an_unknown_way_cost_a_runner_nothing(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """A later version may have written what this one does not understand."""
    batch_id = await yard.prepared(lines("short", 50))
    asked = 0

    async def broken(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise ValueError("of a defect")

    monkeypatch.setattr(yard.services.store.lengths, failing, broken)
    yard.use(Writer({"short": 4}))
    batch = await yard.finish(batch_id)
    assert asked
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 50)


async def test_lengths_that_cannot_be_read_in_an_unknown_way_delay_no_plan(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version may have written what this one does not understand."""
    asked = 0

    async def broken(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise ValueError("of a defect")

    monkeypatch.setattr(yard.services.store.lengths, "of", broken)
    yard.use(Writer({"short": 4}))
    batch_id = await yard.prepared(lines("short", 50))
    assert asked
    batch = await yard.finish(batch_id)
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 50)


async def test_an_estimate_that_fails_in_an_unknown_way_is_tried_again(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And costs the batch nothing."""
    asked = 0

    async def broken(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise KeyError("of a defect")

    monkeypatch.setattr(learning, "FIRST_ESTIMATE_LINES", 10)
    monkeypatch.setattr(yard.services.store.chunks, "expect", broken)
    yard.use(Writer({"short": 4}, latency=0.02))
    batch = await yard.run(lines("short", 50))
    assert asked > 1
    assert batch.counts.completed == 50


async def test_a_write_that_hangs_delays_a_batch_by_little(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = 0

    async def stuck(*_: object) -> None:
        nonlocal writes
        writes += 1
        await asyncio.sleep(3600)

    monkeypatch.setattr(learning, "_LAST_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(yard.services.store.lengths, "record", stuck)
    yard.use(Writer({"short": 4}))
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        batch = await yard.run(lines("short", 50))
    assert writes
    assert batch.counts.completed == 50


async def test_what_was_not_written_is_written_the_next_time(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, calls = yard.services.store.lengths, 0
    record = store.record

    async def fails_at_first(newer: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise StoreUnavailable("The database is away.")
        await record(newer)

    monkeypatch.setattr(store, "record", fails_at_first)
    yard.use(Writer({"short": 4}, latency=0.02))
    await yard.run(lines("short", 60))
    assert calls > 1
    known = (await store.of("default", MODEL)).known
    assert {round(each.weight) for each in known.values()} == {60}


async def test_a_write_is_one_for_many_lines(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls = yard.services.store.lengths, 0
    record = store.record

    async def counted(newer: Any) -> None:
        nonlocal calls
        calls += 1
        await record(newer)

    monkeypatch.setattr(store, "record", counted)
    monkeypatch.setattr("batchyard.intervals.LENGTHS_SECONDS", 3600)
    yard.use(Writer({"short": 4}))
    await yard.run(lines("short", 200))
    assert calls == 1


async def test_no_word_of_a_prompt_and_no_plain_hash_of_it_is_in_the_database(yard: Yard) -> None:
    canary = "canary5d1f"
    yard.use(Writer({"short": 4}))
    found = lines("short", 20)
    for line in found:
        line["body"]["messages"][0]["content"] = f"short {canary}"
    await yard.run(found)
    known = (await yard.services.store.lengths.of("default", MODEL)).known
    assert any(each.template for each in known)
    database = yard.services.settings.home_folder
    stored = b"".join(path.read_bytes() for path in database.glob("batchyard.db*"))
    assert canary.encode() not in stored
    template = f"\x1esystem\x1fshort {canary}".encode()
    digest = hashlib.blake2b(template, digest_size=16)
    assert digest.hexdigest().encode() not in stored
    twice = hashlib.blake2b(digest.digest(), digest_size=16)
    assert twice.hexdigest().encode() not in stored


async def test_a_runner_that_lives_for_long_forgets_batches_and_tenants(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "_MOST_BATCHES", 2)
    found = learning.Learning(yard.services, MODEL, seats=4)
    for tenant in ("one", "two", "three"):
        batch = await found.of(await yard.prepared(lines("short", 10), tenant=tenant))
        batch.count(1, 7)
    assert len(found._batches) == 2
    assert set(found._tenants) == {"one", "two", "three"}  # what one has learned is not written
    async with found.going_on():
        pass
    assert (await yard.services.store.lengths.of("one", MODEL)).known
    await found.of(await yard.prepared(lines("short", 10), tenant="three"))
    assert set(found._tenants) == {"three"}
