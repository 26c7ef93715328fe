"""Flow runs over HTTP: how the server is asked, what its refusals mean, who starts a runner."""

from __future__ import annotations

import asyncio
import base64
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from batchyard.batch_error import BatchError
from batchyard.dispatch import (
    RUN_BATCHES,
    TAKEN_UP,
    OfferedModel,
    PrefectApi,
    RunnerScheduler,
    end_lost_runs,
    engine_blocks,
    ensure_batch_runner,
    scheduler,
    scheduler_lease,
)
from batchyard.dispatch.run_states import MACHINE_PAUSED, NO_ENGINE, NO_SLOT, PUT_OFF, in_queue
from batchyard.errors import DispatchFailed, EngineStartFailed, ModelNotFound, SettingsError
from batchyard.lifecycle import BatchStatus
from batchyard.settings import Settings
from batchyard.store import (
    LiveEngine,
    RunnerKind,
    RunnerRecord,
    RunnerStatus,
    new_sealing_key,
    open_store,
)
from batchyard.wire import BatchUsage
from tests.contract.store.samples import batch_in, begun_batch, new_batch
from tests.patience import PATIENCE
from tests.services.tcp import server_that_fails_once

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.dispatch.prefect_answers import FlowRun
    from batchyard.store import Store

MODEL = "qwen"
RUN_CHUNKS = "run-chunks/gpu"
SILENT_SECONDS = 60.0
START_SECONDS = 1800.0


