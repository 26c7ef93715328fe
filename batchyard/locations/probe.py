"""Whether a presigned URL would take a PUT, found out without one.

A request with ``Expect: 100-continue`` is judged by its headers: method, signature, time, bucket.
If the server asks for the body, it has accepted them, and the connection is closed before a byte
of the body. Only :mod:`~batchyard.locations.known_stores` are known to store nothing then. What an
answer cannot tell: that the whole file will be taken, and that the URL still holds when the batch
is done.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from batchyard.errors import AccessDenied, ObjectNotFound, StorageUnavailable
from batchyard.locations.presigned import check_not_expired, put_headers
from batchyard.locations.put_answers import put_refused
from batchyard.locations.web import WebAccess, error_code, web_errors_as_ours
from batchyard.web.url import checked_url, shown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.errors import StorageError

_CONNECT_SECONDS: Final = 3.0
_SECONDS: Final = 5.0
_SIZE_BYTES: Final = 1_000_000
"""What the probe says that it is about to send: an empty object would be one."""
_FINAL_CODES: Final = {
    *("SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidToken", "ExpiredToken"),
    *("AuthorizationQueryParametersError", "NoSuchBucket"),
    *("AuthenticationFailed", "ContainerNotFound", "AuthorizationPermissionMismatch"),
}
"""Codes of S3's and Azure's answers that no waiting mends, and no other machine gets around."""


class _Accepted(Exception):
    """The server asks for the body."""


async def probe_put(url: str, *, web: WebAccess | None = None) -> None:
    """Ask the server what it says to a PUT, and send none.

    Raises :class:`~batchyard.errors.AccessDenied` for a signature that does not allow it and for a
    redirect, which no upload follows, :class:`~batchyard.errors.ObjectNotFound` for a bucket that
    does not exist, and another :class:`~batchyard.errors.StorageError` where the server could not
    be asked.
    """
    web = replace(web or WebAccess(), connect_seconds=_CONNECT_SECONDS)
    found = await _asked(url, web)
    if found is None:
        return
    error, is_final = found
    if not is_final:
        raise StorageUnavailable(str(error))
    if isinstance(error, ObjectNotFound):
        raise error
    raise AccessDenied(str(error))


async def _asked(url: str, web: WebAccess) -> tuple[StorageError, bool] | None:
    """The server's refusal, and whether it is for ever.

    None: it takes a PUT, or says nothing before it has the body.
    """
    import aiohttp  # noqa: PLC0415 - most commands go to no URL, and it takes long

    target, name = checked_url(url), shown(url)
    check_not_expired(url)
    headers = {**put_headers(url), "Content-Length": str(_SIZE_BYTES)}
    is_accepted = False

    async def body() -> AsyncIterator[bytes]:
        nonlocal is_accepted
        is_accepted = True
        raise _Accepted
        yield b""

    async with web.session() as session:
        with web_errors_as_ours(name):
            try:
                async with (
                    asyncio.timeout(_SECONDS),
                    session.put(
                        target,
                        data=body(),
                        headers=headers,
                        expect100=True,
                        skip_auto_headers=("Content-Type",),
                        allow_redirects=False,
                    ) as response,
                ):
                    if response.status < 300:
                        return None
                    code = await error_code(response)
                    is_final = code in _FINAL_CODES or response.status < 400
                    return put_refused(response, url, code), is_final
            except aiohttp.ConnectionTimeoutError:
                raise
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                if is_accepted or isinstance(error, TimeoutError):
                    return None
                raise
