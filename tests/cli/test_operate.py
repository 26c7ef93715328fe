"""Batches watched and steered from the command line, without any Prefect."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from batchyard import intervals
from batchyard.batch_error import BatchError
from batchyard.cli.batches.list_batches import table
from batchyard.lifecycle import BatchStatus
from batchyard.store import NewFile, RunnerKind
from batchyard.wire import BatchUsage, RequestCounts
from tests.cli.conftest import Ended, with_store
from tests.contract.store.samples import begun_batch, finish, new_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich.table import Table

    from batchyard.store import BatchRecord, Store

    Run = Callable[..., Ended]


def begun(**changes: Any) -> str:
    """A batch in progress; its id."""
    return with_store(lambda store: begun_batch(store, **changes)).id


def completed(**changes: Any) -> str:
    """A batch that has ended; its id."""

    async def work(store: Store) -> BatchRecord:
        batch = await begun_batch(store, **changes)
        await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
        return await finish(store, batch.id, BatchStatus.COMPLETED, counts=RequestCounts(10, 10))

    return with_store(work).id


def cells(line: str) -> list[str]:
    """Of a line of the table: columns have two spaces or more between them."""
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def listed(ended: Ended) -> list[str]:
    """The ids in the table."""
    return [cells(line)[0] for line in ended.stdout.splitlines()[1:]]


# -- list ----------------------------------------------------------------------------------------


def test_an_empty_yard_is_a_head_and_the_name_of_the_database(alone: Run, tmp_path: Path) -> None:
    """Another database than the one that was meant is the likeliest reason."""
    ended = alone("list")
    assert ended.status == 0
    assert cells(ended.stdout) == [
        *("id", "status", "model", "answered", "failed", "deadline", "done", "priority", "why")
    ]
    database = f"sqlite:///{tmp_path}/home/batchyard.db"
    assert ended.stderr == (
        f"batchyard: There are no unfinished batches in {database}. "
        "--all also lists those that have ended.\n"
    )
    assert alone("list", "--all").stderr == f"batchyard: There are no batches in {database}.\n"


def test_the_list_says_why_a_batch_failed(alone: Run) -> None:
    errors = [BatchError("invalid_json_line", "Not JSON.", line=3), BatchError("a", "b")]

    async def work(store: Store) -> None:
        batch = await store.batches.create(new_batch())
        await store.batches.fail(batch.id, errors)

    with_store(work)
    _, line = alone("list", "--all").stdout.splitlines()
    assert line.endswith("line 3: invalid_json_line: Not JSON. (and 1 more)")


def test_the_list_says_why_a_batch_waits(alone: Run) -> None:
    async def work(store: Store) -> None:
        batch = await begun_batch(store)
        await store.batch_schedule.record_waits({batch.model or "": "No runner has room."})

    with_store(work)
    _, line = alone("list").stdout.splitlines()
    assert line.endswith("No runner has room.")


def test_a_batch_is_a_line_of_plain_aligned_text_in_a_pipe(alone: Run) -> None:
    """However long its model's name, nothing is cut off; no line has control characters."""

    async def work(store: Store) -> BatchRecord:
        batch = await begun_batch(store, chunks=200, model="org/" + "m" * 90, priority=7)
        (lease,) = await store.chunks.claim(model=batch.model or "", owner="me", lease_seconds=60)
        await store.chunks.record_progress(lease, completed=8, failed=1, usage=BatchUsage())
        await store.batch_schedule.record_forecast({batch.id: batch.created_at + 7_260})
        return batch

    batch = with_store(work)
    begun()
    ended = alone("list")
    assert "\x1b" not in ended.stdout
    head, *lines = ended.stdout.splitlines()
    (line,) = (line for line in lines if line.startswith(batch.id))
    assert line.index("9/2,000") + len("9/2,000") == head.index("answered") + len("answered")
    values = cells(line)
    assert values[:5] == [batch.id, "in_progress", batch.model, "9/2,000", "1"]
    assert values[5] in {"in 23 h 59 min", "in 1 d 0 h"}
    assert values[6].startswith(("in 2 h 0 min", "in 2 h 1 min"))
    assert values[7] == "7"


