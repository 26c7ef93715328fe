"""What does not fit in the engine's context."""

from __future__ import annotations

from typing import Any

from batchyard.lines.deep_checks import context_refusals

CHAT = "/v1/chat/completions"
CONTEXT = 100


def too_long(
    longest: int | None, url: str = CHAT, context: int | None = CONTEXT, **body: Any
) -> str:
    found = [*context_refusals(url, {"messages": [], **body}, longest, context)]
    assert all(each.code == "context_length_exceeded" for each in found)
    return " ".join(each.param for each in found)


def test_a_prompt_must_leave_room_for_a_token_of_the_answer() -> None:
    assert too_long(99) == ""
    assert too_long(100) == "body.messages"
    assert too_long(100, "/v1/embeddings") == ""
    assert too_long(101, "/v1/embeddings") == "body.messages"


def test_an_answer_that_only_does_not_fit_behind_its_prompt_passes() -> None:
    assert too_long(99, max_tokens=100) == ""
    assert too_long(1, max_tokens=101) == "body.max_tokens"


def test_only_the_limit_that_the_engine_reads_counts() -> None:
    assert too_long(1, max_tokens=101, max_completion_tokens=5) == ""
    assert too_long(1, max_tokens=5, max_completion_tokens=101) == "body.max_completion_tokens"
    assert too_long(1, max_tokens="101") == ""
    assert too_long(1, "/v1/completions", max_tokens=5, max_completion_tokens=101) == ""
    assert too_long(1, "/v1/responses", max_output_tokens=101) == "body.max_output_tokens"


def test_a_prompt_that_the_engine_cuts_is_not_too_long() -> None:
    assert too_long(101, truncate_prompt_tokens=10) == ""
    assert too_long(101, "/v1/responses", truncation="auto") == ""
    assert too_long(101, "/v1/responses", truncation="disabled") == "body.messages"


def test_what_is_not_known_refuses_nothing() -> None:
    assert too_long(None) == ""
    assert too_long(10**9, context=None, max_tokens=10**9) == ""
