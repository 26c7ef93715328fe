"""Multipart uploads that a user has begun: what is sent where, and how they are kept."""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from aiohttp import web as server_side

from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectNotFound,
    ObjectTooLarge,
    StorageUnavailable,
)
from batchyard.locations import upload as module
from batchyard.locations.access import Access
from batchyard.locations.location import parse_location, read_location, write_location
from batchyard.locations.parted_url import MOST_PARTS, PartedUrl
from batchyard.storage.backoff import Backoff
from tests.unit.storage.web_server import close, keeps_processing, says

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.locations.web import WebAccess
    from tests.unit.storage.web_server import Answer, WebServer

MIB = 1024 * 1024
QUERY = "X-Amz-Signature=hunter2&X-Amz-Date=20260101T000000Z&X-Amz-Expires"
PLACE = PartedUrl(
    ("https://s3.example/k?partNumber=1&x=%2F#", "https://s3.example/k?partNumber=2"),
    "https://s3.example/k?uploadId=u&X-Amz-Signature=hunter2",
)


def test_it_is_kept_as_text_and_shown_without_a_secret() -> None:
    assert parse_location(PLACE.text) == PLACE
    assert str(PLACE) == "https://s3.example/k"
    assert "hunter2" not in repr(PLACE)
    # What the outbox tells slow receivers apart by.
    assert urlsplit(PLACE.text).hostname == "s3.example"


@pytest.mark.parametrize(
    "text",
    [
        "multipart+https://s3.example/k",
        "multipart+https://s3.example/k#[",
        "multipart+https://s3.example/k#%7B%7D",
        "multipart+https://s3.example/k#[1]",
        "multipart+https://s3.example/k#[]",
        "multipart+https://s3.example/k#[%22file:///etc/passwd%22]",
    ],
)
def test_what_is_no_upload_is_refused(text: str) -> None:
    with pytest.raises(LocationRefused):
        parse_location(text)


def test_there_is_a_limit_to_the_number_of_parts() -> None:
    with pytest.raises(LocationRefused, match="1 to 1000 parts"):
        PartedUrl(("https://s3.example/k",) * (MOST_PARTS + 1), "https://s3.example/k")


async def test_it_expires_with_the_first_of_its_urls() -> None:
    late, early = (f"https://s3.example/k?{QUERY}={seconds}" for seconds in (7200, 3600))
    place = PartedUrl((late, early), late)
    assert place.expires_at == 1767225600 + 3600
    with pytest.raises(AccessDenied, match="expired"):
        await place.check_output()


async def test_it_is_no_input() -> None:
    with pytest.raises(LocationRefused, match="cannot be read"):
        _ = [block async for block in read_location(PLACE, limit_bytes=1, access=Access())]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    results = tmp_path / "results.jsonl"
    results.write_bytes(b"a" * (8 * MIB) + b"b" * (8 * MIB) + b"c")
    return results


def place_on(server: WebServer, count: int) -> PartedUrl:
    return PartedUrl(
        tuple(server.url(f"/k?part={n}") for n in range(1, count + 1)), server.url("/k?complete")
    )


async def test_the_parts_are_put_together_in_their_order(
    server: WebServer, web: WebAccess, path: Path
) -> None:
    tags = [says(200, ETag=f'"<{n}>"') for n in range(1, 4)]
    server.answers = [*tags, says(200, b"<CompleteMultipartUploadResult/>")]
    await write_location(place_on(server, 3), path, Access(web=web))
    *parts, complete = server.requests
    assert [each.path_and_query for each in parts] == [f"/k?part={n}" for n in (1, 2, 3)]
    assert [(each.method, len(each.body)) for each in parts] == [
        *(("PUT", 8 * MIB), ("PUT", 8 * MIB), ("PUT", 1))
    ]
    assert all(each.headers["content-length"] == str(len(each.body)) for each in parts)
    assert (complete.method, complete.path_and_query) == ("POST", "/k?complete")
    assert re.findall(rb"<PartNumber>(\d)</PartNumber><ETag>([^<]*)</ETag>", complete.body) == [
        (b"%d" % n, b'"&lt;%d&gt;"' % n) for n in (1, 2, 3)
    ]


@pytest.mark.parametrize("count", [1, 2])
async def test_an_empty_file_is_one_empty_part(
    server: WebServer, web: WebAccess, tmp_path: Path, count: int
) -> None:
    (tmp_path / "empty").write_bytes(b"")
    server.answers = [says(200, ETag="x")]
    await write_location(place_on(server, count), tmp_path / "empty", Access(web=web))
    assert [each.method for each in server.requests] == ["PUT", "POST"]


async def test_more_than_the_parts_can_take_is_refused_before_anything_is_sent(
    server: WebServer, web: WebAccess, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "S3_PUT_LIMIT_BYTES", 8 * MIB)
    with pytest.raises(ObjectTooLarge, match="give more URLs"):
        await write_location(place_on(server, 2), path, Access(web=web))
    assert server.requests == []


async def test_an_error_in_an_answer_of_200_is_an_error(
    server: WebServer, web: WebAccess, path: Path
) -> None:
    """S3 begins to answer before it knows."""
    once = replace(web, backoff=Backoff(attempts=1))
    server.answers = [*[says(200, ETag="x")] * 3, says(200, b"<Error><Code>InternalError</Code>")]
    with pytest.raises(StorageUnavailable, match="could not be put together"):
        await write_location(place_on(server, 3), path, Access(web=once))


