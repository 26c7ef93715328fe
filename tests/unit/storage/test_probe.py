"""Asking a presigned URL without writing: servers other than S3, and those that say nothing."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import AccessDenied, ObjectNotFound, StorageUnavailable
from batchyard.locations import probe, web_url
from batchyard.locations.access import Access
from batchyard.locations.location import parse_location
from batchyard.locations.parted_url import PartedUrl
from batchyard.locations.probe import probe_put

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.locations.access import Location
    from batchyard.locations.web import WebAccess

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


def says(status: str, code: str, header: str = "Server: x") -> bytes:
    body = f"<Error><Code>{code}</Code></Error>"
    head = f"HTTP/1.1 {status}\r\n{header}\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"{head}{body}".encode()


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
        # No upload follows a redirect.
        ("301 Moved Permanently", "PermanentRedirect", AccessDenied),
        ("307 Temporary Redirect", "TemporaryRedirect", AccessDenied),
    ],
)
async def test_what_no_waiting_mends_is_told_from_what_may_pass(
    web: WebAccess, status: str, code: str, error: type[Exception]
) -> None:
    async with answering(says(status, code)) as (url, _):
        with pytest.raises(error, match=code if "Redirect" not in code else "redirects") as caught:
            await probe_put(url, web=web)
    assert type(caught.value) is error
    assert "hunter2" not in str(caught.value)


async def test_a_redirect_to_another_region_names_it(web: WebAccess) -> None:
    answer = says("301 Moved", "PermanentRedirect", "x-amz-bucket-region: eu-west-1")
    async with answering(answer) as (url, _):
        with pytest.raises(AccessDenied, match=r"its bucket is in eu-west-1: make a new presigned"):
            await probe_put(url, web=web)


@pytest.mark.parametrize(
    ("query", "signed"),
    [
        (QUERY, "signed for PUT$"),
        (
            f"{QUERY}%3Bcontent-type",
            "with the content-type application/octet-stream, which is what",
        ),
        ("AWSAccessKeyId=k&Signature=x&Expires=4102444800", "for PUT without a content-type$"),
    ],
)
async def test_a_signature_that_does_not_match_is_explained_by_what_it_covers(
    web: WebAccess, query: str, signed: str
) -> None:
    async with answering(says("403 Forbidden", "SignatureDoesNotMatch")) as (url, _):
        with pytest.raises(AccessDenied, match=signed):
            await probe_put(url.replace(QUERY, query), web=web)


def place(query: str, host: str = "127.0.0.1:9") -> Location:
    """A place that takes no connection."""
    return parse_location(f"http://{host}/out?{query}")


async def test_a_url_without_a_signature_is_not_asked(web: WebAccess) -> None:
    await place("version=3").probe(Access(web=web))


async def test_a_server_that_may_replace_what_is_there_is_not_asked(web: WebAccess) -> None:
    """SeaweedFS makes an empty object of a PUT whose body does not come."""
    async with answering(b"") as (url, got):
        with pytest.raises(StorageUnavailable, match="was not asked, because only the stores of"):
            await parse_location(url).probe(Access(web=web))
        assert got.empty()


async def test_a_store_that_keeps_what_is_there_is_asked(
    web: WebAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_url, "is_known_store", lambda _: True)
    async with answering(says("403 Forbidden", "SignatureDoesNotMatch")) as (url, _):
        with pytest.raises(AccessDenied, match="SignatureDoesNotMatch"):
            await parse_location(url).probe(Access(web=web))


@pytest.mark.parametrize(
    ("query", "named"),
    [
        (
            "x-amz-checksum-crc32=AAAAAA%3D%3D&x-amz-sdk-checksum-algorithm=CRC32",
            "x-amz-checksum-crc32",
        ),
        ("x-amz-checksum-sha256=x", "x-amz-checksum-sha256"),
        ("X-Amz-Content-Sha256=e3b0", "x-amz-content-sha256"),
        ("content-md5=x", "content-md5"),
    ],
)
async def test_a_url_for_another_content_is_doubted(web: WebAccess, query: str, named: str) -> None:
    """AWS's SDK for JavaScript signs the checksum of an empty body."""
    with pytest.raises(StorageUnavailable, match=rf'{named}\. .*"WHEN_REQUIRED"'):
        await place(f"{QUERY}&{query}").probe(Access(web=web))
    part = PartedUrl((f"https://s3.example/k?{QUERY}&{query}",), f"https://s3.example/k?{QUERY}")
    with pytest.raises(StorageUnavailable, match=named):
        await part.probe(Access(web=web))


@pytest.mark.parametrize(
    "query",
    ["X-Amz-Content-Sha256=UNSIGNED-PAYLOAD", "x-amz-checksum-algorithm=CRC32", "x-id=PutObject"],
)
async def test_a_url_for_any_content_is_not_doubted(web: WebAccess, query: str) -> None:
    with pytest.raises(StorageUnavailable, match="was not asked"):
        await place(f"{QUERY}&{query}").probe(Access(web=web))
