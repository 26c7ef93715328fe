"""What users get for bad input: one message, status 1, a failed batch, and nothing half-written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from batchyard.errors import SettingsError
from batchyard.settings import read_settings
from commands.up import Everything
from tests.cli.conftest import Background, Ended, Terminal, chat_line
from tests.unit.storage.web_server import running_web_server, says

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Run = Callable[..., Ended]
    Check = Callable[[Ended, str, str], None]

EXPIRED = "X-Amz-Signature=canary&X-Amz-Date=20200101T000000Z&X-Amz-Expires=60"
UNCHANGED = "results of an earlier run\n"


@pytest.fixture
def run(terminal: Terminal, engine_url: str, here: Run) -> Run:
    """``batchyard run`` with an ``out.jsonl`` that is there already, and a server for its engine.

    Checks what holds for every bad input.
    """
    (terminal.folder / "out.jsonl").write_text(UNCHANGED)

    def run_here(*words: str, engine: str | None = engine_url, output: str = "out.jsonl") -> Ended:
        before = terminal.names()
        engine_words = ("--engine-url", engine) if engine else ()
        ended = here("run", "-o", output, *words, *engine_words)
        assert ended.status != 0
        assert ended.stdout == ""
        assert "canary" not in ended.stderr
        assert (terminal.folder / "out.jsonl").read_text() == UNCHANGED
        assert terminal.names() == before
        return ended

    return run_here


@pytest.fixture
def assert_failed(here: Run) -> Callable[[Ended, str, str], None]:
    """The batch has ended as failed, with this error, which the command showed."""

    def check(ended: Ended, code: str, message: str) -> None:
        batch = json.loads(here("show", ended.batch_id, "--json").stdout)
        assert batch["status"] == "failed"
        first = batch["errors"]["data"][0]
        assert first["code"] == code
        assert message in first["message"]
        assert f"{code}: {first['message']}" in ended.stderr

    return check


# -- the input -----------------------------------------------------------------------------------


def test_a_missing_file(terminal: Terminal, run: Run, here: Run) -> None:
    """The message has the whole path. No batch is made for it, and no Prefect server started."""
    ended = run("-i", "nothing.jsonl")
    path = terminal.folder / "nothing.jsonl"
    assert (ended.status, ended.stderr) == (4, f"batchyard: {path} does not exist\n")
    assert "batch_" not in here("list", "--all").stdout


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkdir, "is a directory: give a file"),
        (os.mkfifo, "is a pipe or a device: save it to a file first"),
    ],
)
def test_what_is_no_file(
    terminal: Terminal, run: Run, here: Run, make: Callable[[Path], None], message: str
) -> None:
    """No batch is made for it either."""
    path = terminal.folder / "place"
    make(path)
    ended = run("-i", "place")
    assert (ended.status, ended.stderr) == (3, f"batchyard: {path} {message}\n")
    assert "batch_" not in here("list", "--all").stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(terminal: Terminal, run: Run, assert_failed: Check) -> None:
    """Owner and mode are what there is to look at."""
    (terminal.folder / "in.jsonl").chmod(0)
    ended = run("-i", "in.jsonl")
    assert_failed(ended, "access_denied", "check owner and mode")


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "access_denied", "make a new presigned URL"),
        (404, "object_not_found", "does not exist (the server answered 404)"),
    ],
)
def test_a_url_that_the_server_refuses(
    run: Run, assert_failed: Check, background: Background, status: int, code: str, message: str
) -> None:
    """The URL is shown without its query."""
    web = background.enter(running_web_server())
    web.answers = [says(status)]
    ended = run("-i", web.url("/in.jsonl?sig=canary"))
    assert_failed(ended, code, message)
    assert web.url("/in.jsonl") in ended.stderr


def test_an_expired_url_is_refused_before_anybody_connects(
    run: Run, assert_failed: Check, background: Background
) -> None:
    """The URL says itself until when it holds."""
    web = background.enter(running_web_server())
    ended = run("-i", web.url(f"/in.jsonl?{EXPIRED}"))
    assert_failed(ended, "access_denied", "expired at 2020-01-01 00:01:00 UTC: make a ne")
    assert web.requests == []


def test_a_host_that_does_not_exist(run: Run, assert_failed: Check) -> None:
    """A name that nobody has is not tried again."""
    ended = run("-i", "http://nobody.invalid/in.jsonl")
    assert_failed(ended, "location_refused", "no host has this name, check the URL")


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"", "empty_file", "no request lines"),
        (b"<!doctype html>\n", "invalid_json_line", "not valid JSON"),
        (b"\x89PNG\r\n\x1a\n", "invalid_json_line", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_batch(
    terminal: Terminal, run: Run, assert_failed: Check, content: bytes, code: str, message: str
) -> None:
    """An empty file, a web page, a picture."""
    (terminal.folder / "in.jsonl").write_bytes(content)
    ended = run("-i", "in.jsonl")
    assert_failed(ended, code, message)
    if content:
        assert "The input must be JSONL" in ended.stderr


def test_lines_that_name_another_model(run: Run, assert_failed: Check) -> None:
    """Each line is named, and the option that helps."""
    ended = run("-i", "in.jsonl", "--model", "org/other")
    assert_failed(ended, "model_not_found", "The model stub-model is not offered here")
    assert "line 3: model_not_found" in ended.stderr
    assert "--served-model-name" in ended.stderr


def test_many_errors_are_not_all_shown(terminal: Terminal, run: Run) -> None:
    """The rest can be looked up."""
    terminal.write("in.jsonl", [chat_line(f"id-{n}") for n in range(30)])
    ended = run("-i", "in.jsonl", "--model", "org/other")
    assert f"and 10 more: batchyard show {ended.batch_id}" in ended.stderr
    assert ended.stderr.count("model_not_found") == 20
    shown = terminal.batchyard("show", ended.batch_id).stdout
    assert shown.count("model_not_found") == 30
    assert "more: batchyard show" not in shown


# -- the output ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("nowhere/out.jsonl", "nowhere does not exist: create it first"),
        ("home", "home is a directory: give a file"),
        ("in.jsonl", "input and output are the same place, in.jsonl"),
        (f"http://host.example/out?{EXPIRED}", "http://host.example/out expired at"),
        ("ftp://host.example/out", "ftp:// is not supported"),
    ],
)
def test_an_output_that_cannot_work_is_refused_first(
    terminal: Terminal, run: Run, output: str, message: str
) -> None:
    """No batch is made."""
    ended = run("-i", "in.jsonl", output=output)
    assert ended.status == (4 if output.startswith("nowhere") else 3)
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_error_file_never_replaces_the_input(terminal: Terminal, run: Run) -> None:
    """By default it lies beside the output, where the input may be."""
    (terminal.folder / "in.jsonl").rename(terminal.folder / "out.errors.jsonl")
    ended = run("-i", "out.errors.jsonl")
    assert "input and error are the same place" in ended.stderr


def test_results_that_nobody_takes_are_kept(run: Run, background: Background) -> None:
    """The batch is completed; the status is 1 and the message says where its results are."""
    web = background.enter(running_web_server())
    web.answers = [says(403)]
    ended = run("-i", "in.jsonl", output=web.url("/out.jsonl?sig=canary"))
    assert ended.status == 1
    assert "is completed." in ended.stderr
    (kept,) = [line.split()[1] for line in ended.stderr.splitlines() if "  output " in line]
    with open(kept) as results:  # noqa: PTH123 - a path that was printed
        assert len(results.readlines()) == 3
    assert "The output file could not be written: not allowed to use" in ended.stderr


def test_resuming_delivers_what_was_not_delivered(
    run: Run, here: Callable[..., Ended], background: Background, engine_url: str
) -> None:
    """It fails again while nobody takes it, and is done, once, when somebody does."""
    web = background.enter(running_web_server())
    web.answers = [says(403)]
    ended = run("-i", "in.jsonl", output=web.url("/out.jsonl?sig=canary"))
    assert f"batchyard results {ended.batch_id} -o PLACE" in ended.stderr
    resume = ("run", "--resume", ended.batch_id, "--engine-url", engine_url)

    again = here(*resume)
    assert again.status == 1
    assert "The output file could not be written: not allowed to use" in again.stderr
    assert "canary" not in again.stderr

    web.answers = [says(200)]
    done = here(*resume)
    assert done.status == 0, done.stderr
    assert f"output    {web.url('/out.jsonl')}" in done.stderr
    assert len(web.requests[-1].body.splitlines()) == 3
    put = len(web.requests)
    assert here(*resume).status == 0
    assert len(web.requests) == put


# -- the engine ----------------------------------------------------------------------------------


def test_a_server_that_is_not_there(run: Run, assert_failed: Check) -> None:
    """Its address is in the message."""
    ended = run("-i", "in.jsonl", engine="http://127.0.0.1:9/v1")
    assert_failed(ended, "engine_start_failed", "at http://127.0.0.1:9")
    assert "check that the server runs" in ended.stderr


def test_a_key_that_the_server_refuses(
    run: Run, assert_failed: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key itself is not shown."""
    monkeypatch.setenv("BATCHYARD_ENGINE_API_KEY", "sk-canary")
    ended = run("-i", "in.jsonl")
    assert_failed(ended, "engine_start_failed", "refuses our API key")


