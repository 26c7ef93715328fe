"""Which requests may share an answer."""

from __future__ import annotations

from typing import Any

import pytest

from batchyard.plan.duplicates import NO_DIGEST, answer_digest

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = "/v1/messages"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}


@pytest.mark.parametrize("url", [CHAT, "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.0}, {"seed": 0}])
def test_what_is_greedy_or_has_a_seed_is_deterministic(url: str, fields: dict[str, Any]) -> None:
    assert answer_digest(url, chat(**fields)) != NO_DIGEST


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.1},
        {"temperature": None},
        {"temperature": False},
        {"temperature": "0"},
        {"seed": None},
        {"seed": True},
        {"seed": "1"},
        {"seed": -1},
        {"seed": -1, "temperature": 1},
    ],
)
def test_what_draws_lots_shares_its_answer_with_nobody(fields: dict[str, Any]) -> None:
    assert answer_digest(CHAT, chat(**fields)) == NO_DIGEST


def test_a_seed_counts_only_where_the_engine_takes_one() -> None:
    assert answer_digest(MESSAGES, chat(max_tokens=1, seed=7)) == NO_DIGEST
    assert answer_digest(MESSAGES, chat(max_tokens=1, seed=7, temperature=0)) != NO_DIGEST


def test_what_is_greedy_needs_no_seed() -> None:
    assert answer_digest(CHAT, chat(temperature=0, seed=-1)) != NO_DIGEST


@pytest.mark.parametrize("url", [EMBEDDINGS, "/v1/score", "/rerank", "/v1/classify", "/pooling"])
def test_what_samples_nothing_is_deterministic(url: str) -> None:
    assert answer_digest(url, {"model": "m", "input": "a"}) != NO_DIGEST


@pytest.mark.parametrize("url", ["/v1/images/generations", "/v1/audio/transcriptions"])
def test_images_and_recordings_are_each_their_own(url: str) -> None:
    assert answer_digest(url, {"model": "m", "seed": 1, "temperature": 0}) == NO_DIGEST


def test_the_order_of_a_bodys_own_keys_does_not_count() -> None:
    body = chat(temperature=0, max_tokens=4)
    turned = dict(reversed(body.items()))
    assert answer_digest(CHAT, body) == answer_digest(CHAT, turned)


def test_the_order_within_a_tools_schema_counts_for_the_model_reads_it() -> None:
    schemas = [{"a": {"type": "string"}, "b": {}}, {"b": {}, "a": {"type": "string"}}]
    first, second = (
        answer_digest(CHAT, chat(seed=1, tools=[{"parameters": {"properties": schema}}]))
        for schema in schemas
    )
    assert first != second


@pytest.mark.parametrize(
    "other",
    [
        chat(temperature=0, max_tokens=5),
        chat(temperature=0),
        chat(temperature=0, max_tokens=4, seed=1),
        chat(temperature=0, max_tokens=4, user="someone"),
    ],
)
def test_any_other_field_makes_another_request(other: dict[str, Any]) -> None:
    assert answer_digest(CHAT, chat(temperature=0, max_tokens=4)) != answer_digest(CHAT, other)


def test_another_endpoint_makes_another_request() -> None:
    body = {"model": "m", "input": "a"}
    assert answer_digest(EMBEDDINGS, body) != answer_digest("/pooling", body)
