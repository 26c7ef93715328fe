"""How many large bodies of one tenant are in memory at once, on each route that takes them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from starlette.requests import Request

from batchyard.api import message_requests
from batchyard.api.body import BodyPlaces

if TYPE_CHECKING:
    import pytest
    from starlette.types import Message

    from batchyard.services.services import Services


async def test_while_a_tenants_message_batches_are_received_its_others_wait_and_nobody_elses(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = BodyPlaces(1)
    monkeypatch.setattr(message_requests, "_PLACES", places)

    asked: list[str] = []

    async def count(tenant: str) -> int:
        async def receive() -> Message:
            asked.append(tenant)
            body = {"requests": [{"custom_id": "a", "params": {}}]}
            return {"type": "http.request", "body": json.dumps(body).encode()}

        request = Request({"type": "http", "headers": []}, receive)
        async with message_requests.read_lines(request, services, tenant) as lines:
            return lines.count

    async with places.of("one"):
        waiting = asyncio.create_task(count("one"))
        assert await count("other") == 1
        assert asked == ["other"]
    assert await waiting == 1
