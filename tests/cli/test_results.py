"""``batchyard results``: what a batch has left behind, wherever it is wanted."""

from __future__ import annotations

import json
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from batchyard.batch_error import BatchError
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.locations.local_file import LocalFile
from batchyard.results.results import answered
from batchyard.services.keys import segment_key
from batchyard.services.segments.segments import encode_entry, put_bytes
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.store import NewBatch
from tests.cli.conftest import Background, Ended, with_services, with_store
from tests.pages import block, replaced, words_of
from tests.steps.conftest import Yard, chat_line
from tests.unit.storage.web_server import running_web_server, says

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, Store

    Run = Callable[..., Ended]


@pytest.fixture
def ran(alone: Run, tmp_path: Path) -> Callable[..., str]:
    """Runs a batch of these texts, of which those that say "refused" fail; its id."""

    def run(*texts: str) -> str:
        asked = texts or ("one", "two", "three")

        async def work(services: Services) -> str:
            yard = Yard(services, tmp_path, StubEngine())
            refused = Fault(FaultKind.ANSWER, lambda body: b"refused" in body, status=400)
            yard.use(StubEngine(faults=[refused]))
            path = yard.write_input([chat_line(f"id-{n}", text) for n, text in enumerate(asked)])
            batch_id = await create_batch(yard.services, BatchRequest(input=LocalFile(path)))
            return (await yard.finish(batch_id)).id

        return with_services(work)

    return run


def ids(text: str) -> list[Any]:
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def test_the_answers_go_to_standard_output(alone: Run, ran: Callable[..., str]) -> None:
    ended = alone("results", ran())
    assert (ended.status, ended.stderr) == (0, "")
    assert ids(ended.stdout) == ["id-0", "id-1", "id-2"]


def test_a_ledger_says_what_each_line_used(alone: Run, tmp_path: Path) -> None:
    async def work(services: Services) -> str:
        yard = Yard(services, tmp_path, StubEngine())
        yard.use(StubEngine())
        return (await yard.run([chat_line("a"), chat_line("b")], ledger=True)).id

    batch_id = with_services(work)
    command = replaced(block("docs/how-to/accounts.md", "ledger"), {"batch_abc123": batch_id})
    ended = alone(*words_of(command))
    assert (ended.status, ended.stderr) == (0, "")
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [row["custom_id"] for row in rows] == ["a", "b"]
    assert all(row["total_tokens"] for row in rows)


def test_a_batch_without_a_ledger_says_so(alone: Run, ran: Callable[..., str]) -> None:
    ended = alone("ledger", ran())
    assert (ended.status, ended.stdout) == (3, "")
    assert "was not created with `ledger`" in ended.stderr


def test_failed_lines_are_pointed_at(alone: Run, ran: Callable[..., str]) -> None:
    batch_id = ran("one", "refused", "three")
    ended = alone("results", batch_id)
    assert ended.status == 0
    assert ids(ended.stdout) == ["id-0", "id-2"]
    assert f"batchyard results {batch_id} --errors FILE" in ended.stderr


def test_both_files_go_to_paths(alone: Run, ran: Callable[..., str], tmp_path: Path) -> None:
    ended = alone("results", ran("one", "refused"), "-o", "out.jsonl", "--errors", "bad.jsonl")
    assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")
    assert ids((tmp_path / "out.jsonl").read_text()) == ["id-0"]
    assert ids((tmp_path / "bad.jsonl").read_text()) == ["id-1"]


def test_a_place_that_ends_in_parquet_gets_a_table(
    alone: Run, ran: Callable[..., str], tmp_path: Path
) -> None:
    command = replaced(
        block("docs/how-to/datasets.md", "table"), {"batch_…": ran("one", "refused")}
    )
    ended = alone(*words_of(command))
    assert (ended.status, ended.stderr) == (0, "")
    rows = pq.read_table(tmp_path / "answers.parquet").to_pylist()
    assert [row["custom_id"] for row in rows] == ["id-0", "id-1"]
    assert [row["status"] for row in rows] == ["succeeded", "failed"]
    assert [bool(row["content"]) for row in rows] == [True, False]


def test_lines_that_still_come_make_no_table(alone: Run) -> None:
    ended = alone("results", "batch_1", "--follow", "-o", "answers.parquet")
    assert ended.status == 2
    assert "It writes JSON Lines" in ended.stderr


def test_the_errors_alone_go_to_standard_output(alone: Run, ran: Callable[..., str]) -> None:
    ended = alone("results", ran("one", "refused"), "--errors", "-")
    assert (ended.status, ids(ended.stdout)) == (0, ["id-1"])


