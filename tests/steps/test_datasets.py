"""Datasets: rows into requests by a template, and results as rows again."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import errno
import gzip
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from batchyard.batch.chains import Stage
from batchyard.control.chains import chain_parts
from batchyard.datasets import join, json_rows, process, tables
from batchyard.datasets.files import literal_of, local_files, object_files
from batchyard.datasets.jobs import (
    ROWS_FILE,
    TABLE_FILE,
    JoinJob,
    RenderJob,
)
from batchyard.delivery.redeliver import deliver_to
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import (
    DatasetRefused,
    InputRefused,
    RequestRefused,
    StoreUnavailable,
    TransitionConflict,
)
from batchyard.files.delete import delete_file
from batchyard.lifecycle import BatchStatus
from batchyard.locations.local_file import LocalFile
from batchyard.locations.several import Several
from batchyard.results.results import answered
from batchyard.services.keys import file_key, rows_key
from batchyard.steps.fetch import render
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.steps.retry.retry import retry_batch
from batchyard.store import Quota
from batchyard.wire import RequestCounts, result_file_id
from tests.lifecycle import prepare_batch
from tests.services.swift import BUCKET
from tests.steps.conftest import CHAT, Yard
from tests.steps.test_chains import ended, working
from tests.unit.storage.web_server import gives, running_web_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batchyard.services.services import Services
    from batchyard.storage.bucket import S3Credentials
    from batchyard.store import BatchRecord

TEMPLATE = """
{
  "model": "stub-model",
  "max_tokens": 4,
  "messages": [{"role": "user", "content": {{ question | tojson }}}]
}
"""
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
RICH: dict[str, list[Any]] = {
    "question": ['What is "ü"\n& <b>?', "two\u2028lines", None, "fails", "five 🎉"],
    "status": ["open", None, "open", "", "done"],
    "tags": [["a", "b"], [], None, ["c"], ["d"]],
    "person": [{"name": "Ada", "born": datetime.date(1815, 12, 10)}, None, None, None, None],
    "price": [decimal.Decimal("12.30"), None, None, None, decimal.Decimal("0.01")],
    "seen": [datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)] * 5,
    "picture": [b"\x89PNG\x00", None, b"", b"x", b"y"],
}


def rich_table() -> pa.Table:
    table = pa.table(RICH)
    seen = table["seen"].cast(pa.timestamp("ns", "UTC"))
    kind = pa.array(["x", "y", None, "x", "x"]).dictionary_encode()
    return table.set_column(5, "seen", seen).append_column("kind", kind)


def write(yard: Yard, table: pa.Table, name: str = "data.parquet", **how: Any) -> Path:
    path = yard.folder / name
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path, **how)
    return path


async def create(yard: Yard, path: Path | str, template: str = TEMPLATE, **request: Any) -> str:
    return await yard.create([], input=str(path), template=template, **request)


async def rendered(yard: Yard, path: Path | str, template: str = TEMPLATE, **request: Any) -> Any:
    """The lines of the batch's input."""
    batch_id = await create(yard, path, template, **request)
    await fetch_input(yard.services, batch_id)
    batch = await yard.services.store.batches.get(batch_id)
    return await yard.results(batch.input_file_id)


def questions(count: int) -> pa.Table:
    return pa.table({"question": [f"question {n}" for n in range(count)]})


def random_questions(count: int) -> pa.Table:
    """No file of them is much smaller than 400 bytes for each."""
    return pa.table({"question": [os.urandom(400).hex() for _ in range(count)]})


async def test_rows_become_requests_and_their_answers_rows(yard: Yard) -> None:
    """Of all kinds of columns, in several row groups, and with one that fails."""
    fault = Fault(FaultKind.ANSWER, lambda body: b"fails" in body, status=400)
    yard.use(StubEngine(faults=[fault]))
    table = rich_table()
    path = write(yard, table, row_group_size=2)
    answers = yard.folder / "answers.parquet"
    batch = await yard.finish(await create(yard, path, output=str(answers)))
    assert (batch.status, batch.counts) == (BatchStatus.COMPLETED, RequestCounts(5, 4, 1))
    assert batch.endpoint == CHAT

    found = pq.read_table(answers)
    assert found.select(table.column_names).equals(table)
    rows = found.to_pylist()
    assert [row["custom_id"] for row in rows] == [f"row-{n}" for n in range(1, 6)]
    assert [row["result_status"] for row in rows] == [
        *["succeeded"] * 3,
        "failed",
        "succeeded",
    ]
    lines = {line["custom_id"]: line for line in await yard.results(batch.output_file_id)}
    for row in rows[:3]:
        body = lines[row["custom_id"]]["response"]["body"]
        assert json.loads(row["response"]) == body
        assert row["content"] == body["choices"][0]["message"]["content"]
        assert row["finish_reason"] == body["choices"][0]["finish_reason"]
        assert row["input_tokens"] == body["usage"]["prompt_tokens"]
        assert row["output_tokens"] == body["usage"]["completion_tokens"]
        assert row["error_code"] is row["error_message"] is None
    assert (rows[3]["content"], rows[3]["input_tokens"]) == (None, None)
    assert rows[3]["error_code"]
    assert rows[3]["response"]


async def test_a_template_has_every_value_as_json(yard: Yard) -> None:
    template = """{"model": "m", "messages": [], "metadata": {{ row | tojson }},
        "image": "data:image/png;base64,{{ (picture or "") | base64 }}"}"""
    first, *_, last = await rendered(yard, write(yard, rich_table()), template)
    assert first["custom_id"] == "row-1"
    assert first["body"]["metadata"] == {
        "question": RICH["question"][0],
        "status": "open",
        "tags": ["a", "b"],
        "person": {"name": "Ada", "born": "1815-12-10"},
        "price": "12.30",
        "seen": "2024-02-29T12:30:00Z",
        "picture": "iVBORwA=",
        "kind": "x",
    }
    assert first["body"]["image"] == "data:image/png;base64,iVBORwA="
    assert last["body"]["metadata"]["person"] is None


