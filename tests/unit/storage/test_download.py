"""GET of a URL: whole and in one version, or an error. Faults F7, F8, F9 and A2."""

from __future__ import annotations

import asyncio
import gzip
import random
import ssl
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trustme
from aiohttp import web as server_side

from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectChanged,
    ObjectNotFound,
    ObjectTooLarge,
    StorageError,
    StorageUnavailable,
)
from batchyard.locations.download import download
from batchyard.storage.backoff import Backoff
from tests.services.tcp import silent_server
from tests.unit.storage.web_server import (
    Answer,
    WebServer,
    close,
    cuts,
    gives,
    keeps_processing,
    running_web_server,
    says,
)

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.locations.web import WebAccess

MIB = 1024 * 1024
CONTENT = random.Random(2).randbytes(3 * MIB + 5)
SECRET = "5ecretS1gnature"
MONDAY, TUESDAY = "Mon, 02 Nov 2026 10:00:00 GMT", "Tue, 03 Nov 2026 10:00:00 GMT"


async def get(url: str, web: WebAccess, *, limit_bytes: int = 100 * MIB) -> bytes:
    return b"".join([block async for block in download(url, limit_bytes=limit_bytes, web=web)])


async def test_a_get_asks_for_the_bytes_as_they_are(server: WebServer, web: WebAccess) -> None:
    """The query goes out byte for byte, no compression is offered, no cookie or referrer sent."""
    server.answers = [gives(CONTENT, ETag='"one"')]
    query = "/a%2Fb.jsonl?X-Amz-Credential=k%2F1&sig=a+b%2B&empty="

    assert await get(server.url(query), web) == CONTENT

    (seen,) = server.requests
    assert (seen.method, seen.path_and_query) == ("GET", query)
    assert seen.headers["accept-encoding"] == "identity"
    assert set(seen.headers) == {*("host", "accept", "accept-encoding", "user-agent", "connection")}


async def test_a_get_over_tls_trusts_the_given_authority_only(web: WebAccess) -> None:
    """With the authority the object comes; without it the URL is refused, and not tried again."""
    authority = trustme.CA()
    theirs, ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(theirs)
    authority.configure_trust(ours)
    async with running_web_server(theirs) as server:
        server.answers = [gives(CONTENT)]

        assert await get(server.url(), replace(web, ssl_context=ours)) == CONTENT
        with pytest.raises(LocationRefused, match="certificate"):
            await get(server.url(), web)


async def test_blocks_are_large(server: WebServer, web: WebAccess) -> None:
    """Every block but the last has 1 MiB."""
    server.answers = [gives(CONTENT)]

    sizes = [len(b) async for b in download(server.url(), limit_bytes=100 * MIB, web=web)]

    assert sizes == [MIB, MIB, MIB, 5]


async def test_an_empty_object_is_an_empty_stream(server: WebServer, web: WebAccess) -> None:
    """Zero bytes are a complete answer."""
    server.answers = [gives(b"")]

    assert await get(server.url(), web) == b""


async def test_a_cut_get_resumes_with_if_match(server: WebServer, web: WebAccess) -> None:
    """The second request asks for the rest of the same version."""
    server.answers = [cuts(CONTENT, MIB + 7, ETag='"one"'), gives(CONTENT, ETag='"one"')]

    assert await get(server.url(), web) == CONTENT

    resumed = server.requests[1].headers
    assert resumed["if-match"] == '"one"'
    assert 0 < int(resumed["range"].removeprefix("bytes=").removesuffix("-")) <= MIB + 7


@pytest.mark.parametrize("headers", [{}, {"ETag": 'W/"weak"'}], ids=["no ETag", "weak ETag"])
async def test_without_a_strong_etag_a_cut_get_resumes_by_date(
    server: WebServer, web: WebAccess, headers: dict[str, str]
) -> None:
    """If-Range with Last-Modified takes the place of If-Match."""
    dated = {**headers, "Last_Modified": MONDAY}
    server.answers = [cuts(CONTENT, 2 * MIB, **dated), gives(CONTENT, **dated)]

    assert await get(server.url(), web) == CONTENT

    assert server.requests[1].headers["if-range"] == MONDAY
    assert "if-match" not in server.requests[1].headers


