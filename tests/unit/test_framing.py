"""Where lines begin and end, and that the runner reads whatever the validator lets pass."""

from __future__ import annotations

import io
import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchyard.errors import BrokenLine, InputRefused
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.lines.framing import PhysicalLine, custom_id_of, parse_envelope, read_lines
from batchyard.lines.lines import RequestLine, Validator
from batchyard.lines.prompt import expected_output_tokens, prompt_key
from batchyard.lines.rules import Rules
from batchyard.plan.duplicates import answer_digest

CHAT = "/v1/chat/completions"
BODY = '{"model":"m","messages":[]}'
BLANKS = st.sampled_from([b"", b"\r", b" ", b"\t \r", b"\x0b\x0c"])


def cut(data: bytes, max_line_bytes: int = 10_000) -> list[PhysicalLine]:
    return list(read_lines(io.BytesIO(data), max_line_bytes))


def reference(data: bytes) -> list[tuple[int, bytes]]:
    """The lines that are not blank with their numbers, by the simplest means there is."""
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [(number, line.rstrip(b"\r")) for number, line in enumerate(lines, 1) if line.strip()]


@given(st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=20))
def test_lines_are_cut_at_newlines_and_nowhere_else(lines: list[bytes]) -> None:
    data = b"\n".join(lines)
    found = cut(data)
    assert [(physical.number, physical.data) for physical in found] == reference(data)
    for physical in found:
        assert data[physical.offset :].startswith(physical.data or b"?")


@given(st.lists(st.tuples(st.integers(0, 60), BLANKS, st.booleans()), max_size=12))
def test_numbers_and_offsets_hold_behind_runs_of_blank_lines(
    runs: list[tuple[int, bytes, bool]],
) -> None:
    data = b""
    for count, blank, has_end in runs:
        data += (blank + b"\n") * count + b'{"x":1}' + (b"\n" if has_end else b" y\r\n")
    found = cut(data)
    assert [(physical.number, physical.data) for physical in found] == reference(data)
    for physical in found:
        assert data[physical.offset :].startswith(physical.data or b"?")


def test_a_run_of_blank_lines_longer_than_a_block_is_skipped_whole() -> None:
    data = b" \r\n" * 100_000 + b"a\n" + b"\n" * 70_000 + b" " * 200_000 + b"\n" + b"b"
    assert [(line.number, line.data) for line in cut(data)] == [(100_001, b"a"), (170_003, b"b")]


def test_blank_lines_cost_next_to_nothing() -> None:
    """2.5 s of CPU when each is a line of its own; the limit leaves room for a busy machine."""
    began = time.process_time()
    assert cut(b"\n" * (4 << 20)) == []
    assert time.process_time() - began < 0.5


def test_a_blank_line_beyond_the_limit_is_blank_and_another_one_is_too_long() -> None:
    assert cut(b" " * 50 + b"\n" + b" " * 50 + b"x\n", 10) == [PhysicalLine(2, 51, None)]


def test_the_body_passes_through_byte_for_byte() -> None:
    raw = b'{"model":"m",  "x":1.10000000000000000001, "y":12345678901234567890123}'
    line = b'{"custom_id":"a","method":"POST","url":"/v1/x","body":' + raw + b"}"
    assert bytes(parse_envelope(line).body) == raw


# -- validator and runner ---------------------------------------------------------------------


def validated(line: bytes) -> RequestLine | None:
    """The line as the validator yields it; None where it is refused."""
    validator = Validator(Rules(endpoint=None))
    file = io.BytesIO(line + b"\n")
    lines = list(validator.lines(file))
    try:
        validator.finish(file)
    except InputRefused:
        return None
    return lines[0]


ODD_VALUES = st.sampled_from(
    [
        *("5", "null", "[]", "{}", "true", "1.5", '""', '"\\ud800"', '"\\ud83d\\ude00"', "NaN"),
        *("1e999", "-1e999", "1e-999", "9" * 19, "9" * 20, "-" + "9" * 30, "9" * 4300, "9" * 4301),
        *("9" * 5000, "1" + "0" * 400 + ".5", '{"a":1e999}', "[" * 70 + "]" * 70, '{"a":1,"a":2}'),
        *('"\\u0000"', '"\x7f"', '"\u2028"', "-", "01", '"'),
    ]
)
VALUES = ODD_VALUES | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
).map(json.dumps)
KEYS = st.sampled_from(
    [
        *('"custom_id"', '"url"', '"method"', '"body"', '"x"', '"custom\\u005fid"', '"\\u0075rl"'),
        *('"custom_id\\u0000"', '"Custom_id"', '"\\ud800"', '""'),
    ]
)
GOOD = [
    ('"custom_id"', '"a"'),
    ('"method"', '"POST"'),
    ('"url"', f'"{CHAT}"'),
    ('"body"', BODY),
]


