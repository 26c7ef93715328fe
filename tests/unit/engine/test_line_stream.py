"""The frames, and the middleware between a hand-made server and a hand-made application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse
from starlette.routing import Route

from batchyard.engine.middleware import line_frames, line_stream
from batchyard.engine.middleware.line_frames import (
    ABORTED,
    ENGINE_DEAD,
    MOST_WORDS,
    TIMED_OUT,
    FrameError,
    FrameParser,
    abort_frame,
    answer_frame,
    request_frame,
)
from batchyard.engine.middleware.line_stream import LineStream
from batchyard.lines.forms import AttachedFile, make_form
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from starlette.requests import Request

    Message = MutableMapping[str, Any]

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

words = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
urls = words.map("/".__add__)
frames = st.tuples(st.integers(0, 2**63), urls, st.binary(max_size=200), words)


def slices(data: bytes, sizes: list[int]) -> list[bytes]:
    """``data`` cut into pieces of ``sizes``, round and round."""
    pieces, position, turn = [], 0, 0
    while position < len(data):
        size = sizes[turn % len(sizes)]
        pieces.append(data[position : position + size])
        position, turn = position + size, turn + 1
    return pieces


@given(st.lists(frames, max_size=8), st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_frames_survive_any_slicing(
    sent: list[tuple[int, str, bytes, str]], sizes: list[int]
) -> None:
    """What goes in comes out, however the bytes are cut, newlines in bodies and all."""
    parser = FrameParser()
    data = b"".join(request_frame(tag, url, body, name) for tag, url, body, name in sent)

    got = [frame for piece in slices(data, sizes) for frame in parser.feed(piece)]

    assert got == [
        ([str(tag).encode(), url.encode(), str(len(body)).encode(), name.encode()], body)
        for tag, url, body, name in sent
    ]
    assert parser.is_between_frames


@given(st.binary(max_size=300))
def test_noise_is_refused_or_awaited_but_never_breaks_the_parser(data: bytes) -> None:
    """The only exception is FrameError."""
    parser = FrameParser()
    with contextlib.suppress(FrameError):
        list(parser.feed(data))


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"1 /v1 2\n",
        b"1 /v1 -2 x\n",
        b"x /v1 2 x\n",
        b"1 /v1 " + b"9" * 5000 + b" x\n",
        b"a" * 20000,
    ],
)
def test_a_line_that_is_no_header_is_refused(line: bytes) -> None:
    """Too few words, a negative length, a tag that is no number, a line without end."""
    with pytest.raises(FrameError):
        list(FrameParser().feed(line))


@pytest.mark.parametrize(
    ("url", "name"), [("/v1/a b", "x"), ("/v1", "x\ny"), ("", "x"), ("/é", "x"), ("-", "x")]
)
def test_a_url_or_id_that_would_break_the_header_is_refused(url: str, name: str) -> None:
    """Nothing that a caller passes can smuggle a second frame in."""
    with pytest.raises(FrameError):
        request_frame(1, url, b"", name)


def test_a_content_type_other_than_json_is_a_fifth_word() -> None:
    """Only where one is expected: an answer has four."""
    frame = request_frame(1, "/v1", b"body", "x", "multipart/form-data;boundary=b")

    assert list(FrameParser(most_words=5).feed(frame)) == [
        ([b"1", b"/v1", b"4", b"x", b"multipart/form-data;boundary=b"], b"body")
    ]
    with pytest.raises(FrameError):
        list(FrameParser().feed(frame))


@pytest.mark.parametrize("content_type", ["", "a/b; c=d", "a/b\nc"])
def test_a_content_type_that_would_break_the_header_is_refused(content_type: str) -> None:
    with pytest.raises(FrameError):
        request_frame(1, "/v1", b"", "x", content_type)


def test_a_cache_salt_comes_last() -> None:
    """Behind the content type, which is then always there."""
    frame = request_frame(1, "/v1", b"body", "x", cache_salt="s-1")

    words = [b"1", b"/v1", b"4", b"x", b"application/json", b"s-1"]
    assert list(FrameParser(MOST_WORDS).feed(frame)) == [(words, b"body")]


@pytest.mark.parametrize(("salt", "word"), [("s-1", b"s-1"), (None, b"-")])
def test_a_trace_comes_behind_the_salt(salt: str | None, word: bytes) -> None:
    frame = request_frame(1, "/v1", b"body", "x", cache_salt=salt, traceparent=TRACEPARENT)

    words = [b"1", b"/v1", b"4", b"x", b"application/json", word, TRACEPARENT.encode()]
    assert list(FrameParser(MOST_WORDS).feed(frame)) == [(words, b"body")]


def test_a_trace_that_is_no_word_is_refused() -> None:
    with pytest.raises(FrameError):
        request_frame(1, "/v1", b"", "x", traceparent=f"{TRACEPARENT}\nx")


@pytest.mark.parametrize("salt", ["", "a b", "a\nb", "é", "-"])
def test_a_salt_that_is_no_word_is_refused(salt: str) -> None:
    with pytest.raises(FrameError):
        request_frame(1, "/v1", b"", "x", cache_salt=salt)


def test_an_abort_frame_is_a_request_without_a_url() -> None:
    """So the parser needs no second shape."""
    assert list(FrameParser().feed(abort_frame(7))) == [([b"7", b"-", b"0", b"-"], b"")]


def test_a_frame_cut_short_is_known_as_such() -> None:
    """The stream may only end between frames."""
    parser = FrameParser()
    assert list(parser.feed(request_frame(1, "/v1", b"body", "x")[:-1])) == []
    assert not parser.is_between_frames


def test_the_middleware_needs_nothing_but_the_standard_library() -> None:
    """It is imported in vLLM's process, where nothing of ours is installed."""
    folder = line_stream.__file__.rsplit("/", 1)[0]
    code = f"import sys; sys.path.insert(0, {folder!r}); import line_stream; print(*sys.modules)"

    modules = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()

    assert "line_stream" in modules
    assert not {"batchyard", "aiohttp", "msgspec"} & set(modules)


