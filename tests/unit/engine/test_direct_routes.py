"""The straight way to a handler answers as the usual way does; what it cannot do goes that way."""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from batchyard.engine.middleware import direct_routes
from batchyard.engine.middleware.cache_salt import combined
from batchyard.engine.middleware.direct_routes import DirectRoutes
from batchyard.engine.middleware.line_stream import (
    CANCELS_KEY,
    LINE_PRIORITY_VARIABLE,
    SALT_KEY,
)
from tests.contract.engine.conftest import ENGINE_PYTHON, require_vllm

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Application = Callable[..., Awaitable[None]]


class Body(BaseModel):
    text: str
    number: int = 1


def validate_json_request(raw_request: Request) -> None:
    """Has the name of vLLM's own check."""


async def another_check(raw_request: Request) -> None:
    raise HTTPException(403, "not for you")


class SaltedBody(Body):
    cache_salt: str | None = None


class UrgentBody(Body):
    priority: int = 0


class Marked(Exception):
    pass


class Stamp:
    """An operator's own middleware: it counts, and changes what comes out."""

    def __init__(self, app: Application) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        async def stamped(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"yes")]
            await send(message)

        await self.app(scope, receive, stamped)


def with_cancellation(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Has the name of vLLM's own decorator, and does what it does."""

    @functools.wraps(handler)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await asyncio.create_task(handler(*args, **kwargs))  # type: ignore[arg-type]

    return wrapper


def make_app() -> FastAPI:
    app = FastAPI()
    ways = app.state.ways = []

    def way(request: Request) -> str:
        # FastAPI's own way leaves this in the scope.
        return "usual" if "fastapi_inner_astack" in request.scope else "direct"

    @app.exception_handler(Marked)
    async def on_marked(request: Request, error: Marked) -> JSONResponse:
        return JSONResponse({"marked": str(error)}, 418)

    @app.post("/echo", dependencies=[Depends(validate_json_request)])
    async def echo(request: Body, raw_request: Request) -> JSONResponse:
        ways.append(way(raw_request))
        return JSONResponse({**request.model_dump(), "path": raw_request.url.path})

    @app.post("/fails", dependencies=[Depends(validate_json_request)])
    async def fails(request: Body, raw_request: Request) -> JSONResponse:
        ways.append(way(raw_request))
        raise Marked(request.text)

    @app.post("/checked", dependencies=[Depends(another_check)])
    async def checked(request: Body, raw_request: Request) -> JSONResponse:
        raise AssertionError

    @app.post("/queried")
    async def queried(
        request: Body, raw_request: Request, more: Annotated[int, Query()]
    ) -> JSONResponse:
        ways.append(way(raw_request))
        return JSONResponse({"more": more})

    @app.post("/salted", dependencies=[Depends(validate_json_request)])
    async def salted(request: SaltedBody, raw_request: Request) -> JSONResponse:
        ways.append(way(raw_request))
        return JSONResponse(request.model_dump())

    @app.post("/urgent", dependencies=[Depends(validate_json_request)])
    async def urgent(request: UrgentBody, raw_request: Request) -> JSONResponse:
        return JSONResponse({"priority": request.priority})

    @app.post("/salted-query")
    async def salted_query(
        request: SaltedBody, raw_request: Request, more: Annotated[int, Query()] = 1
    ) -> JSONResponse:
        ways.append(way(raw_request))
        return JSONResponse(request.model_dump())

    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    app.add_middleware(Stamp)
    app.add_middleware(DirectRoutes)
    return app


async def post(
    app: FastAPI,
    path: str,
    content: bytes,
    content_type: str = "application/json",
    *,
    salt: str | None = None,
) -> httpx.Response:
    async def as_from_a_line(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        await app({**scope, SALT_KEY: salt}, receive, send)

    transport = httpx.ASGITransport(as_from_a_line)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        return await client.post(path, content=content, headers={"content-type": content_type})


BODY = json.dumps({"text": "é\U0001f600", "number": 7}).encode()


async def test_a_good_body_goes_straight_to_its_handler() -> None:
    app = make_app()

    answer = await post(app, "/echo", BODY)

    assert answer.json() == {"text": "é\U0001f600", "number": 7, "path": "/echo"}
    assert app.state.ways == ["direct"]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"number": 1}', b'{"text": 1}', b"", b"\xff"])
async def test_a_bad_body_is_refused_as_it_always_was(content: bytes) -> None:
    """The same status and the same words as without the middleware."""
    app, plain = make_app(), make_app()
    plain.user_middleware.pop(0)

    answer, usual = await post(app, "/echo", content), await post(plain, "/echo", content)

    assert 400 <= answer.status_code < 500
    assert (answer.status_code, answer.content) == (usual.status_code, usual.content)
    assert app.state.ways == []


async def test_another_content_type_goes_the_usual_way() -> None:
    app = make_app()

    answer = await post(app, "/echo", BODY, "application/json; charset=utf-8")

    assert answer.status_code == 200
    assert app.state.ways == ["usual"]


async def test_the_applications_exception_handlers_answer() -> None:
    app = make_app()

    answer = await post(app, "/fails", BODY)

    assert (answer.status_code, answer.json()) == (418, {"marked": "é\U0001f600"})
    assert app.state.ways == ["direct"]


async def test_a_dependency_that_is_not_known_is_not_left_out() -> None:
    assert (await post(make_app(), "/checked", BODY)).status_code == 403


async def test_a_handler_that_wants_more_is_called_the_usual_way() -> None:
    app = make_app()

    answer = await post(app, "/queried?more=3", BODY)

    assert answer.json() == {"more": 3}
    assert app.state.ways == ["usual"]


async def test_an_operators_own_middleware_is_kept() -> None:
    app = make_app()

    answer = await post(app, "/echo", BODY)

    assert answer.headers["x-stamp"] == "yes"
    assert app.state.ways == ["direct"]


async def test_a_route_that_is_not_there_is_not_found() -> None:
    assert (await post(make_app(), "/nowhere", BODY)).status_code == 404


@pytest.mark.parametrize(("path", "way"), [("/salted", "direct"), ("/salted-query", "usual")])
async def test_a_lines_cache_salt_reaches_the_handler_on_either_way(path: str, way: str) -> None:
    app = make_app()

    answer = await post(app, path, BODY, salt="s")

    assert answer.json() == {"text": "é\U0001f600", "number": 7, "cache_salt": "s"}
    assert app.state.ways == [way]


@pytest.mark.parametrize("path", ["/salted", "/salted-query"])
async def test_a_body_cannot_get_around_the_salt(path: str) -> None:
    body = b'{"text": "", "cache_salt": "a", "cache_salt": "another tenant\'s"}'

    answer = await post(make_app(), path, body, salt="s")

    assert answer.json()["cache_salt"] == combined("s", "another tenant's")


async def test_without_a_salt_a_body_keeps_its_own() -> None:
    body = b'{"text": "", "cache_salt": "mine"}'

    for path in ("/salted", "/salted-query"):
        assert (await post(make_app(), path, body)).json()["cache_salt"] == "mine"


async def test_a_handler_without_the_field_is_called_as_ever() -> None:
    app = make_app()

    answer = await post(app, "/echo", BODY, salt="s")

    assert answer.json() == {"text": "é\U0001f600", "number": 7, "path": "/echo"}
    assert app.state.ways == ["direct"]


async def test_the_handler_of_a_line_runs_in_its_task() -> None:
    """Which is told to be what ends it; that of a live request keeps a task of its own."""
    app = FastAPI()
    tasks: list[asyncio.Task[Any] | None] = []
    told: list[str] = []

    @app.post("/task")
    @with_cancellation
    async def task(request: Body, raw_request: Request) -> JSONResponse:
        tasks.append(asyncio.current_task())
        return JSONResponse({})

    app.add_middleware(DirectRoutes)

    async def as_a_line(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        line = {SALT_KEY: None, CANCELS_KEY: lambda: told.append("cancels")}
        await app({**scope, **line}, receive, send)

    for application, is_same in ((as_a_line, True), (app, False)):
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            answer = await client.post("/task", json={"text": ""})
        assert answer.status_code == 200
        assert (tasks[-1] is asyncio.current_task()) is is_same
    assert told == ["cancels"]


async def test_of_short_requests_those_of_lines_need_no_thread() -> None:
    app = FastAPI()
    threads: list[int] = []

    @app.post("/thread")
    async def thread(request: Body, raw_request: Request) -> JSONResponse:
        loop = asyncio.get_running_loop()
        threads.append(await loop.run_in_executor(executor, threading.get_ident))
        return JSONResponse({})

    app.add_middleware(DirectRoutes)
    with ThreadPoolExecutor(1) as executor:
        app.state.engine_client = SimpleNamespace(renderer=SimpleNamespace(_executor=executor))
        # Each request has a task of its own, as in the server.
        await asyncio.create_task(post(app, "/thread", BODY))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            await client.post("/thread", json={"text": ""})
    assert [each == threading.get_ident() for each in threads] == [True, False]


@pytest.mark.vllm
def test_vllm_gives_handlers_tasks_of_their_own_as_we_know_it() -> None:
    """Otherwise lines would be answered as well, by a way that costs more."""
    require_vllm()
    sources = ENGINE_PYTHON.parents[1].glob("lib/python*/site-packages/vllm/entrypoints/**/*.py")
    (source,) = [each for each in sources if "def with_cancellation(" in each.read_text()]
    (found,) = [
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "with_cancellation"
    ]
    (wrapper,) = [node for node in found.body if isinstance(node, ast.AsyncFunctionDef)]
    assert f"{found.name}.<locals>.{wrapper.name}" == direct_routes.OWN_TASK
    assert [ast.unparse(each) for each in wrapper.decorator_list] == [
        "functools.wraps(handler_func)"
    ]


async def test_a_line_is_put_behind_live_requests_where_the_engine_has_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A live request comes the same way, and keeps its place; so does a line that names its own."""

    async def priority(app: FastAPI, body: bytes = BODY) -> int:
        return int((await post(app, "/urgent", body)).json()["priority"])

    assert await priority(make_app()) == 0
    monkeypatch.setenv(LINE_PRIORITY_VARIABLE, "1")
    app = make_app()
    assert await priority(app) == 1
    assert await priority(app, b'{"text": "", "priority": 5}') == 5
    transport = httpx.ASGITransport(app)
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        live = await client.post("/urgent", content=BODY, headers=headers)
    assert live.json() == {"priority": 0}


@pytest.mark.parametrize("error", [None, ValueError("VLLM_PORT is not a number")])
async def test_vllm_reads_its_environment_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """And not for each token. Where it cannot, requests are answered all the same."""
    remember = Mock(side_effect=error)
    monkeypatch.setitem(
        sys.modules, "vllm.envs", Mock(spec_set=["enable_envs_cache"], enable_envs_cache=remember)
    )
    app = make_app()

    answers = [await post(app, "/echo", BODY) for _ in range(2)]

    assert [each.status_code for each in answers] == [200, 200]
    remember.assert_called_once_with()
