"""Where only we reach the server of an engine that we start: a socket in a private folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import aiohttp

BASE_URL = "http://engine"
SOCKET_NAME = "engine.sock"
MAX_SOCKET_PATH_BYTES = 107
MAX_SOCKET_NAME_BYTES = 48
"""vLLM's own sockets are named by a UUID."""


async def is_healthy(session: aiohttp.ClientSession) -> bool:
    """Whether the engine answers ``/health`` with 200. Raises nothing for a lost connection."""
    try:
        async with session.get(f"{BASE_URL}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError):
        return False


def private_folder() -> Path:
    """A new folder that only we use, with a path short enough for the sockets in it."""
    folder = tempfile.mkdtemp(prefix="batchyard-")
    if len(os.fsencode(folder)) + MAX_SOCKET_NAME_BYTES > MAX_SOCKET_PATH_BYTES:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="batchyard-", dir="/tmp")
    return Path(folder)
