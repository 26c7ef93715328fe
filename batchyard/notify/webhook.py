"""One POST to a receiver. When to try again, and whether, is for others to say."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Self

import aiohttp
from standardwebhooks import Webhook

from batchyard import __version__
from batchyard.errors import LocationRefused
from batchyard.notify.outcome import SendOutcome
from batchyard.web.address import AddressRefused
from batchyard.web.retry_after import retry_after_seconds
from batchyard.web.session import web_session
from batchyard.web.url import checked_url

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from batchyard.web.address import AddressGuard

_USER_AGENT: Final = f"Batchyard/{__version__} (+webhooks)"
_MAX_ANSWER_BYTES: Final = 64 * 1024
_MAX_RETRY_AFTER_SECONDS: Final = 86_400.0
_ASKING_FOR_TIME: Final = {429, 502, 503, 504}


class WebhookSender:
    """Sends webhooks. An async context manager: connections end with the block.

    ``guard``: where receivers may be, and then only by https; None: anywhere, by http too.
    ``ssl_context``: how certificates are checked; None: as the system does. The caller limits how
    many are under way at once.
    """

    def __init__(
        self,
        guard: AddressGuard | None,
        *,
        timeout_seconds: float = 15.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._guard = guard
        self._timeout_seconds = timeout_seconds
        self._ssl_context = ssl_context
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = web_session(
            guard=self._guard,
            connect_seconds=self._timeout_seconds,
            read_seconds=self._timeout_seconds,
            ssl_context=self._ssl_context,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(
        self,
        url: str,
        body: bytes,
        *,
        delivery_id: str,
        secrets: Sequence[str],
        traceparent: str | None = None,
    ) -> SendOutcome:
        """Sign the JSON ``body``, send it, and say how it went.

        Never raises for what the network or the receiver does. From the host's name to the end
        of the answer it takes at most the time-out, however slowly bytes come. ``traceparent``
        is sent as the header of that name.
        """
        try:
            return await self._send(url, body, delivery_id, secrets, traceparent)
        except TimeoutError:
            return SendOutcome(
                error=f"the receiver did not answer within {self._timeout_seconds:g} seconds"
            )
        except LocationRefused:
            return SendOutcome(
                error="the URL cannot be used: it must be https, with a host and no password"
            )
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            return SendOutcome(error=_in_our_words(error))

    async def _send(
        self,
        url: str,
        body: bytes,
        delivery_id: str,
        secrets: Sequence[str],
        traceparent: str | None,
    ) -> SendOutcome:
        if self._session is None:
            raise RuntimeError("A WebhookSender is used within its `async with`.")
        target = checked_url(url)
        if self._guard is not None and target.scheme != "https":
            raise LocationRefused("not https")
        # The local clock: the receiver compares it with its own, and neither knows the database's.
        headers = signed_headers(
            body, delivery_id=delivery_id, at=datetime.now(UTC), secrets=secrets
        )
        headers |= {"content-type": "application/json", "user-agent": _USER_AGENT}
        if traceparent is not None:
            headers["traceparent"] = traceparent
        ends_at = asyncio.get_running_loop().time() + self._timeout_seconds
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout_at(ends_at):
                request = self._session.post(
                    target, data=body, headers=headers, allow_redirects=False
                )
                response = await stack.enter_async_context(request)
            # The status is the answer, and the rest is not needed. It is
            # read since some servers log an error of theirs where it is not.
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with asyncio.timeout_at(ends_at):
                    await _read_some(response.content)
            return _answer(response.status, response.headers.get("Retry-After"))


async def _read_some(content: aiohttp.StreamReader) -> None:
    left = _MAX_ANSWER_BYTES
    while left > 0 and (piece := await content.read(left)):
        left -= len(piece)


def _answer(status: int, retry_after: str | None) -> SendOutcome:
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return SendOutcome(status_code=status)
    if status < HTTPStatus.BAD_REQUEST:
        return SendOutcome(
            status_code=status,
            error=f"the receiver redirects ({status}), which is not followed: give the final URL",
        )
    if status == HTTPStatus.GONE:
        return SendOutcome(
            status_code=status,
            error="the receiver says that it is gone for good (410)",
            is_final=True,
        )
    pause = retry_after_seconds(retry_after) if status in _ASKING_FOR_TIME else None
    return SendOutcome(
        status_code=status,
        error=f"the receiver answered {status}",
        retry_after_seconds=None if pause is None else min(pause, _MAX_RETRY_AFTER_SECONDS),
    )


def _in_our_words(error: Exception) -> str:
    """What an exception of aiohttp's means. Its own text holds the whole URL."""
    match error:
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            return "the receiver's TLS certificate is not trusted, or it does not use TLS"
        case aiohttp.ClientConnectorDNSError(os_error=OSError(errno=socket.EAI_NONAME)):
            return "no host has the name in the URL"
        case aiohttp.ClientConnectorDNSError():
            return "the receiver's name cannot be looked up: DNS does not answer"
        case aiohttp.ClientConnectorError(os_error=AddressRefused() as refusal):
            return f"the receiver may not be reached: {refusal}"
        case aiohttp.ClientConnectorError():
            return "the receiver cannot be reached: nothing answers at its address"
        case aiohttp.InvalidURL() | UnicodeError():
            # The latter: a name with a label that DNS cannot hold.
            return "the URL cannot be used: check its host and port"
        case aiohttp.ClientResponseError():
            return "the receiver's answer is not HTTP"
        case _:
            return "the connection to the receiver broke"


def signed_headers(
    body: bytes, *, delivery_id: str, at: datetime, secrets: Sequence[str]
) -> dict[str, str]:
    """The three headers of one attempt, by Standard Webhooks, as OpenAI's SDKs check them.

    ``delivery_id`` is the same for every attempt; ``at``, in UTC, is this one's time. One
    signature for each of ``secrets`` (``whsec_…``), of which a receiver needs to know one.
    Raises ``ValueError`` without any.
    """
    if not secrets:
        raise ValueError("A webhook is signed with at least one secret.")
    # The library takes the clock's face for UTC, whatever the time zone.
    if at.utcoffset() != timedelta(0):
        raise ValueError("The time of a signature is in UTC.")
    text = body.decode()
    signatures = [Webhook(secret).sign(delivery_id, at, text) for secret in secrets]
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(signatures),
    }
