"""HTTP with a server that is not ours: one session, short looks, answers up to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import aiohttp
import msgspec
from yarl import URL

from batchyard.errors import SettingsError
from batchyard.web.url import shown

if TYPE_CHECKING:
    import ssl

    from batchyard.engine.remote.server_address import ServerAddress

LOOK_TIMEOUT_SECONDS: Final = 10.0
MAX_ANSWER_BYTES = 256 * 1024**2
"""Of one answer: more than the embeddings of a large request, written out as decimals."""
ANSWER_TOO_LONG = msgspec.json.encode(
    {
        "error": {
            "message": f"The engine's answer was longer than {MAX_ANSWER_BYTES >> 20} MiB.",
            "type": "server_error",
            "param": None,
            "code": "answer_too_long",
        }
    }
)
MAX_LOOK_BYTES = 16 * 1024**2
"""Most bytes that are read of what the server says of itself."""


class Look(NamedTuple):
    """What the server answered to a question of ours."""

    status: int
    body: bytes
    location: str
    """Where it redirects to, as a message may show it; empty if it does not."""


def usable_key(api_key: str | None) -> str:
    """The key without space around it: files and variables often end in a line break.

    Empty: there is none. Raises :class:`~batchyard.errors.SettingsError` for one that no header can
    carry.
    """
    key = (api_key or "").strip()
    if not key.isprintable():
        raise SettingsError("the engine's API key holds a line break or another control character")
    return key


def open_session(
    address: ServerAddress, api_key: str, ssl_context: ssl.SSLContext | None
) -> aiohttp.ClientSession:
    """A session for requests to this server, and no other."""
    # No limit of connections: the caller's window is the limit.
    connector = (
        aiohttp.UnixConnector(address.socket_path, limit=0)
        if address.socket_path
        else aiohttp.TCPConnector(limit=0, ssl=ssl_context or True)
    )
    # Not compressed: the body goes into our files as it came.
    headers = {"Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        # With a balancer's cookie, one of the servers behind it would get all requests.
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


async def look_at(
    session: aiohttp.ClientSession, url: str, *, method: str = "GET", body: bytes | None = None
) -> Look:
    """A short exchange. Raises what aiohttp raises, and ``OSError``."""
    timeout = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_SECONDS)
    headers = None if body is None else {"Content-Type": "application/json"}
    async with session.request(
        method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
    ) as response:
        told = await read_up_to(response, MAX_LOOK_BYTES) or b""
        return Look(response.status, told, location_of(response))


async def read_up_to(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes | None:
    """The body; None, and the connection is closed, where it is longer than the limit."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > limit_bytes:
            response.close()
            return None
        parts.append(part)
    return b"".join(parts)


def location_of(response: aiohttp.ClientResponse) -> str:
    """Where the answer redirects to, without credentials and query; empty if it does not."""
    location = response.headers.get("Location", "")
    if not location:
        return ""
    try:
        return shown(str(response.url.join(URL(location))))
    except ValueError:
        return shown("")
