"""The ledger: a row for each line with what it used, and sums that are the batch's."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.batch.chains import Stage
from batchyard.batch.prices import BILLION
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import RequestRefused
from batchyard.files.read_ledger import ledger_blocks
from batchyard.lifecycle import BatchStatus
from batchyard.results.results import Outcome, ResultLine, answered
from batchyard.services.keys import segment_key
from batchyard.services.segments.segments import encode_entry, put_bytes
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from batchyard.steps.collect.collect import collect_results
from batchyard.steps.collect.publish import publish_results
from batchyard.steps.retry.retry import retry_batch
from batchyard.store.tables.file import FILES
from batchyard.wire import TokenUsage, result_file_id
from tests.faults import actor
from tests.hurry import hurried
from tests.steps.conftest import CHAT, Yard, chat_line, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import BatchRecord

TOKEN_PRICES = {"stub-model": {"input": 0.25, "cached": 0.1, "output": 2.0}}


@pytest.fixture
async def priced(tmp_path: Path, empty_home: Path) -> AsyncIterator[Yard]:
    engine = StubEngine(max_num_seqs=8)

    async def engine_for(_: str) -> StubEngine:
        return engine

    home = shutil.copytree(empty_home, tmp_path / "home")
    settings = read_settings(home=home, chunk_requests=10, flush_seconds=0.05, prices=TOKEN_PRICES)
    async with open_services(settings, engine_for=engine_for) as services:
        with hurried():
            yield Yard(services, tmp_path, engine)


def lines(count: int, **body: Any) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"question {n}", **body) for n in range(count)]


async def rows_of(yard: Yard, batch: BatchRecord) -> list[dict[str, Any]]:
    blocks = [block async for block in ledger_blocks(yard.services, batch)]
    return [json.loads(line) for line in b"".join(blocks).splitlines()]


def sums(rows: list[dict[str, Any]]) -> TokenUsage:
    return TokenUsage(*(sum(row[name] for row in rows) for name in TokenUsage._fields))


def usage_of(batch: BatchRecord) -> TokenUsage:
    return TokenUsage(*(getattr(batch, name) for name in TokenUsage._fields))


async def checked(yard: Yard, batch: BatchRecord) -> list[dict[str, Any]]:
    """The rows, whose sums are the batch's usage and cost."""
    rows = await rows_of(yard, batch)
    assert sums(rows) == usage_of(batch)
    if batch.cost is not None:
        assert sum(round((row["cost"] or 0) * BILLION) for row in rows) == batch.cost
    return rows


async def test_each_line_has_a_row_in_the_order_of_the_input(yard: Yard) -> None:
    batch = await yard.run(lines(25), ledger=True)
    rows = await checked(yard, batch)
    assert [(row["line"], row["custom_id"]) for row in rows] == [
        (n + 1, f"id-{n}") for n in range(25)
    ]
    results = await yard.results(batch.output_file_id)
    used = [each["response"]["body"]["usage"] for each in results]
    assert [row["input_tokens"] for row in rows] == [each["prompt_tokens"] for each in used]
    assert [row["output_tokens"] for row in rows] == [each["completion_tokens"] for each in used]
    assert {key: rows[0][key] for key in ("stage", "endpoint", "model", "status", "error")} == {
        "stage": 1,
        "endpoint": CHAT,
        "model": "stub-model",
        "status": 200,
        "error": None,
    }
    assert {(row["cost"], row["currency"]) for row in rows} == {(None, None)}


async def test_the_cost_of_each_line_is_that_of_its_tokens(priced: Yard) -> None:
    batch = await priced.run(lines(12), ledger=True)
    assert batch.cost
    rows = await checked(priced, batch)
    assert len(rows) == 12
    assert {row["currency"] for row in rows} == {"usd"}
    for row in rows:
        due = row["input_tokens"] * 250 + row["output_tokens"] * 2000
        assert round(row["cost"] * BILLION) == due - row["cached_tokens"] * 150


