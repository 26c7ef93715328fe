"""What planning sees of a request, endpoint by endpoint."""

from __future__ import annotations

from typing import Any

import pytest

from batchyard.lines.endpoints import ENDPOINTS
from batchyard.lines.prompt import (
    adapter_of,
    expected_output_tokens,
    output_limit,
    prompt_key,
    template_of,
)


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


CHAT = "/v1/chat/completions"


def test_a_recording_weighs_the_same_however_its_url_is_written() -> None:
    """The megabytes of a data URL are no tokens."""
    url = "/v1/audio/transcriptions"
    short = prompt_key(url, {"file_url": "https://example.com/a.wav"})
    long = prompt_key(url, {"file_url": "data:audio/wav;base64," + "A" * 1_000_000})
    assert short == long == (url.encode() + b"\0", 6000)


@pytest.mark.parametrize("url", ENDPOINTS)
def test_output_is_expected_of_endpoints_that_write_text(url: str) -> None:
    writes = ("completions", "responses", "messages", "transcriptions", "translations")
    assert (expected_output_tokens(url, {}) > 0) is url.endswith(writes)


@pytest.mark.parametrize("url", ENDPOINTS)
@pytest.mark.parametrize("value", [None, 3, "x", [], [None], {}, [[1], 2], [{"text": 5}]])
def test_no_body_whatever_breaks_the_key(url: str, value: Any) -> None:
    fields = {field for choice in ENDPOINTS[url].required for field in choice}
    key, size = prompt_key(url, dict.fromkeys(fields, value))
    assert key.startswith(url.encode() + b"\0")
    assert size >= 0


def test_a_message_begins_with_its_system_prompt_as_a_chat_does() -> None:
    words = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    asked = {"messages": words, "max_tokens": 7}
    block = {"type": "text", "text": "Be brief."}
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rendered = prompt_key(CHAT, {"messages": chat})[0].partition(b"\0")[2]
    for system in ("Be brief.", [block], [block | {"cache_control": {"type": "ephemeral"}}]):
        key, _ = prompt_key("/v1/messages", {"system": system, **asked})
        assert key == b"/v1/messages\0" + rendered
    assert expected_output_tokens("/v1/messages", asked) == 7


def template(*messages: tuple[str, str], **body: Any) -> bytes:
    conversation = [{"role": role, "content": text} for role, text in messages]
    return template_of(prompt_key(CHAT, {"messages": conversation, **body})[0])


def test_what_comes_before_the_users_words_is_the_template() -> None:
    system = ("system", "You sort letters. " * 100)
    assert template(system, ("user", "a")) == template(system, ("user", "b" * 9000))
    assert template(system, ("user", "a")) != template(("system", "You write."), ("user", "a"))
    assert template(system, ("user", "a"), tools=[{"type": "function"}]) != template(
        system, ("user", "a")
    )


def test_without_a_system_prompt_the_first_block_is_the_template() -> None:
    block = "Translate this letter. " * 20
    assert template(("user", block + "a")) == template(("user", block + "b"))
    assert template(("user", "a" + block)) != template(("user", block))
    keys = [prompt_key("/v1/completions", {"prompt": block + end})[0] for end in "ab"]
    assert template_of(keys[0]) == template_of(keys[1])


def test_of_a_very_long_system_prompt_the_beginning_is_the_template() -> None:
    words = "rule " * 2000
    assert template(("system", words + "a"), ("user", "x")) == template(
        ("system", words + "b"), ("user", "x")
    )


def test_prompts_with_other_cache_salts_may_have_one_template() -> None:
    assert template(("user", "a"), cache_salt="x") == template(("user", "a"), cache_salt="y")


def test_the_limit_is_that_of_all_samples_together() -> None:
    assert output_limit({"max_tokens": 100, "n": 3}) == (300, 3)
    assert output_limit({"max_completion_tokens": 7, "max_tokens": 100}) == (7, 1)
    assert output_limit({"n": 2}) == (None, 2)
    assert output_limit({"max_tokens": 2**40})[0] == 2**31


def test_each_adapter_has_templates_of_its_own() -> None:
    """It answers at other lengths; those of the model stay what they were."""
    keys = [prompt_key(CHAT, {"messages": []}, adapter)[0] for adapter in ("", "a", "b")]
    assert len({template_of(key) for key in keys}) == 3
    assert [adapter_of(key) for key in keys] == [b"", b"a", b"b"]
    assert keys[0] == prompt_key(CHAT, {"messages": []})[0]
