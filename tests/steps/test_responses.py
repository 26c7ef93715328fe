"""Background responses on their way into batches and out of them, whatever ends in between."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.batch.responses import ResponseStatus, answered_object
from batchyard.control import response_groups
from batchyard.control.response_groups import ResponseGroups
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import ModelNotFound, RequestRefused, StoreUnavailable
from batchyard.lifecycle import BatchStatus
from batchyard.steps.create.accept_response import accept_response
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.steps.retry.retry import retry_batch
from batchyard.store.response.responses import Responses
from tests.lifecycle import prepare_batch, run_chunks
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from batchyard.store import ResponseRecord
    from tests.steps.conftest import Yard


async def accept(yard: Yard, text: str = "hello", **changes: Any) -> str:
    body = {"model": "stub-model", "input": text, "background": True, **changes}
    return (await accept_response(yard.services, "a", body)).id


async def collected(yard: Yard, owner: str = "first") -> ResponseGroups:
    """A new process, once nothing waits for it to collect it."""
    groups = ResponseGroups(yard.services, owner)
    async with asyncio.timeout(PATIENCE * 20):
        while await yard.services.store.responses.waiting():
            await groups.look()
            await asyncio.sleep(0.01)
    return groups


async def away(*_: object) -> None:
    raise StoreUnavailable("The database is away.")


async def state(yard: Yard, response_id: str) -> ResponseRecord:
    return await yard.services.store.responses.get(response_id)


async def batches(yard: Yard) -> list[str]:
    return [each.id for each in await yard.services.store.batches.page(limit=100)]


async def test_many_responses_become_few_batches(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_groups, "MOST_LINES", 40)
    ids = [await accept(yard, f"question {n}") for n in range(60)]
    groups = await collected(yard)
    found = {(await state(yard, each)).batch_id for each in ids}
    assert found == set(await batches(yard))
    assert len(found) == 2
    for batch_id in found:
        await yard.finish(str(batch_id))
    await groups.look()
    assert {(await state(yard, each)).status for each in ids} == {ResponseStatus.COMPLETED}
    assert not await yard.services.store.responses.are_open()


async def test_windows_models_and_tenants_do_not_share_a_batch(yard: Yard) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(response_groups, "_PATIENT_LOOKS", 1)
        soon = await accept(yard)
        later = await accept(yard, background_options={"completion_window": "2h"})
        other = await accept(yard, model="other")
        await collected(yard)
    held = [str((await state(yard, each)).batch_id) for each in (soon, later, other)]
    assert len(set(held)) == 3
    records = [await yard.services.store.batches.get(each) for each in held]
    assert [each.completion_window for each in records] == ["24h", "2h", "24h"]
    lasts = [each.expires_at - each.created_at for each in records]
    assert lasts == pytest.approx([86400, 7200, 86400], abs=60)


async def test_two_that_collect_at_once_run_each_response_once(yard: Yard) -> None:
    ids = [await accept(yard, f"question {n}") for n in range(5)]
    (waiting,) = await yard.services.store.responses.waiting()
    await asyncio.gather(
        *(ResponseGroups(yard.services, name)._collect(waiting.kind) for name in ("one", "two"))
    )
    (batch_id,) = await batches(yard)
    assert {(await state(yard, each)).batch_id for each in ids} == {batch_id}
    assert (await yard.finish(batch_id)).counts.total == 5


async def test_what_was_being_collected_when_the_process_ended_is_collected_by_the_next(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await accept(yard)
    with monkeypatch.context() as patch:
        patch.setattr(Responses, "collect", away)
        with pytest.raises(StoreUnavailable):
            await collected(yard)
    assert (await batches(yard), (await state(yard, made)).batch_id) == ([], None)
    await yard.services.store.leases.release("responses", "first")
    await collected(yard, "second")
    assert await batches(yard) == [(await state(yard, made)).batch_id]


async def test_one_process_at_a_time_sees_to_responses(yard: Yard) -> None:
    await accept(yard)
    first = await collected(yard)
    second = ResponseGroups(yard.services, "second")
    await second.look()
    assert (first.is_busy, second.is_busy) == (True, False)
    first.drain()
    await first.look()
    assert not first.is_busy


async def test_a_process_that_begins_anew_reads_results_from_their_start(yard: Yard) -> None:
    good, bad = await accept(yard), await accept(yard, "bad")
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, lambda body: b"bad" in body, status=400)]))
    groups = await collected(yard)
    (batch_id,) = await batches(yard)
    await yard.finish(batch_id)
    await groups.look()
    done = await state(yard, good)
    await groups.look()
    anew = ResponseGroups(yard.services, "first")
    await anew.look()
    assert (await state(yard, good), done.status) == (done, ResponseStatus.COMPLETED)
    assert (await state(yard, bad)).status is ResponseStatus.FAILED


async def test_an_answer_that_could_not_be_recorded_is_read_again(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await accept(yard)
    groups = await collected(yard)
    (batch_id,) = await batches(yard)
    await yard.finish(batch_id)
    with monkeypatch.context() as patch:
        patch.setattr(Responses, "end", away)
        with pytest.raises(StoreUnavailable):
            await groups.look()
    await groups.look()
    assert (await state(yard, made)).status is ResponseStatus.COMPLETED


async def test_a_batch_none_of_whose_answers_is_wanted_any_more_is_stopped(yard: Yard) -> None:
    """The process that cancelled the last response was lost before it stopped the batch."""
    ids = [await accept(yard, f"question {n}") for n in range(2)]
    groups = await collected(yard)
    (batch_id,) = await batches(yard)
    responses = yard.services.store.responses

    await responses.cancel(ids[0], "a")
    await groups.look()
    assert (await yard.services.store.batches.get(batch_id)).status is BatchStatus.VALIDATING
    await responses.cancel(ids[1], "a")
    await groups.look()
    assert (await yard.services.store.batches.get(batch_id)).status is BatchStatus.CANCELLING


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_the_files_of_a_batch_whose_responses_were_deleted_before_its_end_are_deleted(
    yard: Yard, is_stopped: bool
) -> None:
    """Nobody could delete them later: its tenant does not see them."""
    made = await accept(yard)
    await collected(yard)
    (batch_id,) = await batches(yard)
    await yard.services.store.responses.delete(made, "a")
    if is_stopped:
        await yard.services.store.batches.cancel(batch_id)
    batch = await yard.finish(batch_id)
    assert batch.status is (BatchStatus.CANCELLED if is_stopped else BatchStatus.COMPLETED)
    assert [key async for key in yard.services.storage.list("files/")] == []
    assert (await yard.services.store.tenants.usage("a")).stored_bytes == 0


async def test_a_batch_that_only_cancelled_responses_are_left_of_is_stopped(yard: Yard) -> None:
    """Though others of all kinds are open."""
    long = Fault(FaultKind.HANG, lambda body: b"long" in body)
    yard.use(StubEngine(faults=[long]))
    yard.set(flush_seconds=0.05)
    short, cancelled = await accept(yard, "short"), await accept(yard, "long")
    groups = await collected(yard)
    (batch_id,) = await batches(yard)
    running = asyncio.create_task(yard.finish(batch_id))
    await yard.services.store.responses.cancel(cancelled, "a")
    async with asyncio.timeout(PATIENCE * 20):
        while (await state(yard, short)).status is not ResponseStatus.COMPLETED:
            await groups.look()
            await asyncio.sleep(0.01)
        await accept(yard, "another")
        await groups.look()
        ended = await running
    assert (ended.status, ended.counts.completed) == (BatchStatus.CANCELLED, 1)


async def test_a_batch_whose_lines_have_all_ended_is_not_stopped(yard: Yard) -> None:
    """Its responses end before its files are made."""
    made = await accept(yard)
    groups = await collected(yard)
    (batch_id,) = await batches(yard)
    await fetch_input(yard.services, batch_id)
    await prepare_batch(yard.services, batch_id)
    await run_chunks(yard.services, "stub-model", batch_id=batch_id)
    await groups.look()
    assert (await state(yard, made)).status is ResponseStatus.COMPLETED
    await groups.look()
    assert (await yard.finish(batch_id)).status is BatchStatus.COMPLETED


async def test_a_batch_that_failed_fails_its_responses_with_its_words(yard: Yard) -> None:
    made = await accept(yard)
    groups = await collected(yard)

    async def gone(model: str) -> ModelNotFound:
        return ModelNotFound(f"No engine serves {model}.")

    yard.services = replace(yard.services, why_not_offered=gone)
    (batch_id,) = await batches(yard)
    assert (await yard.finish(batch_id)).status == "failed"
    await groups.look()
    found = await state(yard, made)
    assert found.status is ResponseStatus.FAILED
    assert found.error is not None
    assert found.error.message == "No engine serves stub-model."


async def test_a_response_that_is_no_longer_accepted_fails_alone(yard: Yard) -> None:
    """The operator has changed a limit since it was accepted."""
    good, long = await accept(yard), await accept(yard, "long " * 1000)
    limits = yard.services.settings.limits
    yard.set(limits=limits.model_copy(update={"max_line_bytes": 1000}))
    groups = await collected(yard)
    (batch_id,) = await batches(yard)
    await yard.finish(batch_id)
    await groups.look()
    assert (await state(yard, good)).status is ResponseStatus.COMPLETED
    found = await state(yard, long)
    assert found.status is ResponseStatus.FAILED
    assert found.error is not None
    assert "refused before it ran" in found.error.message


async def test_responses_are_not_retried_behind_their_clients_backs(yard: Yard) -> None:
    await accept(yard)
    await collected(yard)
    (batch_id,) = await batches(yard)
    await yard.finish(batch_id)
    with pytest.raises(RequestRefused, match="ask again"):
        await retry_batch(yard.services, batch_id)


async def test_a_batch_that_cannot_be_read_keeps_no_other_waiting(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await accept(yard)
    await collected(yard)
    second = await accept(yard, "another")
    groups = await collected(yard)
    held = sorted(await batches(yard))
    assert len(held) == 2
    for each in held:
        await yard.finish(each)
    read = ResponseGroups._read

    async def failing(self: ResponseGroups, batch: Any, reading: Any) -> Any:
        if batch.id == held[0]:
            raise OSError("Not readable.")
        return await read(self, batch, reading)

    with monkeypatch.context() as patch:
        patch.setattr(ResponseGroups, "_read", failing)
        await groups.look()
    ended = [(await state(yard, each)).ended_at is not None for each in (first, second)]
    assert sorted(ended) == [False, True]
    await groups.look()
    assert not await yard.services.store.responses.are_open()


async def test_flex_responses_are_a_background_batch_of_their_own(yard: Yard) -> None:
    """They run when nothing else wants the engine, and their window is a day."""
    flex = await accept(yard, "may wait", service_tier="flex")
    await accept(yard, "soon")
    both = {"service_tier": "flex", "background_options": {"completion_window": "2h"}}
    promised = await accept(yard, "in two hours", **both)
    await collected(yard)
    windows = {
        each.id: (await yard.services.store.batches.get(each.batch_id or "")).completion_window
        for each in [await state(yard, one) for one in (flex, promised)]
    }
    assert windows == {flex: "background", promised: "2h"}
    assert len(await batches(yard)) == 3
    batch = await yard.services.store.batches.get((await state(yard, flex)).batch_id or "")
    assert batch.expires_at - batch.created_at <= 86400
    tiers = [
        json.loads((await state(yard, each)).given)["service_tier"] for each in (flex, promised)
    ]
    assert tiers == ["flex", "default"]


async def test_a_response_that_ended_has_the_tier_that_it_had(yard: Yard) -> None:
    flex = await accept(yard, "may wait", service_tier="flex")
    given = json.loads((await state(yard, flex)).given)
    line = b'{"custom_id":"x","response":{"status_code":200,"body":{"service_tier":"auto"}}}'
    done = answered_object(given, line, ResponseStatus.COMPLETED, created_at=1.0, ended_at=2)
    assert done["service_tier"] == "flex"
