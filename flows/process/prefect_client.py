"""Prefect's client, for calls that a batch waits for: a busy server is asked again soon.

Prefect's server on SQLite answers 503 to a call that read something which another call has since
changed. A third of the flow runs that are created side by side are refused in this way. The same
call succeeds some milliseconds later, and Prefect's client waits 2 seconds, then 4, then 8.
After such an answer the server closes the connection without having said so, and a call that comes
over it at that moment fails. So a connection on which a call has failed is not used again.

A server with CSRF protection knows one token of each client, the newest. Prefect's client gets one
for each call that has none, so calls side by side end each other's tokens, wait equally long, and
do it again: batches that began together waited for two minutes. Here one call gets the token, and
the others wait for that.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import httpx
import prefect
from prefect.context import AsyncClientContext
from prefect.settings import PREFECT_API_URL

from batchyard.web.csrf import CsrfToken, is_token_wanted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from prefect.client.orchestration import PrefectClient

_LIMITS: Final = httpx.Limits(max_connections=16, max_keepalive_connections=8, keepalive_expiry=3.0)
"""Those of Prefect's client, but connections that are not used are closed sooner.

Prefect's server closes them after 5 seconds, Prefect's client after 25. A call on a connection that
the server is just closing fails, and Prefect's client waits for seconds before it asks again.
"""
_REFUSED: Final = 403
_BUSY: Final = 503
_WAITS_SECONDS: Final = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
"""After these it is Prefect's client that waits and asks again."""


class _AskAgainSoon(httpx.Auth):
    """Adds no login: ``auth`` is where httpx lets a client send a request again by its answer.

    It adds the CSRF token, once the server has asked for it.
    """

    def __init__(self, api_url: str) -> None:
        self._api_url = api_url
        self._token = CsrfToken()

    def take_over(self, client: str, value: str | None) -> None:
        """Use what the server has given to this client, if nothing was needed here yet."""
        if value is not None and self._token.value is None:
            self._token = CsrfToken(client, value)

    async def async_auth_flow(
        self, request: httpx.Request
    ) -> AsyncGenerator[httpx.Request, httpx.Response]:
        token = self._token
        for seconds in _WAITS_SECONDS:
            used = token.value
            request.headers.update(token.headers)
            answer = yield request
            if await _wants_token(answer):
                async with token.renewal(refused=used) as is_due:
                    if is_due:
                        token.take(await _token_in((yield self._token_request(request, token))))
                if token.value not in {used, None}:
                    continue
            # A server that says when to come back, as during its maintenance, is obeyed.
            elif answer.status_code != _BUSY or "Retry-After" in answer.headers:
                return
            # Those that were refused together are not to come back together.
            await asyncio.sleep(seconds * random.uniform(0.5, 1.5))  # noqa: S311 - not a secret
        request.headers.update(token.headers)
        yield request

    def _token_request(self, request: httpx.Request, token: CsrfToken) -> httpx.Request:
        """With the login, the other headers and the time-outs of the call that needs it."""
        headers = {
            name: value
            for name, value in request.headers.items()
            if not name.startswith(("content-", "prefect-csrf-"))
        }
        url = self._api_url + token.path
        return httpx.Request("GET", url, headers=headers, extensions=request.extensions)


class _LeavesFailedConnections(httpx.AsyncBaseTransport):
    """Closes the connection of a call that the server answers with a 5xx status.

    The server does the same a moment later: Starlette raises an error again once it is answered,
    and uvicorn then closes the connection:
    https://github.com/encode/starlette/blob/master/starlette/middleware/errors.py
    """

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self.inner.handle_async_request(request)
        return await _left(answer) if answer.is_server_error else answer

    async def aclose(self) -> None:
        await self.inner.aclose()


async def _left(answer: httpx.Response) -> httpx.Response:
    """The same answer, read; its connection is closed.

    httpcore closes a connection whose answer is not read to its end. One without a length is, and
    its connection stays.
    """
    assert isinstance(answer.stream, httpx.AsyncByteStream)  # noqa: S101 - of an asynchronous call
    length = answer.headers.get("Content-Length")
    body = bytearray()
    if length != "0":
        async for part in answer.stream:
            body += part
            if length == str(len(body)):
                break
    await answer.stream.aclose()
    return httpx.Response(
        answer.status_code,
        headers=answer.headers,
        content=bytes(body),
        extensions=answer.extensions,
    )


async def _wants_token(answer: httpx.Response) -> bool:
    if answer.status_code != _REFUSED:
        return False
    await answer.aread()
    return is_token_wanted(answer.text)


async def _token_in(answer: httpx.Response) -> Any:
    """None: there is none in it, and Prefect's client will see the refusal."""
    await answer.aread()
    try:
        return answer.json() if answer.is_success else None
    except ValueError:
        return None


_settings: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, dict[str, Any]]]
_settings = WeakKeyDictionary()
"""The settings of each event loop and address: a token is waited for in one loop."""


def client_settings() -> dict[str, Any]:
    """What our clients of Prefect give to httpx: in one loop always the same for one address."""
    url = str(PREFECT_API_URL.value()).rstrip("/")
    of_loop = _settings.setdefault(asyncio.get_running_loop(), {})
    if url not in of_loop:
        of_loop[url] = {"auth": _AskAgainSoon(url), "limits": _LIMITS}
        if not url.startswith("https:"):
            # It trusts no certificate. Prefect's client would read all authorities, for 20 to 50 ms
            # in which nothing else runs, to speak HTTP without TLS.
            of_loop[url]["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return of_loop[url]


def get_client() -> PrefectClient:
    """Prefect's client, to be used as an async context manager."""
    client = prefect.get_client(httpx_settings=client_settings())
    ask_as_we_do(client)
    return client


def shared_client() -> AsyncClientContext:
    """An async context manager in which :func:`get_client` returns one client, and not new ones."""
    context = AsyncClientContext(httpx_settings=client_settings())
    ask_as_we_do(context.client)
    return context


def ask_as_we_do(client: PrefectClient) -> None:
    """Let a client that Prefect has made ask a busy server soon, and share the token of ours."""
    http = client._client  # noqa: SLF001 - it has no other way in
    transport = http._transport  # noqa: SLF001 - given as a setting, it would know no proxies
    if isinstance(transport, httpx.AsyncHTTPTransport):
        http._transport = _LeavesFailedConnections(transport)  # noqa: SLF001 - as above
    auth = client_settings()["auth"]
    auth.take_over(str(http.csrf_client_id), http.csrf_token)
    http.auth = auth
    # The setting for this is one of the whole process, whose other clients need it.
    http.enable_csrf_support = False
