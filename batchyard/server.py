"""The API process: a composition root. Start it with ``uvicorn --factory``.

A new resource is a router in its own file, and an entry of ``_ROUTERS``.
"""

from __future__ import annotations

import secrets
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect

from batchyard import __version__
from batchyard.api.batches import batches, events, results
from batchyard.api.batches.batch_watch import BatchWatch
from batchyard.api.files import files, uploads
from batchyard.api.http.body import LingeringClose
from batchyard.api.http.errors import error_response, handle_errors, server_failed
from batchyard.api.http.head import HeadRequests
from batchyard.api.http.message_errors import is_for_messages
from batchyard.api.http.openapi import DescribedApi, document_text
from batchyard.api.http.route import operation_id
from batchyard.api.http.session import send_to_login
from batchyard.api.live import live, responses
from batchyard.api.messages import message_batches
from batchyard.api.operators import health, served_models, usage
from batchyard.api.webhooks import deliveries, webhook_endpoints
from batchyard.files.read_results import ResultsReader
from batchyard.logs import event_logger
from batchyard.page import actions, docs, login, new_batch, routes, static_files
from batchyard.page.failed_logins import FailedLogins
from batchyard.services.services import open_services
from batchyard.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from batchyard.settings import Settings

log = event_logger(__name__)

_ROUTERS = (
    files.router,
    uploads.router,
    batches.router,
    message_batches.router,
    events.router,
    results.router,
    served_models.router,
    webhook_endpoints.router,
    deliveries.router,
    usage.router,
    live.router,
    responses.router,
)
_PREFIX = "/v1"


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application; ``settings`` None: from the environment. Opens its services as it starts."""
    settings = settings or read_settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def prefect_answers() -> bool | None:
            answers: bool | None = await app.state.catalogue.prefect_answers()
            return answers

        async with open_services(settings) as services:
            app.state.services = services
            app.state.results = ResultsReader(services)
            app.state.health = health.health_of(services, prefect_answers)
            async with BatchWatch(services.store.batches.live) as app.state.batch_watch:
                yield

    app = DescribedApi(
        title="Batchyard",
        version=__version__,
        description="OpenAI's Files, Uploads, Batches and Webhooks, and Anthropic's Message "
        "Batches, on your own GPUs.",
        servers=[{"url": "/"}],
        lifespan=lifespan,
        redirect_slashes=False,  # a redirect would lose an upload's body
        docs_url=None,  # ours loads nothing from other hosts
        redoc_url=None,
        generate_unique_id_function=operation_id,
    )
    handle_errors(app)
    for router in _ROUTERS:
        app.include_router(router, prefix=_PREFIX)
    app.include_router(health.router)
    send_to_login(app)
    app.state.failed_logins = FailedLogins()
    for page in (login.router, docs.router, routes.router, actions.router, new_batch.router):
        app.include_router(page)
    app.mount(static_files.PATH, static_files.PageFiles())
    app.add_middleware(HeadRequests)
    app.add_middleware(RequestIds)
    app.add_middleware(LingeringClose)  # the outermost: it closes after answers of RequestIds too
    return app


class RequestIds:
    """``x-request-id`` on every answer, and an answer to every exception that is left.

    Anthropic's SDKs read ``request-id``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_for_messages(scope["path"]):
                    headers["request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            log.info("api.client_left", request=request_id, path=scope["path"])
        except Exception as error:
            log.error(
                "api.failed",
                cause=error,
                request=request_id,
                method=scope["method"],
                path=scope["path"],
            )
            if has_started:
                # The connection breaks off, so that the client sees that something is missing.
                raise
            await error_response(server_failed(), scope)(scope, receive, send_with_id)


if __name__ == "__main__":
    sys.stdout.write(document_text(create_app()))
