"""An installation whose processes reach every server through a proxy, and the lives of its batches.

The API runs in a thread of the test, a control and a runner are processes. The test itself looks
at the database and the bucket directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import openai
from aiohttp import web
from aiohttp.test_utils import TestServer
from sqlalchemy import text

from batchyard.engine.stub.stub_answers import answer_to
from batchyard.files.retention import expire_files, sweep_orphans
from batchyard.lifecycle import TERMINAL
from batchyard.settings import read_settings
from batchyard.store import DeliveryStatus
from tests.api.conftest import Api, served
from tests.faults.nursery import Actor, Nursery, running_nursery
from tests.faults.site import MODEL, Site, as_input, lines, open_site
from tests.hurry import hurried
from tests.network.http_proxy import HttpProxy
from tests.network.postgres_proxy import PostgresProxy
from tests.patience import PATIENCE
from tests.services.receiver import Receiver, running_receiver
from tests.services.swift import BUCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    import pytest

    from batchyard.storage.bucket import S3Credentials
    from tests.services.postgres import PostgresCluster

REQUESTS = 12
LIFE_SECONDS = 30.0
TENANT = "one"
EVENTS = ("batch.completed", "batch.failed", "response.completed", "response.failed")
ROLES = ("control", "runner")
CHAT = "/v1/chat/completions"
_NEXT = '{"max_tokens": 4, "messages": {{ (request.messages * 2) | tojson }}}'
_RESPONSES = 4

_LEFT = {
    "a batch's lease": "SELECT id FROM batches WHERE owner IS NOT NULL",
    "a chunk's lease": "SELECT batch_id FROM chunks WHERE status <> 'done'",
    "a delivery's lease": "SELECT id FROM deliveries WHERE status = 'pending'",
}


@dataclass(slots=True)
class Installation:
    """``proxies`` by the names that the table has for their connections."""

    site: Site
    nursery: Nursery
    api: Api
    receiver: Receiver
    proxies: dict[str, Any]
    actors: dict[str, Actor] = field(default_factory=dict)
    restarts: int = 0
    _has_remote_engine: bool = False
    _lives: int = 0
    _left: str = ""
    _batches: int = 0
    """Of responses, of earlier lives."""

    async def work(self, *, has_remote_engine: bool | None = None) -> None:
        """Have a control and a runner, also where one has ended: a supervisor would start it.

        ``has_remote_engine``: whether the runner's engine is to be a server; None: as before.
        """
        runner = self.actors.get("runner")
        if has_remote_engine is not None and has_remote_engine != self._has_remote_engine:
            self._has_remote_engine = has_remote_engine
            if runner is not None and self.nursery.is_alive(runner):
                await self.nursery.signal(runner, signal.SIGKILL)
                await self.nursery.gone(runner)
        for role in ROLES:
            actor = self.actors.get(role)
            if actor is not None and self.nursery.is_alive(actor):
                continue
            self.restarts += actor is not None
            parts = self.site.parts(max_num_seqs=4)
            if self._has_remote_engine:
                parts["engine"]["server"] = self.proxies["engine"].url
            self.actors[role] = await self.nursery.start(role, parts)

    async def prepare(self, connection: str) -> None:
        """A runner of the other kind of engine takes the place of the one that there is."""
        await self.work(has_remote_engine=connection == "engine")

    def client(self) -> openai.AsyncOpenAI:
        """OpenAI's own, with its own retries."""
        url = f"{self.proxies['client'].url}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=self.api.key, max_retries=4)

    async def until(self, is_true: Callable[[], Awaitable[bool]], what: str) -> None:
        """Return when it is true; start again what has ended meanwhile."""
        deadline = time.monotonic() + PATIENCE * LIFE_SECONDS
        while not await is_true():
            assert time.monotonic() < deadline, f"{what} {self._left}\n{self.site.log_tail()}"
            await self.work()
            await asyncio.sleep(0.2)

    # -- the life of a batch ----------------------------------------------------------------

    async def live(self, life: str, *, spare_files: int = 0) -> None:
        """A life of this kind, and every promise about it.

        ``spare_files``: how many files a client may find that it did not mean to make.
        """
        match life:
            case "responses":
                await self._responses()
            case "chain":
                await self._batch(spare_files, then=[{"endpoint": CHAT, "template": _NEXT}])
            case _:
                await self._batch(spare_files)

    async def _batch(self, spare_files: int, **fields: Any) -> None:
        """One batch from its upload to its deletion."""
        self._lives += 1
        name = f"life{self._lives}"
        requests = lines(REQUESTS, name)
        before = len(self.receiver.requests)
        async with self.client() as client:
            content = as_input(requests)
            file = await client.files.create(file=(f"{name}.jsonl", content), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id,
                endpoint=CHAT,
                completion_window="24h",
                extra_headers={"Idempotency-Key": name},
                extra_body=fields,
            )
            await self.until(lambda: self._has_ended(batch.id), f"{batch.id} has not ended")
            await self._check(client, batch.id, requests, is_chain="then" in fields)
            await self.until(lambda: self._is_delivered(batch.id), "not delivered")
            told = self.receiver.requests[before:]
            assert {each.body.count(batch.id.encode()) for each in told} == {1}
            assert len({each.headers["webhook-id"] for each in told}) == 1
            found = [each.id async for each in client.files.list()]
            assert 0 <= len(found) - 2 <= spare_files, found
            for file_id in {*found, *await self._stage_files(batch.id)}:
                await _deleted(client, file_id)
        await self.until(self._nothing_is_left, "something is left")

    async def _check(
        self, client: openai.AsyncOpenAI, batch_id: str, requests: list[Any], *, is_chain: bool
    ) -> None:
        batch = await client.batches.retrieve(batch_id)
        assert batch.status == "completed", batch
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (len(requests), len(requests), 0)
        assert (batch.error_file_id, batch.errors) == (None, None)
        assert batch.output_file_id is not None
        output = (await client.files.content(batch.output_file_id)).text
        results = [json.loads(line) for line in output.splitlines()]
        assert [each["custom_id"] for each in results] == [each["custom_id"] for each in requests]
        if not is_chain:
            assert [each["response"]["body"] for each in results] == [_answer(r) for r in requests]
        listed = [each async for each in client.batches.list() if each.id == batch_id]
        assert len(listed) == 1
        of_input = [
            each.id
            async for each in client.batches.list()
            if each.input_file_id == batch.input_file_id
        ]
        assert of_input == [batch_id]

    async def _stage_files(self, batch_id: str) -> list[str]:
        """The files with the answers of each stage, which no list shows."""
        with self.api.http() as client:
            stages = (await asyncio.to_thread(client.get, f"/batches/{batch_id}/stages")).json()
        return [each["output_file_id"] for each in stages["data"] if each["output_file_id"]]

    async def _has_ended(self, batch_id: str) -> bool:
        return (await self.site.services.store.batches.get(batch_id)).status in TERMINAL

    async def _is_delivered(self, batch_id: str) -> bool:
        found = await self.site.services.store.deliveries.page(batch_id=batch_id, limit=9)
        return [each.status for each in found] == [DeliveryStatus.DELIVERED]

    async def _responses(self) -> None:
        """Background responses from their creation until they have ended and are told."""
        self._lives += 1
        before = len(self.receiver.requests)
        async with self.client() as client:
            made = [
                await client.responses.create(
                    model=MODEL,
                    input=f"question {n} of life {self._lives}",
                    background=True,
                    extra_body={"background_options": {"completion_window": "soonest"}},
                )
                for n in range(_RESPONSES)
            ]
            ids = [each.id for each in made]

            async def have_ended() -> bool:
                responses = self.site.services.store.responses
                found = [await responses.get(each) for each in ids]
                return all(each.ended_at is not None for each in found)

            async def are_delivered() -> bool:
                page = await self.site.services.store.deliveries.page(TENANT, limit=99)
                of_these = [each for each in page if each.response_id in ids]
                assert len(of_these) <= len(ids)
                return [each.status for each in of_these] == [DeliveryStatus.DELIVERED] * len(ids)

            await self.until(have_ended, "responses have not ended")
            for each in ids:
                found = await client.responses.retrieve(each)
                assert found.status == "completed", found
                assert found.output_text
            await self.until(are_delivered, "not delivered")
            told = self.receiver.requests[before:]
            assert len({each.headers["webhook-id"] for each in told}) == len(ids)
            of_all = [await self.site.services.store.responses.get(each) for each in ids]
            batch_ids = {str(each.batch_id) for each in of_all}
            for batch_id in batch_ids:
                await self.until(partial(self._has_ended, batch_id), "its batch has not ended")
            counts = [
                (await self.site.services.store.batches.get(each)).counts for each in batch_ids
            ]
            assert sum(each.completed for each in counts) == len(ids), counts
            made_of = await self.rows("SELECT id FROM batches WHERE hidden_for = 'responses'")
            assert len(made_of) == len(batch_ids) + self._batches, made_of
            self._batches += len(batch_ids)
            for each in ids:
                with contextlib.suppress(openai.NotFoundError):
                    await client.responses.delete(each)

    # -- what is left -----------------------------------------------------------------------

    async def _nothing_is_left(self) -> bool:
        """No lease, no row without its object and, after retention, no object without its row."""
        services = self.site.services
        for what, statement in _LEFT.items():
            if await self.rows(statement):
                self._left = what
                return False
        await expire_files(services)
        await sweep_orphans(services, 0)
        self._left = str([key async for key in services.storage.list("") if key != "database"])
        return self._left == "[]"

    async def rows(self, statement: str) -> list[Any]:
        async def work(connection: Any) -> list[Any]:
            return list(await connection.execute(text(statement)))

        return await self.site.services.store.database.read(work)


