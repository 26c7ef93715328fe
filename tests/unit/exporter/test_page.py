"""The exporter's page: numbers that processes publish, and what engines answer, or do not."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families as parsed

from batchyard.engine.vllm.private_server import private_folder
from batchyard.metrics.exporter import scrape
from batchyard.metrics.exporter.page import make_page
from batchyard.metrics.exporter.server import application
from batchyard.metrics.metric_families import (
    FAMILIES,
    INFLIGHT,
    LINE_SECONDS,
    LINES_WAITING,
    READY,
    RETRIES,
)
from batchyard.metrics.published import FOLDER_VARIABLE, Figures, publishing
from batchyard.runner.window.counts import BOUNDS, RunnerCounts
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path

    Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

WORKER = {"pool": "gpu", "version": "1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where processes publish."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def values(page: str, name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by the values of its labels."""
    found = [one for each in parsed(page) for one in each.samples if one.name == name]
    return {tuple(one.labels.values()): one.value for one in found}


def figures(inflight: int = 0, *, retries: int = 0, socket: Path | None = None) -> Figures:
    return Figures(
        {READY.name: 1, INFLIGHT.name: inflight},
        {RETRIES.name: {"http_429": retries}},
        None if socket is None else str(socket),
    )


def publish(
    labels: Mapping[str, str], now: Figures
) -> contextlib.AbstractAsyncContextManager[None]:
    return publishing(labels, lambda: now)


def files_in(folder: Path, pattern: str = "*") -> int:
    return len(list(folder.glob(pattern)))


async def until_published(folder: Path, count: int = 1) -> None:
    async with asyncio.timeout(PATIENCE * 10):
        while files_in(folder, "*.json") < count:  # noqa: ASYNC110 - files have no events
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def engine(answer: Answer) -> AsyncIterator[Path]:
    """An engine whose /metrics is ``answer``; its socket."""
    socket = private_folder() / "engine.sock"
    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(socket)).start()
        yield socket
    finally:
        await runner.cleanup()
        socket.unlink(missing_ok=True)
        socket.parent.rmdir()


async def good(_: web.Request) -> web.Response:
    return web.Response(text='# TYPE vllm:x gauge\nvllm:x{engine="0",model_name="m"} 7\n')


async def hanging(_: web.Request) -> web.Response:
    await asyncio.sleep(3600)
    raise AssertionError


async def dripping(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"a 1\n")
        await asyncio.sleep(0.05)


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"a 1\n" * 65536)


async def garbage(_: web.Request) -> web.Response:
    return web.Response(body=b"\xff\xfe<html>\n" * 50)


async def failing(_: web.Request) -> web.Response:
    return web.Response(status=500, text="a 1\n")


async def elsewhere(_: web.Request) -> web.Response:
    raise web.HTTPFound("http://127.0.0.1:1/metrics")


async def test_what_a_process_publishes_is_on_the_page(folder: Path) -> None:
    async with publish({"model": "m", "engine": "0"}, figures(5, retries=2)):
        await until_published(folder)
        page = await make_page(folder, ["0", "1"], WORKER)
    assert values(page, "batchyard_worker_info") == {("gpu", "1"): 1}
    assert values(page, INFLIGHT.name) == {("m", "0"): 5}
    assert values(page, RETRIES.name) == {("m", "0", "http_429"): 2}
    slots = {("free",): 1, ("loading",): 0, ("ready",): 1}
    assert values(page, "batchyard_engine_slots") == slots


async def test_an_engine_that_loads_has_its_slot(folder: Path) -> None:
    async with publish({"model": "m", "engine": "0"}, Figures({READY.name: 0})):
        await until_published(folder)
        page = await make_page(folder, ["0"], WORKER)
    slots = {("free",): 0, ("loading",): 1, ("ready",): 0}
    assert values(page, "batchyard_engine_slots") == slots


async def test_a_worker_without_slots_has_none_on_its_page(folder: Path) -> None:
    assert "batchyard_engine_slots" not in await make_page(folder, [], WORKER)


