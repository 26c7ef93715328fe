"""Asking a presigned URL without writing: servers other than S3, and those that say nothing."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import AccessDenied, ObjectNotFound, StorageUnavailable
from batchyard.storage import probe
from batchyard.storage.access import Access
from batchyard.storage.location import parse_location
from batchyard.storage.probe import probe_put

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.storage.web import WebAccess

QUERY = "X-Amz-Signature=hunter2&X-Amz-SignedHeaders=host"


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[str, asyncio.Queue[bytes]]]:
    """A server that reads a request's head and says this; its URL, and what it got."""
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.put_nowait(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        got.put_nowait(await reader.read())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/out?{QUERY}", got


def says(status: str, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code></Error>"
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


async def test_a_server_that_asks_for_the_body_gets_none(web: WebAccess) -> None:
    async with answering(b"HTTP/1.1 100 Continue\r\n\r\n") as (url, got):
        await probe_put(url, web=web)
        head, body = await got.get(), await got.get()
    assert head.startswith(b"PUT /out?")
    assert b"expect: 100-continue" in head.lower()
    assert b"content-length: 1000000" in head.lower()
    assert body == b""


async def test_a_server_that_waits_for_the_body_says_nothing(
    web: WebAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_SECONDS", 0.1)
    async with answering(b"") as (url, got):
        await probe_put(url, web=web)
        assert (await got.get()).startswith(b"PUT")


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        ("403 Forbidden", "SignatureDoesNotMatch", AccessDenied),
        ("403 Forbidden", "AuthenticationFailed", AccessDenied),
        ("404 Not Found", "NoSuchBucket", ObjectNotFound),
        # Another machine may be allowed, and another moment better.
        ("403 Forbidden", "AccessDenied", StorageUnavailable),
        ("404 Not Found", "NoSuchKey", StorageUnavailable),
        ("405 Method Not Allowed", "MethodNotAllowed", StorageUnavailable),
        ("503 Slow Down", "SlowDown", StorageUnavailable),
        ("302 Found", "redirects", StorageUnavailable),
    ],
)
async def test_what_no_waiting_mends_is_told_from_what_may_pass(
    web: WebAccess, status: str, code: str, error: type[Exception]
) -> None:
    async with answering(says(status, code)) as (url, _):
        with pytest.raises(error, match=code) as caught:
            await probe_put(url, web=web)
    assert type(caught.value) is error
    assert "hunter2" not in str(caught.value)


async def test_only_presigned_urls_are_asked(web: WebAccess, unused_tcp_port: int) -> None:
    """Any other server might take the probe for the file."""
    plain = parse_location(f"http://127.0.0.1:{unused_tcp_port}/out")
    await plain.probe(Access(web=web))
    signed = parse_location(f"http://127.0.0.1:{unused_tcp_port}/out?{QUERY}")
    with pytest.raises(StorageUnavailable):
        await signed.probe(Access(web=web))
