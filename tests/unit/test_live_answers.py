"""What a live request is asked for besides, what is passed on of its answer, and what it used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchyard.engine import live_answers
from batchyard.engine.live_answers import (
    AnswerMeter,
    asking_for_usage,
    hides_usage,
    is_flex,
    said_flex,
)
from batchyard.wire import NO_USAGE

CHAT = "/v1/chat/completions"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def event(**data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


WORD = event(choices=[{"delta": {"content": 'a "usage" b'}}])
LAST = event(choices=[], usage=USAGE)
DONE = b"data: [DONE]\n\n"


def meter(*, hide_usage: bool = True, is_stream: bool = True) -> AnswerMeter:
    made = AnswerMeter(request_bytes=400, hide_usage=hide_usage)
    made.begin(is_stream=is_stream)
    return made


@pytest.mark.parametrize(
    ("path", "body", "hides"),
    [
        (CHAT, {"stream": True}, True),
        ("/v1/completions", {"stream": True, "stream_options": None}, True),
        (CHAT, {"stream": True, "stream_options": {"include_usage": False}}, True),
        (CHAT, {"stream": True, "stream_options": {"include_usage": True}}, False),
        (CHAT, {"stream": False}, False),
        (CHAT, {}, False),
        ("/v1/responses", {"stream": True}, False),
    ],
)
def test_usage_is_hidden_from_clients_who_did_not_ask_for_it(
    path: str, body: dict[str, Any], hides: bool
) -> None:
    assert hides_usage(path, body) is hides


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "m", "stream": true}',
        b'{"model": "m", "stream": true, "stream_options": {"other": 1}} \n',
        b'{"stream_options": {"include_usage": false}, "stream": true}',
    ],
)
def test_the_body_is_the_same_with_a_wish_for_usage(raw: bytes) -> None:
    before = json.loads(raw)
    after = json.loads(asking_for_usage(raw, before))
    wanted = {**(before.get("stream_options") or {}), "include_usage": True}
    assert after == {**before, "stream_options": wanted}


def test_options_that_are_no_object_are_the_engines_to_refuse() -> None:
    raw = b'{"stream_options": 7}'
    assert asking_for_usage(raw, json.loads(raw)) is raw


@pytest.mark.parametrize("size", [1, 5, 64, 4096])
def test_a_stream_is_passed_on_without_the_event_that_was_not_asked_for(size: int) -> None:
    """However its bytes are sliced."""
    whole = WORD * 3 + LAST + DONE
    hiding, showing = meter(), meter(hide_usage=False)
    slices = [whole[start : start + size] for start in range(0, len(whole), size)]
    assert b"".join(map(hiding.feed, slices)) == WORD * 3 + DONE
    assert b"".join(map(showing.feed, slices)) == whole
    assert hiding.usage == showing.usage
    assert (hiding.usage.input_tokens, hiding.usage.output_tokens) == (7, 3)


def test_an_event_goes_out_as_soon_as_it_is_complete() -> None:
    one = meter()
    assert one.feed(WORD[:-1]) == b""
    assert one.feed(WORD[-1:] + b"data: ") == WORD
    assert one.rest() == b"data: "


def test_a_response_tells_its_usage_in_its_last_event() -> None:
    one = meter(hide_usage=False)
    usage = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
    last = b"event: response.completed\n" + event(response={"id": "r", "usage": usage})
    assert one.feed(last) == last
    assert (one.usage.input_tokens, one.usage.output_tokens) == (5, 2)


def test_a_message_tells_its_usage_in_its_last_event_but_one() -> None:
    one = meter(hide_usage=False)
    begun = {"type": "message_start", "message": {"usage": {"input_tokens": 5}}}
    usage = {"input_tokens": 5, "cache_read_input_tokens": 16, "output_tokens": 2}
    delta = {"type": "message_delta", "usage": usage}
    one.feed(event(**begun) + event(**delta) + event(type="message_stop"))
    assert (one.usage.input_tokens, one.usage.output_tokens) == (21, 2)


def test_an_answer_that_is_no_stream_is_passed_on_as_it_comes() -> None:
    body = json.dumps({"data": [1, 2], "usage": {"prompt_tokens": 4}}).encode()
    one = meter(is_stream=False)
    assert one.feed(body[:9]) + one.feed(body[9:]) + one.rest() == body
    assert one.usage.input_tokens == 4


def test_what_was_broken_off_is_estimated_by_its_bytes_and_events() -> None:
    one = meter()
    assert one.estimate().input_tokens == 101
    one.feed(WORD * 5)
    assert (one.estimate().input_tokens, one.estimate().output_tokens) == (101, 5)
    one.feed(LAST)
    assert one.estimate() == one.usage


def test_a_stream_that_never_says_what_it_used_is_estimated() -> None:
    """Whatever a client has done so that the engine was not asked."""
    one = meter()
    one.feed(WORD * 4 + DONE)
    assert (one.usage.input_tokens, one.usage.output_tokens) == (101, 4)


def test_an_answer_that_is_too_long_to_be_kept_is_passed_on_uncounted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_answers, "MAX_KEPT_BYTES", 100)
    long = meter(is_stream=False)
    assert long.feed(b"x" * 99) + long.feed(b"y" * 9) + long.feed(b"z") + long.rest() == (
        b"x" * 99 + b"y" * 9 + b"z"
    )
    assert long.usage == NO_USAGE
    with pytest.raises(ValueError, match="too long"):
        meter().feed(b"data: " + b"x" * 100)


@pytest.mark.parametrize(
    ("path", "tier", "waits"),
    [
        (CHAT, "flex", True),
        ("/v1/responses", "flex", True),
        (CHAT, "auto", False),
        (CHAT, None, False),
        (CHAT, ["flex"], False),
        ("/v1/embeddings", "flex", False),
        ("/v1/messages", "flex", False),
    ],
)
def test_a_request_may_wait_where_openai_has_tiers(path: str, tier: Any, waits: bool) -> None:
    assert is_flex(path, {"service_tier": tier}) is waits


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"id": "a"} \n', {"id": "a", "service_tier": "flex"}),
        (b'{"service_tier":null,"id":"a"}', {"id": "a", "service_tier": "flex"}),
        (b'{"service_tier":"default"}', {"service_tier": "default"}),
        (b"{ }", {"service_tier": "flex"}),
        (b"[1]", [1]),
        (b'{"a": "\\"service_tier\\":null"}', {"a": '"service_tier":null', "service_tier": "flex"}),
    ],
)
def test_an_answer_says_which_tier_was_used_once(answer: bytes, said: Any) -> None:
    def as_given(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    assert json.loads(said_flex(answer), object_pairs_hook=as_given) == said


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_a_flex_answer_is_passed_on_whole_with_its_tier(size: int) -> None:
    made = AnswerMeter(request_bytes=4, hide_usage=False, says_flex=True)
    made.begin(is_stream=False)
    whole = json.dumps({"usage": USAGE, "choices": []}).encode()
    passed = b"".join(made.feed(whole[at : at + size]) for at in range(0, len(whole), size))
    passed += made.rest()
    assert json.loads(passed) == {"usage": USAGE, "choices": [], "service_tier": "flex"}
    assert made.usage.total_tokens == 10


def test_a_flex_answer_that_is_too_long_to_be_kept_is_passed_on_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_answers, "MAX_KEPT_BYTES", 10)
    made = AnswerMeter(request_bytes=4, hide_usage=False, says_flex=True)
    made.begin(is_stream=False)
    pieces = [b"12345", b"67890", b"abc", b"def"]
    assert b"".join(map(made.feed, pieces)) + made.rest() == b"".join(pieces)


def test_each_event_of_a_flex_stream_says_its_tier() -> None:
    made = AnswerMeter(request_bytes=4, hide_usage=True, says_flex=True)
    made.begin(is_stream=True)
    first, second, end = made.feed(WORD * 2 + LAST + DONE).strip().split(b"\n\n")
    for each in (first, second):
        said = json.loads(each.removeprefix(b"data: "))
        assert (said["service_tier"], len(said["choices"])) == ("flex", 1)
    assert end == DONE.strip()
