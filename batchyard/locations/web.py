"""How Batchyard reads and writes http and https URLs.

Downloads and uploads are in :mod:`batchyard.locations.download` and
:mod:`batchyard.locations.upload`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectNotFound,
    ObjectTooLarge,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from batchyard.storage.backoff import Backoff
from batchyard.storage.s3_errors import PASSING_CODES
from batchyard.web.address import AddressRefused
from batchyard.web.session import web_session

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    import aiohttp

    from batchyard.web.address import AddressGuard

_PASSING_STATUS = {408, 425, 429}
# S3 and Google Cloud Storage say so with 400.
_SIGNATURE_CODES = {"ExpiredToken", "InvalidToken", "AuthorizationQueryParametersError"}
# S3 says why in an XML element; nothing else of an answer is ever repeated.
_CODE = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")
_CODE_WITHIN_BYTES = 4096
_CODE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class WebAccess:
    """Time limits, retries and trust for requests to users' URLs."""

    connect_seconds: float = 10.0
    """For the name, the connection and the TLS handshake together."""
    stall_seconds: float = 60.0
    """For the next 1 MiB, in either direction: a trickle counts as a stall."""
    backoff: Backoff = field(default_factory=Backoff)
    ssl_context: ssl.SSLContext | None = None
    """How certificates are checked; None: as the system does."""
    guard: AddressGuard | None = None
    """For URLs that do not come from the operator: where they may lead. With one, no
    redirect is followed."""

    def session(self) -> aiohttp.ClientSession:
        """A new HTTP session with these limits. The caller closes it."""
        return web_session(
            guard=self.guard,
            connect_seconds=self.connect_seconds,
            read_seconds=self.stall_seconds,
            ssl_context=self.ssl_context,
        )


@contextlib.contextmanager
def web_errors_as_ours(name: str) -> Iterator[None]:
    """Turn what aiohttp raises into the error of ours that it stands for; ``name`` is shown.

    The cause is cut off: aiohttp's own messages hold whole URLs, signature included.
    """
    import aiohttp  # noqa: PLC0415 - most commands go to no URL, and it takes long

    try:
        yield
    except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError):
        raise LocationRefused(
            f"{name}: the server's TLS certificate is not trusted, or it does not use TLS"
        ) from None
    except (aiohttp.InvalidURL, UnicodeError):
        # The latter: a name with a label that DNS cannot hold.
        raise LocationRefused(f"{name} is not a URL: check host and port") from None
    except TimeoutError:
        raise StorageUnavailable(f"{name}: the server is too slow or does not answer") from None
    except aiohttp.ClientConnectorDNSError as error:
        if error.os_error.errno == socket.EAI_NONAME:
            # Not a name server that is away for a moment: a typing error, which no retry mends.
            raise LocationRefused(f"{name}: no host has this name, check the URL") from None
        raise StorageUnavailable(f"{name} cannot be reached (no answer from DNS)") from None
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, AddressRefused):
            raise LocationRefused(f"{name} may not be used: {error.os_error}") from None
        raise StorageUnavailable(
            f"{name} cannot be reached ({type(error).__name__}): check the URL, and that the "
            "server runs"
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise StorageUnavailable(f"{name}: the connection broke ({type(error).__name__})") from None


async def refusal(response: aiohttp.ClientResponse, name: str) -> StorageError:
    """The error that an answer other than success stands for."""
    return refused(response, name, await error_code(response))


async def error_code(response: aiohttp.ClientResponse) -> str:
    """S3's code for what is wrong, such as ``NoSuchKey``; empty if there is none in time.

    Reads the beginning of the body.
    """
    import aiohttp  # noqa: PLC0415 - see above

    body = bytearray()
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with asyncio.timeout(_CODE_SECONDS):
            # It may come later than the header, and in pieces.
            while len(body) < _CODE_WITHIN_BYTES and (
                piece := await response.content.read(_CODE_WITHIN_BYTES - len(body))
            ):
                body += piece
    code = _CODE.search(body)
    return code[1].decode() if code else ""


def refused(response: aiohttp.ClientResponse, name: str, code: str) -> StorageError:
    """The same, where the code has been read already."""
    status = response.status
    said = f"the server answered {status} {code}".rstrip()
    if status == 507:
        return StorageFull(f"{name}: {said}, free some space there")
    if status in _PASSING_STATUS or status >= 500 or code in PASSING_CODES:
        return StorageUnavailable(f"{name}: {said}")
    if status in {401, 403} or code in _SIGNATURE_CODES:
        return AccessDenied(f"not allowed to use {name} ({said}): make a new presigned URL")
    if status == 404 and code == "NoSuchUpload":
        return ObjectNotFound(
            f"{name}: the multipart upload has ended ({said}): look whether an earlier attempt has "
            "completed it, or begin another one and give its URLs"
        )
    match status:
        case 404 | 410:
            return ObjectNotFound(f"{name} does not exist ({said})")
        case 413:
            return ObjectTooLarge(f"{name}: too large for the server ({said})")
    if 300 <= status < 400:
        return LocationRefused(f"{name} redirects ({status}): give the final URL")
    return LocationRefused(f"{name}: {said}, check that the URL is meant for {response.method}")
