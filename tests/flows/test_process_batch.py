"""process-batch on a real Prefect API: what the flow does and what people see of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID, uuid4

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.exceptions import PrefectException
from prefect.states import Cancelling

from batchyard.dispatch.run_states import AWAITS_ROOM, UNPUBLISHED
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import StoreUnavailable
from batchyard.lifecycle import BatchStatus
from batchyard.locations.local_file import LocalFile
from batchyard.runner import hours_watch
from batchyard.schedule.hours import ALWAYS, Hours
from batchyard.services import patience
from batchyard.services.keys import plan_key
from batchyard.services.services import as_current
from batchyard.steps.collect.collect import collect_results
from batchyard.steps.collect.publish import publish_results
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.store import ChunkStatus, Quota, WhenFull
from flows import run_chunks
from flows.process.cancel import cancel_its_batch
from flows.process_batch import process_batch
from flows.submit_batch import submit_batch
from tests.contract.store.samples import chunks_in
from tests.flows.conftest import create, request_lines
from tests.lifecycle import prepare_batch
from tests.services.traces import collecting, exported
from tests.steps.test_hours import ending_in, later

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun

    from batchyard.services.services import Services

    OpenYard = Callable[..., AbstractAsyncContextManager[Services]]


async def artifacts_of(flow_run_id: str | None) -> dict[str, str]:
    run_id = UUID(flow_run_id)
    async with get_client() as client:
        found = await client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
        )
    return {str(artifact.type): str(artifact.data) for artifact in found}


async def task_names(client: PrefectClient, flow_run_id: UUID, *, at_least: int) -> list[str]:
    """Prefect records task runs from events: later than they end, and by far on a busy machine."""
    by_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    for _ in range(900):
        names = [run.name for run in await client.read_task_runs(flow_run_filter=by_run)]
        if len(names) >= at_least:
            break
        await asyncio.sleep(0.1)
    return names


async def test_a_batch_runs_to_its_end_as_one_flow_run(open_yard: OpenYard, tmp_path: Path) -> None:
    async with open_yard() as services:
        batch_id = await create(services, tmp_path, request_lines(25))
        state = await process_batch(batch_id, return_state=True)
        batch = await services.store.batches.get(batch_id)
    assert batch.status is BatchStatus.COMPLETED
    assert state.is_completed()
    assert state.message == "completed: 25 of 25 requests succeeded, 0 failed"


async def test_a_batch_whose_engine_closes_in_the_middle_goes_on_in_its_next_hours(
    open_yard: OpenYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: the engine ends, and starts again for what is left."""
    monkeypatch.setattr(hours_watch, "_READ_SECONDS", 0.1)
    engine = StubEngine(max_num_seqs=2, latency=0.05)
    async with open_yard(engine) as services:
        store, said = services.store, set()

        async def hours_of(_: str) -> Hours:
            batch = await store.batches.get(batch_id)
            said.add(batch.wait_reason)
            if not engine.executed:
                return ending_in(1)
            engine._latency = 0.0
            return ALWAYS if any(said) else later()

        batch_id = await create(services, tmp_path, request_lines(200))
        with as_current(replace(services, hours_of=hours_of)):
            state = await process_batch(batch_id, return_state=True)
        batch = await store.batches.get(batch_id)
    assert state.message == "completed: 200 of 200 requests succeeded, 0 failed"
    assert (engine.executed, engine.starts) == (200, 2)
    reasons = [reason for reason in said if reason]
    assert reasons[0].startswith("the hours of engine stub-model begin at ")
    assert batch.wait_reason is None


