"""What a stranger's OpenAPI document says of its fields, found in a bounded number of steps."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.routes import post_routes, routes_with_field

if TYPE_CHECKING:
    from collections.abc import Iterator

A = {"$ref": "#/components/schemas/A"}
B = {"$ref": "#/components/schemas/B"}
LOOP = {"$ref": "#/components/schemas/Loop"}
SALTED = {"properties": {"cache_salt": {}}}
MOST_STEPS = 3_000_000


def page(paths: dict[str, Any], **schemas: Any) -> bytes:
    """Of a server whose ``paths`` take bodies of these schemas."""
    methods = {
        path: {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
        for path, schema in paths.items()
    }
    return json.dumps({"paths": methods, "components": {"schemas": schemas}}).encode()


@contextlib.contextmanager
def few_steps() -> Iterator[None]:
    """Fail as soon as more functions are called than a document may cost."""
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps > MOST_STEPS:
            sys.setprofile(None)
            raise AssertionError("too many steps")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize(
    ("paths", "schemas"),
    [
        ({"/v1/a": A}, {"A": {"anyOf": [A] * 2000}}),
        ({"/v1/a": A}, {"A": {"anyOf": [A, B] * 1000}, "B": {"oneOf": [B, A] * 1000}}),
        ({f"/v1/{number}": A for number in range(2000)}, {"A": {"anyOf": [{}] * 2000}}),
    ],
    ids=["of itself", "of each other", "behind many paths"],
)
def test_a_page_with_thousands_of_references_costs_few_steps(
    paths: dict[str, Any], schemas: dict[str, Any]
) -> None:
    document = page(paths, **schemas)
    with few_steps():
        assert routes_with_field(document, "cache_salt") == frozenset()


def test_references_that_go_round_hide_no_field() -> None:
    document = page(
        {"/v1/loop": LOOP, "/v1/a": A, "/v1/b": B, "/v1/c": {}},
        Loop={"anyOf": [LOOP] * 2000},
        A={"anyOf": [A, B] * 1000},
        B={"anyOf": [{"anyOf": [A, {"allOf": [SALTED]}]}]},
    )
    with few_steps():
        assert routes_with_field(document, "cache_salt") == {"/v1/a", "/v1/b"}


def test_in_a_page_without_end_the_field_counts_as_not_named() -> None:
    document = page({"/v1/a": A, "/v1/b": SALTED}, A={"anyOf": [SALTED, *[{}] * 200_000]})
    with few_steps():
        assert routes_with_field(document, "cache_salt") == frozenset()


@pytest.mark.parametrize("odd", [7, "cache_salt", ["cache_salt"], None, True])
def test_schemas_that_are_none_name_nothing_and_harm_nothing(odd: Any) -> None:
    schema = {"properties": odd, "anyOf": odd, "$ref": odd}
    document = page({"/v1/a": schema, "/v1/b": odd, "/v1/c": B}, A=odd, B=SALTED)
    assert routes_with_field(document, "cache_salt") == {"/v1/c"}
    assert routes_with_field(b'{"components": {"schemas": 7}}', "cache_salt") == frozenset()


CHAT = {"type": "object", "properties": {"model": {}, "response_format": {"$ref": A["$ref"]}}}
FORMAT = {"properties": {"type": {}}}
NULL = {"type": "null"}
OTHERS = {"additionalProperties": True}
OF_FORMAT = {"model", "response_format", "response_format.type"}


@pytest.mark.parametrize(
    ("chat", "format_", "expected"),
    [
        (CHAT, FORMAT, OF_FORMAT),
        (CHAT | {"additionalProperties": False}, {"anyOf": [FORMAT, NULL]}, OF_FORMAT),
        ({"anyOf": [CHAT, {"properties": {"n": {}}}]}, FORMAT, OF_FORMAT | {"n"}),
        # What is not known of an object is not said of it.
        (CHAT, {"type": "object"}, {"model", "response_format", "response_format.*"}),
        (CHAT, FORMAT | OTHERS, {"model", "response_format", "response_format.*"}),
        # It may hand others on.
        (CHAT | OTHERS, FORMAT, None),
        ({"type": "object"}, FORMAT, None),
        ({"anyOf": [CHAT, {}]}, FORMAT, None),
        ({"anyOf": [CHAT, *[{}] * 200_000]}, FORMAT, None),
        # vLLM says that it takes others, and ignores them.
        (
            CHAT | OTHERS | {"properties": CHAT["properties"] | {"vllm_xargs": {}}},
            FORMAT | OTHERS,
            OF_FORMAT | {"vllm_xargs"},
        ),
    ],
)
def test_a_description_says_which_fields_a_body_may_have(
    chat: dict[str, Any], format_: dict[str, Any], expected: set[str] | None
) -> None:
    routes = post_routes(page({"/v1/chat": chat, "/v1/any": {}}, A=format_))
    assert routes == {
        "/v1/chat": None if expected is None else frozenset(expected),
        "/v1/any": None,
    }
