"""Result lines: the exact shapes of the output and the error file."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.results.results import (
    MAX_TOKENS,
    NoAnswerCode,
    Outcome,
    answered,
    copied,
    new_request_id,
    not_served,
    unanswered,
)
from batchyard.services.segments.segment_headers import decode_headers
from batchyard.services.segments.segments import encode_entry
from batchyard.wire import NO_USAGE, TokenUsage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.results.results import ResultLine


def test_a_good_answer_is_an_output_line_with_the_keys_in_order() -> None:
    result = answered("id-1", "req_1", 200, b'{"id":"x","object":"y"}')
    assert result.outcome is Outcome.OUTPUT
    assert re.fullmatch(
        rb'\{"id":"batch_req_[0-9a-f]{32}","custom_id":"id-1","response":\{"status_code":200,'
        rb'"request_id":"req_1","body":\{"id":"x","object":"y"\}\},"error":null\}\n',
        result.line,
    )


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_a_refusal_is_an_error_line_with_its_response_and_a_null_error(status: int) -> None:
    result = answered("a", "req_1", status, b'{"error":{"message":"m","code":400}}')
    line = json.loads(result.line)
    assert result.outcome is Outcome.ERROR
    assert line["error"] is None
    assert line["response"]["status_code"] == status
    assert line["response"]["body"] == {"error": {"message": "m", "code": 400}}


@pytest.mark.parametrize("code", list(NoAnswerCode))
def test_no_answer_is_an_error_line_without_a_response(code: NoAnswerCode) -> None:
    result = unanswered("a", code)
    line = json.loads(result.line)
    assert result.outcome is Outcome.ERROR
    assert line["response"] is None
    assert line["error"]["code"] == code.value
    assert line["error"]["message"]


def test_the_answer_is_written_as_it_came() -> None:
    body = (
        b'{"x": 1.10000000000000000001,"y":123456789012345678901234567890, "z":"\\u00e9\xc3\xa9"}'
    )
    assert body in answered("a", "r", 200, body).line


def test_a_pretty_printed_answer_becomes_one_line_with_the_same_numbers() -> None:
    line = answered("a", "r", 200, b'{\n  "x": 1.50,\r\n  "y": "a b"\n}\n').line
    assert line.count(b"\n") == 1
    assert b'{"x":1.50,"y":"a b"}' in line


@pytest.mark.parametrize("line_end", ["\n", "\r", "\r\n"])
def test_an_answer_of_several_lines_becomes_one(line_end: str) -> None:
    line = answered("a", "r", 200, f'{{{line_end}"x": 1}}'.encode()).line
    assert line.endswith(b'"body":{"x":1}},"error":null}\n')
    assert line.count(b"\n") == 1
    assert b"\r" not in line


def test_line_separators_in_text_are_escaped_for_careless_readers() -> None:
    line = answered("a\u2028", "r", 200, '{"x":"\x85\u2028\u2029"}'.encode()).line.decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["response"]["body"] == {"x": "\x85\u2028\u2029"}
    assert json.loads(line)["custom_id"] == "a\u2028"


@pytest.mark.parametrize("body", [b"<html>", b"", b'{"x": NaN}', b'{"x":"\xff"}', b"{}{}"])
def test_an_answer_that_is_not_json_never_breaks_the_file(body: bytes) -> None:
    result = answered("a", "r", 200, body)
    line = json.loads(result.line)
    assert result.outcome is Outcome.ERROR
    assert line["response"]["status_code"] == 502
    assert set(line["response"]["body"]["error"]) == {"message", "type", "param", "code"}


def test_a_refusal_that_is_not_json_keeps_its_status() -> None:
    assert json.loads(answered("a", "r", 503, b"busy").line)["response"]["status_code"] == 503


def message_of(result: ResultLine) -> tuple[int, str]:
    answer = json.loads(result.line)["response"]
    return answer["status_code"], answer["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("status", "body", "headers", "shown_status", "words"),
    [
        (
            502,
            b"<html>\r\n<head><title>502 Bad Gateway</title></head>",
            {"content_type": "text/html"},
            502,
            "HTTP 502, text/html. Its body begins: <html> <head><title>502 Bad Gateway</title></h",
        ),
        (500, b"Internal Server Error", {}, 500, "HTTP 500. Its body begins: Internal Server Er"),
        (
            307,
            b"",
            {"location": "https://h/v1/chat/completions"},
            307,
            "HTTP 307, redirects to https://h/v1/chat/completions. It has no body.",
        ),
        (
            200,
            b'event: response.created\ndata: {"a": 1}\n\n',
            {"content_type": "text/event-stream; charset=utf-8"},
            502,
            "HTTP 200, text/event-stream; charset=utf-8. Its body begins: event: response.created",
        ),
        (200, b"ID3\x00\xff\xfb", {}, 502, "HTTP 200. Its body begins: ID3"),
        (200, b" \x00", {}, 502, "HTTP 200. It has no body."),
    ],
    ids=["page", "text", "redirect", "event stream", "sound", "nothing"],
)
def test_what_is_not_json_is_described(
    status: int, body: bytes, headers: dict[str, str], shown_status: int, words: str
) -> None:
    got, message = message_of(answered("a", "r", status, body, **headers))
    assert got == shown_status
    assert message.startswith(f"The engine's answer was not valid JSON: {words}")


def test_only_the_beginning_of_what_is_not_json_is_shown() -> None:
    _, message = message_of(answered("a", "r", 200, "é".encode() * 10**6))
    assert message.endswith(f"begins: {'é' * 200}")


def test_usage_is_read_from_chat_and_completions_answers() -> None:
    body = (
        b'{"usage":{"prompt_tokens":5,"completion_tokens":7,"total_tokens":12,'
        b'"prompt_tokens_details":{"cached_tokens":4},'
        b'"completion_tokens_details":{"reasoning_tokens":2}}}'
    )
    assert answered("a", "r", 200, body).usage == TokenUsage(5, 4, 7, 2, 12)


def test_usage_is_read_from_responses_answers() -> None:
    body = (
        b'{"usage":{"input_tokens":5,"output_tokens":7,"total_tokens":12,'
        b'"input_tokens_details":{"cached_tokens":1},'
        b'"output_tokens_details":{"reasoning_tokens":3}}}'
    )
    assert answered("a", "r", 200, body).usage == TokenUsage(5, 1, 7, 3, 12)


def test_the_input_of_a_message_includes_what_the_cache_had() -> None:
    body = (
        b'{"usage":{"input_tokens":5,"output_tokens":7,"cache_read_input_tokens":16,'
        b'"cache_creation_input_tokens":2}}'
    )
    assert answered("a", "r", 200, body).usage == TokenUsage(23, 16, 7, 0, 30)


def test_usage_of_embeddings_has_no_output() -> None:
    body = b'{"data":[],"usage":{"prompt_tokens":5,"total_tokens":5,"completion_tokens":0}}'
    assert answered("a", "r", 200, body).usage == TokenUsage(5, 0, 0, 0, 5)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        # A score, a reranker of vLLM, one of another make.
        (b'{"prompt_tokens":5,"total_tokens":5,"completion_tokens":0}', TokenUsage(5, 0, 0, 0, 5)),
        (b'{"prompt_tokens":5,"total_tokens":5}', TokenUsage(5, 0, 0, 0, 5)),
        (b'{"total_tokens":5}', TokenUsage(5, 0, 0, 0, 5)),
        # Recordings, by time and by tokens.
        (b'{"type":"duration","seconds":7}', NO_USAGE),
        (
            b'{"type":"tokens","input_tokens":5,"output_tokens":2,"total_tokens":7}',
            TokenUsage(5, 0, 2, 0, 7),
        ),
        # Pictures.
        (
            b'{"input_tokens":5,"input_tokens_details":{"image_tokens":2},"output_tokens":8}',
            TokenUsage(5, 0, 8, 0, 13),
        ),
    ],
)
def test_usage_is_read_from_the_answers_of_every_endpoint(
    usage: bytes, expected: TokenUsage
) -> None:
    assert answered("a", "r", 200, b'{"usage":%b}' % usage).usage == expected


@pytest.mark.parametrize("count", [-1, -(2**63), 2**31, 2**32, 2**63, 10**30, 10**4000])
@pytest.mark.parametrize(
    "field",
    [
        *("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens"),
        *("prompt_tokens_details.cached_tokens", "completion_tokens_details.reasoning_tokens"),
        *("input_tokens_details.cached_tokens", "output_tokens_details.reasoning_tokens"),
        *("cache_read_input_tokens", "cache_creation_input_tokens"),
    ],
)
def test_a_number_that_no_engine_can_have_counted_counts_nothing(field: str, count: int) -> None:
    name, _, detail = field.partition(".")
    value = f'{{"{detail}":{count}}}' if detail else str(count)
    result = answered("a", "r", 200, f'{{"usage":{{"{name}":{value}}}}}'.encode())
    assert (result.outcome, result.usage) == (Outcome.OUTPUT, NO_USAGE)


def test_the_other_numbers_of_an_odd_usage_count() -> None:
    body = b'{"usage":{"prompt_tokens":5,"completion_tokens":-3,"total_tokens":99999999999}}'
    assert answered("a", "r", 200, body).usage == TokenUsage(5, 0, 0, 0, 5)


def test_no_more_of_a_prompt_is_cached_than_it_has() -> None:
    """Some servers leave what was cached out of the prompt's tokens: it would cost less than 0."""
    body = b'{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":900}}}'
    assert answered("a", "r", 200, body).usage == TokenUsage(5, 5, 0, 0, 5)