async def test_a_column_custom_id_names_the_requests(yard: Yard) -> None:
    table = questions(2).append_column("custom_id", pa.array([7, 8]))
    answers = yard.folder / "answers.parquet"
    batch = await yard.finish(await create(yard, write(yard, table), output=str(answers)))
    lines = await yard.results(batch.output_file_id)
    assert [line["custom_id"] for line in lines] == ["7", "8"]
    assert pq.read_table(answers)["custom_id"].to_pylist() == [7, 8]


async def test_the_batchs_model_is_that_of_bodies_without_one(yard: Yard) -> None:
    template = '{"messages": [], "n": {{ 1 if question == "question 0" else 2 }}}'
    lines = await rendered(yard, write(yard, questions(2)), template, models=("stub-model",))
    assert [line["body"] for line in lines] == [
        {"model": "stub-model", "messages": [], "n": n} for n in (1, 2)
    ]


BAD = """{"model": "stub-model", "max_tokens": 4, "messages": [
    {%- if question == "question 1" %}{{ missing }}{% endif -%}
    {%- if question == "question 2" %}{{ 1 / 0 }}{% endif -%}
    {%- if question == "question 3" %}no JSON{% endif -%}
    {"role": "user", "content": {{ question | tojson }}}]}"""


async def test_a_row_that_cannot_be_rendered_refuses_the_file(yard: Yard) -> None:
    batch = await yard.finish(await create(yard, write(yard, questions(5)), BAD))
    assert batch.status is BatchStatus.FAILED
    assert batch.errors is not None
    assert [(error.code, error.line, error.param) for error in batch.errors] == [
        ("template_failed", 2, "template"),
        ("template_failed", 3, "template"),
        ("template_invalid_json", 4, "template"),
    ]
    words = "The template fails for this row in its line 2: 'missing' is undefined."
    assert batch.errors[0].message == words
    assert "in its line 3: ZeroDivisionError" in batch.errors[1].message


async def test_or_it_is_an_error_line_and_keeps_its_row(yard: Yard) -> None:
    answers = yard.folder / "answers.parquet"
    batch_id = await create(
        yard, write(yard, questions(5)), BAD, output=str(answers), on_invalid="error_file"
    )
    batch = await yard.finish(batch_id)
    assert (batch.status, batch.counts) == (BatchStatus.COMPLETED, RequestCounts(5, 2, 3))
    rows = pq.read_table(answers).to_pylist()
    assert [row["status"] for row in rows] == ["succeeded", *["failed"] * 3, "succeeded"]
    assert rows[1]["custom_id"] == "row-2"
    assert rows[1]["error_code"] == "template_failed"
    assert rows[1]["error_message"].startswith("Line 2: The template fails for this row")
    assert [row["question"] for row in rows] == [f"question {n}" for n in range(5)]


async def test_a_time_zone_that_is_not_known_here_is_an_error_of_its_row(tmp_path: Path) -> None:
    """Of a template that uses the column; a row without a time is as good as others."""
    path = tmp_path / "data.parquet"
    seen = pa.array([0, None], pa.timestamp("us", "Mars/Olympus"))
    pq.write_table(pa.table({"question": ["x", "y"], "seen": seen}), path)
    job = job_of(path, template='{"model": {{ seen | tojson }}}')
    blocks = [block async for block in process.run_job(job, tmp_path, "default")]
    first, second = map(json.loads, b"".join(blocks).splitlines())
    assert "cannot be given to a template" in first["template_error"]["message"]
    assert second["body"] == {"model": None}


async def test_embeddings_are_lists_of_numbers(yard: Yard) -> None:
    answers = yard.folder / "answers.parquet"
    batch_id = await create(
        yard,
        write(yard, questions(2)),
        '{"model": "stub-model", "input": {{ question | tojson }}}',
        endpoint="/v1/embeddings",
        output=str(answers),
    )
    batch = await yard.finish(batch_id)
    found = pq.read_table(answers)
    assert found.schema.field("embedding").type == pa.list_(pa.float32())
    (first, _) = await yard.results(batch.output_file_id)
    wanted = first["response"]["body"]["data"][0]["embedding"]
    assert wanted
    assert found["embedding"].to_pylist()[0] == pytest.approx(wanted)


async def test_so_are_those_of_the_last_stage_of_a_chain(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_parts, "PATIENCE_SECONDS", 0.0)
    answers = yard.folder / "answers.parquet"
    embed = Stage("/v1/embeddings", '{"input": {{ content | tojson }}}')
    table = write(yard, questions(2))
    async with working(yard):
        batch = await ended(yard, await create(yard, table, then=(embed,), output=str(answers)))
    found = pq.read_table(answers)
    results = await yard.results(batch.output_file_id)
    wanted = [each["response"]["body"]["data"][0]["embedding"] for each in results]
    assert len(wanted) == 2
    for row, embedding in zip(found["embedding"].to_pylist(), wanted, strict=True):
        assert row == pytest.approx(embedding)


@pytest.mark.parametrize(
    ("template", "most_bytes"), [('{"model": "m"}', 200_000), (TEMPLATE, 1_200_000)]
)
async def test_rows_count_as_bytes_of_their_tenant(
    yard: Yard, template: str, most_bytes: int
) -> None:
    """There is no room for the rows, or for both them and the lines. Nothing stays of either."""
    path = write(yard, random_questions(1000))
    await yard.services.store.tenants.set_quota("full", Quota(max_stored_bytes=most_bytes))
    with pytest.raises(InputRefused) as refused:
        await rendered(yard, path, template, tenant="full")
    assert [each.code for each in refused.value.entries] == ["storage_limit_exceeded"]
    assert await yard.services.store.files.page("full", limit=9) == []
    assert [key async for key in yard.services.storage.list("files/")] == []


