"""One S3 bucket against a server that tells what it was sent, and answers as a test says."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from botocore.exceptions import HTTPClientError

from batchyard.errors import AccessDenied, ObjectChanged, StorageFull, StorageUnavailable
from batchyard.storage.backoff import Backoff
from batchyard.storage.bucket import S3Bucket, S3Credentials
from batchyard.storage.s3_errors import s3_errors_as_ours
from tests.unit.storage.web_server import Answer, WebServer, close, says

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CONTENT = bytes(range(256)) * 8192  # two of the blocks that are read at a time
PART_BYTES = 5 * 1024**2


@pytest.fixture
async def bucket(server: WebServer) -> AsyncIterator[S3Bucket]:
    credentials = S3Credentials(server.base_url, "us-east-1", "key", "secret")
    opened = S3Bucket(
        "b", credentials, part_bytes=PART_BYTES, backoff=Backoff(3, first_seconds=0.005)
    )
    yield opened
    await opened.close()


async def parts(*content: bytes) -> AsyncIterator[bytes]:
    for part in content:
        yield part


async def read(bucket: S3Bucket, start: int = 0, stop: int | None = None) -> bytes:
    return b"".join([block async for block in bucket.read("o", start=start, stop=stop)])


def piece(content: bytes, start: int, *, said: int | None = None, etag: str = '"one"') -> Answer:
    """206 with this content, which it says begins at ``said``."""
    begin = start if said is None else said
    sent = f"bytes {begin}-{begin + len(content) - 1}/{len(CONTENT)}"

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        headers = {"Content-Range": sent, "ETag": etag}
        return web.Response(status=206, body=content, headers=headers)

    return answer


def cut(content: bytes, after_bytes: int) -> Answer:
    """200 for the whole content, and the connection breaks after so many bytes."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"ETag": '"one"'})
        response.content_length = len(content)
        await response.prepare(request)
        await response.write(content[:after_bytes])
        close(request)
        return response

    return answer


def whole(content: bytes) -> Answer:
    """200 with this content, or with its length for HEAD."""
    return says(200, content, ETag='"one"')


async def test_a_range_is_asked_for_and_given(bucket: S3Bucket, server: WebServer) -> None:
    server.answers = [piece(CONTENT[5:9], 5)]
    assert await read(bucket, 5, 9) == CONTENT[5:9]
    assert server.requests[0].headers["range"] == "bytes=5-8"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(piece(CONTENT[:4], 5, said=0), id="another place, and it says so"),
        pytest.param(piece(CONTENT[5:20], 5), id="more than was asked for"),
    ],
)
async def test_another_range_than_was_asked_for_is_never_used(
    bucket: S3Bucket, server: WebServer, answer: Answer
) -> None:
    server.answers = [answer]
    with pytest.raises(StorageUnavailable, match="another range"):
        await read(bucket, 5, 9)
    assert len(server.requests) == 3  # it may be a passing fault of a proxy


async def test_a_download_that_breaks_goes_on_with_the_same_version(
    bucket: S3Bucket, server: WebServer
) -> None:
    half = len(CONTENT) // 2
    server.answers = [cut(CONTENT, half), piece(CONTENT[half:], half)]
    assert await read(bucket) == CONTENT
    resumed = server.requests[-1].headers
    assert (resumed["if-match"], resumed["range"]) == (
        '"one"',
        f"bytes={half}-{len(CONTENT) - 1}",
    )