def test_a_total_that_is_added_up_stays_within_bounds() -> None:
    body = b'{"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % (MAX_TOKENS, MAX_TOKENS)
    assert answered("a", "r", 200, body).usage == TokenUsage(
        MAX_TOKENS, 0, MAX_TOKENS, 0, MAX_TOKENS
    )


def test_no_sum_over_a_batch_outgrows_a_64_bit_column() -> None:
    """A plan numbers requests with 32 bits."""
    assert (2**32 - 1) * MAX_TOKENS < 2**63


@given(
    st.dictionaries(
        st.sampled_from([*TokenUsage._fields, "prompt_tokens", "completion_tokens"]),
        st.integers() | st.floats() | st.text(max_size=3) | st.none() | st.booleans(),
    )
)
def test_every_usage_fits_into_a_segment(usage: dict[str, Any]) -> None:
    result = answered("a", "r", 200, json.dumps({"usage": usage}).encode())
    [usage_read] = decode_headers(encode_entry(0, result)).headers["usage"].tolist()
    assert usage_read == list(result.usage)
    assert all(0 <= count <= MAX_TOKENS for count in usage_read)


def test_an_endpoint_that_is_not_served_is_an_error_line_that_says_what_is() -> None:
    result = not_served("a", "req_1", "/v1/score", {"/v1/embeddings", "/rerank"})
    line = json.loads(result.line)
    assert (result.outcome, line["error"]) == (Outcome.ERROR, None)
    assert line["response"] == {
        "status_code": 404,
        "request_id": "req_1",
        "body": {
            "error": {
                "message": "The engine does not serve /v1/score. "
                "It serves: /rerank, /v1/embeddings.",
                "type": "invalid_request_error",
                "param": "url",
                "code": "endpoint_not_served",
            }
        },
    }


