"""The straight way to vLLM's handlers: ASGI middleware for ``vllm serve``, under ``line_stream``.

Most of what the web framework does for a small request is to find out, each time anew, which
handler it is for and what the handler wants. Here that is found out once. A request whose body
is what the handler's model accepts goes to the handler at once, with the same arguments, under
the same exception handlers; everything else (another route, a body that is refused, a form)
takes the usual way, and is answered as it always was.

Here a request gets its cache salt as well, from ``line_stream``: on the straight way as a field
of what the handler is given, on the usual way within its body.

So does its priority, where ``LINE_PRIORITY_VARIABLE`` has one: behind the requests of others.

vLLM runs a handler in a task of its own, beside another that waits for the client to go. A line's
handler runs in the line's task, which ``line_stream`` cancels.

Only vLLM loads it, as ``line_stream``, inside the engine's own process: of what is installed there
it imports what the server itself is made of.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from starlette.requests import Request

if TYPE_CHECKING or __package__:
    from batchyard.engine.middleware import short_prompts
    from batchyard.engine.middleware.cache_salt import FIELD, combined, spliced
    from batchyard.engine.middleware.line_stream import (
        CANCELS_KEY,
        LINE_PRIORITY_VARIABLE,
        SALT_KEY,
    )
else:
    # In the engine's process, where this folder is on the path and Batchyard is not.
    import short_prompts
    from cache_salt import FIELD, combined, spliced
    from line_stream import CANCELS_KEY, LINE_PRIORITY_VARIABLE, SALT_KEY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Message = MutableMapping[str, Any]
    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_JSON: Final = b"application/json"
_NOT_NEEDED: Final = frozenset({"CORSMiddleware", "PrometheusInstrumentatorMiddleware"})
"""For browsers, and for counting HTTP requests: a line is neither."""
_INNERMOST: Final = "ExceptionMiddleware"
_CHECK_OF_CONTENT_TYPE: Final = "validate_json_request"
"""vLLM's only dependency of a JSON route: what it checks is checked here."""
OWN_TASK: Final = "with_cancellation.<locals>.wrapper"
"""What vLLM makes of a handler that is to end when its client goes."""


class _Route(NamedTuple):
    """A handler ``endpoint(<body>=model, <request>=request)`` that gives a response."""

    endpoint: Callable[..., Awaitable[Any]]
    in_this_task: Callable[..., Awaitable[Any]] | None
    """The same without a task of its own; None: it has none, or it is not known how."""
    model: Any
    body_name: str
    request_name: str


class DirectRoutes:
    """The middleware. Of an application that it does not understand it changes nothing."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._routes: dict[str, _Route] | None = None
        self._direct: Application = app
        self._line_priority = int(os.environ.get(LINE_PRIORITY_VARIABLE, "0"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._routes is None:
            # The routes are complete when the first request comes, and not before.
            self._routes = self._look_up(scope)
            _remember_variables()
            short_prompts.skip_threads(scope.get("app"))
        route = self._routes.get(scope["path"])
        salt = scope.get(SALT_KEY)
        is_json = dict(scope["headers"]).get(b"content-type") == _JSON
        if not is_json or (route is None and salt is None):
            await self._app(scope, receive, send)
            return
        body = await _whole_body(receive)
        if body is None:
            return
        if route is None:
            body = body if salt is None else spliced(body, salt)
            await self._app(*_replaced(scope, body, receive), send)
            return
        try:
            parsed = route.model.model_validate(json.loads(body))
        except Exception:  # noqa: BLE001 - the usual way finds it again, and words the refusal
            await self._app(scope, _again(body, receive), send)
            return
        if salt is not None and hasattr(parsed, FIELD):
            setattr(parsed, FIELD, combined(salt, getattr(parsed, FIELD)))
        # Only lines have the key; a live request comes the same way without it.
        if SALT_KEY in scope:
            short_prompts.note_body(body)
            if self._line_priority and getattr(parsed, "priority", None) == 0:
                parsed.priority = self._line_priority
        await self._direct({**scope, "batchyard.call": (route, parsed)}, receive, send)

    def _look_up(self, scope: Scope) -> dict[str, _Route]:
        direct = _without_the_needless(self._app)
        if direct is None:
            return {}
        self._direct = direct
        routes: dict[str, _Route] = {}
        for route in scope["app"].routes:
            found = _understood(route)
            if found is not None:
                # As in routing: the first of a path wins.
                routes.setdefault(route.path, found)
        return routes


def _remember_variables() -> None:
    """Let vLLM read its environment once, as its other processes do, and not for each token."""
    remember = getattr(sys.modules.get("vllm.envs"), "enable_envs_cache", None)
    # Without it the engine is slower, and nothing else.
    with contextlib.suppress(Exception):
        if remember is not None:
            remember()


def _without_the_needless(app: Any) -> Application | None:
    """Copies of the middlewares around the router, fewer, and the handler itself in the middle."""
    if type(app).__name__ == _INNERMOST:
        last = copy.copy(app)
        last.app = _call
        return last  # type: ignore[no-any-return]  # a copy of `app`, of the same type
    if not hasattr(app, "app"):
        return None
    below = _without_the_needless(app.app)
    if below is None or type(app).__name__ in _NOT_NEEDED:
        return below
    again = copy.copy(app)
    again.app = below
    return again  # type: ignore[no-any-return]  # see above


def _understood(route: Any) -> _Route | None:
    """The handler of a POST that wants one JSON body and the request, and nothing else."""
    dependant = getattr(route, "dependant", None)
    if dependant is None or "POST" not in (route.methods or ()) or "{" in route.path:
        return None
    checks = [getattr(each.call, "__name__", "") for each in dependant.dependencies]
    wanted = (
        dependant.path_params or dependant.query_params or dependant.header_params
    ) or dependant.cookie_params
    if wanted or checks not in ([], [_CHECK_OF_CONTENT_TYPE]) or len(dependant.body_params) != 1:
        return None
    (body,) = dependant.body_params
    model = body.field_info.annotation
    if not hasattr(model, "model_validate") or not dependant.request_param_name:
        return None
    endpoint = route.endpoint
    has_own_task = getattr(getattr(endpoint, "__code__", None), "co_qualname", "") == OWN_TASK
    in_this_task = getattr(endpoint, "__wrapped__", None) if has_own_task else None
    return _Route(endpoint, in_this_task, model, body.name, dependant.request_param_name)


async def _call(scope: Scope, receive: Receive, send: Send) -> None:
    route, parsed = scope.pop("batchyard.call")
    request = Request(scope, receive, send)
    arguments = {route.body_name: parsed, route.request_name: request}
    endpoint = route.endpoint
    if route.in_this_task is not None and CANCELS_KEY in scope:
        scope[CANCELS_KEY]()
        endpoint = route.in_this_task
    response = await endpoint(**arguments)
    if response is not None:
        # None: the client was gone first.
        await response(scope, receive, send)


async def _whole_body(receive: Receive) -> bytes | None:
    """None: the client is gone before its body was complete."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replaced(scope: Scope, body: bytes, receive: Receive) -> tuple[Scope, Receive]:
    """The same request with another body."""
    headers = [
        (name, b"%d" % len(body) if name == b"content-length" else value)
        for name, value in scope["headers"]
    ]
    return {**scope, "headers": headers}, _again(body, receive)


def _again(body: bytes, receive: Receive) -> Receive:
    """A channel that gives the whole body first."""
    unread: list[bytes] = [body]

    async def receive_again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return receive_again
