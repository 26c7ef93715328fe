"""``/batches/{id}/results``: lines while the batch runs, as OpenAI's SDK and others get them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import openai
import pytest
from openai import HttpxBinaryResponseContent
from starlette.responses import StreamingResponse

from batchyard.api.http.head import HeadRequests
from batchyard.engine.stub.stub import StubEngine
from batchyard.files.delete import delete_file
from batchyard.results.results import answered
from batchyard.services.keys import segment_key, segments_prefix
from batchyard.services.segments.segments import encode_entry, put_bytes
from tests.api.conftest import served
from tests.api.test_openapi import check
from tests.hurry import hurried
from tests.pages import block, replaced
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line
from tests.up.programs import bash, run_python

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.types import Message, Receive, Scope, Send

    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from tests.api.conftest import Api


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """A server that looks for new lines at each request."""
    return settings.model_copy(update={"flush_seconds": 0.0})


@pytest.fixture
def yard(services: Services, tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(services, tmp_path, StubEngine())
    yard.set(flush_seconds=0.05)
    yard.use(StubEngine())
    with hurried():
        yield yard


async def running(yard: Yard, count: int = 10, *more: str) -> str:
    """A batch of ``id-0``, ``id-1``, …, and ``more``, none of which is finished."""
    names = [*(f"id-{n}" for n in range(count)), *more]
    return await yard.prepared([chat_line(name) for name in names], tenant="one")


async def segment(
    yard: Yard, batch_id: str, *ordinals: int, epoch: int = 1, chunk: int = 0, size: int = 0
) -> None:
    """What a runner writes that has answers for these requests."""
    body = b'{"text": "%s"}' % (b"x" * size)
    entries = [encode_entry(each, answered(f"id-{each}", "req_1", 200, body)) for each in ordinals]
    key = segment_key(batch_id, chunk, epoch, 0)
    await put_bytes(yard.services.storage, key, entries)


def names(text: str) -> list[str]:
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def page(api: Api, batch_id: str, **asked: Any) -> tuple[list[str], httpx.Response]:
    with api.http() as client:
        answer = client.get(f"/batches/{batch_id}/results", params=asked)
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["content-length"]) == len(answer.content)
    return names(answer.text), answer


async def test_openais_client_follows_a_batch_through_two_retries_restarts_and_the_end(
    settings: Settings, keys: tuple[str, str], yard: Yard
) -> None:
    """It keeps the cursor of its last page; each time another server answers."""
    batch_id = await running(yard, 30)
    found: list[str] = []
    after = ""

    def read(api: Api, limit: int) -> bool:
        nonlocal after
        answer = api.openai(max_retries=0).get(
            f"/batches/{batch_id}/results",
            cast_to=HttpxBinaryResponseContent,
            options={"params": {"after": after, "limit": limit}},
        )
        found.extend(names(answer.text))
        headers = answer.response.headers
        after = headers["x-next-after"]
        return headers["x-has-more"] == "true"

    for epoch, ordinals in enumerate([range(8), range(4, 14), range(2, 20)], start=1):
        await segment(yard, batch_id, *ordinals, epoch=epoch)
        with served(settings, keys) as api:
            assert await asyncio.to_thread(read, api, 5)
    await yard.finish(batch_id)
    with served(settings, keys) as api:
        assert await asyncio.to_thread(read, api, 5)
    storage = yard.services.storage
    for key in [each async for each in storage.list(segments_prefix(batch_id))]:
        await storage.delete(key)
    with served(settings, keys) as api:
        while await asyncio.to_thread(read, api, 5):
            continue
    assert sorted(found) == sorted(f"id-{n}" for n in range(30))


async def test_pages_have_their_length_their_cursor_and_no_json_type(api: Api, yard: Yard) -> None:
    batch_id = await running(yard)
    await segment(yard, batch_id, 4, 2, 3)
    found, answer = page(api, batch_id, limit=2)
    assert found == ["id-4", "id-2"]
    assert answer.headers["content-type"].startswith("text/jsonl")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-has-more"] == "true"
    cursor = answer.headers["x-next-after"]
    assert page(api, batch_id, after=cursor)[0] == ["id-3"]
    with api.http() as client:
        again = client.get(f"/batches/{batch_id}/results", headers={"last-event-id": cursor})
    assert names(again.text) == ["id-3"]


async def test_the_order_of_the_input_and_one_kind_of_lines_can_be_asked_for(
    api: Api, yard: Yard
) -> None:
    batch_id = await running(yard, 4)
    await segment(yard, batch_id, 1, 3)
    found, answer = page(api, batch_id, order="input")
    assert (found, answer.headers["x-next-after"]) == ([], "i0")
    await segment(yard, batch_id, 0, epoch=2)
    assert page(api, batch_id, order="input")[0] == ["id-0", "id-1"]
    assert page(api, batch_id, kind="error")[0] == []
    await yard.services.store.batches.cancel(batch_id)
    await yard.finish(batch_id)
    assert page(api, batch_id, kind="error")[0] == ["id-2"]
    assert page(api, batch_id, kind="output", order="input")[0] == ["id-0", "id-1", "id-3"]
    found, answer = page(api, batch_id, order="input")
    assert found == ["id-0", "id-1", "id-2", "id-3"]
    assert answer.headers["x-has-more"] == "false"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"after": "batch_1"}, "after"),
        ({"after": "c99.0"}, "after"),
        ({"after": "i1", "order": "completion"}, "after"),
        ({"order": "desc"}, "order"),
        ({"kind": "errors"}, "kind"),
        ({"limit": "10001"}, "limit"),
        ({"limit": "-1"}, "limit"),
    ],
)
async def test_what_cannot_be_read_is_refused(
    api: Api, yard: Yard, asked: dict[str, str], param: str
) -> None:
    batch_id = await running(yard, 2)
    with api.http() as client:
        answer = client.get(f"/batches/{batch_id}/results", params=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_another_tenants_results_are_not_found(api: Api, yard: Yard) -> None:
    batch_id = await running(yard, 2)
    await segment(yard, batch_id, 0)
    for path in ("results", "results/id-0", "results?custom_id=id-0"):
        with api.http(api.other_key) as client:
            foreign = client.get(f"/batches/{batch_id}/{path}")
            unknown = client.get(f"/batches/{batch_id[:-1]}x/{path}")
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.json() == json.loads(unknown.text.replace(f"{batch_id[:-1]}x", batch_id))


@pytest.mark.parametrize(
    "custom_id",
    ["plain", "a/b//c", "..", ".", "ä ö%2F?#&=+\u2028", 'q"\\', "results", "😀", " x "],
)
async def test_one_line_is_read_by_any_custom_id(api: Api, yard: Yard, custom_id: str) -> None:
    batch_id = await running(yard, 0, custom_id)
    path = f"/v1/batches/{batch_id}/results/{quote(custom_id, safe='')}".encode()
    # Sent raw: HTTP libraries take "." and ".." out of a path.
    head = api.head("GET", "/x").replace(b"/v1/x", path)
    assert b"404" in api.raw(head).partition(b"\r\n")[0]
    await yard.finish(batch_id)
    by_path = api.raw(head)
    assert b"content-type: application/json" in by_path.lower()
    _, one = page(api, batch_id, custom_id=custom_id)
    assert json.loads(one.text)["custom_id"] == custom_id
    assert by_path.partition(b"\r\n\r\n")[2] == one.content


async def test_a_line_that_is_not_finished_and_one_that_is_unknown_have_two_answers(
    api: Api, yard: Yard
) -> None:
    batch_id = await running(yard, 2)
    client = api.openai()
    codes = {"id-1": "result_not_ready", "id-2": "custom_id_not_found"}
    for custom_id, code in codes.items():
        with pytest.raises(openai.NotFoundError) as refused:
            client.get(f"/batches/{batch_id}/results/{custom_id}", cast_to=object)
        assert (refused.value.code, refused.value.param) == (code, "custom_id")
    await segment(yard, batch_id, 1)
    line: Any = client.get(f"/batches/{batch_id}/results/id-1", cast_to=object)
    assert line["response"]["status_code"] == 200


async def test_what_each_line_used_is_read_by_its_tenant_when_the_batch_has_ended(
    api: Api, yard: Yard
) -> None:
    asked = [chat_line(f"id-{n}") for n in range(3)]
    batch_id = await yard.prepared(asked, tenant="one", ledger=True)

    def read(key: str | None = None) -> httpx.Response:
        with api.http(key) as client:
            return client.get(f"/batches/{batch_id}/ledger")

    early = read()
    assert (early.status_code, early.json()["error"]["code"]) == (404, "result_not_ready")
    batch = await yard.finish(batch_id)
    answer = check(api, "/v1/batches/{batch_id}/ledger", "GET", {"batch_id": batch_id})
    rows = [json.loads(line) for line in answer.text.splitlines()]
    assert [row["custom_id"] for row in rows] == ["id-0", "id-1", "id-2"]
    assert sum(row["total_tokens"] for row in rows) == batch.total_tokens
    assert read(api.other_key).status_code == 404


async def test_a_ledger_is_deleted_and_no_longer_counts_towards_the_stored_bytes(
    api: Api, yard: Yard
) -> None:
    batch_id = await yard.prepared([chat_line("a")], tenant="one", ledger=True)
    batch = await yard.finish(batch_id)
    address = f"/batches/{batch_id}/ledger"
    with api.http(api.other_key) as other:
        assert other.delete(address).status_code == 404
    with api.http() as client:
        for file_id in (batch.input_file_id, batch.output_file_id):
            client.delete(f"/files/{file_id}")
        assert (await yard.services.store.tenants.usage("one")).stored_bytes > 0
        assert client.delete(address).json()["deleted"] is True
        assert (await yard.services.store.tenants.usage("one")).stored_bytes == 0
        for answer in (client.get(address), client.delete(address)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "results_gone")


async def test_a_batch_without_a_ledger_has_none(api: Api, yard: Yard) -> None:
    batch_id = await running(yard)
    with api.http() as client:
        answer = client.get(f"/batches/{batch_id}/ledger")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_ledger")


async def test_deleted_results_have_a_clear_answer(api: Api, yard: Yard) -> None:
    batch_id = await running(yard, 2)
    batch = await yard.finish(batch_id)
    assert len(page(api, batch_id)[0]) == 2
    await delete_file(yard.services, "one", str(batch.output_file_id))
    for path in ("results", "results/id-0", "results?order=input"):
        with api.http() as client:
            answer = client.get(f"/batches/{batch_id}/{path}")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "results_gone"
        assert "no longer kept" in error["message"]


async def test_answers_are_as_described(api: Api, yard: Yard) -> None:
    batch_id = await running(yard, 2)
    await segment(yard, batch_id, 1)
    ids = {"batch_id": batch_id}
    assert check(api, "/v1/batches/{batch_id}/results", "GET", ids).status_code == 200
    one = "/v1/batches/{batch_id}/results/{custom_id}"
    for custom_id, status in (("id-1", 200), ("id-0", 404), ("x", 404)):
        found = {**ids, "custom_id": custom_id}
        assert check(api, one, "GET", found).status_code == status


async def test_who_does_not_read_costs_nobody_else(api: Api, yard: Yard) -> None:
    """It asks for 20 MiB and reads nothing, while the others follow the same batch."""
    batch_id = await running(yard)
    await segment(yard, batch_id, *range(5), size=4 * 1024**2)
    with socket.create_connection(("127.0.0.1", api.port)) as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.sendall(api.head("GET", f"/batches/{batch_id}/results"))
        await segment(yard, batch_id, 7, chunk=1)
        found, answer = page(api, batch_id, limit=4)
        assert len(found) == 4
        after = answer.headers["x-next-after"]
        assert page(api, batch_id, after=after)[0] == ["id-4", "id-7"]


async def test_an_answer_that_breaks_off_is_no_whole_one(
    api: Api, yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object store fails midway: the client sees it, and has the same page from it again."""
    batch_id = await running(yard)
    await segment(yard, batch_id, 0, 1, 2, size=100_000)
    await segment(yard, batch_id, 3, chunk=1)
    lost = segment_key(batch_id, 1, 1, 0)
    assert page(api, batch_id)[0] == ["id-0", "id-1", "id-2", "id-3"]
    kept = b"".join([part async for part in yard.services.storage.get(lost)])
    await yard.services.storage.delete(lost)
    with api.http() as client, pytest.raises(httpx.RemoteProtocolError):
        client.get(f"/batches/{batch_id}/results")
    await put_bytes(yard.services.storage, lost, [kept])
    assert len(page(api, batch_id)[0]) == 4