async def test_rows_of_an_earlier_attempt_count_once(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended before it could record the lines."""
    path = write(yard, random_questions(1000))
    await yard.services.store.tenants.set_quota("full", Quota(max_stored_bytes=700_000))
    batch_id = await create(yard, path, '{"model": "m"}', tenant="full")

    async def away(*_: object, **__: object) -> int:
        raise StoreUnavailable("The database cannot be reached.")

    with monkeypatch.context() as patched:
        patched.setattr(render, "record_input", away)
        with pytest.raises(StoreUnavailable):
            await fetch_input(yard.services, batch_id)
    await fetch_input(yard.services, batch_id)
    batch = await yard.services.store.batches.get(batch_id)
    assert len(await yard.results(batch.input_file_id)) == 1000


async def test_rows_that_come_late_do_not_replace_those_of_the_next_owner(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dataset has changed since the first one read it, and the table would have its rows.

    Nor is the input deleted because the quota has no room for the rows once more.
    """
    await yard.services.store.tenants.set_quota("full", Quota(max_stored_bytes=700_000))
    path = write(yard, random_questions(1000))
    batch_id = await create(yard, path, '{"model": "m"}', tenant="full")
    store_input = render.store_input

    async def delayed(services: Services, batch: BatchRecord, parts: Any) -> Any:
        stored = await store_input(services, batch, parts)
        monkeypatch.setattr(render, "store_input", store_input)
        write(yard, random_questions(999))
        await fetch_input(services, batch_id)
        return stored

    monkeypatch.setattr(render, "store_input", delayed)
    with pytest.raises(TransitionConflict):
        await fetch_input(yard.services, batch_id)
    batch = await yard.services.store.batches.get(batch_id)
    key = rows_key(batch.input_file_id)
    rows = b"".join([part async for part in yard.services.storage.get(key)])
    assert pq.read_table(pa.BufferReader(rows)).num_rows == 999
    assert len(await yard.results(batch.input_file_id)) == 999


async def test_what_the_table_is_made_with_is_kept_as_long_as_the_results(yard: Yard) -> None:
    """A window may be as long as the time for which files are kept."""
    batch_id = await create(yard, write(yard, questions(1)), completion_window="30d")
    batch = await yard.finish(batch_id)
    made_with = [batch.input_file_id, result_file_id(batch.id, "rows")]
    files = [
        await yard.services.store.files.get(each)
        for each in (*made_with, str(batch.output_file_id))
    ]
    *ends, end = [int(file.expires_at or 0) for file in files]
    assert min(ends) >= end + 29 * 86_400  # the batch could have taken all of its window

    await delete_file(yard.services, batch.tenant, batch.input_file_id)
    place = LocalFile(yard.folder / "later.parquet")
    (failure,) = await deliver_to(yard.services, batch, {"output": place})
    assert f"the input of the batch, {batch.input_file_id}, which is no longer kept" in failure
    assert await deliver_to(yard.services, batch, {"output": LocalFile(yard.folder / "l")}) == ()


async def test_a_dataset_whose_rows_all_fail_has_its_table(yard: Yard) -> None:
    answers = yard.folder / "answers.parquet"
    batch_id = await create(
        yard,
        write(yard, questions(2)),
        "{{ missing }}",
        output=str(answers),
        on_invalid="error_file",
    )
    batch = await yard.finish(batch_id)
    assert batch.output_file_id is None
    assert pq.read_table(answers)["error_code"].to_pylist() == ["template_failed"] * 2


@pytest.mark.parametrize(
    ("hostile", "code", "words"),
    [
        (ENDLESS, "template_limit", "more than 1 s of processor time"),
        (ENDLESS.replace("%}{% endfor", "%}xxxxxxxxxx{% endfor"), "template_limit", "100000 bytes"),
        ("{% set x = 'x' * 100000000000 %}", "template_limit", "too much memory"),
        ("{{ ''.__class__.__mro__ }}", "template_failed", "SecurityError"),
    ],
    ids=["time", "length", "memory", "interpreter"],
)
async def test_a_hostile_template_costs_its_own_batch_a_moment(
    yard: Yard, hostile: str, code: str, words: str
) -> None:
    """And nobody else's: the loop of the process goes on meanwhile."""
    limits = yard.services.settings.limits
    yard.set(limits=limits.model_copy(update={"max_line_bytes": 100_000}))
    fetching = asyncio.create_task(rendered(yard, write(yard, questions(1)), hostile))
    turns = 0
    while not fetching.done():
        turns += 1
        await asyncio.sleep(0.01)
    (line,) = await fetching
    assert line["template_error"]["code"] == code
    assert words in line["template_error"]["message"]
    assert turns > 10


async def test_one_call_that_never_ends_is_ended_by_the_kernel(yard: Yard) -> None:
    """Where no interpreter comes between: the batch fails, and the process is gone."""
    quadratic = "{{ ([[1] * 1000] * 40000) | sum(start=[]) | length }}"
    with pytest.raises(InputRefused) as refused:
        await rendered(yard, write(yard, questions(1)), quadratic)
    assert refused.value.entries[0].code == "template_limit"


async def test_a_clients_rows_have_so_much_time_altogether(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchyard.steps.fetch.render.CLIENTS_SECONDS", 2)
    with pytest.raises(InputRefused) as refused:
        await rendered(yard, write(yard, questions(9)), ENDLESS, public_urls=True)
    assert refused.value.entries[0].code == "template_limit"


async def test_a_fetch_that_is_repeated_after_a_kill_gives_the_same_input(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends when the lines and the rows are durable, and the rows' file is known."""
    answers = yard.folder / "answers.parquet"
    batch_id = await create(yard, write(yard, questions(3)), output=str(answers))
    files = yard.services.store.files
    create_file = type(files).create

    async def die(self: Any, new: Any, **options: Any) -> Any:
        if new.purpose == "batch":
            raise asyncio.CancelledError
        return await create_file(self, new, **options)

    with monkeypatch.context() as killed:
        killed.setattr(type(files), "create", die)
        with pytest.raises(asyncio.CancelledError):
            await fetch_input(yard.services, batch_id)
    batch = await yard.services.store.batches.get(batch_id)
    first = [part async for part in yard.services.storage.get(file_key(batch.input_file_id))]
    assert await fetch_input(yard.services, batch_id) == len(b"".join(first))
    assert (await yard.finish(batch_id)).counts == RequestCounts(3, 3, 0)
    assert pq.read_table(answers)["question"].to_pylist() == [f"question {n}" for n in range(3)]


async def test_a_dataset_may_come_from_a_url_and_is_needed_once_only(yard: Yard) -> None:
    """What it was when it was fetched is what comes back, under its own name in messages."""
    path, answers = write(yard, questions(2)), yard.folder / "answers.parquet"
    async with running_web_server() as web:
        web.answers.append(gives(path.read_bytes()))
        url = web.url("/data.parquet?sign=hunter2")
        batch_id = await create(yard, url, output=str(answers))
        await fetch_input(yard.services, batch_id)
        web.answers[:] = [gives(b"PAR1")]
        with pytest.raises(InputRefused, match=r"^data\.parquet cannot be read"):
            await rendered(yard, url)
    await yard.finish(batch_id)
    assert pq.read_table(answers)["question"].to_pylist() == ["question 0", "question 1"]


@pytest.mark.parametrize(
    "body",
    [
        rb'{"choices":[{"message":{"content":"\ud800"}}]}',
        rb'{"choices":7,"content":[7],"data":[{"embedding":["x"]}],"usage":[]}',
        b"[" * 2000 + b"]" * 2000,
        b'{"data":[{"embedding":[1' + b"0" * 400 + b"]}]}",
        b'"text"',
    ],
)
def test_an_answer_of_any_shape_spoils_no_other_row(body: bytes) -> None:
    line = answered("a", "req_1", 200, body).line
    columns = join._columns_of("a", line, is_output=True)
    assert columns["embedding"] is None
    assert columns["response"]


async def test_a_fetch_that_is_cancelled_leaves_no_process(yard: Yard) -> None:
    batch_id = await create(yard, write(yard, questions(50)), ENDLESS)
    started = asyncio.Event()
    real = asyncio.create_subprocess_exec
    processes = []

    async def noted(*words: Any, **how: Any) -> Any:
        processes.append(await real(*words, **how))
        started.set()
        return processes[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "create_subprocess_exec", noted)
        fetching = asyncio.create_task(fetch_input(yard.services, batch_id))
        await started.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
    assert processes[0].returncode is not None


def save_as_datasets_does(folder: Path, table: pa.Table) -> Path:
    """What ``Dataset.save_to_disk`` writes, with a file of its cache beside it."""
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    halves = [table.slice(0, 2), table.slice(2)]
    for name, part in [*zip(names, halves, strict=True), ("cache-0123.arrow", table)]:
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names]})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