def test_the_reason_of_a_request_without_an_answer_stands_behind_the_message() -> None:
    result = unanswered("a", NoAnswerCode.FILE_UNAVAILABLE, "It is\u2028 gone.")
    assert len(result.line.decode().splitlines()) == 1
    assert json.loads(result.line)["error"] == {
        "code": "file_url_unavailable",
        "message": "The file that body.file_url names could not be fetched. It is\u2028 gone.",
    }


@pytest.mark.parametrize(
    "body",
    [b'{"usage":null}', b"{}", b"[1]", b'{"usage":"free"}', b'{"usage":{"prompt_tokens":"x"}}'],
)
def test_an_answer_without_a_readable_usage_counts_nothing(body: bytes) -> None:
    result = answered("a", "r", 200, body)
    assert (result.outcome, result.usage) == (Outcome.OUTPUT, NO_USAGE)


def test_refusals_count_no_tokens() -> None:
    body = b'{"usage":{"prompt_tokens":5,"total_tokens":5}}'
    assert answered("a", "r", 400, body).usage == NO_USAGE


def test_request_ids_are_unique() -> None:
    assert len({new_request_id() for _ in range(1000)}) == 1000


@pytest.fixture
def _threads_take_turns_often() -> Iterator[None]:
    """Python switches threads as often as it can, not every five milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns_often")
def test_threads_make_lines_at_once_and_no_id_twice() -> None:
    """Two expired batches that are collected at the same time, each in a thread of its own."""

    def ids(name: str) -> list[str]:
        lines = [unanswered(f"{name}-{n}", NoAnswerCode.EXPIRED).line for n in range(5000)]
        return [json.loads(line)["id"] for line in lines]

    with ThreadPoolExecutor(4) as threads:
        found = [one for some in threads.map(ids, "abcd") for one in some]
    assert len(set(found)) == 20_000


@pytest.mark.parametrize("custom_id", ["b", "b" * 512, 'quo"te', "\u2028", "\u00e9\U0001f600"])
def test_a_copied_line_differs_in_its_ids_alone(custom_id: str) -> None:
    for source_id in ("a", custom_id + "x"):
        result = answered(source_id, "req_1", 200, b'{"usage":{"total_tokens":5},"x":"\xc3\xa9"}')
        copy = copied(result, source_id, custom_id)
        first, second = json.loads(result.line), json.loads(copy.line)
        assert second["custom_id"] == custom_id
        assert second.pop("id") != first.pop("id")
        assert {**second, "custom_id": source_id} == first
        assert list(second) == ["custom_id", "response", "error"]
        assert (copy.outcome, copy.usage, copy.is_copy) == (Outcome.OUTPUT, NO_USAGE, True)


def test_a_request_without_an_answer_is_copied_as_such() -> None:
    result = unanswered("a", NoAnswerCode.TIMEOUT)
    copy = copied(result, "a", "b")
    assert json.loads(copy.line)["error"] == json.loads(result.line)["error"]
    assert copy.outcome is Outcome.ERROR