# -- what the page says ---------------------------------------------------------------------------


PAGE = "docs/how-to/use-the-api.md"


def programs_environment(api: Api) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"OPENAI_BASE_URL": api.url, "OPENAI_API_KEY": api.key, "PATH": path}


async def test_the_pages_program_follows_a_batch_to_its_end(
    api: Api, yard: Yard, tmp_path: Path
) -> None:
    batch_id = await running(yard, 5)
    await segment(yard, batch_id, 3)
    program = replaced(block(PAGE, "follow-python"), {"batch_abc123": batch_id})
    following = asyncio.create_task(
        asyncio.to_thread(run_python, program, tmp_path, programs_environment(api))
    )
    async with asyncio.timeout(PATIENCE * 60):
        while not await yard.services.store.completions.of(batch_id):  # noqa: ASYNC110 - the database tells nobody
            await asyncio.sleep(0.02)
    await yard.finish(batch_id)
    printed = (await following).split()
    assert printed[0] == "id-3"
    assert sorted(printed) == [f"id-{n}" for n in range(5)]


async def test_the_pages_commands_read_one_page_after_the_other(
    api: Api, yard: Yard, tmp_path: Path
) -> None:
    batch_id = await running(yard, 3)
    command = replaced(block(PAGE, "follow-curl"), {"batch_abc123": batch_id})
    await segment(yard, batch_id, 2)
    twice = f"{command}\ntouch read; until [ -e more ]; do sleep 0.05; done\n{command}"
    reading = asyncio.create_task(
        asyncio.to_thread(bash, twice, tmp_path, programs_environment(api))
    )
    async with asyncio.timeout(PATIENCE * 60):
        while not (tmp_path / "read").exists():  # noqa: ASYNC110 - a program of its own makes it
            await asyncio.sleep(0.02)
    await segment(yard, batch_id, 0, chunk=1)
    (tmp_path / "more").touch()
    await reading
    assert names((tmp_path / "results.jsonl").read_text()) == ["id-2", "id-0"]


