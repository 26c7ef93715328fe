"""What a batch's flow run shows in Prefect: its name, tags, steps, progress and end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
import pytest
from prefect import flow, get_client
from prefect.artifacts import Artifact
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
    TaskRunFilter,
    TaskRunFilterName,
)
from prefect.flow_engine import run_flow_async
from prefect.settings import PREFECT_API_URL
from prefect.states import Pending
from prefect.utilities.schema_tools.validation import validate

from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import EngineStartFailed
from batchyard.services.stop_batch import stop_failed
from flows.process.prefect_client import shared_client
from flows.process_batch import ProcessBatchRuns, process_batch
from flows.shown import progress, run_page
from flows.shown.run_page import is_made_up
from flows.submit_batch import submit_batch
from tests.flows.conftest import create, request_lines
from tests.flows.test_process_batch import artifacts_of
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from prefect.client.schemas.objects import FlowRun, TaskRun

    from batchyard.services.services import Services

    OpenYard = Callable[..., AbstractAsyncContextManager[Services]]

WAIT_SECONDS = PATIENCE * 90.0


async def read_run(flow_run_id: str | None) -> FlowRun:
    async with get_client() as client:
        return await client.read_flow_run(UUID(flow_run_id))


async def tasks_of(flow_run_id: str | None, *names: str) -> dict[str, TaskRun]:
    """The task runs by their names, once those that are named have ended."""
    by_run = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run_id)]))
    async with get_client() as client, asyncio.timeout(WAIT_SECONDS):
        while True:
            runs = await client.read_task_runs(flow_run_filter=by_run)
            # The server may have recorded the run, and not yet its first state.
            found = {run.name: run for run in runs if run.state is not None}
            if all(name in found and found[name].state.is_final() for name in names):
                return found
            await asyncio.sleep(0.1)


def write_input(folder: Path, count: int) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in request_lines(count)))
    return path


async def run_named(name: str, source: Path) -> FlowRun:
    """As `prefect deployment run --flow-run-name` does: the flow run exists, with its name."""
    parameters = {"input": str(source)}
    async with get_client() as client:
        run = await client.create_flow_run(
            submit_batch, name=name, parameters=parameters, tags=["mine"], state=Pending()
        )
    await run_flow_async(submit_batch, flow_run=run, parameters=parameters, return_type="state")
    return await read_run(str(run.id))


async def test_the_name_that_a_person_gives_is_kept(open_yard: OpenYard, tmp_path: Path) -> None:
    async with open_yard():
        run = await run_named("nightly-eval", write_input(tmp_path, 2))
    assert run.name == "nightly-eval"


async def test_a_run_without_a_name_of_its_own_is_named_after_the_input(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    source = write_input(tmp_path, 2)
    async with open_yard():
        run = await run_named("straight-kiwi", source)
    assert run.name == str(source)


@pytest.mark.parametrize("name", ["nightly-eval", "kiwi", "straight-kiwi-2", "/data/x.jsonl"])
def test_what_prefect_does_not_make_up_is_a_persons_name(name: str) -> None:
    assert not is_made_up(name)


async def test_a_batch_is_found_by_its_id_its_tenant_and_its_model(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    """Beside the tags that the run has already. The lines name the model, not the request."""
    async with open_yard(tenant="search") as services:
        run = await run_named("nightly-eval", write_input(tmp_path, 2))
        (batch,) = await services.store.batches.page()
    assert set(run.tags) == {"mine", batch.id, "tenant:search", "model:stub-model"}


async def test_the_flow_run_of_a_command_shows_the_same(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    """Prefect's engine does not run it."""
    async with open_yard() as services:
        batch_id = await create(services, tmp_path, request_lines(5))
        async with shared_client():
            ended = await ProcessBatchRuns(services).run(batch_id)
        batch = await services.store.batches.get(batch_id)
    run = await read_run(str(batch.flow_run_id))
    assert run.name == batch_id
    assert set(run.tags) == {batch_id, "tenant:default", "model:stub-model"}
    assert run.state is not None
    assert (run.state.name, run.state.message) == ("Completed", ended.message)
    await tasks_of(batch.flow_run_id, "fetch", "validate", "plan chunks", "upload results")


