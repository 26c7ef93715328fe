"""``batchyard serve``: the API in processes of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
import pytest

from batchyard.cli.operate.serve import listening
from tests.api.conftest import LINE
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Start = Callable[..., subprocess.Popen[str]]

_SECONDS = 20.0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    """Starts the command in a session of its own; whatever is left of it is killed."""
    ours = ("PREFECT_", "BATCHYARD_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    started = []

    def start_it(*words: str, at_hangup: Any = signal.SIG_DFL) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "batchyard.cli", "serve", *words],
            env=inherited | {"BATCHYARD_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGHUP, at_hangup),  # noqa: PLW1509 - one call
        )
        started.append(process)
        return process

    yield start_it
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def base_url(process: subprocess.Popen[str]) -> str:
    """As it prints it first, with the port that it got."""
    assert process.stdout is not None
    return process.stdout.readline().split()[-1]


def client_of(url: str, home: Path) -> openai.OpenAI:
    """It tries again until the server answers."""
    deadline = time.monotonic() + PATIENCE * _SECONDS
    client = openai.OpenAI(
        base_url=url, api_key=(home / "api.key").read_text().strip(), max_retries=0
    )
    while True:
        try:
            client.files.list()
        except openai.APIConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return client


def wait_for_end_of_group(group: int) -> None:
    """Python's own tracker of shared memory ends a moment after the process that it served."""
    deadline = time.monotonic() + PATIENCE * _SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.02)
        pytest.fail("Something is left running.")


@pytest.mark.parametrize("workers", [1, 2])
def test_it_serves_until_ctrl_c(start: Start, home: Path, workers: int) -> None:
    """With one process or several, and leaves none behind."""
    process = start("--port", "0", "--workers", str(workers))
    url = base_url(process)
    with client_of(url, home) as client:
        file = client.files.create(file=LINE, purpose="batch")
        assert client.files.content(file.id).content == LINE
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(_SECONDS) == 0
    wait_for_end_of_group(process.pid)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_in_the_middle_comes_to_its_end(
    start: Start, home: Path, workers: int, number: int
) -> None:
    """A service manager's SIGTERM cuts off no upload, and neither does a terminal that is closed.

    To a terminal's processes the kernel sends SIGHUP, to all of them. Then everything ends.
    """
    process = start("--port", "0", "--workers", str(workers))
    url = base_url(process)
    client_of(url, home).close()
    key = (home / "api.key").read_text().strip()
    port = int(url.split(":")[2].partition("/")[0])
    head = (
        f"POST /v1/batches/batch_0/cancel HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        "Content-Length: 2\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=_SECONDS) as connection:
        connection.sendall(head.encode() + b"{")
        time.sleep(0.3)
        if number == signal.SIGHUP:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        time.sleep(0.3)
        assert process.poll() is None
        connection.sendall(b"}")
        assert connection.recv(65536).startswith(b"HTTP/1.1 404 ")
    process.wait(_SECONDS)
    wait_for_end_of_group(process.pid)


def test_processes_that_share_a_port_end_with_the_one_that_started_them(
    start: Start, home: Path
) -> None:
    """Otherwise they would serve on with old settings, and its successor would find no port."""
    process = start("--port", "0", "--workers", "2")
    client_of(base_url(process), home).close()
    process.kill()
    process.wait(_SECONDS)
    wait_for_end_of_group(process.pid)


@pytest.mark.parametrize("workers", [1, 2])
def test_under_nohup_it_outlives_its_terminal(start: Start, home: Path, workers: int) -> None:
    process = start("--port", "0", "--workers", str(workers), at_hangup=signal.SIG_IGN)
    url = base_url(process)
    client_of(url, home).close()
    os.killpg(process.pid, signal.SIGHUP)
    time.sleep(0.3)
    client_of(url, home).close()
    assert process.poll() is None


def test_a_taken_port_is_a_clear_error(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("--port", str(port))
        stdout, stderr = process.communicate(timeout=_SECONDS)
    assert (process.returncode, stdout) == (1, "")
    assert stderr == (
        f"batchyard: The API cannot listen on 127.0.0.1, port {port} (Address already in use): "
        "choose another with --port or BATCHYARD_API_PORT.\n"
    )


def test_a_host_that_is_none_is_a_clear_error(start: Start) -> None:
    process = start("--host", "no-such-host.invalid", "--port", "0")
    _, stderr = process.communicate(timeout=_SECONDS)
    assert process.returncode == 1
    what = (
        "no-such-host.invalid is not an address of this machine: choose another with --host or "
        "BATCHYARD_API_HOST."
    )
    assert stderr == f"batchyard: {what}\n"


def test_what_it_prints_names_the_keys_file_and_not_the_key(start: Start, home: Path) -> None:
    """It often goes to a log."""
    process = start("--port", "0")
    client_of(base_url(process), home).close()
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    stdout = process.stdout.readline()
    _, stderr = process.communicate(timeout=_SECONDS)
    assert str(home / "api.key") in stdout
    assert (home / "api.key").read_text().strip() not in stdout + stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_answer_is_sent_without_waiting_for_the_acknowledgement_of_its_head(host: str) -> None:
    """Nagle's algorithm would keep the body back, 40 ms on each answer."""
    with (
        listening(host, 0) as listener,
        socket.create_connection(listener.getsockname()[:2]),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