# -- HEAD -----------------------------------------------------------------------------------------


async def test_head_answers_where_get_does_with_its_headers_and_no_body(
    api: Api, yard: Yard
) -> None:
    batch_id = await running(yard, 3)
    batch = await yard.finish(batch_id)
    paths = [
        "/v1/batches",
        f"/v1/batches/{batch_id}",
        f"/v1/batches/{batch_id}/results",
        f"/v1/batches/{batch_id}/results/id-1",
        f"/v1/batches/{batch_id}/results/unknown",
        f"/v1/batches/{batch_id}/events",
        "/v1/batches/batch_unknown",
        "/v1/files",
        f"/v1/files/{batch.output_file_id}/content",
        "/v1/webhook_endpoints",
        "/v1/deliveries",
        "/v1/nothing",
        "/livez",
        "/openapi.json",
        "/",
    ]
    own = {"x-request-id", "date"}
    with api.http(follow_redirects=False) as client:
        for path in paths:
            url = f"http://127.0.0.1:{api.port}{path}"
            get, head = client.get(url), client.head(url)
            assert head.content == b""
            assert head.status_code == get.status_code, path
            assert {k: v for k, v in head.headers.items() if k not in own} == {
                k: v for k, v in get.headers.items() if k not in own
            }, path
            assert head.headers["x-request-id"].startswith("req_")