async def test_a_server_without_ranges_is_read_again_from_its_start(
    server: WebServer, web: WebAccess
) -> None:
    """A 200 to a Range request with the same ETag is skipped up to where we were."""
    server.answers = [cuts(CONTENT, 2 * MIB, ETag='"one"'), says(200, CONTENT, ETag='"one"')]

    assert await get(server.url(), web) == CONTENT


async def test_a_cut_before_the_first_byte_starts_over(server: WebServer, web: WebAccess) -> None:
    """Nothing was used yet, so even an object without ETag and date may be asked for again."""
    server.answers = [cuts(CONTENT, 0), cuts(CONTENT, 0, ETag='"old"'), gives(CONTENT)]

    assert await get(server.url(), web) == CONTENT


async def test_a_cut_object_without_etag_and_date_cannot_be_resumed(
    server: WebServer, web: WebAccess
) -> None:
    """Two halves that may be of two versions are never joined."""
    server.answers = [cuts(CONTENT, 2 * MIB), gives(CONTENT)]

    with pytest.raises(StorageUnavailable):
        await get(server.url(), web)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"ETag": '"one"'}, gives(CONTENT, ETag='"two"')),
        ({"ETag": '"one"'}, says(200, CONTENT, ETag='"two"')),
        ({"ETag": '"one"'}, says(200, CONTENT)),
        ({"ETag": '"one"'}, says(404)),
        ({"ETag": '"one"'}, says(416)),
        ({"Last_Modified": MONDAY}, gives(CONTENT, Last_Modified=TUESDAY)),
        ({"ETag": '"one"'}, gives(CONTENT + b"more", ETag='"one"')),
    ],
    ids=["412", "ignores If-Match", "no ETag any more", "404", "416", "date", "grown"],
)
async def test_an_object_that_changed_midway_is_noticed(
    server: WebServer, web: WebAccess, before: dict[str, str], after: Answer
) -> None:
    """Whatever tells of another version ends the stream with ObjectChanged, at once."""
    server.answers = [cuts(CONTENT, 2 * MIB, **before), after]

    with pytest.raises(ObjectChanged, match="start again"):
        await get(server.url(), web)
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "content_range",
    ["", "bytes 0-99/3145733", "bytes 2097153-3145732/3145733", "bytes */3145733", "items 1-2/3"],
)
async def test_a_wrong_206_is_never_used(
    server: WebServer, web: WebAccess, content_range: str
) -> None:
    """A range other than the one asked for is not taken for the rest."""
    after = 2 * MIB
    wrong = says(206, CONTENT[after:], ETag='"one"', Content_Range=content_range)
    server.answers = [cuts(CONTENT, after, ETag='"one"'), wrong]

    with pytest.raises(StorageUnavailable, match="another range"):
        await get(server.url(), web)
    assert len(server.requests) == web.backoff.attempts


async def test_an_unasked_206_is_refused(server: WebServer, web: WebAccess) -> None:
    """A part is not taken for the whole."""
    server.answers = [says(206, CONTENT[:MIB], Content_Range=f"bytes 0-{MIB - 1}/{len(CONTENT)}")]

    with pytest.raises(LocationRefused, match="206"):
        await get(server.url(), web)


async def test_a_truncated_body_is_never_complete(server: WebServer, web: WebAccess) -> None:
    """Fewer bytes than Content-Length, on every try: an error after all tries."""
    server.answers = [cuts(b"0123456789", 6)]

    with pytest.raises(StorageUnavailable):
        await get(server.url(), web)


async def test_a_truncated_chunked_body_is_never_complete(
    server: WebServer, web: WebAccess
) -> None:
    """A chunked body without its last chunk is cut short, not finished."""

    async def cut_chunked(request: server_side.BaseRequest) -> server_side.StreamResponse:
        response = server_side.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b'{"custom_id": "a"}\n')
        close(request)
        return response

    server.answers = [cut_chunked]

    with pytest.raises(StorageUnavailable):
        await get(server.url(), web)


