"""Whole batches whose input and results are in a dataset of a Hugging Face hub."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchyard.engine.stub.stub import Fault as EngineFault
from batchyard.engine.stub.stub import FaultKind, StubEngine
from batchyard.errors import LocationRefused, RequestRefused
from batchyard.lifecycle import BatchStatus
from batchyard.steps.fetch.fetch import fetch_input
from tests.services.hub import READER, WRITER, Dataset, Fault, Hub, running_hub
from tests.steps.conftest import Yard, chat_line
from tests.steps.test_datasets import TEMPLATE, questions

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "me/mine"
URL = f"hf://datasets/{NAME}"


@pytest.fixture
def hub(yard: Yard) -> Iterator[Hub]:
    """With an empty dataset, and the yard with a token that may write."""
    with running_hub() as hub:
        hub.datasets[NAME] = Dataset()
        hub.datasets[NAME].commit({"README.md": b"A dataset\n"})
        use(yard, hub, WRITER)
        yield hub


@pytest.fixture
def mine(hub: Hub) -> Dataset:
    return hub.datasets[NAME]


def use(yard: Yard, hub: Hub, token: str) -> None:
    async def find(_: Any) -> Any:
        return hub.credentials(token)

    access = replace(yard.services.access, credentials=find)
    yard.services = replace(yard.services, access=access)


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def jsonl(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


async def test_a_batch_of_lines_is_read_from_the_hub_and_its_files_are_committed(
    yard: Yard, hub: Hub, mine: Dataset
) -> None:
    """A commit for each of its files, and a line that failed has one of its own."""
    fails = EngineFault(FaultKind.ANSWER, lambda body: b"fails" in body, status=400)
    yard.use(StubEngine(faults=[fails]))
    lines = [chat_line(f"id-{n}") for n in range(25)]
    lines.append(chat_line("bad", messages=[{"role": "user", "content": "fails"}]))
    mine.commit({"in/requests.jsonl": jsonl(*lines)})
    hub.faults = [Fault("/commit/", is_lost=True)]
    batch = await yard.run(
        [],
        input=f"{URL}/in/requests.jsonl",
        output=f"{URL}/out/answers.jsonl",
        error=f"{URL}/out/errors.jsonl",
    )
    assert (batch.status, batch.counts.completed, batch.counts.failed) == (
        *(BatchStatus.COMPLETED, 25, 1),
    )
    assert batch.undelivered is None
    answers = mine.files()["out/answers.jsonl"].splitlines()
    assert [json.loads(each)["custom_id"] for each in answers] == [f"id-{n}" for n in range(25)]
    (error,) = mine.files()["out/errors.jsonl"].splitlines()
    assert json.loads(error)["custom_id"] == "bad"
    assert mine.summaries[2:] == ["Write out/answers.jsonl", "Write out/errors.jsonl"]


@pytest.mark.parametrize("where", ["data/train-*.parquet", "data/", ""])
async def test_the_answers_to_a_dataset_are_a_table_on_the_hub(
    yard: Yard, mine: Dataset, where: str
) -> None:
    """From a pattern, a folder, or all of the dataset; its card is no file of its data."""
    rows = questions(30)
    parts = {f"data/train-0000{n}-of-00002.parquet": rows.slice(15 * n, 15) for n in range(2)}
    mine.commit({path: parquet(table) for path, table in parts.items()})
    mine.commit({"none": b""}, branch="answers")
    url = f"{URL}/{where}"
    output = f"{URL}@answers/answers.parquet"
    batch = await yard.run([], input=url, template=TEMPLATE, output=output)
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 30)
    assert batch.undelivered is None
    found = pq.read_table(io.BytesIO(mine.files("answers")["answers.parquet"]))
    assert found["question"].to_pylist() == rows["question"].to_pylist()
    assert mine.summaries[3:] == ["Write answers.parquet"]


async def test_all_files_are_of_the_commit_that_the_branch_had_at_first(
    yard: Yard, hub: Hub, mine: Dataset
) -> None:
    """A pattern, several places, and lines: it moves before each first file is read."""
    before = {f"{name}.jsonl": jsonl({"question": f"old {name}"}) for name in "ab"}
    old = {f"lines/{n}.jsonl": jsonl(chat_line(f"old-{n}")) for n in range(2)}
    mine.commit(before | old)

    def move() -> None:
        new = {name: content.replace(b"old", b"new") for name, content in (before | old).items()}
        mine.commit(new | {"c.jsonl": jsonl({"question": "new c"})})

    hub.faults = [Fault("/resolve/", act=move)]
    batch_id = await yard.create([], input=f"{URL}/*.jsonl", template=TEMPLATE)
    await fetch_input(yard.services, batch_id)
    batch = await yard.services.store.batches.get(batch_id)
    lines = await yard.results(batch.input_file_id)
    asked = [line["body"]["messages"][0]["content"] for line in lines]
    assert asked == ["old a", "old b"]

    mine.commit(before | old)
    hub.faults = [Fault("/resolve/", act=move)]
    both = [f"{URL}/lines/{n}.jsonl" for n in range(2)]
    batch_id = await yard.create([], input="several://" + json.dumps(both))
    await fetch_input(yard.services, batch_id)
    assert hub.faults == []
    batch = await yard.services.store.batches.get(batch_id)
    lines = await yard.results(batch.input_file_id)
    assert [line["custom_id"] for line in lines] == ["old-0", "old-1"]


@pytest.mark.parametrize(
    ("output", "token", "words"),
    [
        (f"{URL}/a.jsonl", READER, "not allowed to use"),
        (f"{URL}@none/a.jsonl", WRITER, "no such branch, tag or commit"),
        ("hf://datasets/me/none/a.jsonl", WRITER, "there is no such dataset"),
    ],
)
async def test_a_place_that_takes_no_results_is_refused_before_anything_runs(
    yard: Yard, hub: Hub, output: str, token: str, words: str
) -> None:
    use(yard, hub, token)
    batch = await yard.run([chat_line("a")], output=output)
    assert batch.status is BatchStatus.FAILED
    (error,) = batch.errors
    assert error.code == "destination_refused"
    assert words in error.message
    assert "hf_" not in error.message


async def test_results_may_not_be_written_into_their_dataset(yard: Yard, mine: Dataset) -> None:
    for dataset, output in {
        URL: f"{URL}/answers.parquet",
        f"{URL}@main/data/": f"{URL}/data/answers.parquet",
        f"{URL}/*.parquet": f"{URL}/answers.parquet",
    }.items():
        with pytest.raises(RequestRefused, match="is in the dataset"):
            await yard.create([], input=dataset, template=TEMPLATE, output=output)
    sha = mine.branches["main"]
    with pytest.raises(LocationRefused, match="name a branch"):
        await yard.create([chat_line("a")], output=f"{URL}@{sha}/answers.jsonl")


async def test_without_the_extra_the_message_says_what_to_install(
    yard: Yard, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    batch = await yard.run([], input=f"{URL}/a.jsonl")
    assert batch.status is BatchStatus.FAILED
    assert "pip install 'batchyard[hub]'" in batch.errors[0].message
    batch = await yard.run([chat_line("a")], output=f"{URL}/a.jsonl")
    assert batch.status is BatchStatus.FAILED
    assert "pip install 'batchyard[hub]'" in batch.errors[0].message