def _answer(request: dict[str, Any]) -> Any:
    body = json.dumps(request["body"]).encode()
    return json.loads(answer_to({MODEL}, request["url"], body)[1])


async def _deleted(client: openai.AsyncOpenAI, file_id: str) -> None:
    """A second attempt, of the SDK's own, is told that there is none: it is gone."""
    with contextlib.suppress(openai.NotFoundError):
        await client.files.delete(file_id)


@contextlib.asynccontextmanager
async def installed(
    folder: Path,
    cluster: PostgresCluster,
    s3: S3Credentials,
    patch: pytest.MonkeyPatch,
) -> AsyncIterator[Installation]:
    """Everything but the processes, which :meth:`Installation.work` starts."""
    variables = {
        "AWS_ACCESS_KEY_ID": s3.access_key_id,
        "AWS_SECRET_ACCESS_KEY": s3.secret_access_key,
        "AWS_DEFAULT_REGION": s3.region,
    }
    for name, value in variables.items():
        patch.setenv(name, value)
    patch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    direct = cluster.url(await cluster.create_database())
    async with contextlib.AsyncExitStack() as stack:
        site = await stack.enter_async_context(
            open_site(
                folder,
                lease_seconds=2.0,
                look_seconds=0.3,
                poll_seconds=0.2,
                database_url=direct,
                storage=f"s3://{BUCKET}/{folder.name}",
                allow_private_urls=True,
                chunk_requests=5,
            )
        )
        database = await stack.enter_async_context(
            PostgresProxy(cluster.folder / ".s.PGSQL.5432").running()
        )
        store = await stack.enter_async_context(HttpProxy(s3.endpoint_url).running())
        receiver = stack.enter_context(running_receiver(tls=False))
        hooks = await stack.enter_async_context(
            HttpProxy(f"http://127.0.0.1:{receiver.port}").running()
        )
        keys = site.services.store.api_keys
        one, other = await keys.create(TENANT, "test"), await keys.create("other", "test")
        await site.services.store.webhook_endpoints.create(
            TENANT, name="ours", url=f"{hooks.url}/hook", event_types=EVENTS
        )
        site.settings["database_url"] = database.url(direct)
        patch.setenv("AWS_ENDPOINT_URL", store.url)
        nursery = await stack.enter_async_context(
            running_nursery("tests.network.actor", **variables, AWS_ENDPOINT_URL=store.url)
        )
        stack.enter_context(hurried(**site.hurry))
        settings = read_settings(**site.settings)
        # It waits for its thread, whose requests pass through this loop.
        api = await entered(stack, served(settings, (one.secret, other.secret)))
        client = await stack.enter_async_context(HttpProxy(api.url.removesuffix("/v1")).running())
        proxies = {"database": database, "store": store, "receiver": hooks, "client": client}
        server = await stack.enter_async_context(_engine_server())
        proxies["engine"] = await stack.enter_async_context(HttpProxy(server).running())
        yield Installation(site, nursery, api, receiver, proxies)


@contextlib.asynccontextmanager
async def _engine_server() -> AsyncIterator[str]:
    """A server that answers as the stub does; its URL."""

    async def answer(request: web.Request) -> web.Response:
        status, body = answer_to({MODEL}, request.path, await request.read())
        return web.Response(status=status, body=body, content_type="application/json")

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def entered(stack: contextlib.AsyncExitStack, manager: Any) -> Any:
    """Enter and leave a manager in a thread: it blocks, and needs this loop meanwhile."""

    async def leave() -> None:
        await asyncio.to_thread(manager.__exit__, None, None, None)

    value = await asyncio.to_thread(manager.__enter__)
    stack.push_async_callback(leave)
    return value
