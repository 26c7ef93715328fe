"""Reading and validating request lines: every rule, every encoding, with its code and line."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.errors import InputRefused
from batchyard.lines import duplicates
from batchyard.lines.lines import RequestLine, Validator, embedding_inputs
from batchyard.lines.offer import Offer
from batchyard.lines.rules import Limits, Rules

if TYPE_CHECKING:
    from pathlib import Path

CHAT = "/v1/chat/completions"


def request(custom_id: str = "a", **changes: Any) -> dict[str, Any]:
    line = {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    }
    line.update(changes)
    return {key: value for key, value in line.items() if value is not ...}


def body(**changes: Any) -> dict[str, Any]:
    merged = {"model": "m", "messages": []} | changes
    return {key: value for key, value in merged.items() if value is not ...}


def dumps(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def validate(data: bytes, **rules: Any) -> list[RequestLine]:
    rules.setdefault("endpoint", CHAT)
    validator = Validator(Rules(**rules))
    file = io.BytesIO(data)
    lines = list(validator.lines(file))
    validator.finish(file)
    return lines


def refusal(data: bytes, **rules: Any) -> list[tuple[str, str | None, int | None]]:
    with pytest.raises(InputRefused) as caught:
        validate(data, **rules)
    return [(entry.code, entry.param, entry.line) for entry in caught.value.entries]


def test_a_good_line_comes_out_parsed_with_its_place_in_the_file() -> None:
    data = b"\n" + dumps(request("one"))
    (line,) = validate(data)
    assert (line.number, line.custom_id, line.url, line.model) == (2, "one", CHAT, "m")
    assert json.loads(data[line.offset : line.offset + line.length]) == request("one")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (request(custom_id=...), ("missing_required_parameter", "custom_id", 1)),
        (request(method=...), ("missing_required_parameter", "method", 1)),
        (request(url=...), ("missing_required_parameter", "url", 1)),
        (request(body=...), ("missing_required_parameter", "body", 1)),
        (request(custom_id=""), ("invalid_request", "custom_id", 1)),
        (request(custom_id=7), ("invalid_request", "custom_id", 1)),
        (request(custom_id=None), ("invalid_request", "custom_id", 1)),
        (request(custom_id="x" * 513), ("invalid_custom_id", "custom_id", 1)),
        (request(custom_id="a\0b"), ("invalid_custom_id", "custom_id", 1)),
        (request(method="post"), ("invalid_method", "method", 1)),
        (request(method="GET"), ("invalid_method", "method", 1)),
        (request(url="/v1/embeddings"), ("invalid_url", "url", 1)),
        (request(url=["/v1"]), ("invalid_url", "url", 1)),
        (request(body=[]), ("invalid_request", "body", 1)),
        (request(body=body(model=...)), ("invalid_request", "body.model", 1)),
        (request(body=body(model=3)), ("invalid_request", "body.model", 1)),
        (request(body=body(model="a\0b")), ("invalid_request", "body.model", 1)),
        (request(body=body(messages=...)), ("invalid_request", "body.messages", 1)),
        (request(body=body(stream=True)), ("streaming_unsupported", "body.stream", 1)),
    ],
)
def test_a_broken_line_gets_its_own_code_and_parameter(
    line: dict[str, Any], expected: tuple[str, str | None, int]
) -> None:
    assert refusal(dumps(line)) == [expected]


BAD_JSON = {
    "not JSON": b"{nope",
    "NaN": b'{"custom_id": NaN}',
    "Infinity": b'{"custom_id": -Infinity}',
    "a number beyond floats": b'{"custom_id": "a", "body": {"x": 1e400}}',
    "an integer of 5000 digits": b'{"x": ' + b"1" * 5000 + b"}",
    "a lone surrogate": b'{"custom_id": "\\ud800"}',
    "bytes that are not UTF-8": b'{"custom_id": "\xff"}',
    "UTF-16": '{"custom_id": "a"}'.encode("utf-16"),
    "two documents": b"{} {}",
    "trailing text": b"{} x",
    "a raw control character in a string": b'{"custom_id": "\x01"}',
    "100,000 levels": b"[" * 100_000 + b"]" * 100_000,
    "65 levels": b'{"a":' * 65 + b"1" + b"}" * 65,
}


@pytest.mark.parametrize("data", BAD_JSON.values(), ids=BAD_JSON.keys())
def test_a_line_that_is_not_strict_json_is_an_invalid_json_line(data: bytes) -> None:
    assert refusal(data + b"\n") == [("invalid_json_line", None, 1)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b"{}"), "compressed with gzip"),
        ("{}".encode("utf-16"), "save it as UTF-8"),
        ("{}".encode("utf-16-le"), "save it as UTF-8"),
        ("{}".encode("utf-16-be"), "save it as UTF-8"),
        (b"PK\x03\x04", "unpack it first"),
    ],
    ids=["gzip", "UTF-16", "UTF-16, little-endian", "UTF-16, big-endian", "zip"],
)
def test_a_file_of_another_format_is_named(content: bytes, said: str) -> None:
    with pytest.raises(InputRefused) as caught:
        validate(content + b"\n" + content)
    messages = [entry.message for entry in caught.value.entries]
    assert said in messages[0]
    assert said not in messages[-1]  # a later line may begin like this by chance


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (dumps(request()) + MARK + dumps(request(custom_id="b")), 2),
        (dumps(request()).rstrip() + MARK + dumps(request(custom_id="b")), 1),
        (dumps(request()).rstrip() + b" " + MARK + dumps(request(custom_id="b")), 1),
        (MARK + MARK + dumps(request()), 1),
    ],
    ids=["at a line's start", "in a line", "after a space", "twice at the start"],
)
def test_the_byte_order_mark_of_an_appended_file_is_named(content: bytes, line: int) -> None:
    with pytest.raises(InputRefused) as caught:
        validate(content)
    (entry,) = caught.value.entries
    assert (entry.code, entry.line) == ("invalid_json_line", line)
    assert "byte-order mark (U+FEFF) where another file was appended" in entry.message


def test_a_byte_order_mark_in_a_string_is_not_named_for_another_fault() -> None:
    with pytest.raises(InputRefused) as caught:
        validate(b'{"custom_id": "' + MARK + b'"} x')
    assert "byte-order mark" not in caught.value.entries[0].message


@pytest.mark.parametrize("data", [b"[]", b"3", b'"text"', b"null"])
def test_a_line_that_is_no_object_is_an_invalid_request(data: bytes) -> None:
    assert refusal(data) == [("invalid_request", None, 1)]


def test_64_levels_are_still_accepted() -> None:
    deep: Any = 1
    for _ in range(62):
        deep = [deep]
    assert validate(dumps(request(body=body(x=deep))))


ACCEPTED = {
    "a byte-order mark": b"\xef\xbb\xbf" + dumps(request()),
    "CRLF": dumps(request()).replace(b"\n", b"\r\n"),
    "no newline at the end": dumps(request()).rstrip(),
    "a bare CR between tokens": dumps(request()).replace(b", ", b",\r"),
    "U+2028, U+2029, U+0085, VT and FF escapes in a string": json.dumps(
        request("a\u2028b\u2029c\u0085d"), ensure_ascii=False
    ).encode(),
    "blank lines": b"\n  \n" + dumps(request()) + b"\n\n",
    "an escaped surrogate pair": json.dumps(request("\U0001f600")).encode(),
    "extra keys": dumps(request(note="ignored")),
}


@pytest.mark.parametrize("data", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_harmless_framing_is_accepted_as_one_request(data: bytes) -> None:
    assert len(validate(data)) == 1


def test_blank_lines_count_for_line_numbers() -> None:
    assert refusal(b"\n\r\n" + b"nope\n") == [("invalid_json_line", None, 3)]


def test_of_duplicate_keys_the_last_one_counts() -> None:
    data = b'{"custom_id": "a", ' + dumps(request("b"))[1:]
    assert validate(data)[0].custom_id == "b"


def test_every_bad_line_is_reported_and_a_line_may_be_wrong_twice() -> None:
    data = dumps(request("1"), request("2", method="GET", url="/x"), request("3")) + b"nope\n"
    assert refusal(data) == [
        ("invalid_method", "method", 2),
        ("invalid_url", "url", 2),
        ("invalid_json_line", None, 4),
    ]


def test_the_error_list_is_capped_and_says_how_many_are_left_out() -> None:
    with pytest.raises(InputRefused) as caught:
        validate(b"nope\n" * 250)
    entries = caught.value.entries
    assert len(entries) == 101
    assert entries[99].line == 100
    assert (entries[100].code, entries[100].line) == ("more_errors", None)
    assert "150" in entries[100].message


def test_a_repeated_custom_id_is_reported_on_the_later_line() -> None:
    data = dumps(request("a"), request("b"), request("a"), request("a"))
    assert refusal(data) == [
        ("duplicate_custom_id", "custom_id", 3),
        ("duplicate_custom_id", "custom_id", 4),
    ]


def test_custom_ids_are_compared_code_point_by_code_point() -> None:
    ids = ["a", "A", "a ", "é", "e\u0301"]
    assert len(validate(dumps(*(request(i) for i in ids)))) == len(ids)


def test_an_empty_file_is_refused() -> None:
    assert refusal(b"") == [("empty_file", None, None)]
    assert refusal(b"\n \r\n") == [("empty_file", None, None)]


def test_too_many_requests_are_refused_without_reading_on() -> None:
    data = dumps(*(request(str(n)) for n in range(5)))
    assert refusal(data, limits=Limits(max_requests=4)) == [("too_many_tasks", None, None)]


def test_exactly_as_much_as_is_allowed_is_accepted() -> None:
    """Requests, characters of a custom_id and inputs of embeddings."""
    lines = [
        request(f"id-{n}", url="/v1/embeddings", body={"model": "m", "input": ["a", "b"]})
        for n in range(4)
    ]
    limits = Limits(max_requests=4, max_custom_id_chars=4, max_embedding_inputs=8)
    assert len(validate(dumps(*lines), endpoint="/v1/embeddings", limits=limits)) == 4


def test_two_custom_ids_with_the_same_hash_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchyard.lines.duplicates.hash_of", lambda _: 7)
    assert len(validate(dumps(request("a"), request("b")))) == 2
    assert refusal(dumps(request("a"), request("b"), request("a"))) == [
        ("duplicate_custom_id", "custom_id", 3)
    ]


def test_equal_ids_are_found_among_more_than_are_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "_HELD", 100)
    monkeypatch.setattr(duplicates, "_ADDED", 10)
    hashes = duplicates.IdHashes(tmp_path)
    for name in [*range(1001), 0, 500, 1000]:
        hashes.add(str(name))
    assert hashes.suspects() == {duplicates.hash_of(name) for name in ("0", "500", "1000")}


def test_what_shows_that_ids_are_unique_fills_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "_HELD", 1000)
    monkeypatch.setattr(duplicates, "_ADDED", 100)
    count = 40_000

    duplicates.IdHashes().suspects()  # imports what it needs
    tracemalloc.start()
    try:
        hashes = duplicates.IdHashes(tmp_path)
        for number in range(count):
            hashes.add(str(number))
        assert not hashes.suspects()
        assert tracemalloc.get_traced_memory()[1] < 4 * count
    finally:
        tracemalloc.stop()


def test_a_line_over_the_cap_is_reported_and_the_next_is_read() -> None:
    data = dumps(request("x" * 400), request("b")) + b"nope"
    assert refusal(data, limits=Limits(max_line_bytes=300)) == [
        ("line_too_long", None, 1),
        ("invalid_json_line", None, 3),
    ]


def test_a_second_model_is_refused_unless_models_may_mix() -> None:
    data = dumps(request("a"), request("b", body=body(model="other")))
    assert refusal(data) == [("mismatched_model", "body.model", 2)]
    assert len(validate(data, one_model=False)) == 2


def test_a_model_that_is_not_offered_is_refused_with_the_offer() -> None:
    with pytest.raises(InputRefused, match="offered: big") as caught:
        validate(dumps(request()), models=frozenset({"big"}))
    assert caught.value.entries[0].code == "model_not_found"


OFFER = Offer.of({"m": ["law", "tone"], "other": ["far"]})


def naming(*models: str) -> bytes:
    lines = [request(f"id-{n}", body=body(model=model)) for n, model in enumerate(models)]
    return dumps(*lines)


@pytest.mark.parametrize("models", [("m", "law", "tone"), ("law", "m"), ("tone",)])
def test_a_model_and_its_adapters_are_one_model(models: tuple[str, ...]) -> None:
    validator = Validator(Rules(endpoint=CHAT, offer=OFFER))
    lines = list(validator.lines(io.BytesIO(naming(*models))))
    assert [line.model for line in lines] == list(models)
    assert [line.adapter for line in lines] == ["" if each == "m" else each for each in models]
    assert validator.model == "m"


def test_an_adapter_of_another_model_is_refused_and_one_that_nobody_serves() -> None:
    data = naming("law", "far", "other", "none")
    assert refusal(data, offer=OFFER) == [
        ("mismatched_model", "body.model", 2),
        ("mismatched_model", "body.model", 3),
        ("model_not_found", "body.model", 4),
    ]
    with pytest.raises(InputRefused) as caught:
        validate(data, offer=OFFER)
    start = "All lines of a file must name one model, or adapters of one; the first is m"
    assert [entry.message for entry in caught.value.entries] == [
        f"{start}, and far is an adapter of other.",
        f"{start}.",
        "The model of this line is not offered here: no engine serves it.",
    ]


def test_where_bad_lines_are_left_out_the_first_good_one_says_the_model() -> None:
    bad: list[Any] = []
    rules = Rules(endpoint=CHAT, offer=OFFER)
    validator = Validator(rules, leave_out=bad.append)
    lines = list(validator.lines(io.BytesIO(b"nope\n" + naming("tone", "other", "m"))))
    assert [line.model for line in lines] == ["tone", "m"]
    assert [each.errors[0].code for each in bad] == ["invalid_json_line", "mismatched_model"]


def test_a_batch_for_a_model_takes_its_adapters_and_one_for_an_adapter_takes_no_other() -> None:
    assert len(validate(naming("m", "law"), offer=OFFER, models=frozenset({"m"}))) == 2
    assert refusal(naming("law", "tone", "m"), offer=OFFER, models=frozenset({"law"})) == [
        ("model_not_found", "body.model", 2),
        ("model_not_found", "body.model", 3),
    ]


def test_endpoints_may_mix_where_the_rules_say_so() -> None:
    embed = request("b", url="/v1/embeddings", body={"model": "m", "input": "x"})
    assert [line.url for line in validate(dumps(request(), embed), endpoint=None)] == [
        CHAT,
        "/v1/embeddings",
    ]


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [], "max_tokens": 1}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/embeddings", {"messages": []}),
        ("/v1/moderations", {"input": "x"}),
        ("/v1/score", {"text_1": "x", "text_2": ["y"]}),
        ("/score", {"queries": "x", "documents": ["y"]}),
        ("/v1/score", {"queries": "x", "items": ["y"]}),
        ("/v1/score", {"data_1": "x", "data_2": ["y"]}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("/rerank", {"query": "x", "documents": ["y"]}),
        ("/v2/rerank", {"query": "x", "documents": ["y"]}),
        ("/v1/audio/transcriptions", {"file_url": "https://example.com/a.wav"}),
        ("/v1/audio/translations", {"file_url": "data:audio/wav;base64,"}),
        ("/v1/images/generations", {"prompt": "x"}),
        ("/v1/images/edits", {"prompt": "x", "file_url": "https://example.com/a.png"}),
        ("/v1/images/edits", {"prompt": "x", "images": [{"image_url": "data:,"}]}),
        ("/v1/videos", {"prompt": "x"}),
        ("/classify", {"input": "x"}),
        ("/pooling", {"data": "x"}),
    ],
)
def test_each_endpoint_is_accepted_with_its_own_fields_and_not_without(
    url: str, fields: dict[str, Any]
) -> None:
    line = request(url=url, body={"model": "m"} | fields)
    assert validate(dumps(line), endpoint=url)[0].url == url

    left_out = next(iter(fields))
    del line["body"][left_out]
    refused = refusal(dumps(line), endpoint=url)
    assert {(code, number) for code, _, number in refused} == {("invalid_request", 1)}


def test_of_several_sets_of_fields_the_one_that_was_meant_is_named() -> None:
    def missing(**fields: Any) -> list[str | None]:
        line = request(url="/v1/score", body={"model": "m"} | fields)
        return [param for _, param, _ in refusal(dumps(line), endpoint=None)]

    assert missing() == ["body.text_1", "body.text_2"]
    assert missing(text_1="x") == ["body.text_2"]
    assert missing(queries="x") == ["body.documents"]


@pytest.mark.parametrize("value", [None, 7, "a.wav", "file:///etc/passwd", "s3://bucket/a.wav"])
def test_a_file_url_must_be_one_that_can_be_fetched(value: Any) -> None:
    line = request(url="/v1/audio/transcriptions", body={"model": "m", "file_url": value})
    assert refusal(dumps(line), endpoint=None) == [("invalid_request", "body.file_url", 1)]


def test_an_engine_route_that_is_no_endpoint_is_refused() -> None:
    assert refusal(dumps(request(url="/pause")), endpoint=None) == [("invalid_url", "url", 1)]


@pytest.mark.parametrize(
    ("value", "count"),
    [("text", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2]], 2), (None, 1)],
)
def test_embedding_inputs_are_counted_as_openai_counts_them(value: Any, count: int) -> None:
    assert embedding_inputs(value) == count


def test_too_many_embedding_inputs_are_reported_once() -> None:
    lines = [
        request(str(n), url="/v1/embeddings", body={"model": "m", "input": ["a", "b"]})
        for n in range(4)
    ]
    limits = Limits(max_embedding_inputs=5)
    assert refusal(dumps(*lines), endpoint="/v1/embeddings", limits=limits) == [
        ("too_many_embedding_inputs", "body.input", 3)
    ]


def test_messages_never_quote_the_input() -> None:
    secret = "hunter2"
    data = f'{{"custom_id": "{secret}", "x": nope}}\n{secret}\n"{secret}\xff"'.encode("latin-1")
    with pytest.raises(InputRefused) as caught:
        validate(data + dumps(request(body=body(model=["hunter2"]))))
    assert not any(secret in entry.message for entry in caught.value.entries)


def test_lines_behind_the_limit_are_not_read_again() -> None:
    """A file of a hundred thousand lines must not cost more than one of the most that are taken."""
    data = dumps(*(request("a") for _ in range(3)))
    assert refusal(data, limits=Limits(max_requests=2)) == [
        ("duplicate_custom_id", "custom_id", 2),
        ("too_many_tasks", None, None),
    ]


@given(st.binary(max_size=200))
def test_no_input_whatever_breaks_the_validator(data: bytes) -> None:
    with contextlib.suppress(InputRefused):
        validate(data)