async def test_counters_continue_over_processes_and_gauges_end_with_theirs(folder: Path) -> None:
    """A total that goes down counts twice: Prometheus takes it for one that has begun anew."""
    labels = {"model": "m", "engine": "0"}
    async with publish(labels, figures(5, retries=2)):
        pass
    page = await make_page(folder, ["0"], WORKER)
    assert values(page, RETRIES.name) == {("m", "0", "http_429"): 2}
    assert values(page, INFLIGHT.name) == {}
    assert values(page, "batchyard_engine_slots")["free",] == 1
    async with publish(labels, figures(1, retries=3)):
        pass
    page = await make_page(folder, ["0"], WORKER)
    assert values(page, RETRIES.name) == {("m", "0", "http_429"): 5}
    assert files_in(folder, "*.json") == 1


async def test_the_last_numbers_of_a_process_are_published(folder: Path) -> None:
    """Also those of the time after its last look at the clock."""
    counts = {"http_429": 1.0}

    def read() -> Figures:
        return Figures(counters={RETRIES.name: dict(counts)})

    async with publishing({"model": "m", "engine": "0"}, read):
        await until_published(folder)
        counts["http_429"] = 5.0
    assert values(await make_page(folder, [], WORKER), RETRIES.name) == {("m", "0", "http_429"): 5}


async def test_a_process_that_was_killed_has_no_gauges(folder: Path) -> None:
    """Its file is still there, and says what was true then."""
    script = (
        "import asyncio, os, pathlib, sys\n"
        "from batchyard.metrics.published import Figures, publishing\n"
        "async def main():\n"
        "    async with publishing({'model': 'm', 'engine': '0'}, lambda: Figures("
        f"{{'{INFLIGHT.name}': 4}}, {{'{RETRIES.name}': {{'failed': 1}}}})):\n"
        "        while not list(pathlib.Path(sys.argv[1]).glob('*.json')):\n"
        "            await asyncio.sleep(0.01)\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(folder))
    assert await process.wait() == -9
    page = await make_page(folder, ["0"], WORKER)
    assert values(page, INFLIGHT.name) == {}
    assert values(page, RETRIES.name) == {("m", "0", "failed"): 1}


async def test_two_processes_with_the_same_labels_get_different_ones(folder: Path) -> None:
    labels = {"model": "m", "engine": "remote"}
    async with publish(labels, figures(1)), publish(labels, figures(2)):
        await until_published(folder, 2)
        page = await make_page(folder, [], WORKER)
    assert values(page, INFLIGHT.name) == {("m", "remote"): 1, ("m", "remote-1"): 2}


async def test_a_gauge_with_a_label_of_its_own_has_a_sample_for_each_value(folder: Path) -> None:
    now = Figures(parts={LINES_WAITING.name: {"slot": 3, "turn": 0}})
    async with publish({"model": "m", "engine": "0"}, now):
        await until_published(folder)
        page = await make_page(folder, [], WORKER)
    assert values(page, LINES_WAITING.name) == {("m", "0", "slot"): 3, ("m", "0", "turn"): 0}
    assert values(await make_page(folder, [], WORKER), LINES_WAITING.name) == {}


async def test_a_file_that_is_not_whole_is_left_out(folder: Path) -> None:
    (folder / "x-0.json").write_text('{"labels": {')
    async with publish({"model": "m", "engine": "0"}, figures(5)):
        await until_published(folder, 2)
        page = await make_page(folder, [], WORKER)
    assert values(page, INFLIGHT.name) == {("m", "0"): 5}


async def test_nothing_is_published_where_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    async with publish({"model": "m", "engine": "0"}, figures()):
        pass
    assert not files_in(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "a file", "gone later"])
async def test_what_cannot_be_published_ends_no_batch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    if kind == "a file":
        folder.touch()
    elif kind == "gone later":
        folder.mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    served = False
    async with publish({"model": "m", "engine": "0"}, figures()):
        if kind == "gone later":
            await until_published(folder)
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        served = True
    assert served


async def test_numbers_that_cannot_be_read_end_no_batch(folder: Path) -> None:
    def read() -> Figures:
        raise RuntimeError

    served = False
    async with publishing({"model": "m", "engine": "0"}, read):
        served = True
    assert served


