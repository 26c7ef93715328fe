"""The deployed product tells of its batches: docs/how-to/react-in-prefect.md as it stands there."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from prefect.settings import PREFECT_API_URL, temporary_settings

from batchyard.batch_error import BatchError
from batchyard.store import DeliveryStatus, NewBatch, RunnerKind
from examples import chain_by_events
from tests.deployed.conftest import LEASE_SECONDS, ids_in, until
from tests.pages import block

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.deployed.conftest import Deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = "docs/how-to/react-in-prefect.md"


async def seconds_until_told(deployment: Deployment, batch_id: str) -> float:
    """From the end of the batch to Prefect's receipt of the event; both are on this machine."""
    wanted = {
        "occurred": {"since": (datetime.now(UTC) - timedelta(hours=1)).isoformat()},
        "resource": {"id": [f"batchyard.batch.{batch_id}"]},
        "event": {"name": ["batch.completed"]},
    }
    async with deployment.api.post("/api/events/filter", json={"filter": wanted}) as response:
        (event,) = (await response.json())["events"]
    occurred, received = (datetime.fromisoformat(event[each]) for each in ("occurred", "received"))
    return round((received - occurred).total_seconds(), 2)


@pytest_asyncio.fixture(loop_scope="module")
async def forgotten_automations(deployment: Deployment) -> AsyncIterator[None]:
    """What is made for one test runs no flows for the batches of later ones."""
    yield
    async with deployment.api.post("/api/automations/filter", json={}) as response:
        found = await response.json()
    for each in found:
        await deployment.delete(f"/api/automations/{each['id']}")


@pytest.mark.usefixtures("forgotten_automations")
async def test_an_automation_runs_a_flow_for_each_completed_batch(deployment: Deployment) -> None:
    folder = deployment.folder / "after"
    folder.mkdir()
    (folder / "after_batch.py").write_text(block(PAGE, "flow"))
    (folder / "prefect.yaml").write_text(block(PAGE, "deployment"))
    command = deployment.server.command(*block(PAGE, "deploy").split())
    environment = deployment.server.environment
    deploying = await asyncio.create_subprocess_exec(*command, cwd=folder, env=environment)
    assert await deploying.wait() == 0

    await deployment.serve("told-model")
    source, output = deployment.input("told-model", 5)
    first, second = [await deployment.submit(source, output) for _ in range(2)]
    batches = {each: await deployment.ended_batch(each) for each in (first, second)}

    async def both_were_told_of() -> list[dict[str, str]] | None:
        runs = await deployment.flow_runs("after-batch", state={"type": {"any_": ["COMPLETED"]}})
        # The end of a batch of an earlier test may reach Prefect after the automation was made.
        told = [run["parameters"] for run in runs if run["parameters"]["batch_id"] in batches]
        return told if len({each["batch_id"] for each in told}) == len(batches) else None

    found = await until(both_were_told_of)
    seconds = [await seconds_until_told(deployment, batch_id) for batch_id in batches]
    print(f"\nPrefect had batch.completed after {seconds} s")  # noqa: T201 - the figures are wanted
    # The aim is one second; other tests may have the processors for a while.
    assert max(seconds) < 30
    assert sorted(found, key=str) == sorted(
        (
            {"batch_id": batch.id, "output_file_id": batch.output_file_id}
            for batch in batches.values()
        ),
        key=str,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forgotten_automations")
async def test_the_answers_of_a_batch_are_the_input_of_the_next_one(
    deployment: Deployment,
) -> None:
    """examples/chain_by_events.py as a whole; tests/flows has its flow by itself."""
    await deployment.serve("drafts")
    await deployment.serve("judgements")
    folder = str(deployment.folder)
    with temporary_settings({PREFECT_API_URL: deployment.server.api_url}):
        await chain_by_events.deploy("drafts", "judgements", folder)
        await chain_by_events.start("drafts", folder, "What is a batch?", "And a chunk?")

        async def second() -> str | None:
            newest = await deployment.services.store.batches.page(limit=1)
            return next((each.id for each in newest if each.model == "judgements"), None)

        batch = await deployment.ended_batch(await until(second))
        assert batch.counts.completed == 2
        assert ids_in(deployment.folder / f"{batch.metadata['of']}.judged.jsonl") == [
            "question-0",
            "question-1",
        ]


async def test_the_reconciler_starts_somebody_who_delivers(deployment: Deployment) -> None:
    """A batch ends with no run-batches there; an e-mail is due, and no mail server is set up."""
    store = deployment.services.store
    for row in await store.runners.live(kind=RunnerKind.BATCHES, within_seconds=LEASE_SECONDS):
        await store.runners.drain(row.id)

    async def nobody_is_there() -> bool:
        return not await deployment.running("run-batches")

    await until(nobody_is_there)
    batch = await store.batches.create(
        NewBatch(endpoint="/v1/embeddings", notify_email="author@example.com")
    )
    await store.batches.fail(batch.id, [BatchError("not_found", "No such file.")])

    async def was_tried() -> bool:
        (delivery,) = await store.deliveries.page(batch_id=batch.id)
        return delivery.attempts > 0 and delivery.status is DeliveryStatus.PENDING

    await until(was_tried)
    (runner,) = await deployment.running("run-batches")
    name = f"e-mail batch.failed (attempt 1) of {batch.id}"

    async def is_shown() -> list[dict[str, str]]:
        return [run for run in await deployment.task_runs([runner["id"]]) if run["name"] == name]

    (run, *_) = await until(is_shown)
    assert run["state_type"] == "FAILED"