async def test_an_error_at_the_end_of_an_answer_that_began_as_200_is_an_error(
    server: WebServer, web: WebAccess, path: Path
) -> None:
    """S3 sends spaces while it puts the parts together, and only then how that went."""

    async def fails_late(request: server_side.BaseRequest) -> server_side.StreamResponse:
        answer = server_side.StreamResponse()
        await answer.prepare(request)
        await answer.write(b'<?xml version="1.0" encoding="UTF-8"?>\n ')
        await asyncio.sleep(0.05)
        await answer.write(b"<Error><Code>InternalError</Code></Error>")
        return answer

    once = replace(web, backoff=Backoff(attempts=1))
    server.answers = [*[says(200, ETag="x")] * 3, fails_late]
    with pytest.raises(StorageUnavailable, match="could not be put together"):
        await write_location(place_on(server, 3), path, Access(web=once))


async def test_a_server_that_never_ends_the_header_of_its_answer_is_given_up(
    server: WebServer, web: WebAccess, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tries together have the time that S3 may need, and no try less than a stall."""
    monkeypatch.setattr(module, "_COMPLETE_SECONDS", 0.3)
    impatient = replace(web, stall_seconds=0.2, backoff=Backoff(2, first_seconds=0.005))
    server.answers = [*[says(200, ETag="x")] * 3, keeps_processing(0.05)]
    async with asyncio.timeout(5):
        with pytest.raises(StorageUnavailable, match="too slow"):
            await write_location(place_on(server, 3), path, Access(web=impatient))
    assert len(server.requests) == 5


def failure(status: int, code: str = "") -> Answer:
    return says(status, f"<?xml?><Error><Code>{code}</Code></Error>".encode() if code else b"")


async def loses_its_answer(request: server_side.BaseRequest) -> server_side.StreamResponse:
    close(request)
    return server_side.Response()


async def breaks_off_its_answer(request: server_side.BaseRequest) -> server_side.StreamResponse:
    answer = server_side.StreamResponse()
    await answer.prepare(request)
    await answer.write(b"<?xml?>\n ")
    close(request)
    return answer


FORGOTTEN = failure(404, "NoSuchUpload")


@pytest.mark.parametrize(
    "first",
    [
        loses_its_answer,
        breaks_off_its_answer,
        failure(500, "InternalError"),
        failure(502),
        failure(504),
    ],
)
async def test_an_upload_whose_answer_was_lost_may_be_forgotten_as_complete(
    server: WebServer, web: WebAccess, path: Path, first: Answer
) -> None:
    server.answers = [*[says(200, ETag="x")] * 3, first, failure(503, "SlowDown"), FORGOTTEN]
    await write_location(place_on(server, 3), path, Access(web=web))
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    "first",
    [
        failure(503, "SlowDown"),
        failure(429),
        says(200, b"<?xml?><Error><Code>InternalError</Code></Error>"),
    ],
)
async def test_an_upload_that_is_gone_after_a_refusal_was_not_completed(
    server: WebServer, web: WebAccess, path: Path, first: Answer
) -> None:
    """S3 aborts uploads that are old, or a client does."""
    server.answers = [*[says(200, ETag="x")] * 3, first, FORGOTTEN]
    with pytest.raises(ObjectNotFound, match="404 NoSuchUpload"):
        await write_location(place_on(server, 3), path, Access(web=web))


async def test_an_upload_that_is_gone_before_its_first_part_may_be_complete(
    server: WebServer, web: WebAccess, path: Path
) -> None:
    """A process that has completed it may have ended before it could say so."""
    server.answers = [FORGOTTEN]
    with pytest.raises(ObjectNotFound, match="look whether an earlier attempt has completed it"):
        await write_location(place_on(server, 3), path, Access(web=web))


async def test_an_upload_that_is_gone_after_no_connection_was_not_completed(
    server: WebServer, web: WebAccess, path: Path
) -> None:
    """What was not sent has completed nothing."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    patient = replace(web, backoff=Backoff(6, first_seconds=0.1))
    place = PartedUrl(place_on(server, 3).part_urls, f"http://127.0.0.1:{port}/k")
    server.answers = [says(200, ETag="x")]

    async def forgets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"</CompleteMultipartUpload>")
        body = b"<Error><Code>NoSuchUpload</Code></Error>"
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    writing = asyncio.create_task(write_location(place, path, Access(web=patient)))
    while len(server.requests) < 3:  # noqa: ASYNC110 - they come in another task
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    async with await asyncio.start_server(forgets, "127.0.0.1", port):
        with pytest.raises(ObjectNotFound, match="404 NoSuchUpload"):
            await writing


@pytest.mark.parametrize(
    "gone", [failure(404, "NoSuchBucket"), failure(404), failure(410, "NoSuchUpload")]
)
async def test_only_an_upload_that_is_gone_may_have_been_completed(
    server: WebServer, web: WebAccess, path: Path, gone: Answer
) -> None:
    server.answers = [*[says(200, ETag="x")] * 3, loses_its_answer, gone]
    with pytest.raises(ObjectNotFound):
        await write_location(place_on(server, 3), path, Access(web=web))


async def test_a_code_that_comes_in_pieces_is_read_whole(
    server: WebServer, web: WebAccess, path: Path
) -> None:
    async def hesitates(request: server_side.BaseRequest) -> server_side.StreamResponse:
        answer = server_side.StreamResponse(status=404)
        await answer.prepare(request)
        for piece in (b"<?xml?>\n", b"<Error><Code>NoSuch", b"Upload</Code></Error>"):
            await answer.write(piece)
            await asyncio.sleep(0.02)
        return answer

    server.answers = [*[says(200, ETag="x")] * 3, loses_its_answer, hesitates]
    await write_location(place_on(server, 3), path, Access(web=web))