def test_a_url_gets_a_put(alone: Run, ran: Callable[..., str], background: Background) -> None:
    web = background.enter(running_web_server())
    web.answers = [says(200)]
    ended = alone("results", ran(), "-o", web.url("/new?sig=canary"))
    assert (ended.status, ended.stderr) == (0, "")
    (put,) = web.requests
    assert (put.method, ids(put.body.decode())) == ("PUT", ["id-0", "id-1", "id-2"])


def test_what_cannot_be_written_is_an_error_without_its_secret(
    alone: Run, ran: Callable[..., str], background: Background
) -> None:
    web = background.enter(running_web_server())
    web.answers = [says(403)]
    ended = alone("results", ran(), "-o", web.url("/new?sig=canary"))
    assert ended.status == 1
    assert "The output file could not be written: not allowed to use" in ended.stderr
    assert "canary" not in ended.stderr


def test_a_batch_that_still_runs_has_no_results(alone: Run) -> None:
    batch = with_store(lambda store: store.batches.create(NewBatch(endpoint="/v1/embeddings")))
    ended = alone("results", batch.id)
    assert (ended.status, ended.stdout) == (3, "")
    assert f"{batch.id} is validating: its results are made when it ends" in ended.stderr


def test_a_batch_that_still_runs_is_told_where_its_results_go(
    alone: Run, running: str, tmp_path: Path
) -> None:
    told = alone("results", running, "-o", "there.jsonl")
    assert (told.status, told.stdout) == (0, "")
    assert f"{running} is in_progress: its results are written there when it ends" in told.stderr
    assert not (tmp_path / "there.jsonl").exists()
    finish(running, tmp_path)
    assert len(ids((tmp_path / "there.jsonl").read_text())) == 3


def test_results_do_not_replace_the_input_of_a_batch_that_still_runs(
    alone: Run, running: str, tmp_path: Path
) -> None:
    refused = alone("results", running, "-o", "in.jsonl")
    assert refused.status == 3
    assert "the same place" in refused.stderr


def test_nor_do_they_go_into_the_dataset_of_a_batch_that_still_runs(
    alone: Run, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()

    async def create(services: Services) -> str:
        request = BatchRequest(input=LocalFile(data), template="{}", endpoint="/v1/embeddings")
        return await create_batch(services, request)

    refused = alone("results", with_services(create), "-o", "data/answers.jsonl")
    assert refused.status == 3
    assert "Choose a place outside of it" in refused.stderr


def test_one_line_is_printed_while_the_batch_runs(alone: Run, running: str) -> None:
    found = alone("results", running, "--custom-id", "id-1")
    assert (found.status, ids(found.stdout)) == (0, ["id-1"])
    open_ = alone("results", running, "--custom-id", "id-2")
    assert (open_.status, open_.stdout) == (3, "")
    assert "is not finished yet" in open_.stderr
    unknown = alone("results", running, "--custom-id", "id-9")
    assert "has no request with this custom_id" in unknown.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--order", "input"),
        ("--order", "desc", "--follow"),
        ("--custom-id", "id-1", "--follow"),
        ("--custom-id", "id-1", "-o", "x"),
    ],
)
def test_what_does_not_go_together_is_a_wrong_command_line(
    alone: Run, running: str, words: tuple[str, ...]
) -> None:
    assert alone("results", running, *words).status == 2


@pytest.mark.parametrize(
    ("texts", "words", "message"),
    [
        (("refused",), (), "has no output file: none of its requests succeeded"),
        (("one",), ("--errors", "-"), "has no error file: none of them failed"),
    ],
)
def test_a_file_that_there_is_not_is_a_clear_error(
    alone: Run,
    ran: Callable[..., str],
    texts: tuple[str, ...],
    words: tuple[str, ...],
    message: str,
) -> None:
    ended = alone("results", ran(*texts), *words)
    assert (ended.status, ended.stdout) == (3, "")
    assert message in ended.stderr


def test_a_file_that_was_deleted_is_a_clear_error(alone: Run, ran: Callable[..., str]) -> None:
    batch_id = ran()

    async def delete(services: Services) -> None:
        batch = await services.store.batches.get(batch_id)
        await services.store.files.delete(str(batch.output_file_id))

    with_services(delete)
    assert "is no longer kept" in alone("results", batch_id).stderr


def test_both_files_in_one_place_are_refused(alone: Run, ran: Callable[..., str]) -> None:
    ended = alone("results", ran("one", "refused"), "-o", "same", "--errors", "same")
    assert ended.status == 3
    assert "the same place" in ended.stderr


# -- --follow ------------------------------------------------------------------------------------


@pytest.fixture
def running(alone: Run, tmp_path: Path) -> str:
    """The id of a batch of three requests, the second of which is finished."""

    async def work(services: Services) -> str:
        yard = Yard(services, tmp_path, StubEngine())
        batch_id = await yard.prepared([chat_line(f"id-{n}") for n in range(3)])
        line = answered("id-1", "req_1", 200, b"{}")
        await put_bytes(services.storage, segment_key(batch_id, 0, 0, 0), [encode_entry(1, line)])
        return batch_id

    return with_services(work)