@dataclass
class SmallPrefect:
    """As much of Prefect's server as we speak to, over real HTTP, with what it was told."""

    url: str = ""
    status: int = 200
    seconds: float = 0.0
    """So long it takes for each answer."""
    busy_times: int = 0
    """So many of the next calls are answered 503, as a server does whose SQLite is locked."""
    deployments: set[str] = field(default_factory=lambda: {RUN_CHUNKS, RUN_BATCHES})
    limits: dict[str, int | None] = field(default_factory=lambda: {"gpu": 1})
    runs: list[dict[str, Any]] = field(default_factory=list)
    authorization: str | None = None
    workers: list[dict[str, Any]] = field(default_factory=list)
    """Of the pool ``gpu``, which is of the type ``process``."""
    offered: set[str] | None = None
    """Models that an engine block names; None: it does not say."""
    hours: dict[str, Any] = field(default_factory=dict)
    """What the blocks of these models have as ``batch_hours``."""
    live: set[str] = field(default_factory=set)
    """Those of them whose block is live."""
    csrf: bool = False
    """Whether it wants a token with every change."""
    tokens: dict[str, str] = field(default_factory=dict)
    """The newest of each client, as far as it has asked for one."""
    tokens_made: int = 0
    pools_read: int = 0
    has_lost_pools: bool = False
    """Whether no deployment has a work pool, as after the deletion of all pools."""

    def lose_pools(self) -> None:
        """Delete all pools: neither a deployment nor a flow run has one any more."""
        self.has_lost_pools = True
        for run in self.runs:
            run["work_pool_name"] = None

    def schedule_for_later(self, deployment_id: str, **asked: Any) -> str:
        """A flow run for tomorrow, as of a schedule; its id."""
        run = self.create(deployment_id, {"idempotency_key": "schedule", **asked})
        tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        run["expected_start_time"] = run["next_scheduled_start_time"] = tomorrow
        return str(run["id"])

    def states(self) -> list[str]:
        return [run["state"]["type"] for run in self.runs]

    def put(
        self, state: str, message: str = "", *, ago: float = 0.0, run: int = -1, name: str = ""
    ) -> str:
        """A flow run, the newest unless told, has been in ``state`` for ``ago`` seconds; its id."""
        since = (datetime.now(UTC) - timedelta(seconds=ago)).isoformat()
        self.runs[run]["state"] = {
            "type": state,
            "name": name or state.capitalize(),
            "message": message,
            "timestamp": since,
        }
        return str(self.runs[run]["id"])

    async def answer(self, request: web.Request) -> web.Response:
        self.authorization = request.headers.get("Authorization")
        await asyncio.sleep(self.seconds)
        if self.busy_times:
            self.busy_times -= 1
            return web.Response(status=503)
        if request.path == "/api/csrf-token":
            return await self.new_token(request.query["client"])
        if refusal := self.csrf_refusal(request):
            return web.json_response({"detail": refusal}, status=403)
        if self.status != 200:
            return web.json_response({"detail": "no"}, status=self.status)
        return await self.answer_call(request)

    async def answer_call(self, request: web.Request) -> web.Response:
        match request.path.removeprefix("/api/").split("/"):
            case ["deployments", "name", *names] if "/".join(names) in self.deployments:
                pool = None if self.has_lost_pools else names[-1]
                return web.json_response({"id": "--".join(names), "work_pool_name": pool})
            case ["deployments", deployment_id, "create_flow_run"]:
                return web.json_response(self.create(deployment_id, await request.json()))
            case ["flow_runs", "filter"]:
                return web.json_response(self.filter(await request.json()))
            case ["flow_runs", run_id] if found := [r for r in self.runs if r["id"] == run_id]:
                return web.json_response(found[0])
            case ["flow_runs", run_id, "set_state"]:
                return self.set_state(run_id, (await request.json())["state"])
            case ["work_pools", pool] if pool in self.limits:
                self.pools_read += 1
                limit = self.limits[pool]
                return web.json_response(
                    {"name": pool, "type": "process", "concurrency_limit": limit}
                )
            case ["work_pools", "gpu", "workers", "filter"]:
                return web.json_response(self.workers)
            case ["block_documents", "filter"] if self.offered is not None:
                created = datetime.now(UTC).isoformat()
                blocks = [
                    {
                        "data": {
                            "model": name,
                            "batch_hours": self.hours.get(name, []),
                            "live": name in self.live,
                        },
                        "created": created,
                        "block_type": {"slug": "batchyard-remote-engine"},
                    }
                    for name in self.offered
                ]
                return web.json_response(blocks)
        return web.json_response({"detail": "not found"}, status=404)

    async def new_token(self, client: str) -> web.Response:
        await asyncio.sleep(0.02)
        self.tokens_made += 1
        self.tokens[client] = token = f"token {self.tokens_made}"
        return web.json_response({"token": token, "client": client})

    def csrf_refusal(self, request: web.Request) -> str | None:
        """As Prefect says it."""
        if not self.csrf or request.method == "GET":
            return None
        token = request.headers.get("Prefect-Csrf-Token")
        if token is None:
            return "Missing CSRF token."
        if self.tokens.get(request.headers["Prefect-Csrf-Client"]) != token:
            return "Invalid CSRF token or client identifier."
        return None

    def create(self, deployment_id: str, asked: dict[str, Any]) -> dict[str, Any]:
        for run in self.runs:
            if run["idempotency_key"] == asked["idempotency_key"]:
                return run
        run = {"id": f"r{len(self.runs) + 1:03}", "deployment_id": deployment_id, **asked}
        run["work_pool_name"] = deployment_id.partition("--")[2]
        run["created"] = datetime.now(UTC).isoformat()
        run["expected_start_time"] = run["next_scheduled_start_time"] = run["created"]
        self.runs.append(run)
        self.put("SCHEDULED")
        run["state"]["state_details"] = asked.get("state", {}).get("state_details", {})
        return run

    def set_state(self, run_id: str, state: dict[str, Any]) -> web.Response:
        for index, run in enumerate(self.runs):
            if run["id"] == run_id:
                if run["state"]["type"] in {"SCHEDULED", "PENDING", "RUNNING", "CANCELLING"}:
                    name = state.get("name", "")
                    self.put(state["type"], state.get("message", ""), run=index, name=name)
                    run["state"]["state_details"] = state.get("state_details", {})
                return web.json_response({"status": "ACCEPT"})
        return web.json_response({"detail": "not found"}, status=404)

    def filter(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        key = {"ID_DESC": "id", "EXPECTED_START_TIME_DESC": "expected_start_time"}
        sort, limit, offset = asked.pop("sort"), asked.pop("limit"), asked.pop("offset", 0)
        found = [run for run in self.runs if _matches(run, asked)]
        found.sort(key=lambda run: str(run[key[sort]]), reverse=True)
        return found[offset : offset + limit]


def _matches(run: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Every condition that is asked for holds; one that is not known here fails the test."""
    flow, _, deployment = (run["deployment_id"] or f"{run['flow']}--").partition("--")
    is_deployed = run["deployment_id"] is not None
    wanted = asked.get("flow_runs", {})
    assert asked.keys() <= {"flows", "deployments", "flow_runs"}
    assert wanted.keys() <= {"id", "deployment_id", "tags", "state", "expected_start_time"}
    conditions = [
        (flow, asked.get("flows", {}).get("name", {}).get("any_")),
        (deployment, asked.get("deployments", {}).get("name", {}).get("any_")),
        (run["id"], wanted.get("id", {}).get("any_")),
        (run["deployment_id"], wanted.get("deployment_id", {}).get("any_")),
        (run["state"]["type"], wanted.get("state", {}).get("type", {}).get("any_")),
    ]
    before = wanted.get("expected_start_time", {}).get("before_")
    if before is not None:
        start = datetime.fromisoformat(run["expected_start_time"])
        conditions.append((start <= datetime.fromisoformat(before), [True]))
    tags = wanted.get("tags", {}).get("all_", [])
    if wanted.get("deployment_id", {}).get("is_null_", not is_deployed) is is_deployed:
        return False
    return all(any_ is None or value in any_ for value, any_ in conditions) and (
        set(tags) <= set(run["tags"])
    )


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
async def store(home_with_tables: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{home_with_tables}/batchyard.db") as opened:
        yield opened


@pytest.fixture
def settings() -> Settings:
    return Settings(lease_seconds=SILENT_SECONDS, swap_seconds=0.0)


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
    with pytest.raises(SettingsError, match="process-batch/default: run `batchyard deploy`"):
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


async def test_no_call_meets_the_end_of_a_connection_on_which_another_has_failed() -> None:
    async with (
        server_that_fails_once() as port,
        PrefectApi(f"http://127.0.0.1:{port}/api") as api,
    ):
        await api.emit([{"id": "e1"}])


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_names_the_credentials(
    api: PrefectApi, prefect: SmallPrefect, status: int
) -> None:
    prefect.status = status
    with pytest.raises(SettingsError, match="PREFECT_API_AUTH_STRING or PREFECT_API_KEY"):
        await api.latest(RUN_CHUNKS, tag=MODEL)


async def test_a_csrf_token_is_fetched_once_where_the_server_wants_one(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    """Also when many calls are refused at once: a new token ends the one before it."""
    prefect.csrf = True
    await asyncio.gather(*(api.start(RUN_CHUNKS, {}, name=f"m{n}") for n in range(20)))
    assert len(prefect.runs) == 20
    assert prefect.tokens_made == 1


async def test_a_csrf_token_that_has_expired_is_replaced(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    prefect.csrf = True
    await api.start(RUN_CHUNKS, {}, name="one")
    prefect.tokens.clear()
    await api.start(RUN_CHUNKS, {}, name="two")
    assert [run["name"] for run in prefect.runs] == ["one", "two"]
    assert prefect.tokens_made == 2


async def test_a_server_without_csrf_protection_is_not_asked_for_a_token(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    await api.start(RUN_CHUNKS, {}, name="one")
    assert prefect.tokens_made == 0


async def test_a_server_that_takes_no_csrf_token_is_not_asked_for_ever(
    api: PrefectApi, prefect: SmallPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefect.csrf = True
    monkeypatch.setattr(prefect, "tokens", _Forgetful())
    with pytest.raises(SettingsError, match="refuses the login"):
        await api.start(RUN_CHUNKS, {}, name="one")
    assert prefect.tokens_made == 1


class _Forgetful(dict[str, str]):
    def get(self, _key: str, default: object = None) -> Any:
        return default


async def test_a_server_that_is_not_there_is_named(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}/api"
    async with PrefectApi(url) as api:
        with pytest.raises(DispatchFailed, match=f"The Prefect server at {url} did not answer"):
            await api.latest(RUN_CHUNKS, tag=MODEL)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:canary@127.0.0.1:{port}/api",
        "http://127.0.0.1:{port}/api?token=canary",
        "http://user:canary@[",
    ],
)
async def test_a_password_or_a_query_in_the_servers_url_is_in_no_message(
    unused_tcp_port: int, url: str
) -> None:
    async with PrefectApi(url.format(port=unused_tcp_port)) as api:
        with pytest.raises(DispatchFailed, match="did not answer") as raised:
            await api.latest(RUN_CHUNKS, tag=MODEL)
    assert "canary" not in str(raised.value)


@pytest.mark.parametrize("status", [401, 404])
async def test_what_a_server_refuses_does_not_show_its_password(status: int) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=status)

    served = SmallPrefect()
    served.answer = refuse  # type: ignore[method-assign]
    async with serving(served), PrefectApi(served.url.replace("//", "//user:canary@")) as api:
        with pytest.raises(SettingsError) as raised:
            await api.latest(RUN_CHUNKS, tag=MODEL)
    assert "canary" not in str(raised.value)


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


async def test_the_auth_string_goes_before_a_key_as_in_prefects_clients(
    prefect: SmallPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key for Prefect's cloud may be in the shell that starts a server of our own."""
    monkeypatch.setenv("PREFECT_API_URL", prefect.url)
    monkeypatch.setenv("PREFECT_API_KEY", "pnu_1")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "a:b")
    async with PrefectApi.from_environment() as api:
        await api.latest(RUN_CHUNKS, tag=MODEL)
    assert prefect.authorization == "Basic " + base64.b64encode(b"a:b").decode()


def test_without_a_server_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(SettingsError, match="PREFECT_API_URL is not set"):
        PrefectApi.from_environment()


async def test_a_server_elsewhere_is_asked_through_the_proxy_of_the_environment(
    prefect: SmallPrefect,
) -> None:
    """As Prefect's own client does. Nothing else leads to this host."""
    proxy = prefect.url.removesuffix("/api")
    elsewhere = {"PREFECT_API_URL": "http://prefect.invalid/api"}
    async with PrefectApi.from_environment(elsewhere | {"HTTP_PROXY": proxy}) as api:
        assert await api.has_pool("gpu")
    named = elsewhere | {"http_proxy": "http://u:hunter2@127.0.0.1:9"}
    async with PrefectApi.from_environment(named) as api:
        with pytest.raises(
            DispatchFailed, match=r"not answer through the proxy of http_proxy: \w+\.$"
        ) as caught:
            await api.has_pool("gpu")
    assert "hunter2" not in str(caught.value)


async def test_a_socks_proxy_is_said_to_be_one_for_prefects_client_only() -> None:
    named = {"PREFECT_API_URL": "http://prefect.invalid/api", "ALL_PROXY": "socks5://127.0.0.1:9"}
    async with PrefectApi.from_environment(named) as api:
        with pytest.raises(DispatchFailed, match="ALL_PROXY names a SOCKS proxy, which only"):
            await api.has_pool("gpu")


async def test_a_server_on_this_machine_is_asked_directly(prefect: SmallPrefect) -> None:
    named = {"PREFECT_API_URL": prefect.url, "HTTP_PROXY": "http://127.0.0.1:9"}
    async with PrefectApi.from_environment(named) as api:
        assert await api.has_pool("gpu")


async def test_more_runs_than_one_answer_holds_are_all_found(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    for _ in range(201):
        prefect.create("run-chunks--gpu", {"idempotency_key": len(prefect.runs), "tags": []})
    assert len(await api.active(RUN_CHUNKS)) == 201


async def test_the_latest_run_is_the_one_made_last_whatever_is_scheduled_for_later(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    for _ in range(3):
        await api.start(RUN_CHUNKS, {}, name=MODEL)
    prefect.runs[0]["expected_start_time"] = "2999-01-01T00:00:00+00:00"
    latest = await api.latest(RUN_CHUNKS)
    assert latest is not None
    assert latest.id == "r003"


async def test_a_pool_may_have_no_limit(api: PrefectApi, prefect: SmallPrefect) -> None:
    prefect.limits |= {"big": None}
    assert [await api.pool_limit(pool) for pool in ("gpu", "big")] == [1, None]


async def test_a_key_that_is_used_up_does_not_stop_the_next_run(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    """Keys outlive their deployment; runs that are listed do not."""
    first = await api.start_after(RUN_CHUNKS, {}, name=MODEL, last=None)
    prefect.put("COMPLETED")
    second = await api.start_after(RUN_CHUNKS, {}, name=MODEL, last=None)
    assert [first.id, second.id] == ["r001", "r002"]


async def test_a_run_that_has_ended_or_gone_is_not_marked(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    run = await api.start(RUN_CHUNKS, {}, name=MODEL)
    prefect.put("COMPLETED")
    await api.mark_crashed(run.id, "gone")
    await api.mark_crashed("r999", "gone")
    assert prefect.states() == ["COMPLETED"]


# -- the runner of batches ----------------------------------------------------------------------


async def wake(api: PrefectApi, store: Store) -> str | None:
    run = await ensure_batch_runner(api, store, silent_seconds=SILENT_SECONDS)
    return run.id if run else None


async def test_no_runner_of_batches_is_started_where_one_lives(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    await store.runners.register(kind=RunnerKind.BATCHES, pool="control")
    assert await wake(api, store) is None
    assert prefect.runs == []


async def test_callers_at_once_get_the_same_runner(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    assert set(await asyncio.gather(*(wake(api, store) for _ in range(5)))) == {"r001"}
    assert len(prefect.runs) == 1


@pytest.mark.parametrize(
    ("state", "ago", "woken"),
    [
        ("SCHEDULED", 900.0, "r001"),
        ("PENDING", 9.0, "r001"),
        ("RUNNING", 9.0, "r001"),
        # Its machine may have lost its power, and a minute is all that batches may wait for that.
        ("PENDING", 35.0, "r002"),
        ("RUNNING", SILENT_SECONDS + 1, "r002"),
        # From before the server's clock was set back by two hours.
        ("PENDING", -7200.0, "r002"),
        ("RUNNING", -7200.0, "r002"),
        ("CANCELLING", 1.0, "r002"),
        ("COMPLETED", 1.0, "r002"),
        ("FAILED", 1.0, "r002"),
        ("CRASHED", 1.0, "r002"),
    ],
)
async def test_a_runner_on_its_way_is_waited_for_and_one_that_is_gone_is_not(
    api: PrefectApi, prefect: SmallPrefect, store: Store, state: str, ago: float, woken: str
) -> None:
    await wake(api, store)
    prefect.put(state, ago=ago)
    assert await wake(api, store) == woken


async def test_a_runner_that_is_leaving_is_followed_by_another(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    await wake(api, store)
    row = await store.runners.register(
        kind=RunnerKind.BATCHES, pool="control", flow_run_id=prefect.put("RUNNING")
    )
    await store.runners.drain(row.id)
    assert [await wake(api, store) for _ in range(2)] == ["r002", "r002"]


async def test_a_runner_of_batches_that_is_scheduled_for_tomorrow_does_not_count_today(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    """`batchyard deploy` keeps schedules that people have added to deployments."""
    later = prefect.schedule_for_later("run-batches--default", tags=["internal"])
    assert [await wake(api, store) for _ in range(2)] == ["r002", "r002"]
    assert later == "r001"


async def test_a_runner_of_batches_whose_pool_was_deleted_does_not_count(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    """No worker takes it, also not one of a new pool with the same name."""
    await wake(api, store)
    prefect.lose_pools()
    for _ in range(2):
        with pytest.raises(SettingsError, match="has no work pool: run `batchyard deploy`"):
            await wake(api, store)
    prefect.has_lost_pools = False
    assert [await wake(api, store) for _ in range(2)] == ["r002", "r002"]


# -- lost flow runs -----------------------------------------------------------------------------


def worker(status: str, *, ago: float) -> dict[str, Any]:
    created = datetime.now(UTC) - timedelta(seconds=ago)
    return {"name": "w", "status": status, "created": created.isoformat()}


async def bury(api: PrefectApi, store: Store, seen: set[str]) -> list[str]:
    return await end_lost_runs(
        api,
        store,
        silent_seconds=SILENT_SECONDS,
        start_seconds=START_SECONDS,
        seen=seen,
    )


@pytest.mark.parametrize(
    ("state", "ago", "end"),
    [
        ("RUNNING", 61.0, "CRASHED"),
        ("RUNNING", 50.0, None),
        ("RUNNING", -7200.0, "CRASHED"),
        ("PENDING", 1802.0, "CRASHED"),
        ("PENDING", 1790.0, None),
        ("CANCELLING", 122.0, "CANCELLED"),
        ("SCHEDULED", 9999.0, None),
    ],
)
async def test_a_flow_run_without_a_process_is_ended_at_the_second_look(
    api: PrefectApi, prefect: SmallPrefect, store: Store, state: str, ago: float, end: str | None
) -> None:
    prefect.workers = [worker("ONLINE", ago=9999)]
    await api.start(RUN_CHUNKS, {}, name=MODEL)
    prefect.put(state, ago=ago)
    seen: set[str] = set()
    assert await bury(api, store, seen) == []
    assert prefect.states() == [state]
    assert await bury(api, store, seen) == (["r001"] if end else [])
    assert prefect.states() == [end or state]


async def test_a_lost_flow_run_that_prefect_does_not_end_keeps_no_other_from_its_end(
    api: PrefectApi, prefect: SmallPrefect, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has a place in its pool until then."""
    for _ in range(3):
        await api.start(RUN_CHUNKS, {}, name=MODEL)
        prefect.put("RUNNING", ago=61.0)
    odd = str(prefect.runs[0]["id"])
    set_state = prefect.set_state

    def refuse_odd(run_id: str, state: dict[str, Any]) -> web.Response:
        return web.Response(status=422) if run_id == odd else set_state(run_id, state)

    monkeypatch.setattr(prefect, "set_state", refuse_odd)
    seen: set[str] = set()
    await bury(api, store, seen)
    with pytest.raises(DispatchFailed, match="422"):
        await bury(api, store, seen)
    assert prefect.states() == ["RUNNING", "CRASHED", "CRASHED"]


@pytest.mark.parametrize(
    ("workers", "is_lost"),
    [
        ([("ONLINE", 500)], False),
        ([("OFFLINE", 500)], True),
        ([("OFFLINE", 500), ("ONLINE", 10)], True),
        ([], True),
    ],
)
async def test_a_pending_runner_is_waited_for_unless_the_worker_that_took_it_is_gone(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    workers: list[tuple[str, float]],
    is_lost: bool,
) -> None:
    await api.start(RUN_CHUNKS, {}, name=MODEL)
    prefect.put("PENDING", ago=200)
    prefect.workers = [worker(status, ago=ago) for status, ago in workers]
    seen: set[str] = set()
    for _ in range(2):
        await bury(api, store, seen)
    assert prefect.states() == ["CRASHED" if is_lost else "PENDING"]


async def test_a_runner_in_a_clusters_queue_is_waited_for_however_long(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    await api.start(RUN_CHUNKS, {}, name=MODEL)
    prefect.put("PENDING", ago=9999, name=in_queue("Priority"))
    seen: set[str] = set()
    for _ in range(2):
        await bury(api, store, seen)
    assert prefect.states() == ["PENDING"]


async def test_a_batch_runner_has_no_image_to_wait_for(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    await api.start(RUN_BATCHES, {}, name="run-batches")
    prefect.put("PENDING", ago=122)
    seen: set[str] = set()
    for _ in range(2):
        await bury(api, store, seen)
    assert prefect.states() == ["CRASHED"]


@pytest.mark.parametrize("kind", list(RunnerKind))
async def test_a_flow_run_whose_runner_lives_is_left_alone(
    api: PrefectApi, prefect: SmallPrefect, store: Store, kind: RunnerKind
) -> None:
    await api.start(RUN_CHUNKS, {}, name=MODEL)
    row = await store.runners.register(
        kind=kind, pool="gpu", flow_run_id=prefect.put("RUNNING", ago=999)
    )
    seen: set[str] = set()
    assert [await bury(api, store, seen) for _ in range(3)] == [[], [], []]
    await store.runners.retire(row.id)
    assert [await bury(api, store, seen) for _ in range(3)] == [[], ["r001"], []]


@pytest.mark.parametrize(
    ("status", "end"),
    [
        (BatchStatus.COMPLETED, "COMPLETED"),
        (BatchStatus.EXPIRED, "CRASHED"),
        (BatchStatus.IN_PROGRESS, "CRASHED"),
    ],
)
async def test_a_lost_flow_run_whose_batch_is_completed_is_completed(
    api: PrefectApi, prefect: SmallPrefect, store: Store, status: BatchStatus, end: str
) -> None:
    """Prefect was away when the batch ended, and its process could not report it."""
    batch = await batch_in(store, status)
    await api.start(RUN_BATCHES, {}, name="run-batches")
    await store.batches.set_flow_run(batch.id, prefect.put("RUNNING", ago=999))
    seen: set[str] = set()
    for _ in range(2):
        await bury(api, store, seen)
    assert prefect.states() == [end]


@pytest.mark.parametrize(("tags", "end"), [([TAKEN_UP], "CRASHED"), ([], "RUNNING")])
async def test_of_runs_without_a_deployment_those_of_a_batch_runner_are_ended(
    api: PrefectApi, prefect: SmallPrefect, store: Store, tags: list[str], end: str
) -> None:
    """Others are somebody's own command, which does not ask for our opinion."""
    await api.start(RUN_BATCHES, {}, name="taken up")
    prefect.put("RUNNING", ago=999)
    prefect.runs[-1] |= {"deployment_id": None, "flow": "process-batch", "tags": tags}
    seen: set[str] = set()
    assert await bury(api, store, seen) == []
    await bury(api, store, seen)
    assert prefect.states() == [end]


# -- the scheduler ------------------------------------------------------------------------------


def scheduler_of(
    api: PrefectApi, store: Store, settings: Settings, owner: str = "me"
) -> RunnerScheduler:
    return RunnerScheduler(api, store, settings, owner)


def pass_time(monkeypatch: pytest.MonkeyPatch, store: Store, seconds: float) -> None:
    """Let the database's clock be so many seconds later; negative: it is set back."""
    now = type(store.database).now

    async def moved() -> float:
        return await now(store.database) + seconds

    monkeypatch.setattr(store.database, "now", moved)


async def announce(prefect: SmallPrefect, store: Store, run: int = -1) -> RunnerRecord:
    """The flow run becomes a runner whose model is loaded."""
    flow_run_id = prefect.put("RUNNING", run=run)
    row = await store.runners.register(
        kind=RunnerKind.CHUNKS,
        pool="gpu",
        model=prefect.runs[run]["parameters"]["model"],
        flow_run_id=flow_run_id,
    )
    await store.runners.ready(row.id)
    return row


async def test_without_work_nothing_is_asked_of_prefect_for_runners(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    assert await scheduler_of(api, store, settings).look() == ()
    assert prefect.runs == []


async def test_a_model_with_work_gets_a_runner_once(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    for _ in range(3):
        assert not await looking.look()
    (run,) = prefect.runs
    assert (run["name"], run["tags"]) == (MODEL, [MODEL])
    assert run["parameters"] == {"model": MODEL}
    await announce(prefect, store)
    await looking.look()
    assert len(prefect.runs) == 1


async def test_work_that_deserves_more_gets_as_many_as_the_pool_allows(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    prefect.limits["gpu"] = 3
    await begun_batch(store, chunks=20)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    await looking.look()
    assert len(prefect.runs) == 3


async def test_a_pools_limit_is_not_read_at_each_look(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    for _ in range(3):
        await looking.look()
    assert prefect.pools_read == 1


async def test_only_the_holder_of_the_lease_acts_until_it_closes(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    first, second = (scheduler_of(api, store, settings, owner) for owner in ("a", "b"))
    await first.look()
    await begun_batch(store)
    assert await second.look() == ()
    assert prefect.runs == []
    await first.close()
    await second.look()
    assert len(prefect.runs) == 1


async def test_a_scheduler_that_prefect_answers_slowly_keeps_its_turn(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two that take it from each other during their looks would never start a runner."""
    monkeypatch.setattr(scheduler_lease, "_LEASE_SECONDS", 1.2)
    prefect.seconds = 0.4
    await begun_batch(store)
    assert await store.leases.claim("scheduler", "me", 60)
    looking = asyncio.create_task(scheduler_of(api, store, settings, "me").look())
    while not (await asyncio.wait([looking], timeout=0.2))[0]:
        assert not await store.leases.claim("scheduler", "other", 60)
    assert len(prefect.runs) == 1


async def test_a_scheduler_that_prefect_does_not_answer_leaves_its_turn_to_others(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    unused_tcp_port: int,
) -> None:
    await begun_batch(store)
    async with PrefectApi(f"http://127.0.0.1:{unused_tcp_port}/api") as dead:
        await scheduler_of(dead, store, settings, "cut off").look()
    await scheduler_of(api, store, settings, "other").look()
    assert len(prefect.runs) == 1


async def test_a_scheduler_keeps_its_turn_where_a_pool_is_missing(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    """What it knows of failing models would be lost at each change of turns."""
    prefect.limits.clear()
    await begun_batch(store)
    await scheduler_of(api, store, settings, "first").look()
    other = scheduler_of(api, store, settings, "other")
    await other.look()
    assert not other.is_acting


async def test_two_that_believe_to_hold_the_lease_start_each_runner_once(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All have looked, and each has decided what to start, before the first one starts anything."""
    all_of_them = asyncio.Barrier(4)
    start_after = api.start_after

    async def start_together(*given: Any, **named: Any) -> FlowRun:
        async with asyncio.timeout(PATIENCE * 10):
            await all_of_them.wait()
        return await start_after(*given, **named)

    monkeypatch.setattr(api, "start_after", start_together)
    prefect.limits["gpu"] = 4
    await begun_batch(store, chunks=4)
    await begun_batch(store, chunks=4, model="llama")
    await asyncio.gather(*(scheduler_of(api, store, settings).look() for _ in range(4)))
    assert sorted(run["name"] for run in prefect.runs) == ["llama", "llama", MODEL, MODEL]


async def test_a_runner_that_is_scheduled_for_tomorrow_does_not_count_today(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    prefect.schedule_for_later("run-chunks--gpu", parameters={"model": MODEL}, tags=[MODEL])
    looking = scheduler_of(api, store, settings)
    for _ in range(2):
        await looking.look()
    assert [run["id"] for run in prefect.runs] == ["r001", "r002"]


async def test_a_runner_whose_pool_was_deleted_does_not_count(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.lose_pools()
    await looking.look()
    assert len(prefect.runs) == 1
    prefect.has_lost_pools = False
    for _ in range(2):
        await looking.look()
    assert [run["id"] for run in prefect.runs] == ["r001", "r002"]


async def test_a_model_that_waits_gets_the_place_of_another(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    row = await announce(prefect, store)
    await begun_batch(store, model="llama")
    for _ in range(2):
        await looking.look()
    assert await store.runners.heartbeat(row.id) is RunnerStatus.DRAINING
    assert len(prefect.runs) == 1
    await store.runners.retire(row.id)
    prefect.put("COMPLETED")
    await looking.look()
    assert [run["name"] for run in prefect.runs] == [MODEL, "llama"]


async def test_an_engine_serves_for_a_while_before_it_is_swapped(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, Settings(swap_seconds=300.0))
    await looking.look()
    row = await announce(prefect, store)
    await begun_batch(store, model="llama")
    await looking.look()
    assert await store.runners.heartbeat(row.id) is RunnerStatus.LIVE


CLOSED = [{"cron": "0 0 29 2 *", "duration": "1s", "timezone": "Europe/Berlin"}]


async def odd_answer(_: PrefectApi) -> list[OfferedModel]:
    raise KeyError("created")


@pytest.fixture
def always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_blocks, "_ASK_SECONDS", 0.0)
    monkeypatch.setattr(scheduler, "_LIMIT_SECONDS", 0.0)


@pytest.mark.usefixtures("always_asked")
async def test_outside_of_its_hours_a_model_gets_no_runner_and_its_batches_say_why(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
) -> None:
    """An urgent batch is no exception. Another model has the place meanwhile."""
    prefect.offered, prefect.hours = {MODEL, "llama"}, {MODEL: CLOSED}
    await begun_batch(store, window_seconds=60)
    await begun_batch(store, model="llama", window_seconds=90_000)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    assert [run["name"] for run in prefect.runs] == ["llama"]
    assert looking.waits[MODEL].startswith(f"the hours of engine {MODEL} begin on 20")
    assert looking.waits[MODEL].endswith("-02-29 at 00:00 Europe/Berlin")
    prefect.limits["gpu"], prefect.hours = 2, {}
    await looking.look()
    assert [run["name"] for run in prefect.runs] == ["llama", MODEL]
    assert looking.waits == {}


@pytest.mark.usefixtures("always_asked")
async def test_when_the_hours_of_a_model_end_its_runners_are_drained(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
) -> None:
    prefect.offered = {MODEL}
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    row = await announce(prefect, store)
    prefect.hours = {MODEL: CLOSED}
    await looking.look()
    assert await store.runners.heartbeat(row.id) is RunnerStatus.DRAINING


@pytest.mark.usefixtures("always_asked")
async def test_hours_stay_as_they_were_while_prefect_does_not_say(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor do hours that mean nothing open an engine. Each is said once."""
    prefect.offered, prefect.hours = {MODEL}, {MODEL: CLOSED}
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.offered = None
    await looking.look()
    with monkeypatch.context() as patch:
        patch.setattr(PrefectApi, "offered_models", odd_answer)
        await looking.look()
    prefect.offered, prefect.hours = {MODEL}, {MODEL: [{"cron": "nonsense", "duration": "1h"}]}
    for _ in range(2):
        await looking.look()
    assert prefect.runs == []
    assert MODEL in looking.waits
    assert caplog.text.count(f"The batch_hours of {MODEL} are not valid") == 1


@pytest.mark.usefixtures("always_asked")
async def test_time_in_which_an_engine_is_closed_is_not_held_against_its_model(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
) -> None:
    """A runner failed as the hours ended. The first failure after the night is not the last."""
    prefect.offered = {MODEL}
    await begun_batch(store)
    looking = scheduler_of(api, store, Settings(give_up_seconds=1.0))
    await looking.look()
    prefect.put("FAILED", "no GPU")
    assert not await looking.look()
    prefect.hours = {MODEL: CLOSED}
    await looking.look()
    await asyncio.sleep(1.1)
    prefect.hours = {}
    assert not await looking.look()
    assert looking.waits == {}


async def test_a_batch_whose_runner_is_in_a_clusters_queue_says_why(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    """The runner counts: no other one is started. Once it is one, nothing is waited for."""
    prefect.limits["gpu"] = None
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.put("PENDING", "job 7 waits (Priority)", ago=9999, name=in_queue("Priority"))
    await looking.look()
    assert looking.waits == {MODEL: "job 7 waits (Priority)"}
    assert len(prefect.runs) == 1
    await announce(prefect, store)
    await looking.look()
    assert looking.waits == {}


@pytest.mark.usefixtures("always_asked")
async def test_a_runner_in_a_clusters_queue_leaves_it_when_its_model_has_no_work(
    api: PrefectApi, prefect: SmallPrefect, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time that a runner without work stays, and not if Prefect names no models."""
    monkeypatch.setattr(scheduler, "_END_LOST_SECONDS", 0.0)
    await api.start(RUN_CHUNKS, {"model": MODEL}, name=MODEL)
    prefect.put("PENDING", name=in_queue("Priority"))
    looking = scheduler_of(api, store, Settings(runner_idle_seconds=60))
    for seconds in (0.0, 50.0, 60.0):
        pass_time(monkeypatch, store, seconds)
        await looking.look()
    assert prefect.states() == ["PENDING"]
    prefect.offered = set()
    for seconds in (0.0, 59.0):
        pass_time(monkeypatch, store, seconds)
        await looking.look()
    assert prefect.states() == ["PENDING"]
    pass_time(monkeypatch, store, 61.0)
    await looking.look()
    assert prefect.states() == ["CANCELLING"]


@pytest.mark.usefixtures("always_asked")
async def test_a_runner_in_a_clusters_queue_stays_while_its_model_has_work(
    api: PrefectApi, prefect: SmallPrefect, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_END_LOST_SECONDS", 0.0)
    prefect.offered = {MODEL}
    await begun_batch(store)
    looking = scheduler_of(api, store, Settings(runner_idle_seconds=0))
    await looking.look()
    prefect.put("PENDING", name=in_queue("Priority"))
    for _ in range(2):
        await looking.look()
    assert prefect.states() == ["PENDING"]


@pytest.mark.usefixtures("always_asked")
async def test_a_runner_in_a_clusters_queue_leaves_it_when_the_hours_of_its_model_end(
    api: PrefectApi, prefect: SmallPrefect, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they begin again, other models may have its place. One that is live stays."""
    monkeypatch.setattr(scheduler, "_END_LOST_SECONDS", 0.0)
    prefect.offered, prefect.live = {MODEL}, {MODEL}
    await begun_batch(store)
    looking = scheduler_of(api, store, Settings(runner_idle_seconds=0))
    await looking.look()
    prefect.put("PENDING", name=in_queue("Priority"))
    prefect.hours = {MODEL: CLOSED}
    await looking.look()
    assert prefect.states() == ["PENDING"]
    prefect.live = set()
    await looking.look()
    assert prefect.states() == ["CANCELLING"]


@pytest.mark.usefixtures("always_asked")
async def test_a_runner_in_a_clusters_queue_leaves_it_when_its_model_has_another_pool(
    api: PrefectApi, prefect: SmallPrefect, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have the place there."""
    monkeypatch.setattr(scheduler, "_END_LOST_SECONDS", 0.0)
    prefect.offered = {MODEL}
    await begun_batch(store)
    await scheduler_of(api, store, Settings()).look()
    prefect.put("PENDING", name=in_queue("Resources"))
    moved = Settings(runner_idle_seconds=0, pools={MODEL: "h100"})
    await scheduler_of(api, store, moved).look()
    assert prefect.states()[0] == "CANCELLING"


async def test_background_work_without_a_place_says_so(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    await begun_batch(store, model="llama", completion_window="background")
    looking = scheduler_of(api, store, settings)
    await looking.look()
    assert [run["name"] for run in prefect.runs] == [MODEL]
    assert looking.waits == {"llama": "other models use the pool gpu: it is a background batch"}


async def test_a_background_runner_leaves_for_another_model_at_once(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    """No swap_seconds protect it."""
    await begun_batch(store, completion_window="background")
    looking = scheduler_of(api, store, Settings(swap_seconds=300.0))
    await looking.look()
    row = await announce(prefect, store)
    await begun_batch(store, model="llama", window_seconds=90_000)
    await looking.look()
    assert await store.runners.heartbeat(row.id) is RunnerStatus.DRAINING


async def test_models_go_to_the_pools_that_the_settings_name(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    prefect.limits["big"] = 1
    prefect.deployments.add("run-chunks/big")
    for model in (MODEL, "llama"):
        await begun_batch(store, model=model)
    await scheduler_of(api, store, Settings(pools={"llama": "big"})).look()
    assert {run["name"]: run["deployment_id"] for run in prefect.runs} == {
        MODEL: "run-chunks--gpu",
        "llama": "run-chunks--big",
    }


async def test_a_runner_whose_flow_run_ended_is_replaced_before_its_heartbeat_is_missed(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    await announce(prefect, store)
    prefect.put("CRASHED", "killed")
    await looking.look()
    assert prefect.states() == ["CRASHED", "SCHEDULED"]


async def test_a_place_held_by_no_process_is_freed_and_taken(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "_END_LOST_SECONDS", 0.0)
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.put("RUNNING", ago=500)
    await looking.look()
    assert prefect.states() == ["RUNNING"]
    await looking.look()
    assert prefect.states() == ["CRASHED", "SCHEDULED"]


# -- models that cannot be served ---------------------------------------------------------------


@pytest.fixture
def impatient(settings: Settings) -> Settings:
    """Settings under which one failure is enough."""
    return settings.model_copy(update={"give_up_seconds": 0.0})


async def test_one_runner_that_fails_does_not_give_its_model_up(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    for _ in range(3):
        assert not await looking.look()
        prefect.put("FAILED", "On gpu-c: no GPU")
    assert not await looking.look()
    assert looking.waits == {MODEL: "On gpu-c: no GPU"}


async def test_a_model_that_nobody_could_serve_for_long_is_given_up_once(
    api: PrefectApi, prefect: SmallPrefect, store: Store, impatient: Settings
) -> None:
    batch = await begun_batch(store)
    looking = scheduler_of(api, store, impatient)
    await looking.look()
    prefect.put("FAILED", "On gpu-c: no GPU")
    (given_up,) = await looking.look()
    assert given_up.model == MODEL
    assert isinstance(given_up.error, EngineStartFailed)
    assert "1 runner failed. The last one: On gpu-c: no GPU" in str(given_up.error)
    assert len(prefect.runs) == 1
    await store.batches.fail(batch.id, [BatchError("server_error", "no GPU")])
    assert not await looking.look()


async def test_a_machine_that_fails_ends_nothing_while_another_serves(
    api: PrefectApi, prefect: SmallPrefect, store: Store, impatient: Settings
) -> None:
    prefect.limits["gpu"] = 2
    await begun_batch(store, chunks=4)
    looking = scheduler_of(api, store, impatient)
    await looking.look()
    assert len(prefect.runs) == 2
    await announce(prefect, store, run=0)
    prefect.put("FAILED", "On gpu-c: no GPU", run=1)
    for _ in range(3):
        assert not await looking.look()


@pytest.mark.parametrize("state", ["SCHEDULED", "PENDING", "RUNNING"])
async def test_a_model_is_not_given_up_while_a_runner_of_it_begins(
    api: PrefectApi, prefect: SmallPrefect, store: Store, impatient: Settings, state: str
) -> None:
    prefect.limits["gpu"] = 2
    await begun_batch(store, chunks=4)
    looking = scheduler_of(api, store, impatient)
    await looking.look()
    prefect.put(state, run=0)
    prefect.put("FAILED", "On gpu-c: no GPU", run=1)
    assert not await looking.look()


async def test_a_runner_that_takes_long_to_begin_counts_as_started(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    prefect.workers = [worker("ONLINE", ago=500)]
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.put("PENDING", ago=300)
    for _ in range(3):
        assert not await looking.look()
    assert prefect.states() == ["PENDING"]


async def test_what_is_submitted_after_a_model_was_given_up_is_tried(
    api: PrefectApi, prefect: SmallPrefect, store: Store, impatient: Settings
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, impatient)
    await looking.look()
    prefect.put("FAILED", "no GPU")
    await looking.look()
    assert not await looking.look()
    assert prefect.states() == ["FAILED", "SCHEDULED"]


async def test_one_model_that_fails_leaves_the_others_running(
    api: PrefectApi, prefect: SmallPrefect, store: Store, impatient: Settings
) -> None:
    prefect.limits["gpu"] = 2
    await begun_batch(store)
    await begun_batch(store, model="llama")
    looking = scheduler_of(api, store, impatient)
    await looking.look()
    (failed,) = (n for n, run in enumerate(prefect.runs) if run["name"] == MODEL)
    prefect.put("FAILED", "no such model", run=failed)
    assert [entry.model for entry in await looking.look()] == [MODEL]
    assert len(prefect.runs) == 2


async def test_a_model_that_prefect_does_not_start_leaves_its_place_to_others(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name may have a character that Prefect's database does not take."""
    create = prefect.create

    def refuse_odd(deployment_id: str, body: dict[str, Any]) -> dict[str, Any]:
        if body["name"] == "odd\0name":
            raise web.HTTPInternalServerError
        return create(deployment_id, body)

    monkeypatch.setattr(prefect, "create", refuse_odd)
    await begun_batch(store, model="odd\0name", window_seconds=60)
    await begun_batch(store, window_seconds=90_000)
    looking = scheduler_of(api, store, settings)
    for _ in range(3):
        assert not await looking.look()
    assert [run["name"] for run in prefect.runs] == [MODEL]
    assert "Prefect answered 500" in looking.waits["odd\0name"]


async def test_runners_that_get_nowhere_are_not_started_at_every_look(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    """The second is started at once, the third after a second."""
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    for _ in range(2):
        await looking.look()
        prefect.put("FAILED", "no GPU")
    await looking.look()
    assert prefect.states() == ["FAILED", "FAILED"]


async def test_a_model_that_fails_lets_another_have_the_place(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.put("FAILED", "no GPU")
    # After so many failures the next try is a minute away.
    looking._watches[MODEL].idle_ends = 9
    await begun_batch(store, model="llama")
    await looking.look()
    assert [run["name"] for run in prefect.runs] == [MODEL, "llama"]


async def test_a_model_that_waits_for_a_place_after_one_failure_is_not_given_up(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody has tried it since: that another model has the place says nothing about it."""
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.put("FAILED", "CUDA out of memory: the engine before is still there")
    looking._watches[MODEL].idle_ends = 9
    await begun_batch(store, model="llama")
    await looking.look()
    llama = await announce(prefect, store)
    pass_time(monkeypatch, store, 3600)
    assert not await looking.look()
    await store.runners.retire(llama.id)
    prefect.put("COMPLETED")
    assert not await looking.look()
    assert MODEL in [run["name"] for run in prefect.runs[2:]]


@pytest.mark.parametrize("name", [PUT_OFF, MACHINE_PAUSED])
async def test_a_runner_that_could_not_begin_says_nothing_about_its_model(
    api: PrefectApi, prefect: SmallPrefect, store: Store, impatient: Settings, name: str
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, impatient)
    for _ in range(3):
        assert not await looking.look()
        prefect.put("COMPLETED", "On gpu-c: no room", name=name)
    assert not await looking.look()
    assert looking.waits == {MODEL: "On gpu-c: no room"}


async def test_a_model_that_no_block_offers_is_given_up_at_once(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    """That another model was served before says nothing about this one."""
    prefect.offered = set()
    await store.rates.record("llama", "gpu", load_seconds=3.0)
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.put("COMPLETED", "create a block named qwen", name=NO_ENGINE)
    (given_up,) = await looking.look()
    assert isinstance(given_up.error, ModelNotFound)
    assert "create a block named qwen" in str(given_up.error)


async def test_a_model_that_was_served_before_waits_for_its_block(
    api: PrefectApi, prefect: SmallPrefect, store: Store, impatient: Settings
) -> None:
    """Prefect has lost its database, and its blocks are not made again yet."""
    prefect.offered = set()
    await store.rates.record(MODEL, "gpu", load_seconds=3.0)
    await begun_batch(store)
    looking = scheduler_of(api, store, impatient)
    for _ in range(3):
        assert not await looking.look()
        prefect.put("COMPLETED", "create a block named qwen", name=NO_ENGINE)
    assert not await looking.look()
    assert looking.waits == {MODEL: "create a block named qwen"}


async def test_a_model_is_not_given_up_while_prefect_does_not_say_what_is_offered(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def away(_: PrefectApi) -> None:
        raise DispatchFailed("Prefect is away.")

    monkeypatch.setattr(PrefectApi, "offered_models", away)
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.put("COMPLETED", "create a block named qwen", name=NO_ENGINE)
    assert not await looking.look()


async def test_a_block_that_was_made_meanwhile_is_tried(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.put("COMPLETED", "create a block named qwen", name=NO_ENGINE)
    prefect.offered = {MODEL}
    assert not await looking.look()
    assert prefect.states() == ["COMPLETED", "SCHEDULED"]


async def test_the_machine_of_a_runner_that_was_killed_is_named(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    await store.runners.register(
        kind=RunnerKind.CHUNKS,
        pool="gpu",
        model=MODEL,
        flow_run_id=prefect.put("RUNNING"),
        machine="gpu-c@0123",
    )
    await looking.look()
    prefect.put("CRASHED", "killed")
    await looking.look()
    assert looking.waits == {MODEL: "on gpu-c: killed"}


async def test_an_answer_clears_what_failed_before(
    api: PrefectApi, prefect: SmallPrefect, store: Store, impatient: Settings
) -> None:
    await begun_batch(store, chunks=2)
    (lease,) = await store.chunks.claim(model=MODEL, owner="me", lease_seconds=60)
    patient = impatient.model_copy(update={"give_up_seconds": 60.0})
    looking = scheduler_of(api, store, patient)
    await looking.look()
    prefect.put("FAILED", "no GPU")
    await looking.look()
    assert looking.waits == {MODEL: "no GPU"}
    await store.chunks.record_progress(lease, completed=1, failed=0, usage=BatchUsage())
    await looking.look()
    assert looking.waits == {}


async def test_one_that_is_the_scheduler_again_holds_nothing_old_against_a_model(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    looking, other = (scheduler_of(api, store, settings, owner) for owner in ("me", "other"))
    await looking.look()
    prefect.put("FAILED", "no GPU")
    await looking.look()
    assert looking.waits == {MODEL: "no GPU"}
    await looking.close()
    await other.look()
    await looking.look()
    await other.close()
    await looking.look()
    assert looking.is_acting
    assert looking.waits == {}


async def test_a_model_whose_pool_prefect_does_not_have_says_so_until_it_is_served(
    prefect: SmallPrefect, api: PrefectApi, store: Store, settings: Settings
) -> None:
    """A runner that Prefect has forgotten serves it all the same."""
    await begun_batch(store)
    ours = scheduler_of(api, store, settings)
    prefect.limits = {}
    await ours.look()
    assert "has no /work_pools/gpu: run `batchyard deploy`" in ours.waits[MODEL]
    await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model=MODEL)
    await ours.look()
    assert ours.waits == {}


# -- live models --------------------------------------------------------------------------------


@pytest.fixture
async def sealed_store(home_with_tables: Path) -> AsyncIterator[Store]:
    url = f"sqlite:///{home_with_tables}/batchyard.db"
    async with open_store(url, keys=[new_sealing_key()]) as opened:
        yield opened


async def live_runner(ours: RunnerScheduler, prefect: SmallPrefect, store: Store) -> RunnerRecord:
    """The runner that the scheduler starts for a live model, which answers live requests."""
    prefect.offered, prefect.live = {MODEL}, {MODEL}
    await ours.look()
    runner = await announce(prefect, store)
    await store.live_engines.register(
        LiveEngine(runner_id=runner.id, model=MODEL, address="unix:///s", secret="x")
    )
    return runner


def lose_database(prefect: SmallPrefect) -> None:
    """It knows no flow run, no pool and no block any more."""
    prefect.runs, prefect.limits, prefect.offered = [], {}, set()


async def test_a_live_model_has_one_runner_without_any_batch(
    prefect: SmallPrefect, api: PrefectApi, sealed_store: Store, settings: Settings
) -> None:
    prefect.offered, prefect.live = {MODEL, "other"}, {MODEL}
    ours = scheduler_of(api, sealed_store, settings)
    await ours.look()
    await ours.look()
    await announce(prefect, sealed_store)
    await ours.look()
    assert [run["parameters"] for run in prefect.runs] == [{"model": MODEL}]


@pytest.mark.usefixtures("always_asked")
async def test_a_runner_of_a_model_that_is_live_no_more_is_drained(
    prefect: SmallPrefect, api: PrefectApi, sealed_store: Store, settings: Settings
) -> None:
    """Also while Prefect does not say, it stays: nobody has said that it should go."""
    ours = scheduler_of(api, sealed_store, settings)
    runner = await live_runner(ours, prefect, sealed_store)
    prefect.offered = None
    await ours.look()
    assert (await sealed_store.live_engines.open(60))[0].runner_id == runner.id
    prefect.offered, prefect.live = {MODEL}, set()
    await ours.look()
    assert await sealed_store.live_engines.open(60) == []
    assert len(prefect.runs) == 1


@pytest.mark.parametrize("is_away", [False, True])
async def test_live_runners_stay_when_prefect_has_lost_its_database_and_is_deployed_again(
    prefect: SmallPrefect,
    api: PrefectApi,
    sealed_store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    is_away: bool,
) -> None:
    """The blocks were read just before they were made again, or cannot be read now."""
    ours = scheduler_of(api, sealed_store, settings)
    runner = await live_runner(ours, prefect, sealed_store)
    lose_database(prefect)
    pass_time(monkeypatch, sealed_store, 60)
    await ours.look()
    prefect.limits, prefect.offered = {"gpu": 1}, None if is_away else {MODEL}
    for _ in range(3):
        await ours.look()
    assert [each.runner_id for each in await sealed_store.live_engines.open(60)] == [runner.id]
    assert prefect.runs == []


async def test_others_are_served_while_prefect_does_not_say_whether_a_model_is_live(
    prefect: SmallPrefect,
    api: PrefectApi,
    sealed_store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pools can be read, and its blocks cannot, for as long as one of them has no meaning."""
    ours = scheduler_of(api, sealed_store, settings)
    runner = await live_runner(ours, prefect, sealed_store)
    lose_database(prefect)
    pass_time(monkeypatch, sealed_store, 60)
    await ours.look()
    prefect.limits, prefect.offered = {"gpu": 2}, None
    await begun_batch(sealed_store, model="other")
    await ours.look()
    assert [run["parameters"] for run in prefect.runs] == [{"model": "other"}]
    assert [each.runner_id for each in await sealed_store.live_engines.open(60)] == [runner.id]


@pytest.mark.usefixtures("always_asked")
async def test_a_live_model_that_nobody_can_serve_is_tried_for_ever(
    prefect: SmallPrefect, api: PrefectApi, sealed_store: Store, settings: Settings
) -> None:
    """It has no batches that could fail, and its block may be repaired."""
    settings = settings.model_copy(update={"give_up_seconds": 0.0})
    prefect.offered, prefect.live = {MODEL}, {MODEL}
    ours = scheduler_of(api, sealed_store, settings)
    for number in range(3):
        await ours.look()
        assert len(prefect.runs) == number + 1
        prefect.put("FAILED", "no weights")
        await ours.look()


async def test_a_clock_that_is_set_back_keeps_no_pool_closed(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would until the clock has caught up."""
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.put("COMPLETED", "No engine slot is free on this machine.", name=NO_SLOT)
    await looking.look()
    assert len(prefect.runs) == 1
    pass_time(monkeypatch, store, -3600)
    await looking.look()
    assert len(prefect.runs) == 2


async def test_a_clock_that_is_set_back_lets_blocks_and_limits_be_read(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefect.offered = {"llama"}
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.live, prefect.limits["gpu"] = {"llama"}, 2
    pass_time(monkeypatch, store, -3600)
    await looking.look()
    assert [run["name"] for run in prefect.runs] == [MODEL, "llama"]


async def test_a_clock_that_is_set_back_lets_lost_flow_runs_be_ended(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.put("RUNNING", ago=500)
    for back in (1, 2):
        pass_time(monkeypatch, store, -3600 * back)
        await looking.look()
    assert prefect.states()[0] == "CRASHED"


async def test_a_clock_that_is_set_back_keeps_no_model_from_its_turn(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two models take turns in one place; the one that waits was served before."""
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    pass_time(monkeypatch, store, 3600)
    await looking.look()
    row = await announce(prefect, store)
    await begun_batch(store, model="llama")
    for _ in range(2):
        await looking.look()
    await store.runners.retire(row.id)
    prefect.put("COMPLETED")
    await looking.look()
    assert [run["name"] for run in prefect.runs] == [MODEL, "llama"]
    row = await announce(prefect, store)
    pass_time(monkeypatch, store, 0)
    for _ in range(2):
        await looking.look()
    assert await store.runners.heartbeat(row.id) is RunnerStatus.DRAINING


async def test_that_every_engine_slot_is_taken_is_no_failure(
    api: PrefectApi, prefect: SmallPrefect, store: Store, impatient: Settings
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, impatient)
    await looking.look()
    prefect.put("COMPLETED", "No engine slot is free on this machine.", name=NO_SLOT)
    for _ in range(5):
        assert not await looking.look()
    assert len(prefect.runs) == 1  # it is tried again after a while


async def test_the_message_of_a_state_decides_nothing(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    """A runner that ended for another reason counts, whatever it says."""
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    prefect.put("COMPLETED", NO_SLOT)
    await looking.look()
    assert "ended without an answer" in looking.waits[MODEL]


async def test_a_runner_that_was_drained_may_end_without_an_answer(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    for model in (MODEL, "llama"):
        await begun_batch(store, model=model)
    looking = scheduler_of(api, store, settings)
    for _ in range(10):
        assert not await looking.look()
        row = await announce(prefect, store)
        assert not await looking.look()
        assert await store.runners.heartbeat(row.id) is RunnerStatus.DRAINING
        await store.runners.retire(row.id)
        prefect.put("COMPLETED")
    assert [run["name"] for run in prefect.runs[-2:]] in ([MODEL, "llama"], ["llama", MODEL])


# -- Prefect away -------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 404, 500])
async def test_that_prefect_is_away_is_said_once_and_fails_nothing(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
    status: int,
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    prefect.status = status
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not await looking.look()
    assert len([r for r in caplog.records if "about=gpu" in r.getMessage()]) == 1
    prefect.status = 200
    await looking.look()
    assert len(prefect.runs) == 1


async def test_a_prefect_that_lost_its_database_is_given_its_runners_again(
    api: PrefectApi, prefect: SmallPrefect, store: Store, settings: Settings
) -> None:
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    row = await announce(prefect, store)
    prefect.runs.clear()
    deployments, prefect.deployments = prefect.deployments, set()
    assert not await looking.look()
    prefect.deployments = deployments
    await looking.look()
    assert prefect.runs == []  # the runner works without it
    await store.runners.retire(row.id)
    await looking.look()
    assert len(prefect.runs) == 1


# -- looks that come too late -------------------------------------------------------------------


async def test_of_those_who_start_a_successor_at_once_all_get_the_same(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    """Also where none has seen what another one has started."""
    runs = await asyncio.gather(
        *(api.start_after(RUN_CHUNKS, {}, name=MODEL, last=None) for _ in range(5))
    )
    assert {run.id for run in runs} == {"r001"}
    assert len(prefect.runs) == 1


async def test_a_scheduler_whose_turn_ends_while_prefect_answers_starts_nothing(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await begun_batch(store)
    find = api.find

    async def find_slowly(flow_run_ids: Any) -> Any:
        found = await find(flow_run_ids)
        await store.leases.release("scheduler", "me")
        assert await store.leases.claim("scheduler", "other", 60)
        return found

    monkeypatch.setattr(api, "find", find_slowly)
    assert not await scheduler_of(api, store, settings).look()
    assert prefect.runs == []


@pytest.mark.parametrize(
    ("state", "ago", "is_registered"),
    [("CANCELLING", 1.0, True), ("CANCELLING", 1.0, False), ("RUNNING", 500.0, False)],
)
async def test_one_that_is_leaving_or_gone_keeps_its_place_and_serves_nobody(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    settings: Settings,
    state: str,
    ago: float,
    is_registered: bool,
) -> None:
    prefect.limits["gpu"] = 2
    await begun_batch(store)
    looking = scheduler_of(api, store, settings)
    await looking.look()
    if is_registered:
        await announce(prefect, store)
    prefect.put(state, ago=ago)
    await looking.look()
    assert len(prefect.runs) == 2
    await looking.look()
    assert len(prefect.runs) == 2


async def test_a_flow_run_that_was_missed_once_and_seen_since_is_not_lost(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    await api.start(RUN_CHUNKS, {}, name=MODEL)
    flow_run_id = prefect.put("RUNNING", ago=999)
    seen: set[str] = set()
    assert await bury(api, store, seen) == []
    row = await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", flow_run_id=flow_run_id)
    assert await bury(api, store, seen) == []
    await store.runners.retire(row.id)
    assert [await bury(api, store, seen) for _ in range(2)] == [[], [flow_run_id]]


async def test_a_process_that_announces_itself_between_the_two_looks_lives(
    api: PrefectApi, prefect: SmallPrefect, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.start(RUN_CHUNKS, {}, name=MODEL)
    flow_run_id = prefect.put("RUNNING", ago=999)
    begun = api.begun

    async def announce_meanwhile(flows: Any) -> Any:
        found = await begun(flows)
        await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", flow_run_id=flow_run_id)
        return found

    monkeypatch.setattr(api, "begun", announce_meanwhile)
    assert await bury(api, store, {flow_run_id}) == []
    assert prefect.states() == ["RUNNING"]


async def test_a_flow_run_that_holds_a_batch_lives(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    prefect.deployments.add("process-batch/default")
    run = await api.start("process-batch/default", {}, name="batch")
    prefect.put("RUNNING", ago=999)
    batch = await store.batches.create(new_batch(), owner="me", lease_seconds=60)
    await store.batches.set_flow_run(batch.id, run.id)
    seen: set[str] = set()
    assert [await bury(api, store, seen) for _ in range(3)] == [[], [], []]
