"""Flow runs over HTTP: how the server is asked, what its refusals mean, who starts a runner."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from batchyard import dispatch
from batchyard.dispatch import RUN_CHUNKS, PrefectApi, RunnerWatch, await_chunks_done, wake_runner
from batchyard.errors import DispatchFailed, EngineStartFailed, SettingsError
from batchyard.store import open_store
from batchyard.wire import BatchError, BatchUsage
from tests.contract.store.samples import begun_batch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.store import Store

MODEL = "qwen"
SILENT_SECONDS = 60.0


@dataclass
class SmallPrefect:
    """As much of Prefect's server as we speak to, over real HTTP, with what it was told."""

    url: str = ""
    status: int = 200
    busy_times: int = 0
    """So many of the next calls are answered 503, as a server does whose SQLite is locked."""
    deployments: set[str] = field(default_factory=lambda: {RUN_CHUNKS})
    runs: list[dict[str, Any]] = field(default_factory=list)
    authorization: str | None = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody has started a flow run."""

    def end(self, state: str, message: str = "", **more: Any) -> None:
        """The newest flow run is in ``state`` now."""
        self.runs[-1] |= {"state": {"type": state, "message": message}, **more}

    async def answer(self, request: web.Request) -> web.Response:
        self.authorization = request.headers.get("Authorization")
        if self.busy_times:
            self.busy_times -= 1
            return web.Response(status=503)
        if self.status != 200:
            return web.json_response({"detail": "no"}, status=self.status)
        match request.path.removeprefix("/api/").split("/"):
            case ["deployments", "name", *names]:
                known = "/".join(names) in self.deployments
                return web.json_response({"id": "d1"}, status=200 if known else 404)
            case ["deployments", "d1", "create_flow_run"]:
                return web.json_response(self.create(await request.json()))
            case ["flow_runs", "filter"]:
                (tag,) = (await request.json())["flow_runs"]["tags"]["all_"]
                return web.json_response([r for r in reversed(self.runs) if tag in r["tags"]][:1])
            case ["flow_runs", run_id, "set_state"]:
                asked = await request.json()
                (run,) = (run for run in self.runs if run["id"] == run_id)
                run["state"] = asked["state"]
                return web.json_response({"status": "ACCEPT"})
        return web.json_response({"detail": "no such path"}, status=404)

    def create(self, asked: dict[str, Any]) -> dict[str, Any]:
        for run in self.runs:
            if asked["idempotency_key"] and run["idempotency_key"] == asked["idempotency_key"]:
                return run
        self.runs.append({"id": f"r{len(self.runs) + 1}", **asked})
        self.asked.set()
        return self.runs[-1]


@asynccontextmanager
async def serving(prefect: SmallPrefect) -> AsyncIterator[SmallPrefect]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", prefect.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    prefect.url = f"http://127.0.0.1:{runner.addresses[0][1]}/api"
    try:
        yield prefect
    finally:
        await runner.cleanup()


@pytest.fixture
async def prefect() -> AsyncIterator[SmallPrefect]:
    async with serving(SmallPrefect()) as served:
        yield served


@pytest.fixture
async def api(prefect: SmallPrefect) -> AsyncIterator[PrefectApi]:
    async with PrefectApi(prefect.url) as opened:
        yield opened


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/yard.db", migrate=True) as opened:
        yield opened


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait looks around all the time."""
    monkeypatch.setattr(dispatch, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(dispatch, "_LOOK_SECONDS", 0.02)


# -- the server ---------------------------------------------------------------------------------


async def test_a_flow_run_is_started_by_name_with_its_parameters(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    started = await api.start(RUN_CHUNKS, {"model": MODEL}, name=MODEL)
    (run,) = prefect.runs
    assert started.id == run["id"]
    assert not started.has_ended
    assert run["name"] == MODEL
    assert run["tags"] == [MODEL]
    assert run["parameters"] == {"model": MODEL}


async def test_a_deployment_that_is_not_there_says_how_to_make_it(api: PrefectApi) -> None:
    with pytest.raises(SettingsError, match=r"process-batch/default: run `prefect .* deploy --all"):
        await api.start("process-batch/default", {}, name="b")


async def test_a_server_that_fails_may_be_asked_again(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    prefect.status = 500
    with pytest.raises(DispatchFailed, match="500") as caught:
        await api.latest(RUN_CHUNKS, tag=MODEL)
    assert caught.value.is_retriable


async def test_a_busy_server_is_asked_again_and_starts_one_run(
    prefect: SmallPrefect, api: PrefectApi
) -> None:
    prefect.busy_times = 2
    await api.start(RUN_CHUNKS, {"model": MODEL}, name=MODEL)
    assert len(prefect.runs) == 1


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_names_the_credentials(
    api: PrefectApi, prefect: SmallPrefect, status: int
) -> None:
    prefect.status = status
    with pytest.raises(SettingsError, match="PREFECT_API_AUTH_STRING or PREFECT_API_KEY"):
        await api.latest(RUN_CHUNKS, tag=MODEL)


async def test_a_server_that_is_not_there_is_named(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}/api"
    async with PrefectApi(url) as api:
        with pytest.raises(DispatchFailed, match=f"The Prefect server at {url} did not answer"):
            await api.latest(RUN_CHUNKS, tag=MODEL)


async def test_a_page_that_is_not_the_api_is_no_traceback(tmp_path: Path) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    served = SmallPrefect()
    served.answer = page  # type: ignore[method-assign] # the UI's address instead of the API's
    async with serving(served), PrefectApi(served.url) as api:
        with pytest.raises(DispatchFailed, match="did not answer"):
            await api.latest(RUN_CHUNKS, tag=MODEL)


@pytest.mark.parametrize(
    ("variable", "value", "header"),
    [
        ("PREFECT_API_KEY", "pnu_1", "Bearer pnu_1"),
        ("PREFECT_API_AUTH_STRING", "a:b", "Basic " + base64.b64encode(b"a:b").decode()),
        ("DO_NOT_TRACK", "1", None),
    ],
)
async def test_credentials_come_from_prefects_own_variables(
    prefect: SmallPrefect,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    header: str | None,
) -> None:
    for name in ("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_API_URL", prefect.url)
    monkeypatch.setenv(variable, value)
    async with PrefectApi.from_environment() as api:
        await api.latest(RUN_CHUNKS, tag=MODEL)
    assert prefect.authorization == header


def test_without_a_server_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(SettingsError, match="PREFECT_API_URL is not set"):
        PrefectApi.from_environment()


# -- one runner ---------------------------------------------------------------------------------


async def test_no_runner_is_started_where_one_lives(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    await store.runners.register(model=MODEL)
    assert await wake_runner(api, store, MODEL, silent_seconds=SILENT_SECONDS) is None
    assert prefect.runs == []


async def test_callers_at_once_get_the_same_runner(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    woken = await asyncio.gather(
        *(wake_runner(api, store, MODEL, silent_seconds=SILENT_SECONDS) for _ in range(5))
    )
    assert {run.id for run in woken if run} == {"r1"}
    assert len(prefect.runs) == 1


@pytest.mark.parametrize(
    ("state", "running_seconds"), [("SCHEDULED", 0.0), ("PENDING", 0.0), ("RUNNING", 2.0)]
)
async def test_a_runner_on_its_way_is_waited_for(
    api: PrefectApi, prefect: SmallPrefect, store: Store, state: str, running_seconds: float
) -> None:
    await wake_runner(api, store, MODEL, silent_seconds=SILENT_SECONDS)
    prefect.end(state, estimated_run_time=running_seconds)
    await wake_runner(api, store, MODEL, silent_seconds=SILENT_SECONDS)
    assert len(prefect.runs) == 1


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"])
async def test_a_runner_that_has_ended_is_followed_by_another(
    api: PrefectApi, prefect: SmallPrefect, store: Store, state: str
) -> None:
    await wake_runner(api, store, MODEL, silent_seconds=SILENT_SECONDS)
    prefect.end(state)
    await wake_runner(api, store, MODEL, silent_seconds=SILENT_SECONDS)
    assert [run["state"]["type"] for run in prefect.runs] == [state, "SCHEDULED"]


async def test_each_model_has_its_own_runner(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    for model in (MODEL, "llama"):
        await wake_runner(api, store, model, silent_seconds=SILENT_SECONDS)
    assert [run["name"] for run in prefect.runs] == [MODEL, "llama"]


# -- waiting ------------------------------------------------------------------------------------


def watch_of(api: PrefectApi, store: Store) -> RunnerWatch:
    return RunnerWatch(api, store, MODEL, silent_seconds=SILENT_SECONDS)


async def test_a_runner_that_fails_ends_the_wait_with_its_message(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    watch = watch_of(api, store)
    await watch.look(0)
    prefect.end("FAILED", "no such model")
    with pytest.raises(EngineStartFailed, match="no such model"):
        await watch.look(0)
    assert len(prefect.runs) == 1


async def test_a_failure_from_before_the_wait_is_not_held_against_the_model(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    await wake_runner(api, store, MODEL, silent_seconds=SILENT_SECONDS)
    prefect.end("FAILED", "yesterday")
    await watch_of(api, store).look(0)
    assert len(prefect.runs) == 2


@pytest.mark.parametrize("state", ["CRASHED", "CANCELLED", "COMPLETED"])
async def test_three_runners_in_a_row_without_an_answer_are_enough(
    api: PrefectApi, prefect: SmallPrefect, store: Store, state: str
) -> None:
    watch = watch_of(api, store)
    for _ in range(3):
        await watch.look(0)
        prefect.end(state, "went away")
    with pytest.raises(EngineStartFailed, match=r"3 runners of the model qwen .* \(went away\)"):
        await watch.look(0)
    assert len(prefect.runs) == 3


async def test_a_flow_run_whose_process_is_gone_gives_its_place_back(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    """Prefect leaves it Running for ever when its worker went with it."""
    watch = watch_of(api, store)
    await watch.look(0)
    prefect.end("RUNNING", estimated_run_time=500.0)
    await watch.look(0)
    assert [run["state"]["type"] for run in prefect.runs] == ["RUNNING"]
    await watch.look(0)
    assert [run["state"]["type"] for run in prefect.runs] == ["CRASHED", "SCHEDULED"]


async def test_runners_that_get_somewhere_may_end_as_often_as_they_like(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    watch = watch_of(api, store)
    for answered in range(10):
        await watch.look(answered)
        prefect.end("CRASHED")
    assert len(prefect.runs) == 10


@pytest.mark.usefixtures("quick")
async def test_the_wait_ends_with_the_last_chunk(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    batch = await begun_batch(store, chunks=2)
    waiting = asyncio.create_task(
        await_chunks_done(api, store, batch.id, silent_seconds=SILENT_SECONDS)
    )
    await prefect.asked.wait()
    for lease in await store.chunks.claim(model=MODEL, owner="me", lease_seconds=60, limit=2):
        assert not waiting.done()
        await store.chunks.complete(lease, completed=9, failed=1, usage=BatchUsage())
    assert await waiting == 20
    assert len(prefect.runs) == 1


@pytest.mark.usefixtures("quick")
async def test_a_chunk_whose_owner_is_gone_wakes_a_runner(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    batch = await begun_batch(store)
    await store.chunks.claim(model=MODEL, owner="gone", lease_seconds=0.1)
    waiting = asyncio.create_task(
        await_chunks_done(api, store, batch.id, silent_seconds=SILENT_SECONDS)
    )
    await prefect.asked.wait()
    waiting.cancel()


@pytest.mark.usefixtures("quick")
async def test_the_wait_outlives_prefects_server(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    """Runners work without it; what is done is in the database."""
    prefect.status = 500
    batch = await begun_batch(store)
    waiting = asyncio.create_task(
        await_chunks_done(api, store, batch.id, silent_seconds=SILENT_SECONDS)
    )
    (lease,) = await store.chunks.claim(model=MODEL, owner="me", lease_seconds=60)
    await store.chunks.complete(lease, completed=10, failed=0, usage=BatchUsage())
    assert await waiting == 10


@pytest.mark.usefixtures("quick")
async def test_a_batch_that_ended_meanwhile_is_not_waited_for(
    api: PrefectApi, store: Store
) -> None:
    batch = await begun_batch(store)
    await store.batches.fail(batch.id, [BatchError("server_error", "out of luck")])
    assert await await_chunks_done(api, store, batch.id, silent_seconds=SILENT_SECONDS) == 0
