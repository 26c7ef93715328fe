"""Flow runs that are forked: each looks to Prefect's worker like a process that it has started."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from commands.prefect_worker import fork_server, forked_run
from flows.process.stop_signal import STOP
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(
    not fork_server.is_possible(), reason="this system has no process file descriptors"
)

_SECONDS = 20.0
_WORKER = """
import os, sys
from commands.prefect_worker.fork_server import start

print(start(lambda environment: exec(environment[b"DO"])), flush=True)
sys.stdin.read()
"""
_SAY_PID = "import os, sys; print(os.getpid(), flush=True); "
_LISTENS = (
    "import signal; signal.signal(signal.{name}, lambda *_: os._exit(7)); "
    # Not signal.pause(): a signal just before it would be lost.
    "print('listens', flush=True); import time\n"
    "for _ in range(3000): time.sleep(0.02)"
)


class Worker:
    """What starts the server, in a process that does nothing else."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.name = self.process.stdout.readline().strip()

    def run(self, do: str, **more: Any) -> subprocess.Popen[str]:
        """Start a client whose forked process does that."""
        words = ["-I", "-S", forked_run.__file__, self.name, str(int(STOP))]
        environment = {"DO": do, **more.pop("env", {})}
        return subprocess.Popen(
            [sys.executable, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    def server(self) -> int:
        """The process id of the server: the parent of what it forks."""
        return int(_all_of(self.run("import os; print(os.getppid())")))

    def end(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait()


@pytest.fixture(name="worker")
def _worker() -> Iterator[Worker]:
    with _a_worker() as worker:
        yield worker


@contextmanager
def _a_worker() -> Iterator[Worker]:
    worker = Worker()
    try:
        yield worker
    finally:
        worker.end()


def _all_of(client: subprocess.Popen[str]) -> str:
    out, err = client.communicate(timeout=_SECONDS)
    assert client.returncode == 0, err
    return out


def _line_of(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    assert select.select([client.stdout], [], [], _SECONDS)[0]
    return client.stdout.readline().strip()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE * _SECONDS
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def test_a_fork_has_the_environment_the_folder_and_the_output_of_its_client(
    worker: Worker, tmp_path: Path
) -> None:
    do = "import os; print(environment[b'NAME'].decode(), os.getcwd())"
    client = worker.run(do, env={"NAME": "a=b\nc"}, cwd=tmp_path)
    assert _all_of(client) == f"a=b\nc {tmp_path}\n"


def test_a_client_ends_with_the_exit_code_of_its_fork(worker: Worker) -> None:
    assert worker.run("raise SystemExit(5)").wait(_SECONDS) == 5


def test_a_client_ends_by_the_signal_that_has_ended_its_fork(worker: Worker) -> None:
    client = worker.run("import os; os.kill(os.getpid(), 9)")
    assert client.wait(_SECONDS) == -signal.SIGKILL


def test_an_exception_ends_the_fork_that_has_raised_it_and_nothing_else(worker: Worker) -> None:
    client = worker.run("raise OSError('no room')")
    _, err = client.communicate(timeout=_SECONDS)
    assert client.returncode == 1
    assert err.rstrip().endswith("OSError: no room")
    assert _all_of(worker.run("print('next')")) == "next\n"


def test_what_the_interpreter_does_at_its_end_is_done(worker: Worker) -> None:
    """Prefect sends the last lines of its logs then."""
    assert _all_of(worker.run("import atexit; atexit.register(print, 'the end')")) == "the end\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_to_the_client_is_handed_on(worker: Worker, name: str) -> None:
    client = worker.run("import os; " + _LISTENS.format(name=name))
    assert _line_of(client) == "listens"
    client.send_signal(getattr(signal, name))
    assert client.wait(_SECONDS) == 7


def test_a_signal_that_comes_before_the_forked_process_is_known_is_handed_on() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"test-{os.getpid()}"
        listener.bind(forked_run.address_of(name))
        listener.listen()
        words = ["-I", "-S", forked_run.__file__, name, str(int(STOP))]
        client = subprocess.Popen([sys.executable, *words])
        connection, _ = listener.accept()
    with connection, subprocess.Popen(["/bin/sleep", "25"]) as forked:
        header, descriptors, *_ = socket.recv_fds(connection, forked_run.LENGTH_BYTES, 3)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
        client.send_signal(STOP)
        answer = forked.pid.to_bytes(forked_run.LENGTH_BYTES, "big")
        socket.send_fds(connection, [answer], [os.pidfd_open(forked.pid)])
        ended = forked.wait(_SECONDS)
        connection.sendall(ended.to_bytes(forked_run.LENGTH_BYTES, "big", signed=True))
        assert ended == client.wait(_SECONDS) == -signal.SIGTERM


def test_the_signal_to_stop_is_sigterm_to_a_fork_that_does_not_listen_to_it(
    worker: Worker,
) -> None:
    client = worker.run("import os; " + _LISTENS.format(name="SIGTERM"))
    assert _line_of(client) == "listens"
    client.send_signal(STOP)
    assert client.wait(_SECONDS) == 7


def test_a_fork_ends_with_its_client(worker: Worker) -> None:
    client = worker.run(_SAY_PID + "import time; time.sleep(99)")
    pid = int(_line_of(client))
    client.kill()
    client.wait()
    _until(lambda: not _is_alive(pid))
    assert _all_of(worker.run("print('next')")) == "next\n"


def test_forks_run_side_by_side(worker: Worker) -> None:
    first = worker.run("print(input())", stdin=subprocess.PIPE)
    assert _all_of(worker.run("print('second')")) == "second\n"
    out, _ = first.communicate("first\n", timeout=_SECONDS)
    assert out == "first\n"


def test_a_fork_outlives_the_worker_and_the_server_ends_after_it() -> None:
    with _a_worker() as worker:
        server = worker.server()
        client = worker.run(_SAY_PID + "input(); sys.exit(3)", stdin=subprocess.PIPE)
        _line_of(client)
    assert _is_alive(server)
    client.communicate("\n", timeout=_SECONDS)
    assert client.returncode == 3
    _until(lambda: not _is_alive(server))


def test_the_server_ends_with_a_worker_that_has_no_flow_runs() -> None:
    with _a_worker() as worker:
        server = worker.server()
    _until(lambda: not _is_alive(server))


def test_a_fork_goes_on_without_the_server_and_its_client_waits_for_it(worker: Worker) -> None:
    client = worker.run(_SAY_PID + "input(); print('done')", stdin=subprocess.PIPE)
    pid = int(_line_of(client))
    os.kill(worker.server(), signal.SIGKILL)
    out, _ = client.communicate("\n", timeout=_SECONDS)
    assert (client.returncode, out) == (1, "done\n")
    assert not _is_alive(pid)


def test_without_a_server_a_flow_run_is_started_as_prefect_starts_it(worker: Worker) -> None:
    worker.name = "nonexistent"
    client = worker.run("", env={"PREFECT__FLOW_RUN_ID": "none"})
    out, err = client.communicate(timeout=_SECONDS)
    assert client.returncode == 1
    assert "Invalid flow run id" in out + err


def test_without_a_server_no_code_of_the_current_folder_is_run(
    worker: Worker, tmp_path: Path
) -> None:
    (tmp_path / "prefect.py").write_text("raise SystemExit('code of the current folder was run')\n")
    worker.name = "nonexistent"
    client = worker.run("", env={"PREFECT__FLOW_RUN_ID": "none"}, cwd=tmp_path)
    out, err = client.communicate(timeout=_SECONDS)
    assert "Invalid flow run id" in out + err


def test_a_request_that_breaks_off_ends_nothing_else(worker: Worker) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(forked_run.address_of(worker.name))
        client.send((1000).to_bytes(forked_run.LENGTH_BYTES, "big") + b"only this")
    assert _all_of(worker.run("print('next')")) == "next\n"


def test_the_server_is_no_child_of_the_worker(worker: Worker) -> None:
    """`batchyard worker` takes those for flow runs, and sends them signals."""
    assert worker.server()
    assert not Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_gets_no_process(worker: Worker) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        os.seteuid(65534)
        try:
            client.connect(forked_run.address_of(worker.name))
        finally:
            os.seteuid(0)
        client.settimeout(_SECONDS)
        request = forked_run.request("/", {b"DO": b"print('mine')"})
        length = len(request).to_bytes(forked_run.LENGTH_BYTES, "big")
        # The server may have hung up before either of these.
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(client, [length], [0, 1, 2])
            client.sendall(request)
            assert client.recv(forked_run.LENGTH_BYTES) == b""