async def test_an_object_that_was_replaced_meanwhile_is_not_mixed(
    bucket: S3Bucket, server: WebServer
) -> None:
    server.answers = [cut(CONTENT, len(CONTENT) // 2), says(412)]
    with pytest.raises(ObjectChanged):
        await read(bucket)


async def test_a_resumed_download_that_is_too_short_is_not_the_end(
    bucket: S3Bucket, server: WebServer
) -> None:
    """Only the first answer may be shorter than asked for: there the object ends."""
    half = len(CONTENT) // 2
    server.answers = [cut(CONTENT, half), piece(CONTENT[half:-7], half)]
    with pytest.raises(StorageUnavailable, match="another range"):
        await read(bucket)


def without_a_length(content: bytes) -> Answer:
    """200 with this content in chunks, as a proxy sends it that compresses others."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"ETag": '"one"'})
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(content)
        return response

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(without_a_length(CONTENT), id="no length"),
        pytest.param(says(200, CONTENT), id="no ETag"),
    ],
)
async def test_an_object_whose_end_or_version_is_not_said_is_not_read(
    bucket: S3Bucket, server: WebServer, answer: Answer
) -> None:
    server.answers = [answer]
    with pytest.raises(StorageUnavailable, match="lacks Content-Length or ETag"):
        await read(bucket)
    assert len(server.requests) == 3


async def test_what_a_proxy_has_removed_from_an_answer_is_a_failure_of_s3(
    bucket: S3Bucket, server: WebServer
) -> None:
    server.answers = [says(200)]
    with pytest.raises(StorageUnavailable, match="a proxy changed it"):
        await bucket.write("o", parts(b"lines"))
    server.answers = [without_a_length(b"")]
    with pytest.raises(StorageUnavailable, match="a proxy changed it"):
        await bucket.size("o")


async def test_the_bytes_are_sent_with_their_md5(bucket: S3Bucket, server: WebServer) -> None:
    """So that S3 refuses what was damaged on the way."""
    server.answers = [says(200, ETag='"one"')]
    await bucket.write("o", parts(b"lines"))
    (sent,) = server.requests
    md5 = base64.b64encode(hashlib.md5(b"lines", usedforsecurity=False).digest()).decode()
    assert (sent.method, sent.body, sent.headers["content-md5"]) == ("PUT", b"lines", md5)


OPENED = b"<R><Bucket>b</Bucket><Key>o</Key><UploadId>u1</UploadId></R>"


async def test_each_part_is_sent_with_its_md5(bucket: S3Bucket, server: WebServer) -> None:
    block = b"x" * PART_BYTES
    server.answers = [
        says(200, OPENED),
        says(200, ETag='"1"'),
        says(200, ETag='"2"'),
        says(200, b"<R><ETag>e</ETag></R>"),
    ]
    await bucket.write("o", parts(block, b"rest"))
    sent = [request.headers["content-md5"] for request in server.requests[1:3]]
    digests = [hashlib.md5(each, usedforsecurity=False).digest() for each in (block, b"rest")]
    assert sent == [base64.b64encode(digest).decode() for digest in digests]


async def test_an_upload_that_fails_leaves_no_parts_behind(
    bucket: S3Bucket, server: WebServer
) -> None:
    refused = says(403, b"<Error><Code>AccessDenied</Code></Error>")
    server.answers = [says(200, OPENED), refused, says(204)]
    with pytest.raises(AccessDenied):
        await bucket.write("o", parts(b"x" * PART_BYTES))
    last = server.requests[-1]
    assert (last.method, last.path_and_query) == ("DELETE", "/b/o?uploadId=u1")


NO_SUCH_UPLOAD = says(404, b"<Error><Code>NoSuchUpload</Code></Error>")


def uploads_a_part(*then: Answer) -> list[Answer]:
    """Until a multipart upload of one part is to be completed."""
    return [says(200, OPENED), says(200, ETag='"1"'), *then]


async def test_an_upload_whose_completion_got_no_answer_is_complete_if_the_object_is_there(
    bucket: S3Bucket, server: WebServer
) -> None:
    """MinIO and Ceph forget an upload that is complete: to write all of it again would not help."""
    block = b"x" * PART_BYTES
    server.answers = uploads_a_part(says(504), NO_SUCH_UPLOAD, whole(block))
    assert (await bucket.write("o", parts(block))).size_bytes == PART_BYTES
    assert server.requests[-1].method == "HEAD"


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([NO_SUCH_UPLOAD], id="no earlier try"),
        pytest.param([says(504), NO_SUCH_UPLOAD, says(404)], id="no object"),
        pytest.param([says(504), NO_SUCH_UPLOAD, whole(b"older")], id="another object"),
    ],
)
async def test_an_upload_that_s3_has_lost_is_not_taken_for_complete(
    bucket: S3Bucket, server: WebServer, answers: list[Answer]
) -> None:
    server.answers = uploads_a_part(*answers, NO_SUCH_UPLOAD)
    with pytest.raises(StorageUnavailable, match="lost the upload"):
        await bucket.write("o", parts(b"x" * PART_BYTES))


LISTED = (
    b"<R><IsTruncated>false</IsTruncated><Contents><Key>o</Key><Size>1</Size><ETag>e</ETag>"
    b"<LastModified>2026-01-01T00:00:00Z</LastModified></Contents></R>"
)


async def test_a_listing_whose_body_is_lost_is_not_an_empty_one(
    bucket: S3Bucket, server: WebServer
) -> None:
    """Else a batch would have no results. The connection breaks behind the header."""
    server.answers = [cut(LISTED, 0), says(200, LISTED)]
    assert [key async for key in bucket.list("")] == ["o"]


async def test_an_upload_without_a_word_about_its_end_is_not_complete(
    bucket: S3Bucket, server: WebServer
) -> None:
    server.answers = uploads_a_part(cut(b"<R><ETag>e</ETag></R>", 0))
    with pytest.raises(StorageUnavailable, match="cut off"):
        await bucket.write("o", parts(b"x" * PART_BYTES))


async def test_an_upload_that_has_just_begun_is_left_to_its_writer(
    bucket: S3Bucket, server: WebServer
) -> None:
    listed = (
        b"<R><IsTruncated>false</IsTruncated><Upload><Key>o</Key><UploadId>young</UploadId>"
        b"<Initiated>2026-01-02T00:00:00Z</Initiated></Upload>"
        b"<Upload><Key>o</Key><UploadId>old</UploadId>"
        b"<Initiated>2026-01-01T00:00:00Z</Initiated></Upload></R>"
    )
    now = "Fri, 02 Jan 2026 00:00:01 GMT"
    server.answers = [says(200, listed, Date=now), says(204)]
    assert await bucket.abort_uploads("", 3600) == 1
    assert server.requests[-1].path_and_query == "/b/o?uploadId=old"


@pytest.mark.parametrize(
    ("status", "code", "check"),
    [
        (400, "ExpiredToken", "credentials"),
        (400, "InvalidToken", "credentials"),
        (400, "AuthorizationHeaderMalformed", "region"),
        (405, "MethodNotAllowed", "endpoint"),
        (403, "RequestTimeTooSkewed", "clock"),
    ],
)
async def test_what_s3_refuses_whatever_the_object_is_a_refusal_of_this_process(
    bucket: S3Bucket, server: WebServer, status: int, code: str, check: str
) -> None:
    """Such as credentials that expire while a batch runs: another process may have newer ones."""
    server.answers = [says(status, f"<Error><Code>{code}</Code></Error>".encode())]
    with pytest.raises(AccessDenied, match=f"{status} {code}.*check .*{check}"):
        await bucket.write("o", parts(b"lines"))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (507, "XMinioStorageFull"),
        (400, "XMinioAdminBucketQuotaExceeded"),
        (403, "QuotaExceeded"),
    ],
)
async def test_a_bucket_without_room_is_said_to_be_full(
    bucket: S3Bucket, server: WebServer, status: int, code: str
) -> None:
    """By a full disk, and by a bucket's quota at MinIO and Ceph."""
    server.answers = [says(status, f"<Error><Code>{code}</Code></Error>".encode())]
    with pytest.raises(StorageFull, match="free some space"):
        await bucket.write("o", parts(b"lines"))


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "IncompleteBody"), (400, "XAmzContentSHA256Mismatch"), (499, "ClientDisconnect")],
)
async def test_a_body_that_was_damaged_on_the_way_is_sent_again(
    bucket: S3Bucket, server: WebServer, status: int, code: str
) -> None:
    refused = says(status, f"<Error><Code>{code}</Code></Error>".encode())
    server.answers = [refused, says(200, ETag='"one"')]
    assert (await bucket.write("o", parts(b"lines"))).size_bytes == 5


async def test_an_endpoint_that_redirects_every_request_is_named_as_the_cause(
    bucket: S3Bucket, server: WebServer
) -> None:
    """As a proxy does that wants https: boto3 would ask it for the bucket's region for ever."""
    server.answers = [says(301, b"<html>", Location="https://127.0.0.1:9/")]
    with pytest.raises(AccessDenied, match=r"redirects every request for s3://b/o.*https"):
        await bucket.size("o")


def test_so_it_is_wherever_the_stack_was_full() -> None:
    """botocore's HTTP client makes an error of its own of whatever is raised in it."""
    wrapped = HTTPClientError(error=RecursionError())
    wrapped.__context__ = RecursionError()
    says = pytest.raises(AccessDenied, match=r"redirects every request for s3://b/o")
    with says, s3_errors_as_ours("s3://b/o"):
        raise wrapped
