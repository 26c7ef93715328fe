"""What planning sees of a request, endpoint by endpoint."""

from __future__ import annotations

from typing import Any

import pytest

from batchyard.endpoints import ENDPOINTS
from batchyard.prompt import expected_output_tokens, prompt_key


@pytest.mark.parametrize(
    ("url", "body", "prompt"),
    [
        ("/v1/score", {"text_2": ["b", "c"], "text_1": "a"}, b"abc"),
        ("/score", {"documents": ["b", "c"], "queries": ["a", "d"]}, b"adbc"),
        ("/v1/score", {"items": "b", "queries": "a"}, b"ab"),
        ("/v1/score", {"data_2": "b", "data_1": "a"}, b"ab"),
        ("/v1/rerank", {"documents": ["b", {"text": "c"}], "query": "a"}, b"abc"),
        ("/v2/rerank", {"documents": ["b"], "query": "a"}, b"ab"),
        ("/v1/embeddings", {"input": ["a", "b"]}, b"ab"),
        ("/v1/moderations", {"input": "a"}, b"a"),
        ("/v1/images/generations", {"prompt": "a hat"}, b"a hat"),
        ("/v1/videos", {"prompt": "a walk"}, b"a walk"),
        ("/classify", {"input": "a"}, b"a"),
        ("/pooling", {"data": "a"}, b"a"),
    ],
)
def test_the_key_is_what_the_engine_reads_in_its_order(
    url: str, body: dict[str, Any], prompt: bytes
) -> None:
    """The query of a reranker first: it is what many pairs share."""
    assert prompt_key(url, body) == (url.encode() + b"\0" + prompt, len(prompt))


def test_a_recording_weighs_the_same_however_its_url_is_written() -> None:
    """The megabytes of a data URL are no tokens."""
    url = "/v1/audio/transcriptions"
    short = prompt_key(url, {"file_url": "https://example.com/a.wav"})
    long = prompt_key(url, {"file_url": "data:audio/wav;base64," + "A" * 1_000_000})
    assert short == long == (url.encode() + b"\0", 6000)


@pytest.mark.parametrize("url", ENDPOINTS)
def test_output_is_expected_of_endpoints_that_write_text(url: str) -> None:
    writes = ("completions", "responses", "transcriptions", "translations")
    assert (expected_output_tokens(url, {}) > 0) is url.endswith(writes)


@pytest.mark.parametrize("url", ENDPOINTS)
@pytest.mark.parametrize("value", [None, 3, "x", [], [None], {}, [[1], 2], [{"text": 5}]])
def test_no_body_whatever_breaks_the_key(url: str, value: Any) -> None:
    fields = {field for choice in ENDPOINTS[url].required for field in choice}
    key, size = prompt_key(url, dict.fromkeys(fields, value))
    assert key.startswith(url.encode() + b"\0")
    assert size >= 0
