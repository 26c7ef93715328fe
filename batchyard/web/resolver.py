"""aiohttp's way to :mod:`~batchyard.web.lookup`."""

from __future__ import annotations

import socket

from aiohttp.abc import AbstractResolver, ResolveResult

from batchyard.web.lookup import CONNECTIONS


class Resolver(AbstractResolver):
    """The same as aiohttp's own resolver, but not in the threads of asyncio."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of the host. Raises ``OSError`` and ``UnicodeError``."""
        entries = await CONNECTIONS.entries(host, family=family, flags=socket.AI_ADDRCONFIG)
        return [
            ResolveResult(
                hostname=host,
                host=_with_zone(*place),
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, place in entries
        ]

    async def close(self) -> None:
        """Do nothing: lookups end by themselves."""


def _with_zone(host: str, _port: int, _flow: int = 0, zone: int = 0) -> str:
    """An address that is local to a link means nothing without the link."""
    return f"{host}%{zone}" if zone else host
