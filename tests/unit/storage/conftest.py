"""A scripted web server, and access to it with short waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.locations.web import WebAccess
from batchyard.storage.backoff import Backoff
from tests.unit.storage.web_server import WebServer, running_web_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    """A server without any answer yet."""
    async with running_web_server() as running:
        yield running


@pytest.fixture
def web() -> WebAccess:
    """Four tries within some 10 ms; time-outs that only a test of time-outs should meet."""
    return WebAccess(
        connect_seconds=5.0, stall_seconds=5.0, backoff=Backoff(4, first_seconds=0.005)
    )
