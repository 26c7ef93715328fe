"""Connections that send no request, or half of one, or read no answer, do not stay open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

from batchyard.cli.operate import connection_deadlines
from batchyard.cli.operate.connection_deadlines import DeadlineProtocol
from batchyard.cli.operate.serve import _serve, listening
from batchyard.settings_parts import LogSettings
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 0.4
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
GET_LARGE = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"


LARGE = 64 * 1024**2
answers_ended = threading.Semaphore(0)
"""Of large ones, however they ended."""


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/large":
        await send_large(receive, send)
        return
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


async def send_large(receive: Any, send: Any) -> None:
    """As Starlette does it: until the client is gone."""
    length = b"%d" % LARGE
    headers = [(b"content-length", length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def blocks() -> None:
        # The second waits until the first is read.
        for body, more in ((b"x" * (LARGE - 1), True), (b"x", False)):
            await send({"type": "http.response.body", "body": body, "more_body": more})

    sending = asyncio.create_task(blocks())
    leaving = asyncio.create_task(receive())
    await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
    for task in (sending, leaving):
        task.cancel()
    await asyncio.wait([sending, leaving])
    answers_ended.release()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(connection_deadlines, "HEADER_SECONDS", LIMIT)
    monkeypatch.setattr(connection_deadlines, "READ_SECONDS", LIMIT)
    config = uvicorn.Config(app, http=DeadlineProtocol, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


@pytest.fixture
def connection(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as opened:
        yield opened


def is_closed(connection: socket.socket) -> bool:
    """Waits for the end of the connection, at most as long as the socket's timeout."""
    return connection.recv(1) == b""


def read_answer(connection: socket.socket) -> None:
    received = b""
    while not received.endswith(b"ok"):
        part = connection.recv(65536)
        assert part, received
        received += part


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\nX-More: "])
def test_a_connection_without_a_whole_header_is_closed(
    connection: socket.socket, sent: bytes
) -> None:
    connection.sendall(sent)
    assert is_closed(connection)


def test_a_header_that_comes_byte_by_byte_is_cut_off(connection: socket.socket) -> None:
    """Each byte does not buy more time."""
    connection.settimeout(LIMIT / 4)
    deadline = time.monotonic() + PATIENCE * 10
    for byte in b"GET / HTTP/1.1\r\n" + b"X-More: a\r\n" * 100:
        assert time.monotonic() < deadline
        try:
            connection.sendall(bytes([byte]))
            if connection.recv(1) == b"":
                return
        except TimeoutError:
            continue
        except ConnectionError:
            return
    pytest.fail("The whole header was taken.")


def test_half_a_header_behind_another_request_is_cut_off_as_well(
    connection: socket.socket,
) -> None:
    connection.sendall(GET)
    read_answer(connection)
    connection.sendall(GET[:9])
    assert is_closed(connection)


def test_a_connection_is_kept_between_requests(connection: socket.socket) -> None:
    """An idle one for uvicorn's keep-alive time, which is longer."""
    for request in (GET, POST + b"{}", GET):
        connection.sendall(request)
        read_answer(connection)
        time.sleep(1.5 * LIMIT)


def test_a_slow_body_is_not_its_business(connection: socket.socket) -> None:
    connection.sendall(POST + b"{")
    time.sleep(1.5 * LIMIT)
    connection.sendall(b"}")
    read_answer(connection)


def test_an_answer_that_nobody_reads_is_given_up(connection: socket.socket) -> None:
    """Its client does not even leave."""
    connection.sendall(GET_LARGE)
    assert answers_ended.acquire(timeout=PATIENCE * 20 * LIMIT)
    received = 0
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1024**2):
            received += len(part)
    assert received < LARGE


def test_an_answer_that_is_read_slowly_comes_to_its_end(connection: socket.socket) -> None:
    connection.sendall(GET_LARGE)
    received, began = 0, time.monotonic()
    while received < LARGE:
        part = connection.recv(1024**2)
        assert part, received
        received += len(part)
        time.sleep(LIMIT / 20)
    assert time.monotonic() - began > 2 * LIMIT
    assert answers_ended.acquire(timeout=PATIENCE * 20 * LIMIT)


def test_the_api_is_served_with_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, **_: configs.append(self.config))
    with listening("127.0.0.1", 0) as listener:
        _serve(listener, 1, LogSettings())
    assert configs[0].http is DeadlineProtocol
    assert connection_deadlines.HEADER_SECONDS <= 60
    assert connection_deadlines.READ_SECONDS <= 60
