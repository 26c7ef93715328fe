"""Stands for a forked flow run. Not Prefect's start, which takes seconds (ADR 74).

Prefect's worker starts this process and sees no other.

Run as a script (``python -I -S forked_run.py NAME STOP``) with little of the standard library, so
that it starts in some milliseconds. It asks the fork server of that name for a process with its own
environment, folder and output, hands signals on to that process, and ends as it has ended. If this
process is killed, the server kills the forked one. STOP is the number of a signal that becomes
SIGTERM where the forked process does not listen to it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys

LENGTH_BYTES = 4

_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS = 64
"""Most signals whose arrival is read at once."""
_LOST = 1
"""The exit code where the one of the forked process is not known: Prefect then records a crash."""


def main() -> None:
    """Run one flow run. Does not return."""
    # A signal to the worker's process group, as a terminal sends it, is not for its flow runs.
    os.setsid()
    stop = int(sys.argv[2])
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address_of(sys.argv[1]))
    except OSError:
        # The fork server is gone: start the flow run as Prefect's own worker does.
        os.execv(sys.executable, [sys.executable, "-P", "-m", "prefect.engine"])  # noqa: S606 - no shell is wanted
    # The forked process may run before this one knows of it: until then, signals wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_HANDED_ON, stop))
    try:
        pid, process = _ask(server)
        woken = _hand_on_signals(pid, process, stop)
        code = _result(server, process, woken)
    except OSError as error:
        sys.stderr.write(f"The flow run was not started: {error}\n")
        code = _LOST
    _end_as(code)


def address_of(name: str) -> str:
    """Of a socket that is a name and no file, which only Linux has."""
    return "\0" + name


def request(folder: str, environment: dict[bytes, bytes]) -> bytes:
    """What the server gets: the folder and the variables, separated by zero bytes."""
    variables = [name + b"=" + value for name, value in environment.items()]
    return b"\0".join([os.fsencode(folder), *variables])


def read_request(data: bytes) -> tuple[str, dict[bytes, bytes]]:
    """The opposite of :func:`request`."""
    folder, *variables = data.split(b"\0")
    pairs = (each.partition(b"=") for each in variables)
    return os.fsdecode(folder), {name: value for name, _, value in pairs}


def _ask(server: socket.socket) -> tuple[int, int]:
    """The id of the forked process, and a file descriptor for it. Raises OSError."""
    data = request(os.getcwd(), dict(os.environb))  # noqa: PTH109 - pathlib takes long to import
    socket.send_fds(server, [len(data).to_bytes(LENGTH_BYTES, "big")], [0, 1, 2])
    server.sendall(data)
    answer, descriptors, *_ = socket.recv_fds(server, LENGTH_BYTES, 1)
    if len(answer) < LENGTH_BYTES or not descriptors:
        raise OSError("the worker's fork server has ended")
    return int.from_bytes(answer, "big"), descriptors[0]


def _hand_on_signals(pid: int, process: int, stop: int) -> int:
    """Returns a file descriptor that can be read as soon as a signal has come."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def hand_on(number: int, _: object) -> None:
        if number == stop and not catches(pid, stop):
            number = signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)

    for number in (*_HANDED_ON, stop):
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_HANDED_ON, stop))
    return woken


def _result(server: socket.socket, process: int, woken: int) -> int:
    """The exit code of the forked process, negative for a signal."""
    _until_readable(server.fileno(), woken)
    answer = server.recv(LENGTH_BYTES)
    if len(answer) == LENGTH_BYTES:
        return int.from_bytes(answer, "big", signed=True)
    # The server was killed. The flow run goes on; only its parent could have got its exit code.
    _until_readable(process, woken)
    return _LOST


def _until_readable(descriptor: int, woken: int) -> None:
    # Python runs a signal's handler between two of its instructions. A signal that comes just
    # before a call that waits would be handed on after that call, if nothing ended it.
    while descriptor not in select.select([descriptor, woken], [], [])[0]:
        os.read(woken, _SIGNALS)


def _end_as(code: int) -> None:
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler to remove
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, which would end it otherwise."""
    try:
        with open(f"/proc/{pid}/status") as lines:  # noqa: PTH123 - pathlib takes long to import
            (mask,) = (line.split()[1] for line in lines if line.startswith("SigCgt:"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(int(mask, 16) >> (number - 1) & 1)


if __name__ == "__main__":
    main()