class Connection:
    """One POST to the stream's path, driven by hand."""

    def __init__(self, app: Callable[..., Awaitable[None]], *, timeout_seconds: float = 5) -> None:
        self.to_server: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        scope: Message = {
            "type": "http",
            "method": "POST",
            "path": line_frames.PATH,
            "headers": [(line_frames.TIMEOUT_HEADER.encode(), str(timeout_seconds).encode())],
        }
        self.task = asyncio.create_task(LineStream(app)(scope, self.to_server.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def send(self, *requests: bytes, is_last: bool = False) -> None:
        body = b"".join(requests)
        self.to_server.put_nowait({"type": "http.request", "body": body, "more_body": not is_last})

    def disconnect(self) -> None:
        self.to_server.put_nowait({"type": "http.disconnect"})

    async def until_answered(self, tag: int) -> None:
        async with asyncio.timeout(PATIENCE * 20):
            while tag not in self._answered():  # noqa: ASYNC110 - bytes, without an event
                await asyncio.sleep(0.01)

    async def answers(self) -> dict[int, tuple[int, bytes, bytes]]:
        """Once the stream has ended: tag → status, body, Retry-After."""
        await asyncio.wait_for(self.task, PATIENCE * 20)
        return self._answered()

    def _answered(self) -> dict[int, tuple[int, bytes, bytes]]:
        data = b"".join(message.get("body", b"") for message in self.sent)
        return {
            int(tag): (int(status), body, retry_after)
            for (tag, status, _, retry_after), body in FrameParser().feed(data)
        }


async def application(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """An echo with a few bad habits."""
    message = await receive()
    status, headers = 200, []
    match scope["path"]:
        case "/raise":
            raise ZeroDivisionError
        case "/hang":
            assert (await receive())["type"] == "http.disconnect"
            application.disconnected += 1  # type: ignore[attr-defined]
            return
        case "/hang-on":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                application.cancelled += 1  # type: ignore[attr-defined]
                raise
        case "/headers":
            message = {"body": dict(scope["headers"])[b"content-type"]}
        case "/trace":
            message = {"body": dict(scope["headers"]).get(b"traceparent", b"none")}
        case "/salt":
            message = {"body": str(scope[line_stream.SALT_KEY]).encode()}
        case "/busy":
            status, headers = 429, [(b"Retry-After", b"7")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": message["body"], "more_body": True})
    await send({"type": "http.response.body", "body": scope["query_string"]})


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    application.disconnected = application.cancelled = 0  # type: ignore[attr-defined]


async def test_an_exception_in_the_application_is_that_requests_500() -> None:
    """The others are answered as ever."""
    connection = Connection(application)
    connection.send(
        request_frame(1, "/raise", b"a", "r1"),
        request_frame(2, "/echo?x=1", b"b", "r2"),
        is_last=True,
    )

    answers = await connection.answers()

    assert answers[1][0] == 500
    assert b"ZeroDivisionError" in answers[1][1]
    assert answers[2] == (200, b"bx=1", b"-")


async def test_a_request_has_the_trace_that_it_was_sent_with() -> None:
    """As a header, and beside any salt."""
    connection = Connection(application)
    connection.send(
        request_frame(1, "/trace", b"", "r1", cache_salt="s-1"),
        request_frame(2, "/trace", b"", "r2", traceparent=TRACEPARENT),
        request_frame(3, "/salt", b"", "r3", traceparent=TRACEPARENT),
        request_frame(4, "/salt", b"", "r4", cache_salt="s-1", traceparent=TRACEPARENT),
        is_last=True,
    )

    answers = await connection.answers()

    bodies = [answers[tag][1] for tag in (1, 2, 3, 4)]
    assert bodies == [b"none", TRACEPARENT.encode(), b"None", b"s-1"]


async def test_a_request_has_the_content_type_that_it_was_sent_with() -> None:
    connection = Connection(application)
    connection.send(
        request_frame(1, "/headers", b"", "r1"),
        request_frame(2, "/headers", b"", "r2", "multipart/form-data;boundary=b"),
        is_last=True,
    )

    answers = await connection.answers()

    assert answers[1][1] == b"application/json"
    assert answers[2][1] == b"multipart/form-data;boundary=b"


async def test_a_form_reaches_a_route_that_takes_uploads() -> None:
    """Read as vLLM's server reads it: by Starlette, from a replayed request."""

    async def take(request: Request) -> JSONResponse:
        async with request.form() as form:
            file = form["file"]
            assert isinstance(file, UploadFile)
            size = len(await file.read())
            return JSONResponse([form["model"], file.filename, file.content_type, size])

    form = make_form(
        "/v1/audio/transcriptions",
        {"model": "m", "file_url": "https://example.com"},
        AttachedFile("a.wav", "audio/wav", b"\r\n--" * 500_000),
    )
    connection = Connection(Starlette(routes=[Route("/take", take, methods=["POST"])]))
    connection.send(request_frame(1, "/take", form.body, "r1", form.content_type), is_last=True)

    status, body, _ = (await connection.answers())[1]
    assert (status, json.loads(body)) == (200, ["m", "a.wav", "audio/wav", 2_000_000])


async def test_retry_after_is_handed_on() -> None:
    """The header's own text is the frame's last word."""
    connection = Connection(application)
    connection.send(request_frame(1, "/busy", b"", "r1"), is_last=True)

    assert await connection.answers() == {1: (429, b"", b"7")}


async def test_a_request_that_outlasts_its_time_is_told_that_its_client_is_gone() -> None:
    """First a disconnect, on which vLLM aborts; a cancellation only for who does not listen."""
    connection = Connection(application, timeout_seconds=0.05)
    connection.send(
        request_frame(1, "/hang", b"", "r1"), request_frame(2, "/hang-on", b"", "r2"), is_last=True
    )

    assert await connection.answers() == {1: (TIMED_OUT, b"", b"-"), 2: (TIMED_OUT, b"", b"-")}
    assert application.disconnected == 1  # type: ignore[attr-defined]
    await asyncio.sleep(line_stream.ABORT_GRACE_SECONDS + 0.1)
    assert application.cancelled == 1  # type: ignore[attr-defined]


async def test_an_abort_tells_that_one_request_that_its_client_is_gone() -> None:
    """As a time-out does: first a disconnect, then a cancellation for who does not listen."""
    connection = Connection(application)
    connection.send(*(request_frame(tag, "/hang", b"", "r") for tag in (1, 2)))
    connection.send(request_frame(3, "/hang-on", b"", "r"))
    await asyncio.sleep(0.05)
    connection.send(abort_frame(1), abort_frame(3))
    await asyncio.sleep(0.05)
    assert application.disconnected == 1  # type: ignore[attr-defined]
    assert application.cancelled == 0  # type: ignore[attr-defined]

    connection.send(abort_frame(2), is_last=True)

    assert await connection.answers() == dict.fromkeys((1, 2, 3), (ABORTED, b"", b"-"))
    assert application.disconnected == 2  # type: ignore[attr-defined]
    await asyncio.sleep(line_stream.ABORT_GRACE_SECONDS + 0.1)
    assert application.cancelled == 1  # type: ignore[attr-defined]


async def test_what_runs_in_its_own_task_is_cancelled_at_once() -> None:
    """Nobody there listens to a disconnect: the grace would be time lost in the engine."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def in_its_own_task(scope: Message, *_: object) -> None:
        scope[line_stream.CANCELS_KEY]()
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    connection = Connection(in_its_own_task)
    connection.send(request_frame(1, "/hang", b"", "r"))
    await begun.wait()
    connection.send(abort_frame(1), is_last=True)

    assert await connection.answers() == {1: (ABORTED, b"", b"-")}
    async with asyncio.timeout(line_stream.ABORT_GRACE_SECONDS / 2):
        await ended.wait()


async def test_each_request_has_its_own_deadline() -> None:
    """One timer serves them all, and those that came later and those that come after it fired."""
    connection = Connection(application, timeout_seconds=0.2)
    connection.send(request_frame(1, "/hang", b"", "r"))
    await asyncio.sleep(0.1)
    connection.send(request_frame(2, "/hang", b"", "r"))
    await connection.until_answered(2)
    connection.send(request_frame(3, "/hang", b"", "r"), is_last=True)

    assert await connection.answers() == dict.fromkeys((1, 2, 3), (TIMED_OUT, b"", b"-"))


async def test_an_abort_of_what_is_not_in_flight_is_ignored() -> None:
    """Whether the request has had its answer or never was; aborting twice is once."""
    connection = Connection(application)
    connection.send(request_frame(1, "/echo", b"a", "r"), abort_frame(9))
    await asyncio.sleep(0.05)
    connection.send(abort_frame(1), request_frame(2, "/hang", b"", "r"))
    connection.send(abort_frame(2), abort_frame(2), is_last=True)

    answers = await connection.answers()

    assert answers == {1: (200, b"a", b"-"), 2: (ABORTED, b"", b"-")}
    frames = FrameParser().feed(b"".join(one.get("body", b"") for one in connection.sent))
    assert len(list(frames)) == 2


async def test_a_dropped_connection_ends_everything_in_flight() -> None:
    """The stream returns when its requests have ended, those that do not listen too."""
    connection = Connection(application)
    connection.send(request_frame(1, "/hang", b"", "r1"), request_frame(2, "/hang-on", b"", "r2"))
    await asyncio.sleep(0.05)

    connection.disconnect()
    await asyncio.wait_for(connection.task, PATIENCE * 20)

    assert application.disconnected == 1  # type: ignore[attr-defined]
    assert application.cancelled == 1  # type: ignore[attr-defined]


async def test_a_dying_engines_500s_are_not_answers() -> None:
    """Once ``/health`` says 503 the stream says that the engine is dead, and ends."""

    async def dying(scope: Message, _: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        status = 503 if scope["path"] == "/health" else 500
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"dead"})

    connection = Connection(dying)
    connection.send(*(request_frame(tag, "/v1", b"", "r") for tag in range(1, 4)))

    assert await connection.answers() == {0: (ENGINE_DEAD, b"", b"-")}


async def test_an_engine_that_dies_in_silence_is_noticed() -> None:
    """A death that no answer tells of is found by asking, within a second."""
    health = [200]

    async def silent(scope: Message, receive: Any, send: Any) -> None:
        if scope["path"] != "/health":
            await receive()
            await receive()
        await send({"type": "http.response.start", "status": health[0], "headers": []})
        await send({"type": "http.response.body", "body": b""})

    connection = Connection(silent)
    connection.send(request_frame(1, "/v1", b"", "r"))
    await asyncio.sleep(0.05)
    health[0] = 503

    async with asyncio.timeout(PATIENCE * 20):
        assert (await connection.answers())[0][0] == ENGINE_DEAD


async def test_other_paths_are_left_alone() -> None:
    """What is not a stream goes to the application untouched, lifespan included."""
    seen = []

    async def remember(scope: Any, *_: Any) -> None:
        seen.append(scope)

    scopes = [
        {"type": "lifespan"},
        {"type": "http", "path": "/v1", "method": "POST"},
        {"type": "http", "path": line_frames.PATH, "method": "GET"},
    ]
    for scope in scopes:
        await LineStream(remember)(scope, None, None)  # type: ignore[arg-type]

    assert seen == scopes


def test_an_answer_frame_reads_as_the_parser_expects() -> None:
    """Tag, status, length, Retry-After."""
    assert list(FrameParser().feed(answer_frame(3, 429, b"no", b"7"))) == [
        ([b"3", b"429", b"2", b"7"], b"no")
    ]
