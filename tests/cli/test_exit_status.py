"""Exit statuses: which error has which, and how commands end whose output nobody reads."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from batchyard import errors
from batchyard.cli.terminal.exit_status import MEANINGS, ExitStatus, exit_status
from batchyard.lifecycle import BatchStatus
from batchyard.wire import RequestCounts
from tests.cli.conftest import with_store
from tests.contract.store.samples import begun_batch, finish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from batchyard.store import BatchRecord, Store
    from tests.cli.conftest import Ended

    Run = Callable[..., Ended]

STRAY = os.fsdecode(b"caf\xe9")
"""As a terminal that is not set to UTF-8 passes it on."""

EXPECTED = {
    "BatchyardError": 1,
    "SettingsError": 1,
    "WrongSealingKey": 1,
    "RequestRefused": 3,
    "QuotaExceeded": 3,
    "StorageLimitExceeded": 3,
    "BatchLimitExceeded": 3,
    "BatchRateExceeded": 3,
    "WindowUnattainable": 3,
    "QueueFull": 1,
    "InputRefused": 3,
    "DatasetRefused": 3,
    "InputNotRead": 1,
    "UnexpectedError": 1,
    "IllegalTransition": 3,
    "StoreError": 1,
    "RecordNotFound": 4,
    "TransitionConflict": 3,
    "IdempotencyConflict": 3,
    "OtherTables": 1,
    "OlderTables": 5,
    "TablesInUse": 1,
    "OtherState": 1,
    "KeyExpired": 1,
    "LeaseLost": 1,
    "StoreAccessDenied": 1,
    "StoreUnavailable": 5,
    "StorageError": 1,
    "ObjectNotFound": 4,
    "ObjectChanged": 1,
    "AccessDenied": 3,
    "LocationRefused": 3,
    "ObjectTooLarge": 3,
    "BrokenLine": 1,
    "StorageFull": 1,
    "StorageUnavailable": 5,
    "DispatchFailed": 5,
    "FlowRunNotMade": 5,
    "EngineError": 1,
    "EngineStartFailed": 1,
    "EngineNotReady": 1,
    "ModelNotFound": 4,
    "EngineLost": 1,
    "EngineNotReached": 1,
}


def below(error: type[errors.BatchyardError]) -> Iterator[type[errors.BatchyardError]]:
    if error.__module__ == errors.__name__:
        yield error
    for each in error.__subclasses__():
        yield from below(each)


def test_every_error_of_the_tree_has_its_status() -> None:
    """A new class has to be given one here."""
    found = {
        each.__name__: exit_status(each.__new__(each)) for each in below(errors.BatchyardError)
    }
    assert found == EXPECTED


def test_every_status_has_a_meaning() -> None:
    assert list(MEANINGS) == list(ExitStatus)


@pytest.mark.parametrize(
    ("words", "counts", "status"),
    [
        (["watch"], RequestCounts(10, 10), 0),
        (["watch"], RequestCounts(10, 1, 9), 0),
        (["watch"], RequestCounts(10, 0, 10), 1),
        (["results", "--follow"], RequestCounts(10, 1, 9), 0),
        (["results", "--follow"], RequestCounts(10, 0, 10), 1),
    ],
)
def test_a_command_that_waits_for_a_batch_fails_if_none_of_its_requests_succeeded(
    alone: Run, words: list[str], counts: RequestCounts, status: int
) -> None:
    """As they do for a batch that is not completed. `run` is in test_run.py."""

    async def work(store: Store) -> BatchRecord:
        batch = await begun_batch(store)
        await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
        return await finish(store, batch.id, BatchStatus.COMPLETED, counts=counts)

    assert alone(*words, with_store(work).id).status == status


@pytest.mark.parametrize(
    ("words", "variables", "status"),
    [
        (["show", "batch_0"], {}, 4),
        (["show"], {}, 2),
        (["priority", "batch_0", "99999999"], {}, 3),
        (["show", "batch_0"], {"BATCHYARD_DATABASE_URL": "sqlite+aiosqlite:///{}/new.db"}, 5),
        (["show", "batch_0"], {"BATCHYARD_CHUNK_REQUESTS": "0"}, 1),
    ],
)
def test_a_command_ends_with_the_status_of_its_error(
    alone: Run,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    variables: dict[str, str],
    status: int,
    tmp_path: Path,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    ended = alone(*words)
    assert (ended.status, ended.stdout) == (status, "")
    assert ended.stderr


@pytest.mark.parametrize("words", [["list", "--all"], ["--help"], ["show", "batch_0"]])
def test_a_reader_that_is_gone_is_no_traceback(home_with_tables: Path, words: list[str]) -> None:
    """As of ``batchyard list | head -1``: neither while it writes nor when Python exits."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = os.environ | {"BATCHYARD_HOME": str(home_with_tables)}
    done = subprocess.run(
        [sys.executable, "-m", "batchyard.cli", *words],
        env=environment,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert "defect" not in done.stderr


def test_doctor_ends_well_whose_reader_wanted_one_line(home_with_tables: Path) -> None:
    """As of ``batchyard doctor --json | head -1``: the services are open as it goes."""
    with subprocess.Popen(
        [sys.executable, "-m", "batchyard.cli", "doctor", "cli", "--json"],
        env=os.environ | {"BATCHYARD_HOME": str(home_with_tables)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline().startswith("{")
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 0


@pytest.mark.parametrize(
    ("words", "status"),
    [("list --all >&-", 0), ("show batch_0 2>&-", 4), ("keys list --json <&- >&- 2>&-", 0)],
)
def test_a_closed_stream_is_no_traceback(home_with_tables: Path, words: str, status: int) -> None:
    done = subprocess.run(
        ["bash", "-c", f'"$0" -m batchyard.cli {words}', sys.executable],
        env=os.environ | {"BATCHYARD_HOME": str(home_with_tables)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert "defect" not in done.stderr


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["list", "--all"], {}),
        (["tenants", "list"], {}),
        (["doctor"], {}),
        (["doctor"], {"BATCHYARD_ENGINE_PYTHON": "/none"}),
    ],
    ids=["list", "tenants", "doctor", "a doctor that finds trouble"],
)
def test_output_for_which_there_is_no_room_is_a_failure(
    home_with_tables: Path, words: list[str], more: dict[str, str]
) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        done = subprocess.run(
            [sys.executable, "-m", "batchyard.cli", *words],
            env=os.environ | {"BATCHYARD_HOME": str(home_with_tables)} | more,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    message = "batchyard: The output could not be written: No space left on device.\n"
    assert done.stderr.endswith(message)
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr


def test_no_notice_of_other_programs_is_shown_on_a_terminal(tmp_path: Path) -> None:
    """Prefect's is shown to users who are new to it, as its client is imported."""
    environment = {name: each for name, each in os.environ.items() if name in {"PATH", "HOME"}}
    environment |= {
        "BATCHYARD_HOME": str(tmp_path),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
    }
    terminal, other_end = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "batchyard.cli", "deploy", "--wait", "0"],
        env=environment,
        stdout=other_end,
        stderr=other_end,
        check=False,
    )
    os.close(other_end)
    shown = os.read(terminal, 65_536).decode()
    os.close(terminal)
    assert done.returncode == 5, shown
    assert "anonymous" not in shown
    assert shown.startswith("Prefect: ")


def test_a_terminal_that_is_gone_is_no_other_status(home_with_tables: Path) -> None:
    """Nothing of the command can be read then."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "batchyard.cli", "show", "batch_0"],
        env=os.environ | {"BATCHYARD_HOME": str(home_with_tables)},
        stdout=writing,
        stderr=writing,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 4


@pytest.mark.parametrize(
    "words",
    [
        ("show", STRAY),
        ("keys", "create", STRAY),
        ("tenants", "quota", STRAY),
        ("retry", "batch_1", "--set", f"stop={STRAY}"),
    ],
    ids=lambda words: words[0],
)
def test_an_argument_that_is_not_utf8_is_named(alone: Run, words: tuple[str, ...]) -> None:
    """No database stores it: it is a wrong command line, and no defect that is to be reported."""
    ended = alone(*words)
    assert ended.status == 2
    assert ended.stderr.startswith("batchyard: ")
    assert "caf� is not UTF-8" in ended.stderr
    assert ended.stderr.count("\n") == 1