def parts_of(yard: Yard, kind: str) -> str:
    table, folder = questions(5), yard.folder / "dataset"
    if kind in {"folder", "pattern", "named"}:
        parts = [
            write(yard, table.slice(0, 3), "dataset/part-0.parquet"),
            write(yard, table.slice(3), "dataset/part-1.parquet"),
        ]
        (folder / "_SUCCESS").touch()
        if kind == "named":
            return Several(tuple(map(LocalFile, parts))).text
        return str(folder if kind == "folder" else folder / "part-*.parquet")
    if kind == "lines":
        lines = (json.dumps(row) + "\n" for row in table.to_pylist())
        path = yard.folder / "data.jsonl"
        path.write_text("".join(lines))
        return str(path)
    if kind == "packed":
        lines = [f"{json.dumps(row)}\n".encode() for row in table.to_pylist()]
        folder = yard.folder / "packed"
        folder.mkdir()
        (folder / "1.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:2])))
        (folder / "2.jsonl.zst").write_bytes(zstd.compress(b"".join(lines[2:])))
        return str(folder)
    if kind == "arrow":
        path = yard.folder / "data.arrow"
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
        return str(path)
    if kind == "splits":
        save_as_datasets_does(folder / "train", table)
        (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
        return str(folder)
    return str(save_as_datasets_does(folder, table))


@pytest.mark.parametrize(
    "kind", ["folder", "pattern", "lines", "packed", "arrow", "saved", "splits", "named"]
)
async def test_a_dataset_may_be_of_several_files_and_formats(yard: Yard, kind: str) -> None:
    lines = await rendered(yard, parts_of(yard, kind))
    texts = [line["body"]["messages"][0]["content"] for line in lines]
    assert texts == [f"question {n}" for n in range(5)]
    assert [line["custom_id"] for line in lines] == [f"row-{n}" for n in range(1, 6)]


@pytest.mark.parametrize("above", [".cache", "_work"])
async def test_a_pattern_may_be_below_a_folder_with_a_hidden_name(yard: Yard, above: str) -> None:
    """As below ~/.cache/huggingface: only names below the written-out folder are left out."""
    (yard.folder / above / "data" / "_old").mkdir(parents=True)
    part = write(yard, questions(1), f"{above}/data/part-0.parquet")
    write(yard, questions(1), f"{above}/data/_old/part-0.parquet")
    write(yard, questions(1), f"{above}/data/.part-1.parquet")
    assert local_files(part.parent / "*.parquet") == (part,)
    assert local_files(part.parent / "**" / "*.parquet") == (part,)
    assert len(await rendered(yard, part.parent / "part-?.parquet")) == 1


KEYS = [
    "in/_old/batch.jsonl",
    "in/batch.jsonl",
    "in/batch2.jsonl",
    "in/batch_3.jsonl",
    "in/deep/er/batch.jsonl",
    "in/q1.jsonl",
    "in/q[1].jsonl",
    "odd[1]/",
    "odd[1]/a.jsonl",
]


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        ("in/batch*.jsonl", ["in/batch.jsonl", "in/batch2.jsonl", "in/batch_3.jsonl"]),
        ("in/batch?.jsonl", ["in/batch2.jsonl"]),
        ("in/batch[23].jsonl", ["in/batch2.jsonl"]),
        ("in/batch[2_]*.jsonl", ["in/batch2.jsonl", "in/batch_3.jsonl"]),
        ("in/q[1].jsonl", ["in/q[1].jsonl"]),
        ("in/q[1]*.jsonl", ["in/q1.jsonl"]),
        ("*/batch.jsonl", ["in/batch.jsonl"]),
        ("in/**/batch.jsonl", ["in/batch.jsonl", "in/deep/er/batch.jsonl"]),
        ("in/_old/*.jsonl", ["in/_old/batch.jsonl"]),
        ("in/deep/", ["in/deep/er/batch.jsonl"]),
        ("odd[1]/", ["odd[1]/a.jsonl"]),
    ],
)
def test_a_key_names_objects_as_a_path_names_files(wanted: str, files: list[str]) -> None:
    keys = [key for key in KEYS if key.startswith(literal_of(wanted))]
    assert object_files(keys, wanted, "s3://b") == files


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("**.parquet", ["a.parquet"]),
        ("deep**/b.parquet", ["deep/b.parquet"]),
        ("**", ["a.parquet", "deep/b.parquet"]),
        ("*.parquet", ["a.parquet"]),
    ],
)
def test_stars_in_a_path_name_what_they_name_in_a_key(
    tmp_path: Path, pattern: str, found: list[str]
) -> None:
    """A folder is no file of the dataset, whatever its name is."""
    names = ["a.parquet", "deep/b.parquet"]
    for name in (*names, "folder.parquet/.c.crc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [str(each) for each in local_files(tmp_path / pattern)] == [
        str(tmp_path / name) for name in found
    ]
    assert object_files(names, pattern, "s3://b") == found