def test_batches_that_have_ended_are_listed_on_demand(alone: Run) -> None:
    done, running = completed(), begun()
    assert listed(alone("list")) == [running]
    ended = alone("list", "--all")
    assert set(listed(ended)) == {done, running}
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith(done)]
    assert cells(line)[1:6] == ["completed", "qwen", "10/10", "0", "-"]
    assert cells(line)[6].endswith(" s ago")


def test_the_list_may_be_of_one_tenant(alone: Run) -> None:
    begun()
    mine = begun(tenant="search")
    assert listed(alone("list", "--tenant", "search")) == [mine]


def test_what_the_limit_leaves_out_is_said(alone: Run) -> None:
    for _ in range(3):
        begun()
    ended = alone("list", "--limit", "2")
    assert len(listed(ended)) == 2
    assert ended.stderr == "batchyard: There are more than 2: give a larger --limit.\n"
    assert alone("list", "--limit", "3").stderr == ""


def test_with_json_each_line_is_an_object_as_show_prints_it(alone: Run) -> None:
    begun(priority=3)
    batch_id = begun(tenant="search")
    ended = alone("list", "--json", "--tenant", "search")
    (line,) = ended.stdout.splitlines()
    assert json.loads(line) == json.loads(alone("show", batch_id, "--json").stdout)
    assert len(alone("list", "--json").stdout.splitlines()) == 2


def test_a_batch_that_will_be_late_is_marked(alone: Run) -> None:
    async def work(store: Store) -> BatchRecord:
        batch = await begun_batch(store)
        await store.batch_schedule.record_forecast({batch.id: batch.expires_at + 60})
        return batch

    with_store(work)
    (line,) = alone("list").stdout.splitlines()[1:]
    assert cells(line)[6].endswith(", at risk")


def test_a_model_cannot_write_to_the_terminal(alone: Run) -> None:
    """Neither control characters nor what rich takes for markup."""
    batch = with_store(lambda store: begun_batch(store, model="[red]a\x1b[2J\nb"))
    (column,) = [each for each in table([batch], 0.0).columns if each.header == "model"]
    assert [str(cell) for cell in column.cells] == ["[red]a�[2J�b"]


@pytest.fixture
def watching(alone: Run) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``batchyard list --watch`` in a process of its own, with the home of ``alone``."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "batchyard.cli", "list", "--watch", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lines_from(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(count)]


def pause(batch_id: str) -> None:
    with_store(lambda store: store.batch_schedule.pause(batch_id))


def test_in_a_pipe_a_watched_list_is_a_table_for_each_change(
    watching: Callable[..., subprocess.Popen[str]],
) -> None:
    batch_id = begun()
    process = watching()
    before = lines_from(process, 2)
    pause(batch_id)
    after = lines_from(process, 2)
    assert [cells(line)[1] for line in (*before, *after)] == [
        *("status", "in_progress", "status", "in_progress, paused")
    ]
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "")
    assert process.returncode == 130


def test_with_json_a_watched_batch_is_printed_again_when_it_changes(
    watching: Callable[..., subprocess.Popen[str]],
) -> None:
    begun()
    batch_id = begun()
    process = watching("--json")
    assert len({json.loads(line)["id"] for line in lines_from(process, 2)}) == 2
    pause(batch_id)
    (line,) = lines_from(process, 1)
    assert json.loads(line)["id"] == batch_id
    assert json.loads(line)["batchyard"]["paused_at"] is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_on_a_terminal_a_watched_list_gives_the_screen_back(
    alone: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    begun()
    for name, value in (("TERM", "xterm"), ("COLUMNS", "200"), ("LINES", "20")):
        monkeypatch.setenv(name, value)
    controller, terminal = os.openpty()
    command = [sys.executable, "-m", "batchyard.cli", "list", "--watch"]
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    ) as process:
        os.close(terminal)
        shown = b""
        while b"in_progress" not in shown:
            shown += os.read(controller, 4096)
        assert b"\x1b[?1049h" in shown  # the alternate screen
        process.send_signal(number)
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal open
            while block := os.read(controller, 4096):
                shown += block
    os.close(controller)
    assert shown.rstrip().endswith((b"\x1b[?1049l\x1b[?25h", b"\x1b[?25h\x1b[?1049l"))
    assert process.returncode == 128 + number


