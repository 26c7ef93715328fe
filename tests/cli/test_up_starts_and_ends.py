"""How ``batchyard up`` begins and ends. Its first test ends the one that test_up.py also uses."""

from __future__ import annotations

import os
import pty
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest

from batchyard.processes.guarded_process import GUARDIAN
from tests.patience import PATIENCE
from tests.services.up import Yard, running_yard, start_yard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 30.0


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


def test_what_ends_by_itself_ends_everything(yard: Yard) -> None:
    """It says what it was and where its log is."""
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
    deadline = time.monotonic() + PATIENCE * SECONDS
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