async def test_a_report_that_cannot_be_made_is_not_the_batchs_matter(
    open_yard: OpenYard,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever is wrong with it; what a library says of it may quote a request."""

    async def fail(*_: object) -> str:
        raise ValueError("a prompt")

    monkeypatch.setattr("flows.shown.report._report", fail)
    async with open_yard() as services:
        batch_id = await create(services, tmp_path, request_lines(3))
        state = await process_batch(batch_id, return_state=True)
    assert state.is_completed()
    assert "report.not_shown" in caplog.text
    assert "a prompt" not in caplog.text


async def test_a_step_says_what_it_has_done(open_yard: OpenYard, tmp_path: Path) -> None:
    refused = Fault(FaultKind.ANSWER, lambda body: b'"q 3"' in body, status=400)
    async with open_yard(StubEngine(faults=[refused])) as services:
        batch_id = await create(services, tmp_path, request_lines(25))
        await process_batch(batch_id, return_state=True)
        batch = await services.store.batches.get(batch_id)
    names = ("validate", "run chunks: 3 of 3", "collect errors and expirations")
    steps = await tasks_of(batch.flow_run_id, *names, "upload results")
    said = [steps[name].state.message for name in names]
    assert said[0] == "25 lines, for the model stub-model"
    assert said[1] == "chunk 3 of 3 done, 25 of 25 requests answered"
    assert said[2] == "24 succeeded, 1 failed"
    assert "of answers and" in steps["upload results"].state.message
    assert steps["upload results"].end_time >= steps["upload results"].start_time


async def test_the_step_that_a_batch_failed_in_is_red(
    open_yard: OpenYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for an engine, and another process has given the model up."""
    monkeypatch.setenv("PREFECT_API_URL", str(PREFECT_API_URL.value()))
    async with open_yard(runners="pool") as services:
        batch_id = await create(services, tmp_path, request_lines(2))
        flow_run = asyncio.create_task(process_batch(batch_id, return_state=True))
        # Chunks alone do not say that it waits: it might be stopped between two steps.
        async with get_client() as client, asyncio.timeout(WAIT_SECONDS):
            named = TaskRunFilter(name=TaskRunFilterName(like_="run chunks"))
            while not await client.read_task_runs(  # noqa: ASYNC110 - the server's
                flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[batch_id])),
                task_run_filter=named,
            ):
                await asyncio.sleep(0.1)
        await stop_failed(services, batch_id, EngineStartFailed("No machine serves the model."))
        assert (await flow_run).is_failed()
        batch = await services.store.batches.get(batch_id)
    steps = await tasks_of(batch.flow_run_id, "validate", "run chunks: 0 of 1")
    assert steps["validate"].state.is_completed()
    assert steps["run chunks: 0 of 1"].state.is_failed()
    assert steps["run chunks: 0 of 1"].state.message == "No machine serves the model."


async def test_a_refused_input_is_a_red_validation(open_yard: OpenYard, tmp_path: Path) -> None:
    async with open_yard() as services:
        batch_id = await create(services, tmp_path, [*request_lines(2), *request_lines(1)])
        await process_batch(batch_id, return_state=True)
        batch = await services.store.batches.get(batch_id)
    steps = await tasks_of(batch.flow_run_id, "fetch", "validate")
    assert steps["fetch"].state.is_completed()
    assert steps["validate"].state.is_failed()


