"""How many sequences an engine makes of a request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from batchyard.lines.endpoints import ENDPOINTS
from batchyard.lines.sequences import sequences_of

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"


def of(url: str, **members: Any) -> int:
    return sequences_of(url, msgspec.json.encode({"model": "m", **members}))


@pytest.mark.parametrize("url", ENDPOINTS)
def test_a_plain_request_to_any_endpoint_is_one(url: str) -> None:
    fields = {field for choice in ENDPOINTS[url].required for field in choice}
    assert of(url, **dict.fromkeys(fields, "text")) == 1


@pytest.mark.parametrize(
    ("url", "members", "count"),
    [
        (CHAT, {"messages": [{}, {}], "n": 3}, 3),
        (TEXT, {"prompt": ["a", "b"]}, 2),
        (TEXT, {"prompt": ["a", "b"], "n": 3}, 6),
        (EMBEDDINGS, {"input": ["a", "b", "c"]}, 3),
        ("/pooling", {"input": ["a", "b"]}, 2),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}, 2),
        ("/v1/score", {"queries": ["a", "b"], "documents": ["c", "d"]}, 2),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c", "d"]}, 3),
    ],
)
def test_each_prompt_of_a_list_and_each_answer_is_one(
    url: str, members: dict[str, Any], count: int
) -> None:
    assert of(url, **members) == count


def test_a_list_of_tokens_is_one_prompt() -> None:
    assert of(EMBEDDINGS, input=[1, 2, 3]) == 1
    assert of(EMBEDDINGS, input=[[1, 2], [3]]) == 2
    assert of(TEXT, prompt=[1, 2, 3], n=2) == 2


def test_n_of_an_endpoint_that_writes_no_tokens_means_nothing() -> None:
    assert of(EMBEDDINGS, input="a", n=5) == 1


def test_the_name_of_a_member_may_be_written_with_escapes() -> None:
    assert sequences_of(CHAT, rb'{"\u006e": 4}') == 4


@pytest.mark.parametrize("n", [None, True, "4", 0, -3, 1.5, [2], {}])
def test_what_is_no_number_of_answers_is_one(n: Any) -> None:
    """The engine refuses it."""
    assert of(CHAT, n=n) == 1


def test_a_number_that_no_engine_takes_is_bounded() -> None:
    assert of(TEXT, prompt=["a"] * 10, n=10**9) == 2**16
    assert of(TEXT, n=10**30) == 2**16


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"\xff", b'{"prompt": [' + b"[" * 10**5 + b"]" * 10**5 + b"]}"]
)
def test_a_body_that_cannot_be_read_is_one(body: bytes) -> None:
    assert sequences_of(TEXT, body) == 1