async def test_head_of_a_download_reads_no_more_than_its_beginning(api: Api, yard: Yard) -> None:
    file = api.openai().files.create(file=b'{"a":"%s"}' % (b"x" * 900_000), purpose="batch")
    content = f"/v1/files/{file.id}/content"
    raw = api.raw(api.head("HEAD", "/x").replace(b"/v1/x", content.encode()))
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"content-length: 900008" in head.lower()
    assert body == b""
    with api.http() as client:
        part = client.head(f"/files/{file.id}/content", headers={"range": "bytes=5-9"})
    assert (part.status_code, part.headers["content-length"]) == (206, "5")


async def test_a_handler_whose_answer_has_begun_is_not_asked_for_the_rest() -> None:
    made, sent = [], []

    async def blocks() -> AsyncIterator[bytes]:
        for number in range(100):
            made.append(number)
            yield b"x" * 1024

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["method"] == "GET"
        await StreamingResponse(blocks())(scope, receive, send)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "HEAD", "path": "/x", "headers": []}
    await HeadRequests(app)(scope, receive, send)
    assert made == [0]
    assert [each["type"] for each in sent] == ["http.response.start", "http.response.body"]
    assert sent[1]["body"] == b""
    assert scope["method"] == "HEAD"


def test_head_is_no_way_to_write_and_none_to_use_a_link_that_logs_in_once(api: Api) -> None:
    with api.http() as client:
        assert client.head("/batches/batch_1/cancel").status_code == 405
        root = f"http://127.0.0.1:{api.port}"
        assert client.head(f"{root}/login", params={"code": "x"}).status_code == 405
        client.headers.pop("authorization")
        assert client.head("/batches").status_code == 401


async def test_a_follower_that_is_cut_off_leaves_nothing_behind(api: Api, yard: Yard) -> None:
    batch_id = await running(yard)
    await segment(yard, batch_id, *range(6), size=2 * 1024**2)
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(api.http())
            answer = stack.enter_context(client.stream("GET", f"/batches/{batch_id}/results"))
            next(answer.iter_bytes(1024))
    assert len(page(api, batch_id)[0]) == 6