def test_an_engine_that_does_not_start(
    terminal: Terminal, run: Run, assert_failed: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own complaint is shown, and where the rest of its log is."""
    engine = terminal.folder / "python"
    engine.write_text("#!/bin/sh\necho 'vllm: error: unrecognized arguments: --nope' >&2; exit 2\n")
    engine.chmod(0o755)
    monkeypatch.setenv("BATCHYARD_ENGINE_PYTHON", str(engine))
    ended = run("-i", "in.jsonl", "--model", "stub-model", "--nope", engine=None)
    assert_failed(ended, "engine_start_failed", "unrecognized arguments: --nope")
    assert str(terminal.home / "logs") in ended.stderr


@pytest.mark.parametrize(
    ("words", "engine", "status", "message"),
    [
        (["--model", "/no/model"], None, 4, "--model /no/model does not exist"),
        ([], None, 2, "Invalid value for --model: Say which model to load."),
        (["--exclusive"], None, 2, "--exclusive: They are for a server that"),
        (["--max-model-len", "8"], "http://host.example", 2, "--max-model-len 8 would have no"),
        ([], "ftp://host.example", 1, "must be http://host, https://host or unix:///path.sock"),
    ],
)
def test_an_engine_that_cannot_be_meant(
    run: Run, words: list[str], engine: str | None, status: int, message: str
) -> None:
    """Said at once; no batch is made."""
    ended = run("-i", "in.jsonl", *words, engine=engine)
    assert ended.status == status
    assert message in ended.stderr
    assert status == 2 or ended.stderr.count("\n") == 1


def test_a_missing_engine_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command that makes one."""
    monkeypatch.setenv("BATCHYARD_ENGINE_PYTHON", "/no/python")
    ended = run("-i", "in.jsonl", "--model", "stub-model", engine=None)
    assert ended.stderr.startswith(
        "batchyard: No engine environment at /no/python: run `batchyard en"
    )


# -- the place -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("BATCHYARD_CHUNK_REQUESTS", "many", "BATCHYARD_CHUNK_REQUESTS: Input should be a valid"),
        ("BATCHYARD_DATABASE_URL", "mysql://u:canary@h/x", "No such database: mysql"),
        ("BATCHYARD_HOME", "/dev/null", "BATCHYARD_HOME, /dev/null, cannot be used"),
        ("BATCHYARD_HOME", "/proc/home", "BATCHYARD_HOME, /proc/home, cannot be used"),
    ],
)
def test_a_setting_of_no_use(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    """The variable is named."""
    monkeypatch.setenv(name, value)
    ended = run("-i", "in.jsonl")
    assert ended.status == 1
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


UNUSABLE = "BATCHYARD_HOME, /dev/null/home, cannot be used (Not a directory): name a folder"


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["migrate"],
        ["secrets", "rotate"],
        ["engine", "install", "--python", sys.executable],
    ],
)
def test_a_home_of_no_use_is_named_by_each_command(
    alone: Run, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("BATCHYARD_HOME", "/dev/null/home")
    ended = alone(*words)
    assert ended.status == 1
    assert ended.stderr.startswith(f"batchyard: {UNUSABLE}")


def test_a_home_of_no_use_is_named_before_an_engine_is_started(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_HOME", "/dev/null/home")
    monkeypatch.setenv("BATCHYARD_ENGINE_PYTHON", sys.executable)
    ended = run("-i", "in.jsonl", "--model", "stub-model", engine=None)
    assert (ended.status, ended.stderr.startswith(f"batchyard: {UNUSABLE}")) == (1, True)


def test_a_home_of_no_use_is_named_before_everything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATCHYARD_HOME", "/dev/null/home")
    everything = Everything(read_settings().home_folder, 1, 2)
    with pytest.raises(SettingsError, match=re.escape(UNUSABLE)):
        everything.start(lambda _: None)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--metadata", "team"], 3, "--metadata team is not of the form key=value"),
        (["--completion-window", "soon"], 3, "must be a number and m, h or d, for example 24h"),
        (["--endpoint", "/v1/nope"], 3, "endpoint must be one of /v1/chat/completions,"),
        (["--resume", "batch_0"], 4, "No batch found with id 'batch_0'"),
    ],
)
def test_an_option_of_no_use(run: Run, words: list[str], status: int, message: str) -> None:
    """Said at once; no batch is made."""
    ended = run("-i", "in.jsonl", *words)
    assert ended.status == status
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_prefect_api_that_does_not_answer(run: Run, assert_failed: Check) -> None:
    """The batch fails at once: nobody else would take it up."""
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        ended = run("-i", "in.jsonl")
    assert_failed(ended, "dispatch_failed", "Prefect's API at http://127.0.0.1:9/api")


