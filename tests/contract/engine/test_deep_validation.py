"""Real vLLM runs what deep validation lets pass, and refuses what that refuses, to the token."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.prompt_counting.counter import CountedRequest, PromptCounter
from batchyard.lines.body_fields import FieldCounts, ignored_fields
from batchyard.lines.lines import RequestLine, Validator
from batchyard.lines.rules import Rules
from batchyard.processes.threads import in_thread
from batchyard.steps.prepare.deep_validation import DeepValidation
from tests.contract.engine.conftest import CHAT, MODEL, request
from tests.contract.engine.odd_requests import ODD_REQUESTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.engine.base import EngineRequest
    from batchyard.engine.prompt_counting.counter import CounterProgram
    from batchyard.engine.vllm.vllm import VllmEngine

pytestmark = [pytest.mark.vllm]
CONTEXT = 8192
IGNORED = ["unknown_parameter"]
"""The codes of a request that the engine runs without one of its fields."""
COMPLETIONS = "/v1/completions"


def chat(content: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    return CHAT, {"model": MODEL, "messages": messages, "max_tokens": 1, **more}


def completion(prompt: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": MODEL, "prompt": prompt, "max_tokens": 1, **more}


def response(text: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": MODEL, "input": text, "max_output_tokens": 1, **more}


def message(text: str, **more: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return "/v1/messages", {"model": MODEL, "messages": messages, "max_tokens": 1, **more}


def filled(counter: PromptCounter, make: Any, tokens: int) -> tuple[str, dict[str, Any]]:
    """A request of so many tokens, by the counter."""
    low, high = 0, tokens + 1
    while low < high:
        middle = (low + high) // 2
        # Of letters that no tokenizer joins, each is a token.
        url, body = make(("zqxj" * tokens)[:middle])
        counter.send([CountedRequest(url, body)])
        longest = counter.receive()[0].longest
        assert longest is not None
        if longest == tokens:
            return url, body
        low, high = (middle + 1, high) if longest < tokens else (low, middle)
    raise AssertionError(f"no text has {tokens} tokens")


def refused(
    program: CounterProgram, requests: list[tuple[str, dict[str, Any]]]
) -> dict[int, list[str]]:
    """The places of those that deep validation refuses, each with the codes."""
    validator, found = Validator(Rules(None)), {}
    lines = [
        RequestLine(place, place, 0, 9, str(place), url, MODEL, body)
        for place, (url, body) in enumerate(requests)
    ]
    validator._leave_out = lambda bad: found.update({bad.ordinal: [e.code for e in bad.errors]})
    with contextlib.ExitStack() as opened:
        deep = DeepValidation(validator, program, opened, lambda: None)
        assert len([*deep.lines(iter(lines))]) + len(found) == len(requests)
        assert deep.findings.max_model_len == CONTEXT
    return found


def edges(program: CounterProgram) -> list[tuple[str, dict[str, Any]]]:
    """Requests beside each edge, on both of its sides."""
    texts = (
        chat,
        lambda text: chat([{"type": "text", "text": text}, {"type": "text", "text": "b"}]),
        lambda text: completion(["short", text]),
        response,
        message,
    )
    with PromptCounter(program, lambda: None) as counter:
        filling = [filled(counter, make, CONTEXT - 1 + n) for make in texts for n in range(2)]
    return [
        *filling,
        *(completion([5] * (CONTEXT - 1 + n)) for n in range(3)),
        completion([5] * CONTEXT, truncate_prompt_tokens=10),
        *(chat("hi", max_tokens=CONTEXT + n, stop="a", ignore_eos=False) for n in range(2)),
        chat("hi", max_tokens=CONTEXT + 1, max_completion_tokens=1),
        completion("hi", max_completion_tokens=CONTEXT + 1),
        response("hi", max_output_tokens=CONTEXT + 1),
        message("hi", max_tokens=CONTEXT + 1),
    ]


def fields_of(url: str, body: dict[str, Any]) -> dict[str, dict[str, int]]:
    counts = FieldCounts()
    counts.count(url, body)
    return counts.by_endpoint()


async def sent(requests: list[EngineRequest]) -> AsyncIterator[EngineRequest]:
    for each in requests:
        yield each


@pytest.mark.asyncio(loop_scope="session")
async def test_the_engine_refuses_what_deep_validation_refuses_and_nothing_else(
    session_vllm: VllmEngine,
) -> None:
    program = session_vllm.prompt_counter
    requests = [*await in_thread(edges, program), *ODD_REQUESTS]
    found = await in_thread(refused, program, requests)

    asked = [request(n, json.dumps(body).encode(), url) for n, (url, body) in enumerate(requests)]
    answers = {
        answer.tag: answer async for answer in session_vllm.stream(sent(asked), timeout_seconds=900)
    }

    statuses = {place: answers[place].status for place in answers}
    said = {place: answers[place].body[:300] for place in answers if place in found}
    ours = {place: 200 if found.get(place, IGNORED) == IGNORED else 400 for place in statuses}
    wrong = {place for place in ours if ours[place] != statuses[place]}
    assert not wrong, [(requests[n], statuses[n], said.get(n), found.get(n)) for n in wrong]
    ignored = {place for place, codes in found.items() if codes == IGNORED}
    assert len(ignored) == 10
    # The engine's own description says the same of them as its models do.
    routes = await session_vllm.routes() or {}
    by_routes = {n for n, asked in enumerate(requests) if ignored_fields(fields_of(*asked), routes)}
    assert {place for place in by_routes if statuses[place] == 200} == ignored
    assert {place for place in found if place < 10} == {1, 3, 5, 7, 9}
