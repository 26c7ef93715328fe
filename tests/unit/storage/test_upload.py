"""PUT of a file to a URL: what goes over the wire, and when it is sent again."""

from __future__ import annotations

import asyncio
import hashlib
import os
import traceback
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from aiohttp import web as server_side

from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectNotFound,
    ObjectTooLarge,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from batchyard.locations.location import parse_location
from batchyard.locations.presigned import S3_PUT_LIMIT_BYTES
from batchyard.locations.upload import upload
from batchyard.storage.backoff import Backoff
from tests.services.tcp import silent_server
from tests.unit.storage.web_server import close, says

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.locations.web import WebAccess
    from tests.unit.storage.web_server import Answer, WebServer

CONTENT = b'{"custom_id": "a"}\n' * 100_000
SECRET = "5ecretS1gnature"
V4 = f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature={SECRET}"
FAR_FUTURE = 4_102_444_800  # the year 2100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A results file of 1.9 MB."""
    results = tmp_path / "results.jsonl"
    results.write_bytes(CONTENT)
    return results


async def test_a_put_has_its_length_and_octet_stream_as_vllm(
    server: WebServer, web: WebAccess, path: Path
) -> None:
    """Content-Length instead of chunks, and no header that says anything about the file."""
    server.answers = [says(200)]

    await upload(server.url("/out?a=b%2Fc"), path, web=web)

    (seen,) = server.requests
    assert (seen.method, seen.path_and_query) == ("PUT", "/out?a=b%2Fc")
    assert hashlib.sha256(seen.body).digest() == hashlib.sha256(CONTENT).digest()
    assert seen.headers["content-length"] == str(len(CONTENT))
    assert seen.headers["content-type"] == "application/octet-stream"
    assert set(seen.headers) == {
        *("host", "accept", "accept-encoding", "user-agent", "connection"),
        *("content-length", "content-type"),
    }


@pytest.mark.parametrize(
    ("query", "content_type"),
    [
        (f"{V4}&X-Amz-SignedHeaders=host", "application/octet-stream"),
        (
            f"{V4}&X-Amz-SignedHeaders=content-type%3Bhost",
            "application/octet-stream",
        ),
        (f"AWSAccessKeyId=k&Signature=x&Expires={FAR_FUTURE}", None),
        (f"AWSAccessKeyId=k&Signature=x&content-type=text%2Fx&Expires={FAR_FUTURE}", "text/x"),
        ("X-Goog-Signature=x&X-Goog-SignedHeaders=host", "application/octet-stream"),
    ],
)
async def test_the_content_type_is_the_one_that_the_url_signs(
    server: WebServer, web: WebAccess, path: Path, query: str, content_type: str | None
) -> None:
    """Version 2 signs the type in any case: without one in the URL, none may be sent."""
    server.answers = [says(200)]

    await upload(server.url(f"/out?{query}"), path, web=web)

    assert server.requests[0].headers.get("content-type") == content_type


@pytest.mark.parametrize(
    ("query", "why"),
    [
        # As boto3 signs an ACL, and AWS's SDK for Go the length of an empty body.
        (f"{V4}&X-Amz-SignedHeaders=host%3Bx-amz-acl", "signs x-amz-acl, for which"),
        (f"{V4}&X-Amz-SignedHeaders=content-length%3Bhost", "signs content-length, for which"),
        (f"{V4}&X-Amz-SignedHeaders=content-md5%3Bhost", "signs content-md5, for which"),
        # As AWS's SDK for JavaScript says for what a URL is.
        (f"{V4}&X-Amz-SignedHeaders=host&x-id=GetObject", "is for GetObject: make one for PUT"),
        ("sv=2024-11-04&sp=r&sig=x", "allows no writing"),
    ],
)
async def test_a_signature_that_no_put_of_ours_can_have_is_refused(
    server: WebServer, web: WebAccess, path: Path, query: str, why: str
) -> None:
    """Better a clear refusal before anything runs than a 403 at the end."""
    url = server.url(f"/out?{query}")
    with pytest.raises(LocationRefused, match=why):
        await upload(url, path, web=web)
    assert server.requests == []
    with pytest.raises(LocationRefused, match=why):
        await parse_location(url).check_output()


@pytest.mark.parametrize("code", ["BadDigest", "XAmzContentSHA256Mismatch"])
async def test_the_checksum_of_another_content_in_the_url_is_final(
    server: WebServer, web: WebAccess, path: Path, code: str
) -> None:
    """The next try would have the same URL; without the checksum, the body was damaged."""
    server.answers = [says(400, f"<Error><Code>{code}</Code></Error>".encode())]
    with pytest.raises(LocationRefused, match=rf'{code}, for the URL has .*"WHEN_REQUIRED"'):
        await upload(server.url(f"/out?{V4}&x-amz-checksum-crc32=AAAAAA%3D%3D"), path, web=web)
    assert len(server.requests) == 1
    with pytest.raises(StorageUnavailable):
        await upload(server.url(f"/out?{V4}"), path, web=web)


