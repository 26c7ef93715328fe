"""Files on their way into the window: how many at a time, and what is left of them after."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import EngineLost
from batchyard.locations.web import WebAccess
from batchyard.runner.chunk import attachments
from batchyard.runner.chunk.attachments import MAX_FILE_BYTES, Attachments
from batchyard.runner.window.admission import Admission, AdmissionQueue
from batchyard.runner.window.room import FILE_BYTES, FileBudget
from batchyard.runner.window.window import Window
from batchyard.runner.window.window_request import WindowRequest
from batchyard.schedule.turns import BACKGROUND_URGENCY, QueueEntry
from batchyard.storage.backoff import Backoff
from tests.patience import PATIENCE
from tests.unit.storage.web_server import gives, running_web_server, says
from tests.unit.test_admission import lease_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.results.results import ResultLine
    from tests.unit.storage.web_server import WebServer

AUDIO = "/v1/audio/transcriptions"
WEB = WebAccess(connect_seconds=5, stall_seconds=5, backoff=Backoff(1))


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with running_web_server() as running:
        running.answers = [gives(b"x" * 1000)]
        yield running


@pytest.fixture
async def engine() -> StubEngine:
    stub = StubEngine(max_num_seqs=4, latency=lambda body: 3600.0 if b"slow" in body else 0.001)
    await stub.start()
    return stub


@pytest.fixture
async def window(engine: StubEngine) -> AsyncIterator[Window]:
    async with Window(engine, timeout_seconds=60, hang_seconds=60) as one:
        yield one


def attachments_of(
    window: Window, queue: AdmissionQueue | None = None, *, is_background: bool = False
) -> Attachments:
    """Those of a chunk that is in the queue, by itself if there is none yet."""
    queue = queue or AdmissionQueue(1)
    name = "background" if is_background else "other"
    entry = QueueEntry(
        batch_id=name, tenant=name, urgency=BACKGROUND_URGENCY if is_background else 3
    )
    lease = lease_of(name)
    queue.enter(lease.key, entry)
    admission = Admission(queue, lease, entry, set(), may_return=lambda: True)
    return Attachments(window.room.files, admission, window.submit, WEB)


class Results:
    def __init__(self) -> None:
        self.lines: dict[int, dict[str, object]] = {}

    def request(self, number: int, file_url: str, **body: object) -> WindowRequest:
        fields = {"model": "stub-model", "file_url": file_url, **body}
        return WindowRequest(
            number, f"id-{number}", AUDIO, json.dumps(fields).encode(), self._deliver, owner="test"
        )

    def _deliver(self, number: int, result: ResultLine) -> None:
        assert number not in self.lines
        self.lines[number] = json.loads(result.line)


async def until_all_is_free(window: Window) -> None:
    async with asyncio.timeout(PATIENCE * 20):
        while window.room.files._free_bytes != FILE_BYTES:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)


async def test_answered_requests_give_their_room_back(window: Window, server: WebServer) -> None:
    results = Results()
    async with attachments_of(window) as one:
        for number in range(30):
            await one.submit(results.request(number, server.url()))

    await until_all_is_free(window)
    assert len(results.lines) == 30


async def test_a_chunk_that_is_stopped_as_a_fetch_begins_leaves_no_room_taken(
    window: Window, server: WebServer
) -> None:
    async def submit() -> None:
        async with attachments_of(window) as one:
            await one.submit(Results().request(1, server.url()))

    submitting = asyncio.create_task(submit())
    await asyncio.sleep(0)
    submitting.cancel()
    await asyncio.wait([submitting])
    assert window.room.files._free_bytes == FILE_BYTES


async def test_a_request_in_the_engine_holds_room_for_its_file_and_no_more(
    window: Window, server: WebServer, engine: StubEngine
) -> None:
    results = Results()
    async with attachments_of(window) as one:
        await one.submit(results.request(1, server.url(), prompt="slow"))

    assert 1000 < FILE_BYTES - window.room.files._free_bytes < 2000
    await window.withdraw("test", abort=True)
    await until_all_is_free(window)


async def test_a_file_that_cannot_be_had_gives_its_room_back(
    window: Window, server: WebServer
) -> None:
    server.answers = [says(404)]
    results = Results()
    async with attachments_of(window) as one:
        await one.submit(results.request(1, server.url()))
        await one.submit(results.request(2, "data:;base64,*"))

    await until_all_is_free(window)
    assert all(line["error"] for line in results.lines.values())


async def test_an_early_end_breaks_off_the_fetches(window: Window, server: WebServer) -> None:
    """Those that wait for the server, for a slot and for room alike; nobody gets a result."""
    is_asked = asyncio.Event()

    async def hang(_: web.BaseRequest) -> web.StreamResponse:
        is_asked.set()
        await asyncio.sleep(3600)
        raise AssertionError

    server.answers = [hang]
    results = Results()

    async def admit() -> None:
        async with attachments_of(window) as one:
            for number in range(50):
                await one.submit(results.request(number, server.url()))

    admission = asyncio.create_task(admit())
    await is_asked.wait()
    admission.cancel()
    await asyncio.wait([admission])

    assert window.room.files._free_bytes == FILE_BYTES
    assert results.lines == {}


async def test_a_request_whose_owner_leaves_gives_its_room_back(
    window: Window, server: WebServer
) -> None:
    """It waits for a slot, gets that of another, and finds its owner leaving."""
    results = Results()
    one = attachments_of(window)
    async with one:
        for number in range(window.size):
            await window.submit(
                WindowRequest(
                    number,
                    "slow",
                    "/v1/completions",
                    b'{"model": "stub-model", "prompt": "slow"}',
                    lambda *_: None,
                    owner="test",
                )
            )
        await one.submit(results.request(99, server.url()))
        async with asyncio.timeout(PATIENCE * 20):
            # Once it has its file, it has given back the room that the file did not need.
            while window.room.files._free_bytes < FILE_BYTES - 2000:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.005)
        await window.withdraw("test", abort=True)

    await until_all_is_free(window)
    assert results.lines == {}


async def test_the_end_of_the_window_is_told_as_it_was(server: WebServer) -> None:
    """Not wrapped: whoever runs the chunk knows what to make of a lost engine."""

    async def submit_to(window: Window) -> None:
        async with attachments_of(window) as one:
            await one.submit(Results().request(1, server.url()))

    engine = StubEngine(start_failures=9)
    async with Window(engine, timeout_seconds=60, hang_seconds=60) as window:
        await window.ended()
        with pytest.raises(EngineLost):
            await submit_to(window)


async def test_a_host_that_fails_again_and_again_is_not_asked_for_ever(
    window: Window, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the chunk has its error at once; files from elsewhere are fetched as ever."""
    monkeypatch.setattr(attachments, "MAX_FILE_BYTES", FILE_BYTES)  # one at a time
    server.answers = [says(503)]
    results = Results()
    async with attachments_of(window) as one:
        for number in range(20):
            await one.submit(results.request(number, server.url()))
        await one.submit(results.request(20, server.url().replace("127.0.0.1", "localhost")))
        await one.submit(results.request(21, "data:audio/wav,x"))

    assert len(server.requests) == 6
    assert "failed for too many" in str(results.lines[19]["error"])
    await until_all_is_free(window)
    assert results.lines[21]["error"] is None


