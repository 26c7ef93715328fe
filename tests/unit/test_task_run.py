"""The task run of a step: which events Prefect gets for it, and that none is the step's matter."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prefect.context import FlowRunContext

from batchyard.errors import ModelNotFound, StoreUnavailable
from tasks import step as steps
from tasks import task_run
from tasks.run_chunk import run_chunk
from tasks.step import step
from tasks.task_run import RecordedTask

FLOW_RUN = "6c1f0f5e-6c0b-4e58-9d0f-0b7a54a3a1d2"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is sent to Prefect."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(task_run, "emit_event", lambda **event: sent.append(event))
    return sent


async def test_a_short_step_is_one_event(
    events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_run, "_SHOWN_AFTER_SECONDS", 0.01)
    async with RecordedTask("fetch", "fetch", flow_run_id=FLOW_RUN) as run:
        run.message = "172 MB"
    await asyncio.sleep(0.03)
    (event,) = events
    assert event["event"] == "prefect.task-run.Completed"
    assert event["payload"]["validated_state"]["message"] == "172 MB"
    assert event["payload"]["task_run"]["end_time"] >= event["payload"]["task_run"]["start_time"]
    assert event["related"][0]["prefect.resource.id"] == f"prefect.flow-run.{FLOW_RUN}"


async def test_a_step_that_lasts_is_shown_while_it_runs(
    events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_run, "_SHOWN_AFTER_SECONDS", 0.0)
    async with RecordedTask("run", "run chunks", flow_run_id=FLOW_RUN) as run:
        while not events:  # noqa: ASYNC110 - the event loop's own timer
            await asyncio.sleep(0.001)
        run.name = "run chunks: 3 of 3"
    first, last = (event["event"] for event in events)
    assert (first, last) == ("prefect.task-run.Running", "prefect.task-run.Completed")
    assert len({event["resource"]["prefect.resource.id"] for event in events}) == 1
    assert events[1]["resource"]["prefect.resource.name"] == "run chunks: 3 of 3"


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (ValueError("no"), "prefect.task-run.Failed"),
        (asyncio.CancelledError(), "Cancelled"),
        (SystemExit(1), "Cancelled"),
    ],
)
async def test_a_step_ends_as_its_block_does(
    events: list[dict[str, Any]], error: BaseException, event: str
) -> None:
    with pytest.raises(type(error)):
        async with RecordedTask("fetch", "fetch", flow_run_id=FLOW_RUN):
            raise error
    assert events[0]["event"].endswith(event)


@pytest.mark.parametrize(
    ("error", "message"),
    [(ModelNotFound("No engine is set up."), "No engine is set up."), (KeyError("x"), "KeyError")],
)
async def test_the_text_of_an_error_that_is_not_ours_is_not_shown(
    events: list[dict[str, Any]], error: Exception, message: str
) -> None:
    """It may quote a request."""
    with pytest.raises(type(error)):
        async with RecordedTask("fetch", "fetch", flow_run_id=FLOW_RUN):
            raise error
    assert events[0]["payload"]["validated_state"]["message"] == message


async def test_a_step_may_fail_without_an_error(events: list[dict[str, Any]]) -> None:
    """As that of a batch which was stopped meanwhile."""
    async with RecordedTask("run", "run chunks", flow_run_id=FLOW_RUN) as run:
        run.has_failed, run.message = True, "No engine serves the model."
    assert events[0]["event"] == "prefect.task-run.Failed"
    assert events[0]["payload"]["validated_state"]["message"] == run.message


@pytest.mark.parametrize("error", [RuntimeError("no event loop"), OSError(), ValueError()])
async def test_what_goes_wrong_in_prefect_is_not_the_steps_matter(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def emit(**_: Any) -> None:
        raise error

    monkeypatch.setattr(task_run, "emit_event", emit)
    ended = False
    async with RecordedTask("fetch", "fetch", flow_run_id=FLOW_RUN):
        ended = True
    assert ended


async def test_the_flow_run_is_still_the_current_one_afterwards(
    events: list[dict[str, Any]],
) -> None:
    """Its context is left out of the event, and is there for what comes after the step."""
    token = FlowRunContext.__var__.set(here := object())  # type: ignore[arg-type]
    try:
        async with RecordedTask("fetch", "fetch", flow_run_id=FLOW_RUN):
            pass
        assert FlowRunContext.__var__.get() is here
    finally:
        FlowRunContext.__var__.reset(token)
    assert len(events) == 1


async def test_a_chunk_runs_on_although_its_record_is_given_up(
    events: list[dict[str, Any]],
) -> None:
    is_over = asyncio.Event()
    work: asyncio.Task[Any] = asyncio.create_task(is_over.wait())
    record = asyncio.create_task(run_chunk("batch_1", 3, work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    record.cancel()
    await asyncio.wait([record])
    is_over.set()
    assert await work


async def test_outside_of_a_flow_run_nothing_is_recorded(events: list[dict[str, Any]]) -> None:
    async with RecordedTask("fetch", "fetch"):
        pass
    assert events == []


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(steps, "_RETRY_AFTER_SECONDS", (0.0, 0.0))
    return []


async def test_a_step_is_tried_again_after_an_error_that_passes(
    events: list[dict[str, Any]], tries: list[int]
) -> None:
    @step("collect")
    async def collect(run: RecordedTask) -> str:
        tries.append(1)
        if len(tries) < 3:
            raise StoreUnavailable("The database is away.")
        return "done"

    assert await collect() == "done"
    assert len(tries) == 3


async def test_a_step_gives_up_in_the_end(events: list[dict[str, Any]], tries: list[int]) -> None:
    @step("collect")
    async def collect(run: RecordedTask) -> None:
        tries.append(1)
        raise StoreUnavailable("The database is away.")

    with pytest.raises(StoreUnavailable):
        await collect()
    assert len(tries) == 3


async def test_a_step_is_not_tried_again_after_an_error_that_stays(
    events: list[dict[str, Any]], tries: list[int]
) -> None:
    @step("validate")
    async def check(run: RecordedTask) -> None:
        tries.append(1)
        raise ModelNotFound("No engine is set up.")

    with pytest.raises(ModelNotFound):
        await check()
    assert len(tries) == 1
