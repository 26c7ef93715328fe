"""HEAD, answered wherever GET is: the same status and headers, and no body.

FastAPI's routes answer 405. Here the handler of GET runs until its answer begins, so that even the
largest download reads no more than its beginning.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from batchyard.api.http.session import LOGIN_PATH

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class _Answered(Exception):
    """The headers are out: the handler need not go on."""


class HeadRequests:
    """Let the handlers of GET answer HEAD too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # HEAD must not use up a link that logs in once.
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"] == LOGIN_PATH:
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send(message if message["type"] == "http.response.start" else _NO_BODY)
            if message["type"] == "http.response.body":
                raise _Answered

        with contextlib.suppress(_Answered):
            # A copy: the server must not forget that it was a HEAD.
            await self._app({**scope, "method": "GET"}, receive, send_head)


_NO_BODY: Message = {"type": "http.response.body", "body": b""}
