"""``/livez``, ``/readyz`` and ``/metrics``: for the machines that watch this one, without a key."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from batchyard.api.http.api_error import ApiError
from batchyard.api.operators.metrics import metrics_page
from batchyard.errors import BatchyardError, ObjectNotFound
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.services.services import Services
    from batchyard.store.figures import Figures

log = event_logger(__name__)

T = TypeVar("T")

_KEPT_SECONDS = 5.0
_KEPT_TIMES = 10
"""No key is needed, so an answer is kept for five seconds, or for ten times what it took."""
_PATIENCE_SECONDS = 5.0
_NO_OBJECT = "health/no-such-object"

# No part of OpenAI's API, so not of its document.
router = APIRouter(include_in_schema=False)


class Kept(Generic[T]):
    """The last answer, for some seconds. One request asks, and all others wait."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._asking = asyncio.Lock()
        self._kept: tuple[float, T] | None = None

    async def answer(self) -> T:
        """The answer, which may be some seconds old."""
        async with self._asking:
            if self._kept is None or time.monotonic() > self._kept[0]:
                began = time.monotonic()
                found = await self._ask()
                now = time.monotonic()
                until = now + max(_KEPT_SECONDS, (now - began) * _KEPT_TIMES)
                self._kept = (until, found)
            return self._kept[1]


@dataclass(frozen=True, slots=True)
class Health:
    """What is asked again and again, of the services of one application."""

    figures: Kept[Figures | None]
    parts: Kept[dict[str, bool | None]]


def health_of(services: Services, prefect: Callable[[], Awaitable[bool | None]]) -> Health:
    """``prefect`` says whether Prefect's server answers; None: there is none."""

    async def parts() -> dict[str, bool | None]:
        asked = {
            "database": _works(services.store.figures.ping()),
            "storage": _works(_look_into(services)),
            "prefect": prefect(),
        }
        answers: list[bool | None] = await asyncio.gather(*asked.values())
        return dict(zip(asked, answers, strict=True))

    async def figures() -> Figures | None:
        try:
            return await services.store.figures.read()
        except BatchyardError as error:
            log.warning("metrics.not_read", error)
            return None

    return Health(Kept(figures), Kept(parts))


@router.get("/livez")
async def livez() -> Response:
    """200 while this process works, even if the database or the storage does not."""
    return PlainTextResponse("ok\n")


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """200 if requests can be answered, else 503, and which part does not work.

    Without Prefect they can: what is submitted begins when it is back.
    """
    health: Health = request.app.state.health
    parts = await health.parts.answer()
    is_ready = parts["database"] and parts["storage"]
    words = {True: "ok", False: "unavailable", None: "not configured"}
    said = {name: words[works] for name, works in parts.items()}
    body = {"status": "ready" if is_ready else "not ready", **said}
    return JSONResponse(body, status_code=200 if is_ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The figures of all batches, for Prometheus; see :mod:`batchyard.api.operators.metrics`."""
    services: Services = request.app.state.services
    token = services.settings.metrics_token
    if token is not None:
        wanted = f"Bearer {token.get_secret_value()}".encode()
        given = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(wanted, given):
            raise ApiError(
                401,
                "The metrics of this server need the token of the setting metrics_token, in an "
                "Authorization header with Bearer auth.",
                headers={"www-authenticate": "Bearer"},
            )
    health: Health = request.app.state.health
    page = metrics_page(await health.figures.answer())
    return Response(page, media_type=CONTENT_TYPE_LATEST)


async def _works(question: Awaitable[object]) -> bool:
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await question
    except (BatchyardError, TimeoutError) as error:
        log.warning("health.failed", error)
        return False
    return True


async def _look_into(services: Services) -> None:
    try:
        await services.storage.size(_NO_OBJECT)
    except ObjectNotFound:
        return