def shown_on_a_terminal(table: Table, **variables: str) -> str:
    file = io.StringIO()
    Console(file=file, force_terminal=True, width=200, _environ=variables).print(table)
    return file.getvalue()


def test_statuses_have_colours_on_a_terminal_only_unless_no_color_is_set(alone: Run) -> None:
    batch_id = completed()
    batch = with_store(lambda store: store.batches.get(batch_id))
    assert "\x1b[32mcompleted" in shown_on_a_terminal(table([batch], 0.0))
    assert "\x1b[32m" not in shown_on_a_terminal(table([batch], 0.0), NO_COLOR="1")
    assert "\x1b" not in alone("list", "--all").stdout


# -- show ----------------------------------------------------------------------------------------


def test_a_batch_in_progress_is_shown_in_a_few_lines(alone: Run) -> None:
    async def work(store: Store) -> BatchRecord:
        batch = await begun_batch(store, chunks=200, metadata={"team": "search"}, priority=7)
        (lease,) = await store.chunks.claim(model=batch.model or "", owner="me", lease_seconds=60)
        await store.chunks.record_progress(lease, completed=8, failed=1, usage=BatchUsage())
        await store.batch_schedule.record_forecast({batch.id: batch.expires_at + 600})
        await store.batch_schedule.record_waits({batch.model or "": "No runner has room."})
        return batch

    batch = with_store(work)
    head, *lines = alone("show", batch.id).stdout.splitlines()
    assert head == f"{batch.id} is in_progress, waiting."
    found = {line[2:11].strip(): line[12:] for line in lines}
    assert found.pop("created").endswith(" s ago")
    assert found.pop("done").endswith(", by forecast: after its window")
    assert found.pop("window").startswith("24h, ends in ")
    assert found == {
        "model": "qwen",
        "endpoint": "/v1/chat/completions",
        "tenant": "default, priority 7",
        "metadata": "team=search",
        "requests": "8 succeeded, 1 failed, 1,991 left",
        "waits": "No runner has room.",
    }


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, "f1"),
        ({"PREFECT_API_URL": "http://p:4200/api"}, "http://p:4200/runs/flow-run/f1"),
        (
            {"PREFECT_API_URL": "http://p:4200/api", "PREFECT_UI_URL": "https://ui.example/"},
            "https://ui.example/runs/flow-run/f1",
        ),
    ],
)
def test_the_flow_run_is_a_link_where_prefect_has_a_ui(
    alone: Run, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str
) -> None:
    batch_id = begun()
    with_store(lambda store: store.batches.set_flow_run(batch_id, "f1"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert f"  flow run  {place}\n" in alone("show", batch_id).stdout


def test_a_batch_that_has_ended_is_shown_with_its_counts_and_its_end(alone: Run) -> None:
    batch_id = completed()
    shown = alone("show", batch_id).stdout
    assert shown.startswith(f"{batch_id} is completed.\n")
    assert "  requests  10 succeeded, 0 failed, 10 in all\n" in shown
    assert "  ended     20" in shown


def test_what_clients_write_cannot_write_to_the_terminal(alone: Run) -> None:
    batch_id = begun(model="a\x1b[2J", metadata={"a": "\x1b[2J"})
    assert "\x1b" not in alone("show", batch_id).stdout


def test_what_a_clients_template_has_raised_cannot_write_to_the_terminal(alone: Run) -> None:
    """A template may name a field of any characters, and the message names the field."""

    async def work(store: Store) -> str:
        batch = await store.batches.create(new_batch())
        message = "UndefinedError: 'dict object' has no attribute '\x1b[2J'"
        await store.batches.fail(batch.id, [BatchError("invalid_template", message, line=1)])
        return batch.id

    shown = alone("show", with_store(work)).stdout
    assert "has no attribute '�[2J'" in shown


# -- watch ---------------------------------------------------------------------------------------


def test_a_batch_is_watched_until_it_has_ended(alone: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its progress goes to standard error, and how it ended to standard output."""
    monkeypatch.setattr(intervals, "LOOK_SECONDS", 0.05)
    batch_id = begun()

    async def end(store: Store) -> None:
        await store.batches.advance(batch_id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
        await finish(store, batch_id, BatchStatus.COMPLETED, counts=RequestCounts(10, 10))

    later = threading.Timer(0.5, lambda: with_store(end))
    later.start()
    ended = alone("watch", batch_id)
    later.join()
    assert ended.status == 0
    assert ended.stderr.startswith("Running requests: 0/10")
    assert ended.stdout.startswith(f"{batch_id} is completed.\n")


def test_watching_ends_with_1_if_the_batch_is_not_completed(alone: Run) -> None:
    async def work(store: Store) -> BatchRecord:
        batch = await store.batches.create(new_batch())
        return await store.batches.fail(batch.id, [BatchError("empty_file", "No lines.")])

    batch = with_store(work)
    ended = alone("watch", batch.id)
    assert (ended.status, ended.stderr) == (1, "")
    assert "empty_file: No lines." in ended.stdout


def test_ctrl_c_ends_the_watching_and_not_the_batch(
    alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = begun()
    later = threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT))
    later.start()
    ended = alone("watch", batch_id)
    later.join()
    assert ended.status == 130
    assert ended.stderr.endswith(
        f"batchyard: The batch continues. To see it again: batchyard watch {batch_id}\n"
    )
    assert listed(alone("list")) == [batch_id]


def test_what_is_not_openais_is_under_a_key_of_its_own(alone: Run) -> None:
    """The 22 keys of the Batch object, and one more at the end."""
    batch_id = begun(tenant="search", priority=-2, retry_of="batch_0")
    shown = json.loads(alone("show", batch_id, "--json").stdout)
    assert len(shown) == 23
    assert list(shown)[-1] == "batchyard"
    assert shown["batchyard"] == {
        "tenant": "search",
        "priority": -2,
        "paused_at": None,
        "eta_at": None,
        "at_risk_at": None,
        "wait_reason": None,
        "retry_of": "batch_0",
        "flow_run_id": None,
        "undelivered": None,
    }


# -- cancel, pause, unpause, priority -------------------------------------------------------------


def test_a_cancelled_batch_is_cancelling_at_once(alone: Run) -> None:
    ended = alone("cancel", begun())
    assert (ended.status, ended.stdout, ended.stderr) == (0, "cancelling\n", "")


def test_a_batch_that_has_ended_cannot_be_cancelled(alone: Run) -> None:
    ended = alone("cancel", completed())
    assert (ended.status, ended.stdout) == (3, "")
    assert ended.stderr == "batchyard: Cannot cancel a batch with status 'completed'.\n"


def test_to_wait_for_a_cancellation_is_to_see_its_end(
    alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intervals, "LOOK_SECONDS", 0.05)
    batch_id = begun()

    async def finish_it(store: Store) -> None:
        status = None
        while status is not BatchStatus.CANCELLING:
            await asyncio.sleep(0.01)
            status = (await store.batches.get(batch_id)).status
        await finish(store, batch_id, BatchStatus.CANCELLED)

    runner = threading.Thread(target=with_store, args=(finish_it,))
    runner.start()
    ended = alone("cancel", batch_id, "--wait")
    runner.join()
    assert (ended.status, ended.stdout) == (0, "cancelled\n")


def test_a_paused_batch_says_so_until_it_is_unpaused(alone: Run) -> None:
    batch_id = begun()
    assert alone("pause", batch_id).stdout == "in_progress, paused, priority 0\n"
    assert cells(alone("list").stdout.splitlines()[1])[1] == "in_progress, paused"
    assert alone("unpause", batch_id).stdout == "in_progress, priority 0\n"


def test_the_earlier_name_of_unpause_still_works_and_is_not_in_the_help(alone: Run) -> None:
    batch_id = begun()
    assert alone("pause", batch_id).status == 0
    assert alone("resume", batch_id).stdout == "in_progress, priority 0\n"
    commands = {line.split()[1] for line in alone("--help").stdout.splitlines() if "│ " in line}
    assert "unpause" in commands
    assert "resume" not in commands


def test_a_paused_batch_that_is_cancelled_is_paused_no_more(alone: Run) -> None:
    batch_id = begun()
    alone("pause", batch_id)
    alone("cancel", batch_id)
    assert cells(alone("list").stdout.splitlines()[1])[1] == "cancelling"


@pytest.mark.parametrize("value", ["5", "-5"])
def test_a_priority_is_any_whole_number(alone: Run, value: str) -> None:
    ended = alone("priority", begun(), value)
    assert (ended.status, ended.stdout) == (0, f"in_progress, priority {value}\n")


@pytest.mark.parametrize(
    ("value", "status", "said"),
    [("high", 2, "Invalid value for 'N'"), (str(2**31), 3, "must be between -1000000 and 1000000")],
)
def test_any_other_priority_is_refused(alone: Run, value: str, status: int, said: str) -> None:
    ended = alone("priority", begun(), value)
    assert ended.status == status
    assert said in ended.stderr


@pytest.mark.parametrize("words", [["pause"], ["unpause"], ["priority"]])
def test_a_batch_that_has_ended_cannot_be_steered(alone: Run, words: list[str]) -> None:
    batch_id = completed()
    value = ["1"] if words == ["priority"] else []
    ended = alone(*words, batch_id, *value)
    assert ended.status == 3
    assert ended.stderr == f"batchyard: {batch_id} is completed: nothing is left to run of it.\n"


@pytest.mark.parametrize(
    "command", ["show", "watch", "cancel", "pause", "unpause", "priority", "retry"]
)
def test_a_batch_that_does_not_exist_is_one_clear_line(
    alone: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    value = ["1"] if command == "priority" else []
    ended = alone(command, "batch_0", *value)
    assert (ended.status, ended.stdout) == (4, "")
    assert ended.stderr == "batchyard: No batch found with id 'batch_0'.\n"


# -- quota ---------------------------------------------------------------------------------------


def quota_lines(ended: Ended) -> list[list[str]]:
    assert ended.status == 0, ended.stderr
    return [cells(line) for line in ended.stdout.splitlines()]


def test_a_tenant_without_limits_has_none(alone: Run) -> None:
    begun(tenant="search", chunks=200)
    assert quota_lines(alone("quota", "search")) == [
        ["tenant search", "used", "limit"],
        ["active batches", "1", "none"],
        ["enqueued requests", "2,000", "none"],
        ["enqueued tokens", "14,000", "none"],
        ["stored bytes", "0", "none"],
        ["when full", "-", "refuse", "(default)"],
        ["live requests", "-", "0", "(default)"],
    ]


def test_only_the_limits_that_are_given_change(alone: Run) -> None:
    alone("quota", "search", "--active-batches", "3", "--tokens", "5000000")
    alone("quota", "search", "--live-requests", "8", "--stored-bytes", "100000000000")
    alone("quota", "search", "--when-full", "wait")
    lines = quota_lines(alone("quota", "search", "--active-batches", "none", "--requests", "10"))
    limits = ["none", "10", "5,000,000", "100,000,000,000", "wait", "8"]
    assert [line[2] for line in lines[1:]] == limits


def test_the_limits_of_the_settings_are_shown_as_such(
    alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_QUOTA__ACTIVE_BATCHES", "20")
    monkeypatch.setenv("BATCHYARD_QUOTA__ENQUEUED_REQUESTS", "50")
    lines = quota_lines(alone("quota", "search", "--active-batches", "30"))
    assert lines[1:] == [
        ["active batches", "0", "30"],
        ["enqueued requests", "0", "50", "(default)"],
        ["enqueued tokens", "0", "none"],
        ["stored bytes", "0", "none"],
        ["when full", "-", "refuse", "(default)"],
        ["live requests", "-", "0", "(default)"],
    ]


@pytest.mark.parametrize("text", ["many", "-1", "1.5", "", str(2**63)])
def test_a_limit_is_a_number_or_none(alone: Run, text: str) -> None:
    ended = alone("quota", "search", "--requests", text)
    assert ended.status == 2
    assert "--requests" in ended.stderr


# -- by hand, what deployments do by the clock ---------------------------------------------------


def test_reconcile_says_what_it_found(alone: Run) -> None:
    """A batch that ran out of time, a runner that fell silent, a chunk that it had."""

    async def work(store: Store) -> tuple[str, str]:
        overdue = await store.batches.create(new_batch(window_seconds=0))
        await begun_batch(store)
        runner = await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model="qwen")
        await store.chunks.claim(model="qwen", owner=runner.id, lease_seconds=-1)

        async def silence(connection: Any) -> None:
            await connection.exec_driver_sql("UPDATE runners SET heartbeat_at = heartbeat_at - 99")

        await store.database.write(silence)
        return overdue.id, runner.id

    overdue_id, runner_id = with_store(work)
    ended = alone("reconcile")
    assert ended.status == 0
    assert [line.rsplit(maxsplit=1) for line in ended.stdout.splitlines()] == [
        ["batches overdue", "1"],
        [f"  {overdue_id}", "expired"],
        ["runners lost", "1"],
        [f"  {runner_id}", "qwen"],
        ["chunks put back", "1"],
        ["batches free", "1"],
    ]


def test_expire_files_says_what_is_gone(alone: Run) -> None:
    file = NewFile(
        purpose="batch",
        filename="in.jsonl",
        size_bytes=2_000,
        sha256="",
        storage_key="files/file-gone",
        lifetime_seconds=-1,
    )
    with_store(lambda store: store.files.create(file))
    ended = alone("expire-files")
    assert ended.status == 0, ended.stderr
    assert ended.stdout.splitlines()[0].split() == ["files", "expired", "1", "(2.0", "kB)"]
    assert alone("expire-files").stdout.splitlines()[0].split()[2] == "0"


@pytest.mark.parametrize(
    ("field", "printed"),
    [
        ("status", "in_progress"),
        ("request_counts.total", "10"),
        ("batchyard.tenant", "search"),
        ("output_file_id", ""),
        ("metadata.job", "day 1: a\tb"),
        ("metadata.team.name", "x"),
        ("request_counts", '{"total":10,"completed":0,"failed":0}'),
    ],
)
def test_one_field_of_a_batch_is_printed_plain_for_scripts(
    alone: Run, field: str, printed: str
) -> None:
    batch_id = begun(tenant="search", metadata={"job": "day 1: a\tb", "team.name": "x"})
    ended = alone("show", batch_id, "--field", field)
    assert (ended.status, ended.stdout, ended.stderr) == (0, f"{printed}\n", "")


@pytest.mark.parametrize("field", ["stat", "status.x", "request_counts.", "", "usage.cost"])
def test_an_unknown_field_is_refused_with_the_names_that_there_are(alone: Run, field: str) -> None:
    ended = alone("show", begun(), "--field", field)
    assert (ended.status, ended.stdout) == (2, "")
    said = "".join(ended.stderr.split())
    assert f"Thereisnofield'{field}'" in said.replace("│", "")
    for name in ("status", "request_counts.completed", "usage.total_tokens", "batchyard.tenant"):
        assert name in said.replace("│", "")


def test_one_field_and_the_whole_object_are_not_asked_for_at_once(alone: Run) -> None:
    assert alone("show", begun(), "--field", "status", "--json").status == 2