async def test_a_pattern_in_a_bucket_may_begin_within_a_name(yard: Yard, s3: S3Credentials) -> None:
    """With a real S3 server: nothing that the pattern matches is left out."""

    async def credentials(_: Any) -> Any:
        return s3

    access = replace(yard.services.access, credentials=credentials)
    yard.services = replace(yard.services, access=access)
    for name in ("batch.jsonl", "batch2.jsonl", "batch_3.jsonl", "q[1].jsonl", "other.jsonl"):
        body = json.dumps({"question": name}) + "\n"
        s3.client().put_object(Bucket=BUCKET, Key=f"patterns/{name}", Body=body)
    for pattern, names in {
        "batch*.jsonl": ["batch.jsonl", "batch2.jsonl", "batch_3.jsonl"],
        "batch?.jsonl": ["batch2.jsonl"],
        "q[1].jsonl": ["q[1].jsonl"],
    }.items():
        lines = await rendered(yard, f"s3://{BUCKET}/patterns/{pattern}")
        assert [line["body"]["messages"][0]["content"] for line in lines] == names


async def test_a_text_of_json_lines_stays_a_text(yard: Yard) -> None:
    """Also if it looks like a time, and also within objects and lists."""
    row = {"day": "2024-02-29", "of": {"days": ["2024-02-29 12:00:00"]}, "n": 1, "none": None}
    path = yard.folder / "data.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (line,) = await rendered(yard, path, '{"row": {{ row | tojson }}}')
    assert line["body"]["row"] == row


TOOLS: list[dict[str, Any]] = [
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
    {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
]
TALKS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS[:1], "id": 2**64 + 1},
    {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        "tools": TOOLS,
        "id": 7,
        "metadata": {},
    },
]


def write_lines(yard: Yard, rows: list[Any], name: str = "data.jsonl") -> Path:
    path = yard.folder / name
    path.write_text(
        "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in rows)
    )
    return path


async def test_objects_of_json_lines_have_their_own_keys_only(yard: Yard) -> None:
    """Those of other lines would make their schemas invalid. Integers are exact, and {} is kept."""
    template = """{"model": "stub-model", "max_tokens": 4, "messages": {{ messages | tojson }},
        "tools": {{ tools | tojson }}, "id": {{ id }}, "metadata": {{ metadata | tojson }}}"""
    path = write_lines(yard, TALKS)
    lines = await rendered(yard, path, template)
    fixed = {"model": "stub-model", "max_tokens": 4, "metadata": None}
    assert [line["body"] for line in lines] == [fixed | row for row in TALKS]

    answers = yard.folder / "answers.parquet"
    chat = '{"model": "stub-model", "max_tokens": 4, "messages": {{ messages | tojson }}}'
    await yard.finish(await create(yard, path, chat, output=str(answers)))
    found = pq.read_table(answers)
    for name in ("messages", "tools", "id", "metadata"):
        assert found.schema.field(name).type == pa.string()
        kept = [text and json.loads(text) for text in found[name].to_pylist()]
        assert kept == [row.get(name) for row in TALKS]