async def test_the_progress_has_counts_speed_and_the_batchs_page(
    open_yard: OpenYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_FIRST_LOOK_SECONDS", 0.05)
    engine = StubEngine(max_num_seqs=2, latency=0.02)
    async with open_yard(engine, public_url="https://batches.example") as services:
        batch_id = await create(services, tmp_path, request_lines(25))
        await process_batch(batch_id, return_state=True)
        batch = await services.store.batches.get(batch_id)
    async with get_client() as client:
        answer = await client._client.post(
            "/artifacts/filter", json={"flow_runs": {"id": {"any_": [batch.flow_run_id]}}}
        )
    found = {each["type"]: each for each in answer.json()}
    assert found["progress"]["data"] == 100.0
    assert found["progress"]["description"].startswith("**25 of 25** requests answered")
    page = f"[{batch_id}](https://batches.example/batches/{batch_id})"
    assert page in found["progress"]["description"]
    assert f"| Batch | {page} |" in found["markdown"]["data"]


async def test_a_batch_that_waited_has_the_speed_of_the_time_with_an_engine(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    async with open_yard(StubEngine(max_num_seqs=8)) as services:
        batch_id = await create(services, tmp_path, request_lines(2))
        await process_batch(batch_id, return_state=True)
        batch = await services.store.batches.get(batch_id)
    report = (await artifacts_of(batch.flow_run_id))["markdown"]
    assert re.search(r"^\| Time waiting for an engine \| \d+ s \|$", report, re.MULTILINE)
    assert "| Requests per second | 0.0" not in report


async def test_a_parent_flow_gets_how_the_batch_ended(open_yard: OpenYard, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"

    @flow
    async def parent() -> Any:
        return await submit_batch(str(write_input(tmp_path, 5)), output=str(output))

    async with open_yard() as services:
        found = await parent()
        (batch,) = await services.store.batches.page()
    assert found == {
        "batch_id": batch.id,
        "status": "completed",
        "request_counts": {"total": 5, "completed": 5, "failed": 0},
        "output_file_id": batch.output_file_id,
        "error_file_id": None,
        "output": str(output),
        "errors": None,
        "page": None,
    }
    kept = await Artifact.aget(f"batch-of-{batch.flow_run_id}")
    assert json.loads(kept.data) == found


async def test_nothing_that_prefect_does_not_take_fails_a_batch(
    open_yard: OpenYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags, names, task runs, progress, report and outcome, all at once."""

    def refuse(*_: object, **__: object) -> Any:
        raise httpx.ConnectError("Prefect is away")

    monkeypatch.setattr(run_page, "get_client", refuse)
    monkeypatch.setattr("flows.shown.artifacts.get_client", refuse)
    monkeypatch.setattr(progress, "_FIRST_LOOK_SECONDS", 0.01)
    monkeypatch.setattr("tasks.task_run.emit_event", refuse)
    async with open_yard():
        state = await submit_batch(str(write_input(tmp_path, 25)), return_state=True)
    assert state.message == "completed: 25 of 25 requests succeeded, 0 failed"


@pytest.mark.parametrize(
    ("field", "url"),
    [
        ("input", "https://host.example/in.jsonl?X-Amz-Signature=hunter2"),
        ("output", "https://me:hunter2@host.example/out"),
        ("webhook_url", "https://host.example/hook?token=hunter2"),
        ("webhook_url", "no URL"),
    ],
)
def test_a_refused_url_gets_a_sentence_and_is_not_repeated(field: str, url: str) -> None:
    """As Prefect's server checks parameters, for its API and for the form."""
    schema = submit_batch.parameters.model_dump()
    (error,) = validate({"input": "/in.jsonl", field: url}, schema)
    assert "without a query and a password, because Prefect records it" in error.message
    assert "hunter2" not in error.message
    assert "(?" not in error.message


@pytest.mark.parametrize(
    "given",
    [
        {"input": "s3://bucket/key", "output": "/out.jsonl"},
        {"input": "https://host.example/in.jsonl", "webhook_url": "https://host.example/hook"},
        {"input": "/in.jsonl", "webhook_url": "", "notify_email": "me@example.com"},
        {"input": "/in.jsonl", "output_expires_after": "7d", "tenant": "search"},
        {"input": "/in.jsonl", "completion_window": "background"},
    ],
)
def test_what_can_be_recorded_is_accepted(given: dict[str, str]) -> None:
    assert not validate(given, submit_batch.parameters.model_dump())


def test_the_form_says_what_a_background_batch_is() -> None:
    schema = submit_batch.parameters.model_dump()["properties"]["completion_window"]
    assert "`background`: it runs only when nothing else wants its engine" in " ".join(
        schema["description"].split()
    )


async def test_a_submission_may_be_for_the_background(open_yard: OpenYard, tmp_path: Path) -> None:
    async with open_yard() as services:
        state = await submit_batch(
            str(write_input(tmp_path, 2)), completion_window="background", return_state=True
        )
        (batch,) = await services.store.batches.page()
    assert state.is_completed(), state.message
    assert batch.completion_window == "background"


async def test_a_submission_has_the_receivers_and_the_lifetime_of_its_batch(
    open_yard: OpenYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_SMTP__HOST", "mail.example")
    async with open_yard() as services:
        state = await submit_batch(
            str(write_input(tmp_path, 2)),
            webhook_url="https://receiver.example/hook",
            notify_email="me@example.com",
            output_expires_after="2h",
            return_state=True,
        )
        (batch,) = await services.store.batches.page()
        deliveries = await services.store.deliveries.page()
    assert state.is_completed(), state.message
    assert batch.output_lifetime_seconds == 7200
    assert {each.kind.value for each in deliveries} == {"webhook", "email"}


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"output_expires_after": "2 hours"}, "output_expires_after must be a number"),
        ({"output_expires_after": "31d"}, "between 1h and 30d"),
        ({"completion_window": "sometime"}, "for example 24h, or background"),
        ({"webhook_url": "https://host.example/?token=hunter2"}, "batchyard webhooks create"),
    ],
)
async def test_a_submission_that_cannot_be_is_refused_before_a_batch_is_made(
    open_yard: OpenYard, tmp_path: Path, parameters: dict[str, str], said: str
) -> None:
    async with open_yard() as services:
        state = await submit_batch(str(write_input(tmp_path, 2)), return_state=True, **parameters)
        assert await services.store.batches.page() == []
    assert state.is_failed()
    assert said in str(state.message)
    assert "hunter2" not in str(state.message)


async def test_the_log_tells_the_batchs_life(
    open_yard: OpenYard,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a busy machine the batch may run for longer, and then it also tells what it waits for.
    monkeypatch.setattr(progress, "_FIRST_LOOK_SECONDS", 3600)
    caplog.set_level(logging.INFO, "batchyard")
    async with open_yard() as services:
        batch_id = await create(services, tmp_path, request_lines(25))
        await process_batch(batch_id, return_state=True)
    lines = [r.getMessage() for r in caplog.records if r.name == "batchyard.services.story.story"]
    assert [line.split()[0] for line in lines] == [
        "batch.began",
        "batch.fetched",
        "batch.validated",
        "batch.planned",
        "batch.progress",
        "batch.collected",
        "batch.uploaded",
    ]
    assert all(f"batch={batch_id}" in line for line in lines)
    assert "25 lines, " in lines[2]
    assert "25 requests in 3 chunks, " in lines[3]