def finish(batch_id: str, tmp_path: Path) -> None:
    async def work(services: Services) -> None:
        yard = Yard(services, tmp_path, StubEngine())
        yard.use(StubEngine())
        await yard.finish(batch_id)

    with_services(work)


def test_lines_are_followed_until_the_batch_has_ended(
    alone: Run, running: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_FLUSH_SECONDS", "0.05")
    out = tmp_path / "out.jsonl"

    def finish_when_there_is_a_line() -> None:
        while not out.exists() or not out.read_bytes():
            time.sleep(0.01)
        finish(running, tmp_path)

    later = threading.Thread(target=finish_when_there_is_a_line)
    later.start()
    ended = alone("results", running, "--follow", "-o", "out.jsonl")
    later.join()
    assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")
    assert ids(out.read_text()) == ["id-1", "id-0", "id-2"]


@pytest.mark.parametrize("rest", [b'{"custom_id": "id', b'{"id": "x", "custom_id": "id-1"}', b"\0"])
def test_a_file_is_continued_after_its_last_whole_line(
    alone: Run, running: str, tmp_path: Path, rest: bytes
) -> None:
    """As it is after a crash of the command, or of its machine."""
    finish(running, tmp_path)
    out = tmp_path / "out.jsonl"
    out.write_bytes(b'{"custom_id": "id-2"}\n' + rest)
    assert alone("results", running, "--follow", "-o", "out.jsonl").status == 0
    assert ids(out.read_text()) == ["id-2", "id-0", "id-1"]
    assert alone("results", running, "--follow", "-o", "out.jsonl").status == 0
    assert len(ids(out.read_text())) == 3


def test_lines_are_followed_in_the_order_of_the_input(
    alone: Run, running: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    later = threading.Timer(0.3, lambda: finish(running, tmp_path))
    later.start()
    ended = alone("results", running, "--follow", "--order", "input", "-o", "out.jsonl")
    later.join()
    assert ended.status == 0
    assert ids(out.read_text()) == ["id-0", "id-1", "id-2"]


def test_failed_lines_are_followed_to_a_place_of_their_own(
    alone: Run, ran: Callable[..., str], tmp_path: Path
) -> None:
    ended = alone("results", ran("one", "refused"), "-f", "-o", "-", "--errors", "bad.jsonl")
    assert (ended.status, ids(ended.stdout)) == (0, ["id-0"])
    assert ids((tmp_path / "bad.jsonl").read_text()) == ["id-1"]


def test_following_ends_with_1_if_the_batch_is_not_completed(alone: Run) -> None:
    async def work(store: Store) -> BatchRecord:
        batch = await store.batches.create(NewBatch(endpoint="/v1/embeddings"))
        return await store.batches.fail(batch.id, [BatchError("empty_file", "No lines.")])

    assert alone("results", with_store(work).id, "--follow").status == 1


def test_ctrl_c_ends_the_following_and_not_the_batch(
    alone: Run, running: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"

    def interrupt_when_there_is_a_line() -> None:
        while not out.exists() or not out.read_bytes():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    later = threading.Thread(target=interrupt_when_there_is_a_line)
    later.start()
    ended = alone("results", running, "--follow", "-o", "out.jsonl")
    later.join()
    assert (ended.status, ids(out.read_text())) == (130, ["id-1"])
    assert ended.stderr == "batchyard: The batch continues.\n"


def test_a_file_with_other_lines_is_not_continued(alone: Run, running: str, tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("buy milk\n")
    ended = alone("results", running, "--follow", "-o", "notes.txt")
    assert (ended.status, out.read_text()) == (3, "buy milk\n")
    assert "name another file" in ended.stderr


@pytest.mark.parametrize("content", ["buy milk", '{"milk": true}'])
def test_a_file_of_something_else_whose_line_has_no_end_is_left_as_it_is(
    alone: Run, running: str, tmp_path: Path, content: str
) -> None:
    """Only what a killed command has left of a result line is cut off."""
    finish(running, tmp_path)
    out = tmp_path / "notes.txt"
    out.write_text(content)
    ended = alone("results", running, "--follow", "-o", "notes.txt")
    assert (ended.status, out.read_text()) == (3, content)


def test_only_a_file_or_standard_output_can_be_followed_into(alone: Run, running: str) -> None:
    ended = alone("results", running, "--follow", "-o", "https://host.example/new?sig=canary")
    assert ended.status == 3
    assert "cannot be written line by line" in ended.stderr
    assert "canary" not in ended.stderr


def test_one_place_for_two_kinds_of_lines_is_a_wrong_command_line(alone: Run, running: str) -> None:
    assert alone("results", running, "--follow", "-o", "same", "--errors", "same").status == 2