async def test_an_engines_own_metrics_are_on_the_page_with_our_labels(folder: Path) -> None:
    async with (
        engine(good) as first,
        engine(good) as second,
        publish({"model": "org/m", "engine": "0"}, figures(socket=first)),
        publish({"model": "org/m", "engine": "1"}, figures(socket=second)),
    ):
        await until_published(folder, 2)
        page = await make_page(folder, ["0", "1"], WORKER)
    assert values(page, "vllm:x") == {("org/m", each, "0", "m"): 7 for each in "01"}
    assert 'batchyard_model="org/m",batchyard_engine="0"' in page
    assert values(page, "batchyard_engine_scrape_ok") == {("org/m", each): 1 for each in "01"}
    assert page.count("# TYPE vllm:x") == 1


@pytest.mark.parametrize("bad", [hanging, dripping, endless, garbage, failing, elsewhere])
async def test_an_engine_that_misbehaves_costs_its_own_part_only(
    bad: Answer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "SCRAPE_SECONDS", 2.0)
    async with (
        engine(bad) as first,
        engine(good) as second,
        publish({"model": "bad", "engine": "0"}, figures(1, socket=first)),
        publish({"model": "good", "engine": "1"}, figures(2, socket=second)),
    ):
        await until_published(folder, 2)
        async with asyncio.timeout(PATIENCE * 30):
            page = await make_page(folder, ["0", "1"], WORKER)
    assert values(page, "vllm:x") == {("good", "1", "0", "m"): 7}
    ok = {("bad", "0"): 0, ("good", "1"): 1}
    assert values(page, "batchyard_engine_scrape_ok") == ok
    assert values(page, INFLIGHT.name) == {("bad", "0"): 1, ("good", "1"): 2}


async def test_an_engine_that_answers_without_end_is_cut_off() -> None:
    """At once, and not when its time is up: it may fill the memory before."""
    async with engine(endless) as socket, asyncio.timeout(scrape.SCRAPE_SECONDS * 0.8):
        assert await scrape.scrape(socket) is None


async def test_an_engine_that_is_gone_is_not_ok(folder: Path, tmp_path: Path) -> None:
    socket = tmp_path / "none.sock"
    async with publish({"model": "m", "engine": "0"}, figures(socket=socket)):
        await until_published(folder)
        page = await make_page(folder, ["0"], WORKER)
    assert values(page, "batchyard_engine_scrape_ok") == {("m", "0"): 0}


async def test_the_time_in_the_engine_is_a_histogram(folder: Path) -> None:
    counts = RunnerCounts()
    labels = {"model": "m", "engine": "0"}
    async with publishing(labels, lambda: Figures(counters=counts.counters())):
        pass
    page = await make_page(folder, ["0"], WORKER)
    buckets = values(page, f"{LINE_SECONDS.name}_bucket")
    assert len(buckets) == len(BOUNDS) + 1
    assert ("m", "0", "+Inf") in buckets
    assert values(page, f"{LINE_SECONDS.name}_count") == {("m", "0"): 0}


def test_names_and_types_are_those_that_prometheus_expects() -> None:
    assert len({each.name for each in FAMILIES}) == len(FAMILIES)
    for each in FAMILIES:
        assert each.name.startswith("batchyard_")
        assert each.name.endswith("_total") == (each.kind == "counter")
        assert each.help.endswith(".")


async def test_requests_at_the_same_time_share_one_page() -> None:
    """Each would ask every engine; and who goes away ends nothing for the others."""
    made = 0
    go = asyncio.Event()

    async def make() -> str:
        nonlocal made
        made += 1
        await go.wait()
        return "a 1\n"

    async with TestClient(TestServer(application(make))) as client:
        gone = asyncio.create_task(client.get("/metrics"))
        asking = [asyncio.create_task(client.get("/metrics")) for _ in range(5)]
        await asyncio.sleep(0.1)
        gone.cancel()
        await asyncio.sleep(0.1)
        go.set()
        answers = await asyncio.gather(*asking)
        assert [await answer.text() for answer in answers] == ["a 1\n"] * 5
        assert answers[0].headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert made == 1
        assert (await client.post("/metrics")).status == 405
        assert (await client.get("/")).status == 404