async def test_the_trace_of_a_batch_has_a_span_for_each_step_of_the_flow(
    open_yard: OpenYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting(monkeypatch) as collector:
        async with open_yard() as services:
            await process_batch(await create(services, tmp_path, request_lines(3)))
        steps = {"batch.fetch", "batch.plan", "batch.run", "batch.collect", "batch.publish"}
        assert len(await exported(collector, {"batch.create", "chunk.run"} | steps)) == 7


async def test_the_runs_have_names_that_people_can_read(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    async with open_yard() as services:
        batch_id = await create(services, tmp_path, request_lines(25))
        await process_batch(batch_id, return_state=True)
        batch = await services.store.batches.get(batch_id)
    async with get_client() as client:
        run = await client.read_flow_run(UUID(batch.flow_run_id))
        names = await task_names(client, run.id, at_least=9)
    assert run.name == batch_id
    assert run.parameters == {"batch_id": batch_id}
    chunks = {f"chunk {n} of {batch_id}" for n in range(3)}
    steps = {"fetch", "validate", "plan chunks", "run chunks: 3 of 3"}
    ends = {"collect errors and expirations", "upload results"}
    assert set(names) == steps | chunks | ends


async def test_the_report_shows_counts_tokens_and_files(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    refused = Fault(FaultKind.ANSWER, lambda body: b'"q 3"' in body, status=400)
    async with open_yard(StubEngine(faults=[refused])) as services:
        batch_id = await create(services, tmp_path, request_lines(10))
        state = await process_batch(batch_id, return_state=True)
        batch = await services.store.batches.get(batch_id)
    assert state.message.startswith("completed: 9 of 10 requests succeeded, 1 failed: 1 × 400")
    artifacts = await artifacts_of(batch.flow_run_id)
    report = artifacts["markdown"]
    assert "| Requests | 9 succeeded, 1 failed, 10 in all |" in report
    assert "| Failed with | 1 × 400" in report
    assert f"{batch.usage.input_tokens:,}" in report
    assert str(batch.output_file_id) in report
    assert str(batch.error_file_id) in report


async def test_the_report_says_how_many_lines_have_an_identical_ones_answer(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    body = {"model": "stub-model", "input": "the same"}
    lines = [{**line, "body": body, "url": "/v1/embeddings"} for line in request_lines(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = StubEngine()
    async with open_yard(engine) as services:
        state = await submit_batch(str(path), deduplicate=True, return_state=True)
        (batch,) = await services.store.batches.page()
    assert state.is_completed()
    assert engine.executed == 1
    report = (await artifacts_of(batch.flow_run_id))["markdown"]
    assert "| Copies | 9 with the answer of an identical request |" in report


async def test_a_refused_input_ends_the_run_as_failed_with_the_first_error(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    async with open_yard() as services:
        batch_id = await create(services, tmp_path, [*request_lines(2), *request_lines(1)])
        state = await process_batch(batch_id, return_state=True)
        batch = await services.store.batches.get(batch_id)
    assert state.is_failed()
    assert "line 3" in str(state.message)
    assert batch.status is BatchStatus.FAILED
    assert "duplicate_custom_id" in (await artifacts_of(batch.flow_run_id))["markdown"]


async def test_the_run_of_a_batch_that_waits_for_room_says_so_and_ends(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    """It has not failed: another run goes on with it when there is room."""
    async with open_yard() as services:
        quota = Quota(max_enqueued_requests=3, when_full=WhenFull.WAIT)
        await services.store.tenants.set_quota("default", quota)
        first = await create(services, tmp_path, request_lines(3))
        await fetch_input(services, first)
        await prepare_batch(services, first)
        second = await create(services, tmp_path, request_lines(2))
        state = await process_batch(second, return_state=True)
        batch = await services.store.batches.get(second)
    assert (state.is_completed(), state.name) == (True, AWAITS_ROOM)
    assert (batch.status, batch.awaited_requests) == (BatchStatus.VALIDATING, 2)
    assert (batch.wait_reason, batch.owner) == ("earlier batches fill the tenant's quota", None)


async def test_an_engine_that_does_not_start_ends_the_run_and_the_batch(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    async with open_yard(StubEngine(start_failures=9)) as services:
        batch_id = await create(services, tmp_path, request_lines(2))
        state = await process_batch(batch_id, return_state=True)
        batch = await services.store.batches.get(batch_id)
    assert state.is_failed()
    assert batch.errors is not None
    assert batch.errors[0].code == "engine_start_failed"


async def test_a_run_can_be_repeated_and_does_nothing_twice(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    engine = StubEngine()
    async with open_yard(engine) as services:
        batch_id = await create(services, tmp_path, request_lines(5))
        await process_batch(batch_id, return_state=True)
        again = await process_batch(batch_id, return_state=True)
    assert again.is_completed()
    assert "already completed" in str(again.message)
    assert engine.executed == 5


async def test_submit_batch_creates_the_batch_and_runs_it(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    async with open_yard() as services:
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in request_lines(5)))
        output = tmp_path / "out.jsonl"
        state = await submit_batch(
            str(path),
            output=str(output),
            model="stub-model",
            endpoint="/v1/chat/completions",
            completion_window="2h",
            metadata={"team": "search"},
            return_state=True,
        )
        del services
    assert state.is_completed()
    assert len(output.read_text().splitlines()) == 5


async def test_a_submission_that_is_cancelled_before_its_batch_is_held_cancels_the_batch(
    open_yard: OpenYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect kills the process, and runs the hook in another one."""

    def is_killed(*_: object) -> Any:
        raise SystemError

    monkeypatch.setattr("flows.submit_batch.take_to_its_end", is_killed)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in request_lines(5)))
    async with open_yard() as services:
        state = await submit_batch(str(path), return_state=True)
        async with get_client() as client:
            run = await client.read_flow_run(state.state_details.flow_run_id)
        deployed = run.model_copy(update={"deployment_id": uuid4()})
        await cancel_its_batch(submit_batch, deployed, state)
        (batch,) = await services.store.batches.page()
    assert batch.status is BatchStatus.CANCELLING


async def test_a_cancellation_in_prefect_waits_for_a_database_that_is_away(
    open_yard: OpenYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect calls the hook once. Afterwards the flow run is Cancelled, and nobody looks at it."""
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.0)
    async with open_yard() as services:
        batch_id = await create(services, tmp_path, request_lines(1))
        batches = services.store.batches
        cancel = batches.cancel

        async def be_away(_: str) -> None:
            monkeypatch.setattr(batches, "cancel", cancel)
            raise StoreUnavailable("The database is away.")

        monkeypatch.setattr(batches, "cancel", be_away)
        run = SimpleNamespace(id=uuid4(), deployment_id=uuid4(), parameters={"batch_id": batch_id})
        await cancel_its_batch(process_batch, cast("FlowRun", run), Cancelling())
        batch = await batches.get(batch_id)
    assert batch.status is BatchStatus.CANCELLING


async def test_submit_batch_takes_a_dataset_and_its_template(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    path, output = tmp_path / "data.parquet", tmp_path / "answers.parquet"
    pq.write_table(pa.table({"question": ["one", "two"]}), path)
    message = '{"role": "user", "content": {{ question | tojson }}}'
    async with open_yard():
        state = await submit_batch(
            str(path),
            output=str(output),
            model="stub-model",
            template=f'{{"max_tokens": 4, "messages": [{message}]}}',
            return_state=True,
        )
    assert state.is_completed(), state.message
    assert pq.read_table(output)["question"].to_pylist() == ["one", "two"]
    assert pq.read_table(output)["status"].to_pylist() == ["succeeded"] * 2


async def test_submit_batch_refuses_what_prefect_must_not_record(open_yard: OpenYard) -> None:
    async with open_yard():
        state = await submit_batch("https://host.example/in.jsonl?sig=secret", return_state=True)
    assert state.is_failed()
    assert "batchyard submit" in str(state.message)
    assert "secret" not in str(state.message)


async def test_submit_batch_refuses_a_path_of_one_machine_where_there_may_be_several(
    open_yard: OpenYard,
) -> None:
    async with open_yard(storage="s3://bucket/yard", machine="control-1") as services:
        state = await submit_batch("s3://in/x", output="/out.jsonl", return_state=True)
        assert await services.store.batches.page() == []
    assert state.is_failed()
    assert "may be run on another machine than control-1" in str(state.message)


async def test_submit_batch_refuses_a_path_that_depends_on_the_folder(open_yard: OpenYard) -> None:
    async with open_yard():
        state = await submit_batch("in.jsonl", return_state=True)
    assert state.is_failed()
    assert "absolute path" in str(state.message)


async def test_results_that_cannot_be_delivered_show_in_the_final_state(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    async with open_yard() as services:
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in request_lines(2)))

        batch_id = await create_batch(
            services, BatchRequest(input=LocalFile(path), output=LocalFile(folder / "out.jsonl"))
        )
        folder.rmdir()
        state = await process_batch(batch_id, return_state=True)
    assert state.name == UNPUBLISHED
    assert str(folder) in str(state.message)


async def submitted(folder: Path, **parameters: Any) -> Any:
    """The state in which a submission ends."""
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in request_lines(2)))
    return await submit_batch(str(path), **parameters, return_state=True)


async def tenant_of_newest(services: Services) -> str:
    (batch,) = await services.store.batches.page(limit=1)
    return batch.tenant


@pytest.mark.parametrize(
    ("settings", "asked", "tenant"),
    [
        ({}, {}, "default"),
        ({}, {"tenant": "search"}, "search"),
        ({"tenant": "search"}, {}, "search"),
        ({"tenant": "search"}, {"tenant": "search"}, "search"),
    ],
)
async def test_a_submission_is_of_its_deployments_tenant_or_of_the_one_it_names(
    open_yard: OpenYard,
    tmp_path: Path,
    settings: dict[str, Any],
    asked: dict[str, Any],
    tenant: str,
) -> None:
    async with open_yard(**settings) as services:
        state = await submitted(tmp_path, **asked)
        assert state.is_completed(), state.message
        assert await tenant_of_newest(services) == tenant


async def test_a_deployment_of_one_tenant_takes_no_batch_of_another(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    async with open_yard(tenant="search") as services:
        state = await submitted(tmp_path, tenant="finance")
        assert state.is_failed()
        assert "batches of the tenant search" in state.message
        assert list(await services.store.batches.page(limit=1)) == []


async def test_the_quota_of_the_tenant_holds_for_submissions(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    async with open_yard() as services:
        await services.store.tenants.set_quota("search", Quota(max_active_batches=0))
        state = await submitted(tmp_path, tenant="search")
        assert state.is_failed()
        assert "Tenant 'search' may have 0 active batches" in state.message
        assert (await submitted(tmp_path)).is_completed()


async def test_a_chunk_that_prefect_cannot_record_runs_all_the_same(
    open_yard: OpenYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's client fails before the task's own code is called, after it, or says nothing."""
    recorded = run_chunks.run_chunk

    async def unrecorded(batch_id: str, index: int, work: asyncio.Task[Any]) -> int:
        if index == 0:
            raise httpx.ConnectError("Prefect is away")
        if index == 1:
            await recorded(batch_id, index, work)
            raise PrefectException("Prefect is away")
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(run_chunks, "run_chunk", unrecorded)
    monkeypatch.setattr(run_chunks, "_RECORD_SECONDS", 0.1)
    engine = StubEngine(max_num_seqs=8)
    async with open_yard(engine) as services:
        batch_id = await create(services, tmp_path, request_lines(25))
        state = await process_batch(batch_id, return_state=True)
    assert state.message == "completed: 25 of 25 requests succeeded, 0 failed"
    assert engine.executed == 25


async def test_an_error_in_one_batchs_chunk_leaves_the_other_batchs_of_its_runner(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    """Two batches on one run-chunks flow run; the plan of one is lost."""
    async with open_yard(runners="pool", runner_idle_seconds=8.0) as services:
        batches = [await create(services, tmp_path, request_lines(25)) for _ in range(2)]
        for batch_id in batches:
            await fetch_input(services, batch_id)
            await prepare_batch(services, batch_id)
        await services.storage.delete(plan_key(batches[0], 0))
        state = await run_chunks.run_chunks("stub-model", return_state=True)
        # Its files are made by whichever process has the batch.
        collected = await collect_results(services, batches[0], 0)
        await publish_results(services, batches[0], collected)
        failed, whole = [await services.store.batches.get(batch_id) for batch_id in batches]
        chunks = await chunks_in(services.store, whole.id)
    assert state.is_completed(), state
    assert failed.status is BatchStatus.FAILED
    assert {chunk.status for chunk in chunks} == {ChunkStatus.DONE}
    assert whole.counts.completed == 25
