"""The session in which every request to a user's URL is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

    import aiohttp

    from batchyard.web.address import AddressGuard


def web_session(
    *,
    guard: AddressGuard | None,
    connect_seconds: float,
    read_seconds: float,
    ssl_context: ssl.SSLContext | None = None,
) -> aiohttp.ClientSession:
    """A session that follows nothing, remembers nothing and unpacks nothing by itself.

    ``guard``: which addresses it may lead to; None for URLs of the operator's own.
    ``ssl_context``: how certificates are checked; None: as the system does.
    """
    import aiohttp  # noqa: PLC0415 - most commands open no session, and it takes long

    from batchyard.web.resolver import Resolver  # noqa: PLC0415 - imports aiohttp

    connector = aiohttp.TCPConnector(
        ssl=ssl_context or True,
        force_close=True,
        # Those who wait for a slow server's connection would delay all others.
        limit=0,
        resolver=Resolver(),
        # With it, aiohttp waits for lookups that no request waits for any more.
        use_dns_cache=False,
        socket_factory=guard.socket if guard else None,
    )
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity", "User-Agent": "batchyard"},
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_seconds, sock_read=read_seconds),
        trust_env=False,
    )
