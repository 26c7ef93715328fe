"""``batchyard up``: everything on one machine. With an engine: tests/up."""

from __future__ import annotations

import os
import pty
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from batchyard.engine.guarded_process import GUARDIAN
from tests.services.up import Yard, running_yard, start_yard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 30.0


@pytest.fixture(scope="module", name="yard")
def yard_without_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running_yard(tmp_path_factory.mktemp("yard"), first=True) as running:
        yield running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Yard]]:
    """Starts it without waiting; whatever is left of it is killed."""
    started = []

    def start_it(*, output: int | None = None, **environment: str) -> Yard:
        yard = start_yard(tmp_path, output=output, **environment)
        started.append(yard)
        return yard

    yield start_it
    for yard in started:
        for pid in {yard.process.pid, *yard.process_ids()}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        yard.process.wait()


def test_it_says_where_everything_is(yard: Yard) -> None:
    said = yard.said()
    assert f"The API:       {yard.url}\n" in said
    assert f"Its key:       {yard.key}\n" in said
    assert f"Logs:          {yard.home}/logs\n" in said
    assert yard.environment["PREFECT_API_URL"] in said


def test_the_key_that_it_prints_opens_the_api(yard: Yard) -> None:
    with openai.OpenAI(base_url=yard.url, api_key=yard.key) as client:
        assert [model.id for model in client.models.list()] == ["tiny-chat"]
        assert list(client.batches.list()) == []


def test_the_ui_calls_the_port_that_prefect_has(yard: Yard) -> None:
    url = yard.environment["PREFECT_API_URL"]
    with httpx.Client() as client:
        settings = client.get(url.removesuffix("/api") + "/ui-settings").json()
    assert settings["api_url"] == url


def test_no_log_has_the_key_or_the_login(yard: Yard) -> None:
    for path in (yard.home / "logs").iterdir():
        said = path.read_text(errors="replace")
        assert yard.key not in said, path
        assert yard.prefect_login not in said, path


def test_the_commands_that_it_prints_open_prefect(yard: Yard) -> None:
    """It names the file with the login, and does not show it."""
    assert f"Its password:  the line in {yard.home}/prefect.login\n" in yard.said()
    assert yard.prefect_login not in yard.said()
    exports = [line for line in yard.said().splitlines() if line.startswith("  export PREFECT")]
    commands = "\n".join([*exports, "prefect work-pool ls", "batchyard reconcile"])
    environment = {"PATH": yard.operator_environment()["PATH"], "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        env=environment,
        cwd=yard.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "control" in done.stdout
    assert "batches free      0\n" in done.stdout
    assert "Prefect" not in done.stderr


def test_only_the_owner_can_read_the_login(yard: Yard) -> None:
    assert stat.S_IMODE((yard.home / "prefect.login").stat().st_mode) == 0o600


def test_what_ends_by_itself_ends_everything(yard: Yard) -> None:
    """The last one with this yard. It says what it was and where its log is."""
    (api,) = [
        pid
        for pid in yard.process_ids()
        if b"serve" in words_of(pid) and bytes(GUARDIAN) not in words_of(pid)
    ]
    os.kill(api, signal.SIGKILL)
    assert yard.process.wait(SECONDS) == 1
    assert f"batchyard: api has ended; its log: {yard.home}/logs/api.log\n" in yard.said()
    assert yard.is_over()


def test_the_models_of_a_file_are_served_by_a_worker_on_each_pool(tmp_path: Path) -> None:
    config = tmp_path / "batchyard.toml"
    config.write_text(
        '[[models]]\nmodel = "far"\nbase_url = "http://127.0.0.1:9/v1"\npool = "remote"\n'
    )
    with running_yard(tmp_path, BATCHYARD_CONFIG=str(config)) as yard:
        with openai.OpenAI(base_url=yard.url, api_key=yard.key) as client:
            assert [model.id for model in client.models.list()] == ["far"]
        assert f"Settings:      {config}\n" in yard.said()
        workers = [words for words in map(words_of, yard.process_ids()) if b"worker" in words]
        assert {words[words.index(b"--pool") + 1] for words in workers} == {
            b"control",
            b"gpu",
            b"remote",
        }
        assert yard.interrupt() == 0
        assert yard.is_over()


def test_ctrl_c_while_it_starts_leaves_nothing_behind(start: Callable[..., Yard]) -> None:
    yard = start()
    wait_for_children(yard)
    assert yard.interrupt() == 0
    assert yard.is_over()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(start: Callable[..., Yard], number: int) -> None:
    yard = start()
    wait_for_children(yard)
    yard.process.send_signal(number)
    assert yard.process.wait(SECONDS) == 0
    assert yard.is_over()


def test_ctrl_c_ends_everything_when_nobody_reads_what_it_says(start: Callable[..., Yard]) -> None:
    """As in ``batchyard up | head``, whose reader is gone."""
    reader, writer = os.pipe()
    yard = start(output=writer)
    os.close(writer)
    os.close(reader)
    wait_for_children(yard)
    assert yard.interrupt() == 0
    assert yard.is_over()


def test_a_closed_terminal_ends_everything(start: Callable[..., Yard]) -> None:
    """The kernel sends SIGHUP, and what is written to the terminal from then on is an error."""
    window, terminal = pty.openpty()
    yard = start(output=terminal)
    os.close(terminal)
    wait_for_children(yard)
    os.close(window)
    assert yard.process.wait(SECONDS) == 0
    assert yard.is_over()


def test_sigkill_ends_everything(start: Callable[..., Yard]) -> None:
    yard = start()
    wait_for_children(yard)
    yard.process.kill()
    yard.process.wait()
    assert yard.is_over(5.0)


def wait_for_children(yard: Yard) -> None:
    """The server and the API, each with its guardian, beside the command itself."""
    deadline = time.monotonic() + SECONDS
    while len(yard.process_ids()) < 5:
        assert yard.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("variable", "option"),
    [("BATCHYARD_API_PORT", "--port"), ("PREFECT_SERVER_API_PORT", "--prefect-port")],
)
def test_a_taken_port_is_a_clear_error(
    start: Callable[..., Yard], variable: str, option: str
) -> None:
    """Before anything is started or written."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        yard = start(**{variable: port})
        assert yard.process.wait(SECONDS) == 1
    said = yard.said()
    assert f"port {port} (Address already in use): choose another with {option} " in said
    assert variable in said
    assert "Stopping" not in said
    assert not yard.home.exists()


def words_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
