"""A process that forks itself on request. Not Prefect's start, which takes seconds (ADR 74).

It has everything imported. It has one thread and no event loop, because a fork takes no other
thread along. It ends when the process that started it has ended and no fork is left: flow runs
outlive a worker that is killed.
Its clients are `forked_run.py`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
import traceback
from typing import TYPE_CHECKING, Final, NoReturn

from commands.prefect_worker.forked_run import LENGTH_BYTES, address_of, read_request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Environment = Mapping[bytes, bytes]

_STANDARD: Final = (0, 1, 2)
"""Input, output and errors: the file descriptors that a client sends."""
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group, as Linux has them for the other end of a socket."""
_ASK_SECONDS: Final = 60.0
_WAITING_CLIENTS: Final = 128
_PIECE_BYTES: Final = 1 << 16


def is_possible() -> bool:
    """Whether this system has process file descriptors: Linux 5.3 or newer."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def start(run: Callable[[Environment], None]) -> str:
    """Fork the server from this process, which must have one thread; the name of its socket.

    ``run`` is called in each fork with the environment of its client, which has the same standard
    files and folder. What it raises ends the fork as it ends a program.
    """
    # A name without a file needs no folder that can be written, and ends with the server.
    name = f"batchyard-worker-{secrets.token_hex(16)}"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address_of(name))
    listening.listen(_WAITING_CLIENTS)
    listening.setblocking(False)  # a client may be killed before it is its turn
    # Only this process holds the end for writing. The other end is at its end once we are gone.
    worker, ours = os.pipe()
    between = os.fork()
    if between == 0:
        os.setsid()
        if os.fork():
            # `batchyard worker` sends signals to the children of the worker, which are flow runs.
            os._exit(0)
        os.close(ours)
        _Server(run, listening, worker).serve()
    os.waitpid(between, 0)
    listening.close()
    os.close(worker)
    return name


class _Server:
    """Forks on request, and tells each client how its process has ended."""

    def __init__(
        self,
        run: Callable[[Environment], None],
        listening: socket.socket,
        worker: int,
    ) -> None:
        self._run = run
        self._listening = listening
        self._worker = worker
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ, self._accept)
        self._selector.register(worker, selectors.EVENT_READ, self._end_of_worker)

    def serve(self) -> NoReturn:
        """Serve until the worker has ended and no fork is left."""
        gc.collect()
        gc.freeze()  # or a collection in a child would copy all pages
        while self._selector.get_map():
            for key, _ in self._selector.select():
                key.data()
        os._exit(0)

    def _end_of_worker(self) -> None:
        for each in (self._listening, self._worker):
            self._selector.unregister(each)
        self._listening.close()
        os.close(self._worker)

    def _accept(self) -> None:
        try:
            client, _ = self._listening.accept()
        except OSError:
            return
        try:
            client.settimeout(_ASK_SECONDS)
            self._fork(client, *_read(client))
        except OSError as error:
            sys.stderr.write(f"batchyard: A flow run was not started: {error}\n")
            client.close()

    def _fork(
        self,
        client: socket.socket,
        folder: str,
        environment: Environment,
        standard: list[int],
    ) -> None:
        pid = os.fork()
        if pid == 0:
            self._become(client, folder, environment, standard)
        for each in standard:
            os.close(each)
        try:
            process = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        _Fork(self._selector, client, pid, process)

    def _become(
        self, client: socket.socket, folder: str, environment: Environment, standard: list[int]
    ) -> NoReturn:
        """In a forked process: be the program that the client asked for, and exit."""
        try:
            client.close()
            self._leave()
            os.setsid()
            for number, descriptor in zip(_STANDARD, standard, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.chdir(folder)
            self._run(environment)
        except SystemExit:
            raise
        except BaseException:  # noqa: BLE001 - nothing may go back into the server's loop
            traceback.print_exc()
            raise SystemExit(1) from None
        raise SystemExit(0)

    def _leave(self) -> None:
        """Close what is the server's."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()


class _Fork:
    """A forked process, and the connection of the client that stands for it."""

    def __init__(
        self, selector: selectors.BaseSelector, client: socket.socket, pid: int, process: int
    ) -> None:
        self._selector = selector
        self._client = client
        self._pid = pid
        self._process = process
        self._has_client = True
        selector.register(process, selectors.EVENT_READ, self._end)
        selector.register(client, selectors.EVENT_READ, self._end_of_client)
        with contextlib.suppress(OSError):  # it is gone, and there is something to read
            socket.send_fds(client, [pid.to_bytes(LENGTH_BYTES, "big")], [process])

    def _end_of_client(self) -> None:
        """Clients say no more than their request, so this one has been killed."""
        if self._has_client:  # or both have ended at once
            self._forget_client()
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def _end(self) -> None:
        _, status = os.waitpid(self._pid, 0)
        if self._has_client:
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):
                self._client.send(code.to_bytes(LENGTH_BYTES, "big", signed=True))
            self._forget_client()
        self._selector.unregister(self._process)
        os.close(self._process)

    def _forget_client(self) -> None:
        self._has_client = False
        self._selector.unregister(self._client)
        self._client.close()


def _read(client: socket.socket) -> tuple[str, Environment, list[int]]:
    """The folder, the variables and the standard files of a request. Raises OSError."""
    peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(peer)
    if user != os.getuid():
        raise PermissionError(f"the user {user} asked for it")
    start, standard, *_ = socket.recv_fds(client, LENGTH_BYTES, len(_STANDARD))
    missing = int.from_bytes(start, "big")
    data = bytearray()
    while missing > len(data) and (piece := client.recv(_PIECE_BYTES)):
        data += piece
    if len(standard) != len(_STANDARD) or len(data) != missing or not data:
        for each in standard:
            os.close(each)
        raise ConnectionError("its request is not complete")
    return *read_request(bytes(data)), standard