async def test_what_no_line_costs_is_a_row_without_a_line(priced: Yard) -> None:
    """An hour of the engine has a price of its own, and no clock says whose second it was."""
    batch = await priced.run(lines(5), ledger=True)
    with_hours = batch.model_copy(update={"cost": (batch.cost or 0) + 777})
    *rows, rest = await checked(priced, with_hours)
    assert (len(rows), rest["line"], rest["custom_id"], rest["model"]) == (
        5,
        None,
        None,
        "stub-model",
    )
    assert (rest["total_tokens"], round(rest["cost"] * BILLION)) == (0, 777)


async def test_a_line_with_anothers_answer_used_nothing(yard: Yard) -> None:
    same = [chat_line(f"id-{n}", "same", temperature=0) for n in range(6)]
    batch = await yard.run(same, deduplicate=True, ledger=True)
    rows = await checked(yard, batch)
    assert Counter(row["deduplicated"] for row in rows) == {False: 1, True: 5}
    assert all(row["total_tokens"] == 0 for row in rows if row["deduplicated"])


async def test_a_line_that_was_sent_again_used_the_tokens_of_all_attempts(yard: Yard) -> None:
    longer = {"finish_reasons": ["length"], "set": {"max_tokens": 9}, "attempts": 2}
    once = await yard.run(lines(3), ledger=True)
    again = await yard.run(lines(3), ledger=True, on_invalid_output=longer | {"then": "error_file"})
    rows = await checked(yard, again)
    assert {row["error"] for row in rows} == {"invalid_output"}
    assert sums(rows).total_tokens > sums(await rows_of(yard, once)).total_tokens


async def test_refusals_and_bad_lines_have_a_row_that_says_so(yard: Yard) -> None:
    refusal = Fault(FaultKind.ANSWER, lambda body: b"question 1" in body, status=400)
    yard.use(StubEngine(faults=[refusal]))
    bad = chat_line("bad") | {"method": "GET"}
    batch = await yard.run([*lines(3), bad], ledger=True, on_invalid="error_file")
    rows = await checked(yard, batch)
    assert [(row["custom_id"], row["status"], row["error"]) for row in rows] == [
        ("id-0", 200, None),
        ("id-1", 400, None),
        ("id-2", 200, None),
        ("bad", None, "invalid_method"),
    ]
    assert rows[3]["model"] is None


async def test_a_cancelled_batch_has_rows_of_what_was_run(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(6), ledger=True)
    body = b'{"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}'
    entries = [encode_entry(n, answered(f"id-{n}", "req_x", 200, body)) for n in (4, 1)]
    await put_bytes(yard.services.storage, segment_key(batch_id, 0, 1, 0), entries)
    # Another owner has run the first of them once more.
    await put_bytes(yard.services.storage, segment_key(batch_id, 0, 2, 0), entries[:1])
    batches = yard.services.store.batches
    await batches.advance(batch_id, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
    collected = await collect_results(yard.services, batch_id, 0)
    rows = await checked(yard, await publish_results(yard.services, batch_id, collected))
    assert [row["custom_id"] for row in rows] == ["id-1", "id-4"]


async def _has_ended(yard: Yard, batch_id: str) -> bool:
    return (await yard.services.store.batches.get(batch_id)).status is BatchStatus.COMPLETED


async def test_a_chain_has_the_rows_of_each_stage(priced: Yard) -> None:
    embed = Stage("/v1/embeddings", '{"input": {{ content | tojson }}}')
    priced.set(runner_idle_seconds=3600.0)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(actor.control(priced.services)),
            group.create_task(actor.runner(priced.services, "stub-model")),
        ]
        batch_id = await priced.create(lines(12), then=(embed,), ledger=True)
        await until(lambda: _has_ended(priced, batch_id))
        for task in tasks:
            task.cancel()
    rows = await checked(priced, await priced.services.store.batches.get(batch_id))
    found = [(row["stage"], row["endpoint"], row["custom_id"]) for row in rows]
    assert found == [
        *((1, CHAT, f"id-{n}") for n in range(12)),
        *((2, "/v1/embeddings", f"id-{n}") for n in range(12)),
    ]