CREATE = f"sv=2024-11-04&sp=c&sig={SECRET}"


def azure_says(code: str) -> Answer:
    return says(403, f"<Error><Code>{code}</Code></Error>".encode())


@pytest.mark.parametrize("code", ["UnauthorizedBlobOverwrite", "AuthorizationPermissionMismatch"])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_blob_that_may_be_made_once_counts_as_stored_if_only_the_answer_was_lost(
    server: WebServer, web: WebAccess, path: Path, code: str, is_lost: bool
) -> None:
    """As Azure says it, and Azurite."""

    async def lost(request: server_side.BaseRequest) -> server_side.StreamResponse:
        close(request)
        return server_side.Response()

    server.says_continue = True
    server.answers = [lost if is_lost else says(500), azure_says(code)]
    await upload(server.url(f"/out?{CREATE}"), path, web=web)
    assert [each.headers["expect"] for each in server.requests] == ["100-continue"] * 2


@pytest.mark.parametrize("code", ["UnauthorizedBlobOverwrite", "AuthorizationPermissionMismatch"])
async def test_a_blob_of_others_that_may_not_be_replaced_is_no_success(
    server: WebServer, web: WebAccess, path: Path, tmp_path: Path, code: str
) -> None:
    """Also if the connection broke before the whole body was sent."""
    server.says_continue = True
    server.answers = [azure_says(code)]
    with pytest.raises(AccessDenied):
        await upload(server.url(f"/out?{CREATE}"), path, web=web)

    large = tmp_path / "large"
    with large.open("wb") as sparse:
        sparse.truncate(64 * 1024 * 1024)
    tries = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        await reader.readuntil(b"\r\n\r\n")
        if tries == 1:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await reader.readexactly(100_000)
        else:
            body = f"<Error><Code>{code}</Code></Error>"
            head = f"HTTP/1.1 403 No\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(f"{head}{body}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as azure:
        port = azure.sockets[0].getsockname()[1]
        with pytest.raises(AccessDenied):
            await upload(f"http://127.0.0.1:{port}/out?{CREATE}", large, web=web)
    assert tries == 2


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_a_passing_failure_is_sent_again_whole(
    server: WebServer, web: WebAccess, path: Path, status: int
) -> None:
    """The file is read from its start for each try."""
    server.answers = [says(status), says(status), says(201)]

    await upload(server.url(), path, web=web)

    assert [seen.body == CONTENT for seen in server.requests] == [True, True, True]


@pytest.mark.parametrize("code", ["RequestTimeout", "IncompleteBody"])
async def test_so_is_one_that_s3_calls_a_bad_request(
    server: WebServer, web: WebAccess, path: Path, code: str
) -> None:
    """The connection stalled or broke: nothing is wrong with the URL."""
    server.answers = [says(400, f"<Error><Code>{code}</Code></Error>".encode()), says(200)]
    await upload(server.url(), path, web=web)
    assert [seen.body == CONTENT for seen in server.requests] == [True, True]


async def test_a_put_whose_reply_is_lost_is_sent_again(
    server: WebServer, web: WebAccess, path: Path
) -> None:
    """The object arrived, its receipt did not: the second PUT leaves the same object."""

    async def lost(request: server_side.BaseRequest) -> server_side.StreamResponse:
        close(request)
        return server_side.Response()

    server.answers = [lost, says(200)]

    await upload(server.url(), path, web=web)

    assert [seen.body == CONTENT for seen in server.requests] == [True, True]


async def test_a_failure_that_stays_is_unavailable(
    server: WebServer, web: WebAccess, path: Path
) -> None:
    """The tries are counted."""
    server.answers = [says(503)]

    with pytest.raises(StorageUnavailable, match="503"):
        await upload(server.url(), path, web=web)
    assert len(server.requests) == web.backoff.attempts


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, LocationRefused),
        (401, AccessDenied),
        (403, AccessDenied),
        (404, ObjectNotFound),
        (411, LocationRefused),
        (413, ObjectTooLarge),
        (507, StorageFull),
    ],
)
async def test_a_final_answer_is_not_asked_for_twice(
    server: WebServer, web: WebAccess, path: Path, status: int, error: type[StorageError]
) -> None:
    """One request, one error, without the query."""
    server.answers = [says(status)]

    with pytest.raises(error) as raised:
        await upload(server.url(f"/out?token={SECRET}"), path, web=web)

    assert len(server.requests) == 1
    assert SECRET not in "".join(traceback.format_exception(raised.value))


async def test_a_signature_whose_time_is_over_is_no_bad_request(
    server: WebServer, web: WebAccess, path: Path
) -> None:
    """As Google Cloud Storage says it, and S3 of temporary credentials."""
    server.answers = [says(400, b"<Error><Code>ExpiredToken</Code></Error>")]
    with pytest.raises(AccessDenied, match="make a new presigned URL"):
        await upload(server.url(), path, web=web)


