"""Real vLLM: what one tenant has sent cannot be seen in the ``cached_tokens`` of another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.base import BatchTraits, EngineRequest
from tests.contract.engine.conftest import (
    CHAT,
    MODEL,
    chat_body,
    request,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.engine.vllm.vllm import VllmEngine

pytestmark = [pytest.mark.vllm]
in_session_loop = pytest.mark.asyncio(loop_scope="session")

WORDS = " ".join(f"secret {number}" for number in range(200))


async def one_request(wanted: EngineRequest) -> AsyncIterator[EngineRequest]:
    yield wanted


async def answer_to(
    engine: VllmEngine, body: bytes, url: str = CHAT, *, salt: str | None
) -> dict[str, Any]:
    plain = request(1, body, url)

    wanted = EngineRequest(1, url, body, plain.request_id, of_batch=BatchTraits(cache_salt=salt))
    stream = engine.stream(one_request(wanted), timeout_seconds=60)
    (answer,) = [one async for one in stream]
    found = json.loads(answer.body)
    assert answer.status == 200, found
    assert salt is None or salt.encode() not in answer.body
    return dict(found)


async def cached_tokens(
    engine: VllmEngine, body: bytes, url: str = CHAT, *, salt: str | None
) -> int:
    usage = (await answer_to(engine, body, url, salt=salt))["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def bodies(text: str) -> list[tuple[str, bytes]]:
    plain = {"model": MODEL, "max_tokens": 1}
    return [
        (CHAT, chat_body(f"chat {text} {WORDS}", max_tokens=1)),
        (
            "/v1/completions",
            json.dumps({**plain, "prompt": f"completions {text} {WORDS}"}).encode(),
        ),
        (
            "/v1/responses",
            json.dumps(
                {"model": MODEL, "max_output_tokens": 1, "input": f"responses {text} {WORDS}"}
            ).encode(),
        ),
    ]


@in_session_loop
@pytest.mark.parametrize("index", range(3))
async def test_a_prompt_is_cached_for_its_own_tenant_only(
    session_vllm: VllmEngine, index: int
) -> None:
    url, body = bodies("mine")[index]

    assert await cached_tokens(session_vllm, body, url, salt="alice") == 0
    assert await cached_tokens(session_vllm, body, url, salt="bob") == 0
    assert await cached_tokens(session_vllm, body, url, salt=None) == 0
    assert await cached_tokens(session_vllm, body, url, salt="alice") >= 128


@in_session_loop
async def test_where_the_cache_is_shared_a_prompt_is_cached_for_all(
    session_vllm: VllmEngine,
) -> None:
    url, body = bodies("ours")[0]

    assert await cached_tokens(session_vllm, body, url, salt=None) == 0
    assert await cached_tokens(session_vllm, body, url, salt=None) >= 128


@in_session_loop
async def test_a_tenant_cannot_choose_the_salt_of_another(session_vllm: VllmEngine) -> None:
    """Even one who knows it: a salt in the body counts only together with the tenant's own."""
    url, body = bodies("chosen")[0]
    with_salt = body[:-1] + b', "cache_salt": "alice"}'

    assert await cached_tokens(session_vllm, body, url, salt="alice") == 0
    assert await cached_tokens(session_vllm, with_salt, url, salt="bob") == 0
    assert await cached_tokens(session_vllm, with_salt, url, salt="bob") >= 128
