"""Prefect's client, for calls that a batch waits for: a busy server is asked again soon.

Prefect's server on SQLite answers 503 to a call that read something which another call has since
changed. A third of the flow runs that are created side by side are refused in this way. The same
call succeeds some milliseconds later, and Prefect's client waits 2 seconds, then 4, then 8.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from typing import TYPE_CHECKING, Any, Final

import httpx
import prefect
from prefect.context import AsyncClientContext
from prefect.settings import PREFECT_API_URL

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from prefect.client.orchestration import PrefectClient

_BUSY: Final = 503
_WAITS_SECONDS: Final = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
"""After these it is Prefect's client that waits and asks again."""


class _AskAgainSoon(httpx.Auth):
    """Adds no login: ``auth`` is where httpx lets a client send a request again by its answer."""

    async def async_auth_flow(
        self, request: httpx.Request
    ) -> AsyncGenerator[httpx.Request, httpx.Response]:
        for seconds in _WAITS_SECONDS:
            answer = yield request
            # A server that says when to come back, as during its maintenance, is obeyed.
            if answer.status_code != _BUSY or "Retry-After" in answer.headers:
                return
            # Those that were refused together are not to come back together.
            await asyncio.sleep(seconds * random.uniform(0.5, 1.5))  # noqa: S311 - not a secret
        yield request


SETTINGS: Final = {"auth": _AskAgainSoon()}
_PLAIN: Final = {**SETTINGS, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
"""It trusts no certificate. Prefect's client would read all authorities, for 20 to 50 ms in
which nothing else runs, to speak HTTP without TLS."""


def client_settings() -> dict[str, Any]:
    """What our clients of Prefect give to httpx; always the same for one address."""
    return SETTINGS if str(PREFECT_API_URL.value()).startswith("https:") else _PLAIN


def get_client() -> PrefectClient:
    """Prefect's client, to be used as an async context manager."""
    return prefect.get_client(httpx_settings=client_settings())


def shared_client() -> AsyncClientContext:
    """An async context manager in which :func:`get_client` returns one client, and not new ones."""
    return AsyncClientContext(httpx_settings=client_settings())