async def test_a_body_whose_end_cannot_be_told_is_refused(web: WebAccess) -> None:
    """Neither Content-Length nor chunks: a broken connection would look like the end."""

    async def old_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nhalf a file?")
        writer.close()

    async with await asyncio.start_server(old_server, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(LocationRefused, match="Content-Length"):
            await get(f"http://127.0.0.1:{port}/in", web)


@pytest.mark.parametrize(
    ("goes_on", "error"),
    [
        ("206 Rest\r\nContent-Range: bytes 4-11/12", LocationRefused),
        ("200 OK", LocationRefused),
        ("206 Rest\r\nContent-Range: bytes 4-11/12\r\nContent-Length: 6", StorageUnavailable),
    ],
)
async def test_nor_is_the_rest_of_one_whose_end_cannot_be_told(
    web: WebAccess, goes_on: str, error: type[StorageError]
) -> None:
    """The first answer came in chunks, so it does not say how long the whole is."""
    began = b'HTTP/1.1 200 OK\r\nETag: "one"\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n'
    rest = f'HTTP/1.1 {goes_on}\r\nETag: "one"\r\nConnection: close\r\n\r\nhalf a'.encode()
    answers = [began, rest]

    async def breaks_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0) if answers else b"HTTP/1.1 503 Away\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(breaks_off, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(error):
            await get(f"http://127.0.0.1:{port}/in", web)


async def test_progress_renews_the_tries(server: WebServer, web: WebAccess) -> None:
    """A large object may break more often than one request may be tried."""
    content = CONTENT * 3

    async def cut_each_time(request: server_side.BaseRequest) -> server_side.StreamResponse:
        start = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=")[:-1])
        response = server_side.StreamResponse(
            status=206 if start else 200, headers={"ETag": '"one"'}
        )
        response.headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        response.content_length = len(content) - start
        await response.prepare(request)
        await response.write(content[start : start + MIB + MIB // 2])
        if start + MIB + MIB // 2 < len(content):
            close(request)
        return response

    server.answers = [cut_each_time]

    assert await get(server.url(), replace(web, backoff=Backoff(3, 0.001))) == content
    assert len(server.requests) > 3


async def test_compressed_content_is_refused(server: WebServer, web: WebAccess) -> None:
    """A gzip bomb is not unpacked, not even looked into."""
    server.answers = [says(200, gzip.compress(bytes(50 * MIB)), Content_Encoding="gzip")]

    with pytest.raises(LocationRefused, match="compressed"):
        await get(server.url(), web)


async def test_compressed_content_comes_as_it_is_stored_to_those_who_unpack_it(
    server: WebServer, web: WebAccess
) -> None:
    """Nobody unpacks it twice, and a broken transfer is resumed in the bytes that are stored."""
    content = gzip.compress(CONTENT)
    server.answers = [
        cuts(content, MIB, ETag='"one"', Content_Encoding="gzip"),
        says(
            206,
            content[MIB:],
            ETag='"one"',
            Content_Encoding="gzip",
            Content_Range=f"bytes {MIB}-{len(content) - 1}/{len(content)}",
        ),
    ]
    stream = download(server.url(), limit_bytes=100 * MIB, web=web, may_be_packed=True)
    assert b"".join([block async for block in stream]) == content


async def test_another_encoding_is_refused_though_some_may_be_unpacked(
    server: WebServer, web: WebAccess
) -> None:
    server.answers = [says(200, b"brotli", Content_Encoding="br")]
    stream = download(server.url(), limit_bytes=100 * MIB, web=web, may_be_packed=True)
    with pytest.raises(LocationRefused, match="store it uncompressed, or with gzip or zstd"):
        await anext(stream)


async def test_a_length_over_the_limit_is_refused_before_the_body(
    server: WebServer, web: WebAccess
) -> None:
    """Content-Length alone is enough; the limit itself is still allowed."""
    server.answers = [gives(b"0123456789")]

    assert await get(server.url(), web, limit_bytes=10) == b"0123456789"
    with pytest.raises(ObjectTooLarge, match="larger than 9 bytes"):
        await get(server.url(), web, limit_bytes=9)


async def test_an_endless_body_is_stopped_at_the_limit(server: WebServer, web: WebAccess) -> None:
    """Without a length, the bytes are counted."""

    async def endless(request: server_side.BaseRequest) -> server_side.StreamResponse:
        response = server_side.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(MIB))

    server.answers = [endless]

    with pytest.raises(ObjectTooLarge):
        await get(server.url(), web, limit_bytes=3 * MIB)


async def test_a_trickle_is_a_stall(server: WebServer, web: WebAccess) -> None:
    """A byte now and then does not keep the transfer alive."""

    async def trickle(request: server_side.BaseRequest) -> server_side.StreamResponse:
        response = server_side.StreamResponse(headers={"ETag": '"one"'})
        response.content_length = MIB
        await response.prepare(request)
        while True:
            await response.write(b".")
            await asyncio.sleep(0.01)

    server.answers = [trickle]

    with pytest.raises(StorageUnavailable, match="too slow"):
        await get(server.url(), replace(web, stall_seconds=0.1, backoff=Backoff(1)))


async def test_a_silent_server_is_given_up(server: WebServer, web: WebAccess) -> None:
    """No answer at all: the time-out ends it, after the tries."""
    forever = asyncio.Event()

    async def silent(_: server_side.BaseRequest) -> server_side.StreamResponse:
        await forever.wait()
        return server_side.Response()

    server.answers = [silent]

    with pytest.raises(StorageUnavailable, match="too slow or does not answer"):
        await get(server.url(), replace(web, stall_seconds=0.05, backoff=Backoff(2, 0.001)))
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_passing_failure_is_tried_again(
    server: WebServer, web: WebAccess, status: int
) -> None:
    """Two failures, then the object."""
    server.answers = [says(status), says(status), gives(CONTENT)]

    assert await get(server.url(), web) == CONTENT


async def test_a_failure_that_stays_is_unavailable(server: WebServer, web: WebAccess) -> None:
    """Tries are counted, and the last answer is named."""
    server.answers = [says(503, b"<Error><Code>SlowDown</Code></Error>")]

    with pytest.raises(StorageUnavailable, match="503 SlowDown"):
        await get(server.url(), web)
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, AccessDenied),
        (403, AccessDenied),
        (404, ObjectNotFound),
        (410, ObjectNotFound),
        (400, LocationRefused),
        (204, LocationRefused),
    ],
)
async def test_a_final_answer_is_not_asked_for_twice(
    server: WebServer, web: WebAccess, status: int, error: type[StorageError]
) -> None:
    """One request, one error."""
    server.answers = [says(status)]

    with pytest.raises(error):
        await get(server.url(), web)
    assert len(server.requests) == 1


