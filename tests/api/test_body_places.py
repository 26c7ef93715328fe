"""How many large bodies of one tenant are in memory at once, on each route that takes them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import AsyncMock

import pytest
from starlette.requests import Request

from batchyard.api.http.auth import Caller
from batchyard.api.live import responses
from batchyard.api.messages import message_requests
from batchyard.errors import RequestRefused
from batchyard.processes.tenant_turns import TenantTurns

if TYPE_CHECKING:
    from starlette.types import Message

    from batchyard.services.services import Services


async def test_while_a_tenants_message_batches_are_received_its_others_wait_and_nobody_elses(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = TenantTurns(None, of_each=1)
    monkeypatch.setattr(message_requests, "_BODIES", turns)

    asked: list[str] = []

    async def count(tenant: str) -> int:
        async def receive() -> Message:
            asked.append(tenant)
            body = {"requests": [{"custom_id": "a", "params": {}}]}
            return {"type": "http.request", "body": json.dumps(body).encode()}

        request = Request({"type": "http", "headers": []}, receive)
        async with message_requests.read_lines(request, services, tenant) as lines:
            return lines.count

    async with turns.turn("one"):
        waiting = asyncio.create_task(count("one"))
        assert await count("other") == 1
        assert asked == ["other"]
    assert await waiting == 1


async def test_a_response_has_its_place_until_it_is_accepted(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is made of a body needs more memory than its bytes."""
    turns = TenantTurns(None, of_each=1)
    monkeypatch.setattr(responses, "_BODIES", turns)
    was_held = []

    async def accept(*_: Any) -> NoReturn:
        was_held.append(await is_held(turns))
        raise RequestRefused("no", param=None, code="invalid_value")

    monkeypatch.setattr(responses, "accept_response", accept)
    monkeypatch.setattr(responses, "_check_model", AsyncMock())

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"model": "m", "background": true}'}

    request = Request({"type": "http", "headers": []}, receive)
    caller = Caller("one", services, "key", is_operator=False, may_write=True)
    with pytest.raises(RequestRefused):
        await responses.create_response(request, caller)
    assert was_held == [True]


async def is_held(turns: TenantTurns) -> bool:
    """Whether the tenant has all the turns that it may have."""
    try:
        async with asyncio.timeout(0.01), turns.turn("one"):
            return False
    except TimeoutError:
        return True