def test_the_password_of_a_prefect_api_is_in_no_message(run: Run, assert_failed: Check) -> None:
    """``run`` looks for the canary in all that is printed."""
    with temporary_settings({PREFECT_API_URL: "http://user:canary@127.0.0.1:9/api"}):
        ended = run("-i", "in.jsonl")
    assert_failed(ended, "dispatch_failed", "Prefect's API at http://127.0.0.1:9/api")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one and a half mebibytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_without_room(
    terminal: Terminal,
    run: Run,
    here: Run,
    engine_url: str,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folder is named, and that it needs room. Once it has some, the batch goes on."""
    terminal.write("in.jsonl", [chat_line(f"id-{n}", "x" * 100_000) for n in range(20)])
    monkeypatch.setenv("BATCHYARD_HOME", str(small_disk))
    ended = run("-i", "in.jsonl")
    assert f"no room to write {small_disk}/objects/files" in ended.stderr
    assert "free some space" in ended.stderr
    assert f"--resume {ended.batch_id}" in ended.stderr
    left = [path for path in small_disk.rglob("*") if "partial" in path.name]
    assert left == []
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    resumed = here(
        *("run", "--resume", ended.batch_id, "-o", "out.jsonl", "--engine-url", engine_url)
    )
    assert resumed.status == 0, resumed.stderr
    assert len(terminal.read("out.jsonl")) == 20


def test_a_defect_of_ours_is_a_sentence_and_a_file(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback is in the file, for a report; the error's own text is not shown."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("commands.run.read_settings", _broken)
    ended = here("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", "http://host.example")
    assert ended.status == 1
    assert ended.stderr.startswith("batchyard: This should not happen (KeyError).")
    assert "canary" not in ended.stderr
    (report,) = tmp_path.glob("batchyard-defect-*.txt")
    assert str(report) in ended.stderr
    assert "Traceback" in report.read_text()


def _broken(**_: object) -> None:
    raise KeyError("canary")