async def test_a_redirect_on_the_same_origin_is_followed(server: WebServer, web: WebAccess) -> None:
    """Three hops at most, relative or absolute."""
    server.answers = [
        says(302, Location="/second?b=2"),
        says(307, Location=server.url("/third")),
        says(301, Location="fourth"),
        gives(CONTENT),
    ]

    assert await get(server.url(), web) == CONTENT
    assert server.requests[1].path_and_query == "/second?b=2"

    server.answers = [says(302, Location="/again")]
    with pytest.raises(LocationRefused, match="more than 3"):
        await get(server.url(), web)


@pytest.mark.parametrize(
    "location",
    [
        "http://localhost:{port}/in",  # the same machine, but another name
        "http://127.0.0.1:{other_port}/in",
        "https://127.0.0.1:{port}/in",
        "//example.org/in",
        "ftp://127.0.0.1:{port}/in",
        "file:///etc/passwd",
        "http://[::1/in",
    ],
)
async def test_a_redirect_to_another_origin_is_refused(
    server: WebServer, web: WebAccess, location: str
) -> None:
    """Scheme, host and port all have to stay; nothing is sent to the other one."""
    async with running_web_server() as other:
        other.answers = [gives(CONTENT)]
        port, other_port = (each.base_url.rpartition(":")[2] for each in (server, other))
        server.answers = [says(302, Location=location.format(port=port, other_port=other_port))]

        with pytest.raises(LocationRefused, match="another host"):
            await get(server.url(), web)
        assert len(server.requests) == 1
        assert other.requests == []


async def test_a_redirect_may_not_add_a_password(server: WebServer, web: WebAccess) -> None:
    """What we refuse in a URL, we refuse in a redirect."""
    server.answers = [says(302, Location=server.base_url.replace("//", "//user:pw@") + "/in")]

    with pytest.raises(LocationRefused):
        await get(server.url(), web)