@pytest.mark.parametrize("status", [b"000 None", b"101 Switching Protocols"])
async def test_a_status_below_200_is_no_success(
    web: WebAccess, tmp_path: Path, status: bytes
) -> None:
    """Nothing says that the file was stored."""
    (tmp_path / "small").write_bytes(b"x")

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\nx")
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as odd:
        port = odd.sockets[0].getsockname()[1]
        with pytest.raises(LocationRefused, match="answered"):
            await upload(f"http://127.0.0.1:{port}/out", tmp_path / "small", web=web)


async def test_a_redirect_is_not_followed(server: WebServer, web: WebAccess, path: Path) -> None:
    """The results go where the user said, or nowhere."""
    server.answers = [says(307, Location="/elsewhere")]

    with pytest.raises(LocationRefused, match="redirects"):
        await upload(server.url(), path, web=web)
    assert len(server.requests) == 1


async def test_a_server_that_stops_reading_is_given_up(web: WebAccess, tmp_path: Path) -> None:
    """The time for a block runs while we send, too."""
    large = tmp_path / "large"
    with large.open("wb") as sparse:
        sparse.truncate(64 * 1024 * 1024)
    impatient = replace(web, stall_seconds=0.2, backoff=Backoff(1))

    async with silent_server(limit=1) as port:
        with pytest.raises(StorageUnavailable, match="too slow"):
            await upload(f"http://127.0.0.1:{port}/out", large, web=impatient)


async def test_a_server_that_reads_slowly_and_goes_on_reading_gets_everything(
    web: WebAccess, tmp_path: Path
) -> None:
    """The time is for each block, not for all of them."""
    large = tmp_path / "large"
    with large.open("wb") as sparse:
        sparse.truncate(24 * 1024 * 1024)
    patient = replace(web, stall_seconds=2.0, backoff=Backoff(1))

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(24):
            await reader.readexactly(1024 * 1024)
            await asyncio.sleep(0.125)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as slow:
        port = slow.sockets[0].getsockname()[1]
        began = asyncio.get_running_loop().time()
        await upload(f"http://127.0.0.1:{port}/out", large, web=patient)
    assert asyncio.get_running_loop().time() - began > patient.stall_seconds


async def test_an_unreachable_host_is_unavailable(web: WebAccess, path: Path) -> None:
    """Nobody listens on the port."""
    with pytest.raises(StorageUnavailable, match="cannot be reached"):
        await upload("http://127.0.0.1:9/out", path, web=web)


async def test_an_expired_url_is_denied_before_any_connection(
    server: WebServer, web: WebAccess, path: Path
) -> None:
    """The message says that it expired, and when."""
    signed_at = datetime.now(UTC) - timedelta(hours=2)
    query = f"{V4}&X-Amz-Date={signed_at:%Y%m%dT%H%M%SZ}&X-Amz-Expires=3600"

    with pytest.raises(AccessDenied) as raised:
        await upload(server.url(f"/out?{query}"), path, web=web)

    expired_at = signed_at + timedelta(hours=1)
    assert f"expired at {expired_at:%Y-%m-%d %H:%M:%S} UTC" in str(raised.value)
    assert server.requests == []


async def test_more_than_s3_takes_is_refused_before_any_connection(
    server: WebServer, web: WebAccess, tmp_path: Path
) -> None:
    """One PUT to S3 takes 5 GiB; other servers are asked."""
    huge = tmp_path / "huge"
    with huge.open("wb") as sparse:
        os.truncate(sparse.fileno(), S3_PUT_LIMIT_BYTES + 1)

    with pytest.raises(ObjectTooLarge, match="split the batch"):
        await upload(server.url(f"/out?{V4}"), huge, web=web)
    assert server.requests == []


async def test_as_much_as_s3_takes_is_not_too_large(
    server: WebServer, web: WebAccess, tmp_path: Path
) -> None:
    """It comes as far as the next check, which is of the URL's time."""
    huge = tmp_path / "huge"
    with huge.open("wb") as sparse:
        os.truncate(sparse.fileno(), S3_PUT_LIMIT_BYTES)
    query = f"{V4}&X-Amz-Date=20200101T000000Z&X-Amz-Expires=60"
    with pytest.raises(AccessDenied, match="expired"):
        await upload(server.url(f"/out?{query}"), huge, web=web)


async def test_an_absent_file_is_not_found(
    server: WebServer, web: WebAccess, tmp_path: Path
) -> None:
    """It is looked for before the connection is made."""
    with pytest.raises(ObjectNotFound, match="absent"):
        await upload(server.url(), tmp_path / "absent", web=web)


async def test_an_empty_file_is_an_empty_object(
    server: WebServer, web: WebAccess, tmp_path: Path
) -> None:
    """Content-Length: 0, not a chunked body of nothing."""
    empty = tmp_path / "empty"
    empty.touch()
    server.answers = [says(200)]

    await upload(server.url(), empty, web=web)

    assert server.requests[0].headers["content-length"] == "0"
    assert "transfer-encoding" not in server.requests[0].headers
