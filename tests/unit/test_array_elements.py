"""The array of a Message Batch, cut into its requests without a look at what is in them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.array_elements import ArrayElements

JSON = st.recursive(
    st.sampled_from(["", "\\", '"', "]}", "[{", "é\n", 1, None, True]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def cut(body: bytes, size: int, most_bytes: int = 10**6) -> list[bytes]:
    elements = ArrayElements(most_bytes)
    found: list[bytes] = []
    for start in range(0, len(body), size):
        found += elements.feed(body[start : start + size])
    elements.finish()
    return found


@given(
    st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=3), max_size=4),
    st.integers(1, 40),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_every_request_is_found_however_the_body_is_written_and_sliced(
    requests: list[dict[str, Any]], size: int, indent: int | None, is_ascii: bool
) -> None:
    body = json.dumps({"requests": requests}, indent=indent, ensure_ascii=is_ascii).encode()
    assert [json.loads(each) for each in cut(body, size)] == requests


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "requests: it is required"),
        (b"{}", "requests: it is required"),
        (b'{"other": 1, "requests": []}', "requests: it is required"),
        (b" " * 2000, "requests: it is required"),
        (b'{"requests": [1]}', "requests.0: it must be an object"),
        (b'{"requests": [{}, "a"]}', "requests.1: it must be an object"),
        (b'{"requests": [{},]}', "requests.1: it must be an object"),
        (b'{"requests": [{}{}]}', "not valid JSON behind requests.0"),
        (b'{"requests": [{}], "model": "m"}', "'requests' and nothing else"),
        (b'{"requests": [{}]} x', "not valid JSON behind requests.0"),
        (b'{"requests": [{}]', "not complete JSON"),
        (b'{"requests": [{"a": "}]}', "not complete JSON"),
    ],
)
@pytest.mark.parametrize("size", [1, 10_000])
def test_what_is_no_such_body_is_refused(body: bytes, message: str, size: int) -> None:
    with pytest.raises(ApiError) as refused:
        cut(body, size)
    assert message in refused.value.message
    assert refused.value.status == 400


def test_a_request_that_is_too_large_is_refused_before_its_end() -> None:
    elements = ArrayElements(most_bytes=100)
    assert len(elements.feed(b'{"requests": [{"a": 1}, {"b": "')) == 1
    with pytest.raises(ApiError, match=r"requests\.1: a request may have 100 bytes"):
        elements.feed(b"x" * 200)