async def test_an_unreachable_host_is_unavailable(web: WebAccess) -> None:
    """Nobody listens on the port."""
    with pytest.raises(StorageUnavailable, match="cannot be reached"):
        await get("http://127.0.0.1:9/in", web)


async def test_proxies_of_the_environment_are_not_used(
    server: WebServer, web: WebAccess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a proxy nor a .netrc of this machine takes part."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login us password secret")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server.answers = [gives(CONTENT)]

    assert await get(server.url(), web) == CONTENT
    assert "authorization" not in server.requests[0].headers


@pytest.mark.parametrize(
    "answer",
    [
        says(403),
        says(503),
        says(302, Location=f"http://elsewhere.example/?token={SECRET}"),
        cuts(CONTENT, MIB),
        says(200, Content_Encoding="gzip"),
    ],
    ids=["403", "503", "redirect", "cut", "gzip"],
)
async def test_no_error_shows_the_query(server: WebServer, web: WebAccess, answer: Answer) -> None:
    """Neither the message nor the whole printed traceback holds the signature."""
    server.answers = [answer]

    with pytest.raises(StorageError) as raised:
        await get(server.url(f"/in.jsonl?X-Amz-Signature={SECRET}"), web)

    assert "/in.jsonl" in str(raised.value)
    assert SECRET not in "".join(traceback.format_exception(raised.value))


async def test_no_error_shows_the_query_when_the_connection_times_out(web: WebAccess) -> None:
    """aiohttp's own message about this one holds the whole URL."""
    stuck = replace(web, connect_seconds=0.05, backoff=Backoff(1))
    # It accepts and never answers the TLS handshake.
    async with silent_server() as port:
        with pytest.raises(StorageUnavailable, match="does not answer") as raised:
            await get(f"https://127.0.0.1:{port}/in?X-Amz-Signature={SECRET}", stuck)

    assert SECRET not in "".join(traceback.format_exception(raised.value))


async def test_a_part_that_does_not_say_where_the_object_ends_is_not_its_end(
    server: WebServer, web: WebAccess
) -> None:
    """The length is known from the first answer; what is missing is asked for again."""

    async def a_part_of_the_rest(request: server_side.BaseRequest) -> server_side.StreamResponse:
        start = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        headers = {"ETag": '"one"', "Content-Range": f"bytes {start}-{start + 99}/*"}
        return server_side.Response(status=206, body=CONTENT[start : start + 100], headers=headers)

    server.answers = [
        cuts(CONTENT, MIB + 7, ETag='"one"'),
        a_part_of_the_rest,
        gives(CONTENT, ETag='"one"'),
    ]
    assert await get(server.url(), web) == CONTENT
    assert len(server.requests) == 3


async def test_a_server_that_never_ends_its_header_is_given_up(
    server: WebServer, web: WebAccess
) -> None:
    """Each interim answer is a sign of life, and none of them is the answer."""
    server.answers = [keeps_processing(0.05)]
    impatient = replace(web, stall_seconds=0.3, backoff=Backoff(1))

    async with asyncio.timeout(5):
        with pytest.raises(StorageUnavailable, match="too slow"):
            await get(server.url(), impatient)


async def test_a_server_that_trickles_what_we_have_already_is_given_up(
    server: WebServer, web: WebAccess
) -> None:
    """Without ranges all of it is sent again: the time is for each block, not for each byte."""

    async def trickles(request: server_side.BaseRequest) -> server_side.StreamResponse:
        response = server_side.StreamResponse(headers={"ETag": '"one"'})
        response.content_length = len(CONTENT)
        await response.prepare(request)
        for byte in CONTENT:
            await response.write(bytes([byte]))
            await asyncio.sleep(0.05)
        return response

    server.answers = [cuts(CONTENT, 2 * MIB, ETag='"one"'), trickles]
    impatient = replace(web, stall_seconds=0.3, backoff=Backoff(2, first_seconds=0.005))

    async with asyncio.timeout(5):
        with pytest.raises(StorageUnavailable, match="too slow"):
            await get(server.url(), impatient)