async def test_a_retry_has_a_ledger_as_its_batch_has(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, lambda _: True, status=400)]))
    first = await yard.run(lines(2), ledger=True)
    yard.use(StubEngine())
    again = await yard.finish(await retry_batch(yard.services, first.id))
    assert [row["status"] for row in await checked(yard, again)] == [200, 200]


async def test_the_operator_may_have_one_of_every_batch(yard: Yard) -> None:
    """Also of a retry of one that was made before."""
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, lambda _: True, status=400)]))
    before = await yard.run(lines(2))
    yard.set(ledger=True)
    assert len(await checked(yard, await yard.run(lines(2)))) == 2
    again = await yard.finish(await retry_batch(yard.services, before.id))
    assert len(await checked(yard, again)) == 2


async def test_a_line_that_was_damaged_in_the_store_does_not_keep_the_batch_from_ending(
    yard: Yard,
) -> None:
    batch_id = await yard.prepared(lines(2), ledger=True)
    damaged = ResultLine(Outcome.OUTPUT, b"\0\0\0\n", TokenUsage(3, 0, 2, 0, 5))
    entries = [encode_entry(0, damaged), encode_entry(1, answered("id-1", "req_x", 200, b"{}"))]
    await put_bytes(yard.services.storage, segment_key(batch_id, 0, 1, 0), entries)
    batches = yard.services.store.batches
    await batches.advance(batch_id, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
    collected = await collect_results(yard.services, batch_id, 0)
    rows = await checked(yard, await publish_results(yard.services, batch_id, collected))
    found = [(row["line"], row["custom_id"], row["total_tokens"]) for row in rows]
    assert found == [(1, None, 5), (2, "id-1", 0)]


async def test_nothing_is_written_for_a_batch_that_did_not_ask(yard: Yard) -> None:
    batch = await yard.run(lines(2))
    with pytest.raises(RequestRefused, match="not created with `ledger`"):
        await rows_of(yard, batch)
    file_id = result_file_id(batch.id, "ledger")
    assert await yard.services.store.files.recorded(file_id) is None


async def test_it_is_there_when_the_batch_has_ended_and_until_it_is_deleted(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(2), ledger=True)
    running = await yard.services.store.batches.get(batch_id)
    with pytest.raises(RequestRefused, match="it is in_progress"):
        await rows_of(yard, running)
    batch = await yard.finish(batch_id)
    files = yard.services.store.files
    assert "ledger" not in {each.filename for each in await files.page("default", limit=9)}
    await files.delete(result_file_id(batch_id, "ledger"))
    with pytest.raises(RequestRefused, match="no longer kept"):
        await rows_of(yard, batch)


async def test_it_expires_before_its_bytes_are_wiped(yard: Yard) -> None:
    """As the results do."""
    batch = await yard.run(lines(2), ledger=True)

    async def overdue(connection: AsyncConnection) -> None:
        await connection.execute(FILES.update().values(expires_at=1))

    await yard.services.store.database.write(overdue)
    with pytest.raises(RequestRefused, match="no longer kept"):
        await rows_of(yard, batch)


async def test_a_batch_that_never_ran_has_an_empty_ledger(yard: Yard) -> None:
    batch = await yard.run([chat_line("a") | {"method": "GET"}], ledger=True)
    assert batch.status is BatchStatus.FAILED
    assert await checked(yard, batch) == []


async def test_a_batch_that_was_cancelled_before_any_line_ran_has_an_empty_ledger(
    yard: Yard,
) -> None:
    """Its error file has all lines, so there are results that could have a ledger."""
    batch_id = await yard.prepared(lines(3), ledger=True)
    batches = yard.services.store.batches
    await batches.advance(batch_id, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
    collected = await collect_results(yard.services, batch_id, 0)
    batch = await publish_results(yard.services, batch_id, collected)
    assert batch.error_file_id is not None
    assert await checked(yard, batch) == []
    await yard.services.store.files.delete(batch.error_file_id)
    assert await rows_of(yard, batch) == []
