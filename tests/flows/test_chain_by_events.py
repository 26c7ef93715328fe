"""The flow of examples/chain_by_events.py: what it starts for a batch that is completed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from prefect import get_client

from batchyard.locations.local_file import LocalFile
from batchyard.steps.create.create import BatchRequest, create_batch
from examples import chain_by_events
from flows.process_batch import process_batch
from flows.submit_batch import submit_batch
from tests.flows.conftest import request_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    import pytest

    from batchyard.services.services import Services

    OpenYard = Callable[..., AbstractAsyncContextManager[Services]]


async def completed(services: Services, folder: Path, metadata: dict[str, str]) -> str:
    """A batch of two answers."""
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in request_lines(2)))
    batch_id = await create_batch(services, BatchRequest(input=LocalFile(path), metadata=metadata))
    await process_batch(batch_id, return_state=True)
    return batch_id


async def started_in(folder: Path) -> list[dict[str, Any]]:
    """The parameters of the flow runs that were asked for, with files of this folder."""
    async with get_client() as client:
        runs = await client.read_flow_runs()
    asked = [run.parameters for run in runs if run.deployment_id is not None]
    return [each for each in asked if str(each.get("input")).startswith(f"{folder}/")]


async def test_a_first_batch_starts_one_second_batch_and_that_one_starts_none(
    open_yard: OpenYard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Prefect runs the automation twice."""
    async with get_client() as client:
        flow_id = await client.create_flow(submit_batch)
        await client.create_deployment(flow_id=flow_id, name="default")
    async with open_yard() as services:
        monkeypatch.setenv("BATCHYARD_HOME", str(services.settings.home_folder))
        first = await completed(services, tmp_path, {"stage": "generate"})
        second = await completed(services, tmp_path, {"stage": "judge", "of": first})
        for batch_id in (first, first, second):
            await chain_by_events.judge(batch_id, "judge-model", str(tmp_path))
    source = tmp_path / f"{first}.to-judge.jsonl"
    assert await started_in(tmp_path) == [
        {
            "input": str(source),
            "output": str(tmp_path / f"{first}.judged.jsonl"),
            "metadata": {"stage": "judge", "of": first},
        }
    ]
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["id-0", "id-1"]
    assert {line["body"]["model"] for line in lines} == {"judge-model"}
    question = lines[0]["body"]["messages"][0]["content"]
    assert question.startswith(f"{chain_by_events.QUESTION}\n\n")