@pytest.mark.parametrize(
    ("values", "kind", "kept"),
    [
        ([1, None, 1.5], pa.float64(), [1.0, None, 1.5]),
        ([2**60 + 1, 1], pa.int64(), [2**60 + 1, 1]),
        ([2**60 + 1, 1.5], pa.string(), ["1152921504606846977", "1.5"]),
        ([True, 1], pa.string(), ["true", "1"]),
        ([None, "x"], pa.string(), [None, "x"]),
        (["x", 1], pa.string(), ['"x"', "1"]),
        ([None, float("nan")], pa.float64(), [None, pytest.approx(float("nan"), nan_ok=True)]),
        ([[], [None], [[1]]], pa.list_(pa.list_(pa.int64())), [[], [None], [[1]]]),
        ([[], None], pa.list_(pa.null()), [[], None]),
        ([{"a": None}, {"a": 1}], pa.struct({"a": pa.int64()}), [{"a": None}, {"a": 1}]),
        ([{"a": 1}, {"a": 1, "b": 2}], pa.string(), ['{"a":1}', '{"a":1,"b":2}']),
        ([{"a": [{}]}, None], pa.string(), ['{"a":[{}]}', None]),
    ],
)
def test_a_column_of_json_lines_holds_the_values_of_all_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[Any], kind: Any, kept: list[Any]
) -> None:
    """Also those that come late, and a column that only the last line of the last file has."""
    monkeypatch.setattr(json_rows, "BATCH_ROWS", 1)
    rows = [{"of": each} for each in values]
    rows[-1]["last"] = "here"
    files = [tmp_path / f"{n}.jsonl" for n in range(len(rows))]
    for path, row in zip(files, rows, strict=True):
        path.write_text(f"\ufeff\n{json.dumps(row)}\r\n\n")
    lines = json_rows.JsonLines(files)
    assert lines.schema == pa.schema({"of": kind, "last": pa.string()})
    pieces = list(lines.pieces())
    assert [batch.num_rows for batch, _ in pieces] == [1] * len(rows)
    assert pa.Table.from_batches([batch for batch, _ in pieces])["of"].to_pylist() == kept