@given(
    before=st.lists(st.tuples(KEYS, VALUES), max_size=4),
    after=st.lists(st.tuples(KEYS, VALUES), max_size=1),
    good=st.permutations(GOOD),
)
@example(before=[('"custom_id"', "5")], after=[], good=GOOD)
@example(before=[('"url"', "null")], after=[], good=GOOD)
@example(before=[('"custom_id"', "9" * 4301)], after=[], good=GOOD)
@example(before=[("custom_id", '"\\ud800"')], after=[], good=GOOD)
def test_whatever_the_validator_yields_the_runner_reads_with_the_same_values(
    before: list[tuple[str, str]], after: list[tuple[str, str]], good: list[tuple[str, str]]
) -> None:
    pairs = [*before, *good, *after]
    data = ("{" + ",".join(f"{key}:{value}" for key, value in pairs) + "}").encode()
    line = validated(data)
    if line is None:
        return
    envelope = parse_envelope(data)
    assert (envelope.custom_id, envelope.url) == (line.custom_id, line.url)
    assert custom_id_of(data) == line.custom_id
    assert validated_body(bytes(envelope.body)) == line.body


BODIES = st.dictionaries(
    st.sampled_from(
        [
            *("messages", "input", "prompt", "tools", "instructions", "max_tokens", "n", "seed"),
            *("temperature", "query", "documents", "text_1", "text_2", "data", "file_url", "stop"),
        ]
    ),
    VALUES,
)


@given(BODIES, st.sampled_from(sorted(ENDPOINTS)))
@example({"messages": f'[{{"role":{"9" * 4300}}}]', "n": "9" * 4300, "seed": "1"}, CHAT)
def test_whatever_the_validator_yields_can_be_planned(body: dict[str, str], url: str) -> None:
    fields = "".join(f',"{name}":{value}' for name, value in body.items())
    line = validated(
        f'{{"custom_id":"a","method":"POST","url":"{url}","body":{{"model":"m"{fields}}}}}'.encode()
    )
    if line is None:
        return
    key, size = prompt_key(line.url, line.body)
    assert key.startswith(url.encode())
    assert 0 <= size < 2**31
    assert 0 <= expected_output_tokens(line.url, line.body) <= 2**31
    assert len(answer_digest(line.url, line.body)) == 16


def validated_body(raw: bytes) -> dict[str, Any]:
    line = validated(
        b'{"custom_id":"a","method":"POST","url":"%b","body":%b}' % (CHAT.encode(), raw)
    )
    assert line is not None
    return line.body


@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_a_line_that_cannot_be_read_is_one_error_of_ours(data: bytes) -> None:
    with pytest.raises(BrokenLine):
        parse_envelope(data)


def test_the_error_of_an_unreadable_line_does_not_quote_it() -> None:
    with pytest.raises(BrokenLine) as caught:
        parse_envelope(b'{"custom_id": hunter2}')
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "custom_id"),
    [
        *((b"", ""), (b"{", ""), (b"[]", ""), (b"7", ""), (b"[" * 100_000, "")),
        (b'{"url":"u","body":{}}', ""),
        (b'{"custom_id":5,"url":"u","body":{}}', ""),
        (b'{"custom_id":5,"custom_id":"a","url":7}', "a"),
    ],
)
def test_a_broken_line_has_the_custom_id_that_it_shows(data: bytes, custom_id: str) -> None:
    assert custom_id_of(data) == custom_id


def test_the_custom_id_of_a_line_is_found_without_making_the_rest_of_it() -> None:
    """As objects, the rest can be fifty times as large, and stop all else that a process does."""
    line = b'{"body":[%b[]],"custom_id":"a"}' % (b"[]," * 100_000)
    tracemalloc.start()
    try:
        assert custom_id_of(line) == "a"
        assert tracemalloc.get_traced_memory()[1] < len(line)
    finally:
        tracemalloc.stop()
