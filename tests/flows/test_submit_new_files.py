"""submit-new-files: what its form has, what it hands in, and what people see of a run."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from prefect import get_client
from prefect.utilities.schema_tools.validation import validate

from flows.submit_batch import submit_batch
from flows.submit_new_files import submit_new_files
from tests.flows.conftest import request_lines
from tests.flows.test_process_batch import artifacts_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from batchyard.services.services import Services

    OpenYard = Callable[..., AbstractAsyncContextManager[Services]]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with one file that was written a while ago, and an empty one for results."""
    source, target = tmp_path / "in", tmp_path / "out"
    for each in (source, target):
        each.mkdir()
    path = source / "a.jsonl"
    path.write_text(json.dumps(request_lines(1)[0]) + "\n")
    os.utime(path, (0, 0))
    return source, target


def test_the_form_has_every_parameter_of_submit_batch_but_the_places_of_one_file() -> None:
    ours, theirs = (each.parameters.properties for each in (submit_new_files, submit_batch))
    shared = theirs.keys() - {"input", "output", "errors"}
    assert ours.keys() == shared | {"input_prefix", "output_prefix", "max_batches"}
    for name in shared:
        same = {"type", "default", "enum", "if", "else", "additionalProperties"}
        assert {k: v for k, v in ours[name].items() if k in same} == {
            k: v for k, v in theirs[name].items() if k in same
        }
        assert ours[name]["description"].split() == theirs[name]["description"].split()
    assert submit_new_files.parameters.required == ["input_prefix"]


@pytest.mark.parametrize(
    ("place", "is_taken"),
    [("s3://b/in/", True), ("/data/in", True), ("in", False), ("https://b.example/in/", False)],
)
def test_the_form_takes_folders_only(place: str, is_taken: bool) -> None:
    schema = submit_new_files.parameters.model_dump(mode="json")
    assert (validate({"input_prefix": place}, schema) == []) is is_taken


async def test_a_run_hands_in_what_is_new_and_says_so(
    open_yard: OpenYard, folders: tuple[Path, Path]
) -> None:
    source, target = map(str, folders)
    options: dict[str, Any] = {"completion_window": "2h", "metadata": {"team": "search"}}
    async with open_yard() as services:
        first = await submit_new_files(source, target, **options, return_state=True)
        again = await submit_new_files(source, target, **options, return_state=True)
        (batch,) = await services.store.batches.page()
    assert first.message == "batches created: 1"
    assert again.message == "batches created: 0, files that had one already: 1"
    assert (batch.completion_window, batch.metadata) == ("2h", {"team": "search"})
    assert await first.result() == {"a.jsonl": batch.id}
    run_id = str(first.state_details.flow_run_id)
    assert json.loads((await artifacts_of(run_id))["table"]) == [
        {"file": "a.jsonl", "batch": batch.id}
    ]
    async with get_client() as client:
        assert (await client.read_flow_run(UUID(run_id))).name == source


async def test_it_fails_with_what_no_file_can_be_run_with(
    open_yard: OpenYard, folders: tuple[Path, Path]
) -> None:
    async with open_yard():
        state = await submit_new_files(str(folders[0]), completion_window="1y", return_state=True)
    assert state.is_failed()
    assert "completion_window must be a number and m, h or d" in str(state.message)


async def test_it_refuses_a_path_of_one_machine_where_there_may_be_several(
    open_yard: OpenYard, folders: tuple[Path, Path]
) -> None:
    async with open_yard(storage="s3://bucket/yard", machine="control-1") as services:
        state = await submit_new_files(str(folders[0]), return_state=True)
        assert await services.store.batches.page() == []
    assert state.is_failed()
    assert "may be run on another machine than control-1" in str(state.message)