def test_pieces_of_json_lines_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of long lines and of compressed ones, too. A line that is too long is no row."""
    monkeypatch.setattr(json_rows, "BATCH_BYTES", 1000)
    monkeypatch.setattr(json_rows, "_MOST_LINE_BYTES", 1000)
    path = tmp_path / "data.jsonl.gz"
    lengths = [400, 400, 400, 2000, 900, 10]
    lines = [json.dumps({"q": "x" * length}) + "\n" for length in lengths]
    path.write_bytes(gzip.compress("".join(lines).encode()))
    pieces = list(json_rows.JsonLines([path]).pieces())
    assert [batch.num_rows for batch, _ in pieces] == [2, 2, 2]
    found = [row for _, rows in pieces for row in rows]
    why = "line 4 of data.jsonl.gz is longer than 1000 bytes"
    assert found.pop(3) == json_rows.UnusableRow(why)
    assert [len(row["q"]) for row in found] == [400, 400, 400, 900, 10]


def test_a_byte_order_mark_between_json_lines_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes('{"q": 1}\n\ufeff{"q": 2}\n'.encode())
    rows = [row for _, rows in json_rows.JsonLines([path]).pieces() for row in rows]
    assert isinstance(rows[1], json_rows.UnusableRow)
    assert "line 2 of data.jsonl is not a valid JSON object: it has a byte-order mark" in str(
        rows[1]
    )


INTERVAL = pa.month_day_nano_interval()
BROKEN = ['{"question": "brok', r'{"question": "half a \ud83d"}', "[1]", "[" * 2000]


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_line_that_is_no_object_is_a_bad_line(yard: Yard, broken: str) -> None:
    """It is named, and not quoted; the others run, and it keeps its place in the table."""
    path = write_lines(yard, [{"question": "a"}, "", broken, {"question": "b"}])
    answers = yard.folder / "answers.parquet"
    batch_id = await create(yard, path, output=str(answers), on_invalid="error_file")
    batch = await yard.finish(batch_id)
    assert (batch.status, batch.counts) == (BatchStatus.COMPLETED, RequestCounts(3, 2, 1))
    rows = pq.read_table(answers).to_pylist()
    assert [row["question"] for row in rows] == ["a", None, "b"]
    assert rows[1]["error_code"] == "template_failed"
    assert rows[1]["error_message"].endswith(": line 3 of data.jsonl is not a valid JSON object.")


async def test_a_file_whose_first_line_is_no_object_is_refused(yard: Yard) -> None:
    path = write_lines(yard, ["question,answer", {"question": "a"}], "data.csv")
    words = (
        r"^data\.csv is neither .* JSON lines: line 1 of data\.csv is not a valid JSON object\.$"
    )
    with pytest.raises(InputRefused, match=words):
        await rendered(yard, path)


async def test_json_lines_do_not_go_with_other_formats(yard: Yard) -> None:
    files = [write(yard, questions(1)), write_lines(yard, [{"question": "a"}])]
    with pytest.raises(InputRefused, match=r"data\.jsonl has another format than data\.parquet"):
        await rendered(yard, Several(tuple(map(LocalFile, files))).text)


@pytest.mark.parametrize(
    ("column", "values", "texts"),
    [
        (pa.array([{}, None], pa.struct([])), [{}, None], ["{}", None]),
        (pa.array([[{"a": {}}], []]), [[{"a": {}}], []], ['[{"a":{}}]', "[]"]),
        (pa.RunEndEncodedArray.from_arrays([1, 2], ["a", None]), ["a", None], ['"a"', None]),
        (pa.array([(1, 2, 3), None], INTERVAL), [[1, 2, 3], None], ["[1,2,3]", None]),
    ],
    ids=["object", "nested", "run-end-encoded", "interval"],
)
async def test_what_parquet_does_not_have_is_json_text_in_the_table(
    yard: Yard, column: pa.Array, values: list[Any], texts: list[str | None]
) -> None:
    """The template gets the value itself."""
    path = yard.folder / "data.arrow"
    table = questions(2).append_column("of", column)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    template = TEMPLATE.replace(
        '"max_tokens"', '"metadata": {{ {"of": of} | tojson }}, "max_tokens"'
    )
    lines = await rendered(yard, path, template)
    assert [line["body"]["metadata"]["of"] for line in lines] == values
    answers = yard.folder / "answers.parquet"
    batch = await yard.finish(await create(yard, path, output=str(answers)))
    assert batch.counts == RequestCounts(2, 2, 0)
    assert pq.read_table(answers)["of"].to_pylist() == texts


async def test_what_is_no_dataset_is_refused_by_name(yard: Yard) -> None:
    path = yard.folder / "data.parquet"
    path.write_bytes(b"PAR1 and nothing else PAR1")
    with pytest.raises(InputRefused, match=r"data\.parquet cannot be read") as refused:
        await rendered(yard, path)
    assert refused.value.entries[0].code == "invalid_dataset"


async def test_parts_with_other_columns_are_refused(yard: Yard) -> None:
    write(yard, questions(1), "parts/0.parquet")
    path = write(yard, pa.table({"answer": ["x"]}), "parts/1.parquet")
    with pytest.raises(InputRefused, match=r"1\.parquet has other columns"):
        await rendered(yard, path.parent)


def test_so_are_parts_with_more_columns(tmp_path: Path) -> None:
    """Their order does not matter."""
    first = questions(1).append_column("answer", [["x"]])
    pq.write_table(first, tmp_path / "0.parquet")
    pq.write_table(first.select(["answer", "question"]), tmp_path / "1.parquet")
    pq.write_table(first.append_column("more", [[1]]), tmp_path / "2.parquet")
    files = sorted(tmp_path.iterdir())
    schema = tables.schema_of(files[:2])
    assert [tables.in_columns(rows, schema) for rows in tables.read_rows(files[:2])] == [
        *first.to_batches(),
        *first.to_batches(),
    ]
    with pytest.raises(tables.Refused, match=r"2\.parquet has other columns .* is more\."):
        tables.schema_of(files)


def test_parts_may_have_more_fields_in_their_objects(tmp_path: Path) -> None:
    """Where a file does not have a field, it is null in the table."""
    small, large = pa.struct({"a": pa.int64()}), pa.struct({"a": pa.int64(), "b": pa.int64()})
    kinds = [lambda of: of, pa.list_, pa.large_list, lambda of: pa.map_(pa.string(), of)]
    for number, make in enumerate(kinds):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = []
        for name, kind in (("0", small), ("1", large)):
            files.append(folder / name)
            pq.write_table(pa.table({"x": pa.nulls(1, make(kind))}), files[-1])
        schema = tables.schema_of(files)
        assert schema.field("x").type == make(large)
        rows = [tables.in_columns(each, schema) for each in tables.read_rows(files)]
        assert pa.Table.from_batches(rows).num_rows == 2


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        ({"template": "{% if %}"}, "template", "in its line 1"),
        ({"template": "x" * 70_000}, "template", "65536 characters"),
        ({"template": "{{" + "(" * 5000}, "template", "nested too deeply|in its line"),
        ({"template": "{{ " + "1" * 5000 + " }}"}, "template", "too long a number"),
        ({"template": None}, "template", "give the template"),
        ({"error": "errors.parquet"}, "error", "failed lines are JSON lines"),
    ],
)
async def test_what_cannot_work_is_refused_at_once(
    yard: Yard, request_: dict[str, Any], param: str, words: str
) -> None:
    if "error" in request_:
        request_ = {"error": str(yard.folder / request_["error"])}
    with pytest.raises(RequestRefused, match=words) as refused:
        await create(yard, yard.folder / "data.parquet", **{"template": TEMPLATE, **request_})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        ("data", "data/a.parquet"),
        ("data", "data/new.parquet"),
        ("data", "data/deep/answers.jsonl"),
        ("data", "link/a.parquet"),
        ("data/*.parquet", "data/a.parquet"),
        ("data/*.parquet", "link/new.parquet"),
        ("link/*.parquet", "data/a.parquet"),
        ("data/**/*.parquet", "data/deep/new.parquet"),
        ("data/*", "data/answers.jsonl"),
        ("data", "data/out-link.parquet"),
        ("data", "link-to-a.parquet"),
        ("s3://b/data/", "s3://b/data/deep/a.parquet"),
        ("s3://b/data/*.parquet", "s3://b/data/a.parquet"),
        ("s3://b/data/[ab]*", "s3://b/data/answers.jsonl"),
    ],
)
@pytest.mark.parametrize("name", ["output", "error"])
async def test_results_are_never_files_of_their_dataset(
    yard: Yard, dataset: str, place: str, name: str
) -> None:
    """Neither in place of one of them nor as one more, which the next batch would read."""
    if name == "error":
        place = place.replace(".parquet", ".jsonl")
        dataset = dataset.replace(".parquet", ".jsonl")
    lay_out(yard)
    places = {key: at(yard, text) for key, text in (("input", dataset), (name, place))}
    with pytest.raises(RequestRefused, match="Choose a place outside of it") as refused:
        await yard.create([], template=TEMPLATE, **places)
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        ("data", "data-answers.parquet"),
        ("data/*.parquet", "data/answers.jsonl"),
        ("data/*.parquet", "data/deep/answers.parquet"),
        ("data/a.parquet", "data/answers.parquet"),
        ("s3://b/data/", "s3://b/data-answers.parquet"),
        ("s3://b/data/", "s3://c/data/a.parquet"),
        ("s3://b/data/*.parquet", "s3://b/data/deep/a.parquet"),
        ("data", "s3://b/data/a.parquet"),
    ],
)
async def test_results_may_be_beside_their_dataset(yard: Yard, dataset: str, place: str) -> None:
    lay_out(yard)
    assert await create(yard, at(yard, dataset), output=at(yard, place))


async def test_results_of_a_retry_are_no_files_of_the_dataset_either(yard: Yard) -> None:
    fault = Fault(FaultKind.ANSWER, lambda body: b"1" in body, status=400)
    yard.use(StubEngine(faults=[fault]))
    path = write(yard, questions(2), "data/a.parquet")
    batch = await yard.finish(await create(yard, path.parent))
    place = LocalFile(path.with_name("answers.jsonl"))
    with pytest.raises(RequestRefused, match="Choose a place outside of it"):
        await retry_batch(yard.services, batch.id, output=place)


def at(yard: Yard, text: str) -> str:
    """A place in the folder of the test, unless it is remote."""
    return text if "://" in text else str(yard.folder / text)


def lay_out(yard: Yard) -> None:
    """A folder with files, a link to it, a link in it, and a link to one of its files."""
    (yard.folder / "data" / "deep").mkdir(parents=True)
    (yard.folder / "link").symlink_to("data")
    for suffix in (".parquet", ".jsonl"):
        (yard.folder / "data" / f"a{suffix}").touch()
        (yard.folder / "data" / f"out-link{suffix}").symlink_to(yard.folder / f"out{suffix}")
        (yard.folder / f"link-to-a{suffix}").symlink_to(yard.folder / "data" / f"a{suffix}")


async def test_without_pyarrow_the_batch_says_what_to_install(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputRefused, match=r"pip install 'batchyard\[datasets\]'") as refused:
        await rendered(yard, write(yard, questions(1)))
    assert refused.value.entries[0].code == "datasets_not_installed"


async def test_a_clients_dataset_may_have_no_more_rows_than_a_file_has_lines(yard: Yard) -> None:
    limits = yard.services.settings.limits
    yard.set(limits=limits.model_copy(update={"max_requests": 3}))
    batch_id = await create(yard, write(yard, questions(4)), public_urls=True)
    await fetch_input(yard.services, batch_id)
    with pytest.raises(InputRefused, match="more than 3 requests"):
        await prepare_batch(yard.services, batch_id)


async def test_a_table_knows_bad_lines_by_their_places(yard: Yard) -> None:
    """Also rows that repeat a custom_id or have none."""
    ids = pa.array(["a", "a", None, "b"])
    table = questions(4).append_column("custom_id", ids)
    answers = yard.folder / "answers.parquet"
    batch_id = await create(yard, write(yard, table), output=str(answers), on_invalid="error_file")
    await yard.finish(batch_id)
    assert pq.read_table(answers)["error_code"].to_pylist() == [
        *(None, "duplicate_custom_id"),
        *("invalid_request", None),
    ]


@pytest.fixture
def arrow_memory() -> Iterator[pa.MemoryPool]:
    """What Arrow allocates in this test. Others use another pool."""
    before, pool = pa.default_memory_pool(), pa.system_memory_pool()
    pa.set_memory_pool(pool)
    yield pool
    pa.set_memory_pool(before)


def test_a_table_of_large_rows_needs_memory_for_a_few_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrow_memory: pa.MemoryPool
) -> None:
    """Though 1,024 rows are larger than that, and other rows are small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables, "BATCH_BYTES", 2**20)
    monkeypatch.setattr(tables, "_GROUP_BYTES", 2**21)
    pictures = [os.urandom(2**16 if n < 500 or n >= 20_500 else 10) for n in range(21_000)]
    with tables.RowsWriter(tmp_path / "rows.parquet", pa.schema({"picture": pa.binary()})) as rows:
        for start in range(0, len(pictures), 20):
            rows.add(pa.record_batch({"picture": pictures[start : start + 20]}))
    ids = [f"row-{n}" for n in range(len(pictures))]
    lines = "".join(f'{{"custom_id":"{each}"}}\n' for each in ids)
    (tmp_path / "lines.jsonl").write_text(lines)
    results = b"".join(answered(each, "req_1", 200, b"{}").line for each in ids)
    (tmp_path / "output.jsonl").write_bytes(results)
    join.main(
        JoinJob(
            lines="lines.jsonl",
            output="output.jsonl",
            error=None,
            rows="rows.parquet",
            has_embeddings=False,
        )
    )
    assert arrow_memory.max_memory() < 12 * 2**20
    found = pq.read_table(TABLE_FILE)
    assert found["picture"].to_pylist() == pictures
    assert found["custom_id"].to_pylist() == ids
    assert pq.read_metadata(TABLE_FILE).num_row_groups < 100


