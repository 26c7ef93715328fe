"""The metrics of an engine of this machine, from its private socket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp

if TYPE_CHECKING:
    from pathlib import Path

SCRAPE_SECONDS: Final = 3.0
"""Prometheus stops waiting after ten seconds, for all engines together."""
MAX_BYTES: Final = 4 * 1024**2
"""The largest page that is read; vLLM's has 70 KB."""


async def scrape(socket: Path) -> str | None:
    """The page; None for an engine that does not serve one in time. Raises nothing."""
    try:
        async with asyncio.timeout(SCRAPE_SECONDS):
            return await _get(socket)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None


async def _get(socket: Path) -> str | None:
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket), force_close=True),
            headers={"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"},
            # What is compressed may be of any size, and we have not asked for it.
            auto_decompress=False,
            trust_env=False,
        ) as session,
        session.get("http://engine/metrics", allow_redirects=False) as response,
    ):
        if response.status != 200:
            return None
        page = bytearray()
        async for part in response.content.iter_any():
            page += part
            if len(page) > MAX_BYTES:
                return None
        return page.decode(errors="replace")
