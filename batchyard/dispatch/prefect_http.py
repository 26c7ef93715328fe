"""Calls to Prefect's REST API: the login, the CSRF token, retries, and refusals as our errors."""

from __future__ import annotations

import base64
import os
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import stamina

from batchyard.errors import DispatchFailed, SettingsError
from batchyard.web.csrf import CsrfToken, is_token_wanted
from batchyard.web.proxies import proxy_for, proxy_words
from batchyard.web.url import shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from batchyard.web.proxies import Proxy

_TIMEOUT_SECONDS = 30


def checked_api_url(url: str | None) -> str:
    """The same, or :class:`~batchyard.errors.SettingsError` where there is none."""
    if not url:
        raise SettingsError(
            "PREFECT_API_URL is not set: say where the Prefect server is, "
            "for example http://127.0.0.1:4200/api."
        )
    return url


class _Busy(DispatchFailed):
    """Prefect did nothing because it is busy; a later call may succeed."""


class Refused(DispatchFailed):
    """Prefect answered, and did not do this. Of another object it may do the same."""


class Missing(SettingsError):
    """There is nothing at this path, or it is not the API."""


def is_cut_off(error: Exception) -> bool:
    """Whether a call has failed in a way in which it need not fail on another machine.

    Prefect did not answer, was busy, or refused the login.
    """
    return not isinstance(error, Missing | Refused)


class Reply(NamedTuple):
    """What the server answered."""

    json: Any
    at: datetime | None
    """When, by the server's clock."""


class PrefectHttp:
    """One server, for the calls of a subclass. Use as an async context manager."""

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, proxy: Proxy | None = None
    ) -> None:
        import aiohttp  # noqa: PLC0415 - many commands make no call, and it takes a sixth of theirs

        self._url = url.rstrip("/")
        self._shown = shown(self._url)
        """For messages: the URL may have a password or a query."""
        self._proxy = proxy
        """What Prefect's client would use. aiohttp knows no SOCKS."""
        self._failure = aiohttp.ClientError
        self._session = aiohttp.ClientSession(
            # The server closes a connection on which a call failed, and one that was not used for
            # 5 seconds. A call that comes over it at that moment fails.
            connector=aiohttp.TCPConnector(force_close=True),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS),
            trust_env=False,
            proxy=proxy.url if proxy is not None and proxy.is_http else None,
        )
        self._csrf = CsrfToken()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """The server that ``PREFECT_API_URL`` names, as Prefect's own clients find it.

        Raises :class:`~batchyard.errors.SettingsError` if the variable is not set.
        """
        url = checked_api_url(environment.get("PREFECT_API_URL"))
        headers = {}
        # In this order, as Prefect's own clients.
        if login := environment.get("PREFECT_API_AUTH_STRING"):
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        elif key := environment.get("PREFECT_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        return cls(url, headers, proxy_for(url, environment))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def _way(self) -> str:
        is_used = self._proxy is not None and self._proxy.is_http
        return proxy_words(self._proxy) if is_used else ""

    @property
    def _missing(self) -> str:
        if self._proxy is None or self._proxy.is_http:
            return ""
        return (
            f" It was asked directly, because {self._proxy.variable} names a SOCKS proxy, which "
            "only Prefect's own client can use: name an HTTP proxy in HTTPS_PROXY or HTTP_PROXY, "
            "or make a tunnel to the server."
        )

    async def _call(self, method: str, path: str, body: Any = None) -> Reply:
        """One call; a server that is busy (its SQLite is locked) is asked again for a while."""
        async for attempt in stamina.retry_context(on=_Busy, attempts=8, timeout=_TIMEOUT_SECONDS):
            with attempt:
                return await self._call_once(method, path, body)
        raise AssertionError("a retry context returns or raises")

    async def _call_once(
        self, method: str, path: str, body: Any, *, is_repeated: bool = False
    ) -> Reply:
        token = self._csrf.value
        try:
            async with self._session.request(
                method, self._url + path, json=body, headers=self._csrf.headers
            ) as response:
                is_refused = response.status == 403
                if is_refused and not is_repeated and is_token_wanted(await response.text()):
                    await self._renew_token(refused=token)
                    return await self._call_once(method, path, body, is_repeated=True)
                if is_refused or response.status == 401:
                    raise SettingsError(
                        f"The Prefect server at {self._shown} refuses the login "
                        f"(HTTP {response.status}): set PREFECT_API_AUTH_STRING or PREFECT_API_KEY."
                    )
                if response.status == 404:
                    raise Missing(
                        f"The Prefect server at {self._shown} has no {path}: run "
                        "`batchyard deploy`, and check that PREFECT_API_URL ends in /api."
                    )
                if response.status in {429, 503}:
                    raise _Busy(f"Prefect is too busy: it answers {response.status} to {path}.")
                if not response.ok:
                    raise Refused(f"Prefect answered {response.status} to {path}.")
                found = None if response.status == 204 else await response.json()
                return Reply(found, _date(response.headers))
        except (self._failure, TimeoutError, OSError, ValueError) as error:
            reason = type(error).__name__
            if self._shown == self._url and self._proxy is None:
                # Some of aiohttp's errors repeat the URL, or the proxy's.
                reason = str(error) or reason
            raise DispatchFailed(
                f"The Prefect server at {self._shown} did not answer{self._way}: {reason}."
                f"{self._missing}"
            ) from error

    async def _renew_token(self, *, refused: str | None) -> None:
        async with self._csrf.renewal(refused=refused) as is_due:
            if is_due:
                async with self._session.get(self._url + self._csrf.path) as response:
                    response.raise_for_status()
                    self._csrf.take(await response.json())


def _date(headers: Mapping[str, str]) -> datetime | None:
    date = headers.get("Date")
    return parsedate_to_datetime(date) if date else None