async def test_a_line_of_another_file_cannot_say_that_it_was_rendered(yard: Yard) -> None:
    line = {"custom_id": "a", "template_error": {"code": "nonsense", "message": "m"}}
    with pytest.raises(InputRefused) as refused:
        await yard.prepared([line])
    assert "nonsense" not in {entry.code for entry in refused.value.entries}


async def test_other_tenants_wait_for_nobodys_template(yard: Yard) -> None:
    path = write(yard, questions(20))
    hostile = [await create(yard, path, ENDLESS, tenant="hostile") for _ in range(5)]
    fetching = [asyncio.create_task(fetch_input(yard.services, each)) for each in hostile]
    await asyncio.sleep(0)
    assert await rendered(yard, write(yard, questions(1), "one.parquet"))
    assert not any(each.done() for each in fetching)
    for each in fetching:
        each.cancel()
    await asyncio.gather(*fetching, return_exceptions=True)


def job_of(path: Path, *, template: str = TEMPLATE, **more: Any) -> RenderJob:
    return RenderJob(
        files=(str(path),),
        template=template,
        url=CHAT,
        model="stub-model",
        most_line_bytes=10_000,
        most_rows=10_000,
        **more,
    )


async def test_rows_that_are_too_many_for_a_clients_limit_are_refused(tmp_path: Path) -> None:
    """They will never have room, unlike on a disk that is full."""
    path = tmp_path / "rows.parquet"
    pq.write_table(questions(2000), path)
    blocks = process.run_job(job_of(path), tmp_path, "default", file_bytes=100)
    with pytest.raises(DatasetRefused, match="too much room"):
        _ = [block async for block in blocks]


async def test_a_full_disk_is_no_fault_of_the_dataset(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(questions(1), path)
    (tmp_path / ROWS_FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as full:
        _ = [block async for block in process.run_job(job_of(path), tmp_path, "default")]
    assert full.value.errno == errno.ENOSPC