async def test_a_file_that_takes_too_long_is_given_up(
    window: Window, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def trickle(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.01)

    monkeypatch.setattr(attachments, "_FETCH_SECONDS", 0.2)
    server.answers = [trickle]
    results = Results()
    async with attachments_of(window) as one:
        await one.submit(results.request(1, server.url()))

    assert "was not fetched within" in str(results.lines[1]["error"])


async def test_there_is_room_for_so_much_and_first_come_is_first_served() -> None:
    room = FileBudget(10)
    order: list[str] = []

    async def take(name: str, size: int) -> None:
        await room.take(size)
        order.append(name)

    await take("a", 8)
    waiting = [asyncio.create_task(take(*one)) for one in (("b", 5), ("c", 1))]
    await asyncio.sleep(0.01)
    assert order == ["a"]

    room.give_back(8)
    await asyncio.wait(waiting)
    assert order == ["a", "b", "c"]
    assert room._free_bytes == 4


async def test_background_batches_leave_half_of_the_room_to_others() -> None:
    room = FileBudget(10)
    async with asyncio.timeout(PATIENCE * 20):
        await room.take(5, is_background=True)
        waiting = asyncio.create_task(room.take(1, is_background=True))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await room.take(5)
        room.give_back(6)
        await waiting


async def test_files_of_a_background_batch_that_waits_for_others_keep_no_file_of_theirs_out(
    window: Window, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachments, "MAX_FILE_BYTES", 2000)
    window.room.files = FileBudget(4000)
    queue, results = AdmissionQueue(1), Results()
    background = attachments_of(window, queue, is_background=True)
    other = attachments_of(window, queue)

    async def admit_background() -> None:
        async with background as one:
            for number in range(5):
                await one.submit(results.request(number, server.url()))

    admission = asyncio.create_task(admit_background())
    async with asyncio.timeout(PATIENCE * 20):
        while not server.requests:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        async with other as one:
            for number in range(10, 15):
                await one.submit(results.request(number, server.url()))
        assert results.lines.keys().isdisjoint(range(5))
        queue.leave(lease_of("other").key)
        await admission
        while len(results.lines) < 10:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)


def test_at_least_one_file_fits() -> None:
    assert FILE_BYTES >= MAX_FILE_BYTES


async def test_a_file_that_is_too_large_costs_its_line_and_no_memory(
    window: Window, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachments, "MAX_FILE_BYTES", 2000)
    server.answers = [says(200, b"x" * 2001)]
    results = Results()
    async with attachments_of(window) as one:
        await one.submit(results.request(1, server.url()))
    await until_all_is_free(window)
    (line,) = results.lines.values()
    assert line["error"]["code"] == "file_url_unavailable"
    assert "larger than 2000 bytes" in line["error"]["message"]
