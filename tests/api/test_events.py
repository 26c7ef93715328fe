"""Server-sent events of a batch: what is sent, when a stream ends, and what it costs others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from batchyard.api.batches import event_stream
from batchyard.api.batches.batch_watch import MOST_OF_A_TENANT, BatchWatch, TooManyWatch
from batchyard.api.batches.event_stream import Event
from batchyard.errors import StoreUnavailable
from batchyard.lifecycle import BatchStatus
from batchyard.store import NewChunk
from tests.api.conftest import ROOT, receive_until
from tests.contract.store.samples import MODEL, new_batch
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord
    from batchyard.store.batch.pages import LiveBatch
    from tests.api.conftest import Api

S = BatchStatus


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchyard.intervals.LOOK_SECONDS", 0.02)


@pytest.fixture
async def batch(services: Services) -> BatchRecord:
    return await services.store.batches.create(new_batch(tenant="one"))


async def run(services: Services, batch: BatchRecord) -> None:
    """Its one chunk of ten requests waits for a runner."""
    chunk = NewChunk(model=MODEL, first_record=0, request_count=10, token_estimate=1000)
    await services.store.batches.begin(
        batch.id, model=MODEL, total=10, plan_key="plan", chunks=[chunk]
    )


async def fail(services: Services, batch: BatchRecord) -> None:
    await services.store.batches.fail(batch.id, [])


class Stream:
    """One client, which reads event after event."""

    def __init__(self, api: Api, batch_id: str, key: str | None = None, **headers: str) -> None:
        self._client = api.http(key)
        self._opened = self._client.stream("GET", f"/batches/{batch_id}/events", headers=headers)
        self.response = self._opened.__enter__()
        self._lines = self.response.iter_lines()

    def event(self) -> dict[str, Any]:
        """The next one; an empty one at the end."""
        found: dict[str, Any] = {}
        for line in self._lines:
            name, _, value = line.partition(": ")
            if line.startswith(("retry", ":")):
                continue
            if line:
                found[name] = value
            elif found:
                return {**found, "data": json.loads(found["data"])}
        return {}

    def until(self, name: str, **wanted: object) -> dict[str, Any]:
        while event := self.event():
            if event["event"] == name and wanted.items() <= event["data"].items():
                return event
        raise AssertionError(f"The stream ended without {name} {wanted}")

    def close(self) -> None:
        self._opened.__exit__(None, None, None)
        self._client.close()


@contextlib.contextmanager
def stream(api: Api, batch_id: str, key: str | None = None, **headers: str) -> Iterator[Stream]:
    opened = Stream(api, batch_id, key, **headers)
    with contextlib.closing(opened):
        yield opened


async def test_a_stream_has_each_status_and_ends_with_the_batch(
    api: Api, services: Services, batch: BatchRecord
) -> None:
    with stream(api, batch.id) as events:
        assert events.response.headers["content-type"].startswith("text/event-stream")
        assert events.response.headers["cache-control"] == "no-store"
        first = await asyncio.to_thread(events.until, "batch", status="validating")
        assert first["data"] == api.http().get(f"/batches/{batch.id}").json()
        assert first["id"]
        await run(services, batch)
        events.until("batch", status="in_progress")
        progress = events.until("progress", status="in_progress")["data"]
        assert progress | {"tokens_per_second": None} == {
            "object": "batch.progress",
            "batch_id": batch.id,
            "status": "in_progress",
            "request_counts": {"total": 10, "completed": 0, "failed": 0},
            "tokens": 0,
            "tokens_per_second": None,
            "eta_at": None,
            "is_paused": False,
            "wait_reason": None,
        }
        await services.store.batch_schedule.pause(batch.id)
        assert events.until("progress", is_paused=True)
        await fail(services, batch)
        assert events.until("batch", status="failed")
        assert events.event() == {}


async def test_an_ended_batch_is_shown_once_and_then_there_is_nothing(
    api: Api, services: Services, batch: BatchRecord
) -> None:
    await fail(services, batch)
    with stream(api, batch.id) as events:
        shown = events.event()
        assert shown["data"]["status"] == "failed"
        assert events.event() == {}
    with stream(api, batch.id, **{"Last-Event-ID": shown["id"]}) as again:
        assert again.response.status_code == 204


async def test_a_client_that_connects_again_gets_only_what_is_new(
    api: Api, services: Services, batch: BatchRecord
) -> None:
    with stream(api, batch.id) as events:
        seen = events.until("batch")["id"]
    with stream(api, batch.id, **{"Last-Event-ID": seen}) as events:
        assert events.event()["event"] == "progress"
        await run(services, batch)
        assert events.until("batch")["data"]["status"] == "in_progress"
    with stream(api, batch.id, **{"Last-Event-ID": seen}) as events:
        assert events.event()["data"]["status"] == "in_progress"
        await fail(services, batch)
        assert events.until("batch", status="failed")


async def test_the_tokens_of_a_second_are_measured(
    api: Api, services: Services, batch: BatchRecord
) -> None:
    await run(services, batch)
    with stream(api, batch.id) as events:
        assert events.until("progress", status="in_progress")
        assert events.until("progress", tokens_per_second=0.0)


async def test_nobody_follows_another_tenants_batch_but_an_operator(
    api: Api, services: Services, batch: BatchRecord
) -> None:
    with stream(api, batch.id, api.other_key) as refused:
        assert refused.response.status_code == 404
    boss = await services.store.api_keys.create("boss", "x", is_operator=True, may_write=False)
    with stream(api, batch.id, boss.secret) as events:
        assert events.until("batch", id=batch.id)


async def test_one_tenant_has_so_many_streams_and_the_others_have_theirs(
    api: Api, services: Services, batch: BatchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchyard.api.batches.batch_watch.MOST_OF_A_TENANT", 2)
    others = await services.store.batches.create(new_batch(tenant="other"))
    with stream(api, batch.id) as one, stream(api, batch.id) as two:
        assert one.until("batch")
        assert two.until("batch")
        refused = api.http().get(f"/batches/{batch.id}/events")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "30"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "close a stream" in refused.json()["error"]["message"]
        with stream(api, others.id, api.other_key) as others_stream:
            assert others_stream.until("batch")
    # What has left makes room, when the server notices.
    deadline = time.monotonic() + PATIENCE * 10
    while True:
        with stream(api, batch.id) as again:
            if again.response.status_code == 200:
                return
        assert time.monotonic() < deadline


async def test_who_does_not_read_costs_nobody_else(
    api: Api, services: Services, batch: BatchRecord
) -> None:
    """It connects and reads nothing, while another one sees the batch end."""
    with socket.create_connection(("127.0.0.1", api.port)) as silent:
        silent.sendall(api.head("GET", f"/batches/{batch.id}/events"))
        with stream(api, batch.id) as events:
            assert events.until("batch", status="validating")
            await run(services, batch)
            await fail(services, batch)
            assert events.until("batch", status="failed")
        silent.settimeout(10)
        receive_until(silent, b"failed")


async def test_a_server_that_stops_ends_its_streams(
    settings: Any, keys: tuple[str, str], services: Services, batch: BatchRecord
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(  # noqa: ASYNC220 - it starts at once, and the test waits below
        [sys.executable, "-m", "batchyard.cli", "serve", "--port", str(port)],
        cwd=ROOT,
        env={"BATCHYARD_HOME": str(settings.home), "PATH": "", "HOME": str(settings.home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        async with httpx.AsyncClient(timeout=30) as client:
            for _ in range(1000):
                with contextlib.suppress(httpx.ConnectError):
                    await client.get(f"http://127.0.0.1:{port}/livez")
                    break
                assert process.poll() is None
                await asyncio.sleep(0.05)
            url = f"http://127.0.0.1:{port}/v1/batches/{batch.id}/events"
            headers = {"authorization": f"Bearer {keys[0]}"}
            async with client.stream("GET", url, headers=headers) as response:
                received = b""
                asked = 0.0
                async for block in response.aiter_bytes():
                    received += block
                    if b"event: batch" in received and not asked:
                        asked = time.monotonic()
                        process.send_signal(signal.SIGTERM)
                # Ended by the server, in the regular way.
                assert asked
                assert time.monotonic() - asked < 10
        assert await asyncio.to_thread(process.wait, 20) in {0, -signal.SIGTERM}
        assert process.stderr is not None
        assert b"timeout graceful shutdown exceeded" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


# -- the watch -----------------------------------------------------------------------------------


class Database:
    """Counts the looks, and fails when it is told to."""

    def __init__(self, services: Services) -> None:
        self._live = services.store.batches.live
        self.looks: list[list[str]] = []
        self.looked_often = asyncio.Event()
        self.failure: Exception | None = None

    async def live(self, batch_ids: Collection[str]) -> dict[str, LiveBatch]:
        self.looks.append(sorted(batch_ids))
        if len(self.looks) >= 3:
            self.looked_often.set()
        if self.failure is not None:
            raise self.failure
        return await self._live(batch_ids)


async def test_one_look_serves_all_watchers_and_none_is_made_for_nobody(
    services: Services, batch: BatchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchyard.intervals.LOOK_SECONDS", 0.1)
    other = await services.store.batches.create(new_batch(tenant="one"))
    database = Database(services)
    async with BatchWatch(database.live) as watch:
        await asyncio.sleep(0.15)
        assert database.looks == []
        with contextlib.ExitStack() as stack:
            watchers = [
                stack.enter_context(watch.watch(each.id, "one"))
                for each in (batch, other) * (MOST_OF_A_TENANT // 2)
            ]
            for watcher in watchers:
                await asyncio.wait_for(watcher.changed.wait(), PATIENCE * 10)
            assert all(look == sorted([batch.id, other.id]) for look in database.looks)
            assert len(database.looks) < len(watchers) / 2
            with pytest.raises(TooManyWatch):
                stack.enter_context(watch.watch(batch.id, "one"))
            await fail(services, batch)
            for watcher in watchers[::2]:
                while watcher.seen is None or not watcher.seen.has_ended:
                    watcher.changed.clear()
                    await asyncio.wait_for(watcher.changed.wait(), PATIENCE * 10)
        await asyncio.sleep(0.15)
        count = len(database.looks)
        await asyncio.sleep(0.3)
        assert len(database.looks) == count


@pytest.mark.parametrize("failure", [StoreUnavailable("away"), ZeroDivisionError()])
async def test_watchers_wait_while_the_database_is_away(
    services: Services, batch: BatchRecord, failure: Exception
) -> None:
    database = Database(services)
    database.failure = failure
    async with BatchWatch(database.live) as watch:
        with watch.watch(batch.id, "one") as watcher:
            await asyncio.wait_for(database.looked_often.wait(), PATIENCE * 10)
            assert watcher.seen is None
            database.failure = None
            await asyncio.wait_for(watcher.changed.wait(), PATIENCE * 10)
            assert watcher.seen is not None


async def test_a_batch_that_is_deleted_ends_its_streams(services: Services) -> None:
    async with BatchWatch(services.store.batches.live) as watch:
        with watch.watch("batch_gone", "one") as watcher:
            await asyncio.wait_for(watcher.changed.wait(), PATIENCE * 10)
            assert watcher.is_gone


async def test_a_quiet_stream_says_that_it_is_there(
    api: Api, batch: BatchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.05)
    with api.http().stream("GET", f"/batches/{batch.id}/events") as response:
        for line in response.iter_lines():
            if line == ": keep-alive":
                return
    pytest.fail("The stream ended.")


async def test_a_stream_ends_after_a_while_so_that_its_key_is_checked_again(
    api: Api, batch: BatchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "_MOST_SECONDS", 0.2)
    with stream(api, batch.id) as events:
        while events.event():
            continue


def test_data_of_several_lines_stay_one_event() -> None:
    assert Event("a", b"x\r\nid: 1\n\nevent: b").encoded() == (
        b"event: a\ndata: x\ndata: id: 1\ndata: \ndata: event: b\n\n"
    )
