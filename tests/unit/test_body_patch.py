"""A patch changes the fields that it names, and no other byte."""

from __future__ import annotations

from typing import Any

import pytest

from batchyard.errors import RequestRefused
from batchyard.lines.body_patch import MOST_PATHS, BodyPatch, parse_assignment

LINE = (
    b'{"custom_id": "a\\u0062", "body": {"model":"m", "n": 1.50, "stop":null,'
    b'"rf":{"a":{"b":1}, "c":[1e5]}}}'
)


def patched(values: dict[str, Any], *removed: str) -> bytes:
    return BodyPatch.of(values, removed).applied(LINE)


def test_what_is_not_named_keeps_its_bytes() -> None:
    assert patched({"model": "other", "max_tokens": 4096}) == (
        b'{"custom_id":"a\\u0062","body":{"model":"other","n":1.50,"stop":null,'
        b'"rf":{"a":{"b":1}, "c":[1e5]},"max_tokens":4096}}'
    )


def test_dots_lead_into_objects_and_make_those_that_are_missing() -> None:
    assert patched({"rf.a.b": True, "stop.x": 1, "new.y.z": []}).endswith(
        b'"stop":{"x":1},"rf":{"a":{"b":true},"c":[1e5]},"new":{"y":{"z":[]}}}}'
    )


def test_a_field_is_removed_if_it_is_there() -> None:
    assert patched({}, "rf.a.b", "n", "none", "none.at.all", "model.x").endswith(
        b'"body":{"model":"m","stop":null,"rf":{"a":{},"c":[1e5]}}}'
    )


def test_no_patch_leaves_the_line_as_it_is() -> None:
    assert patched({}) is LINE


@pytest.mark.parametrize(
    ("values", "removed", "param"),
    [
        ({"": 1}, (), "set"),
        ({"a..b": 1}, (), "set"),
        ({}, (".a",), "unset"),
        ({f"f{n}": n for n in range(MOST_PATHS)}, ("g",), "set"),
    ],
)
def test_what_is_no_path_is_refused(
    values: dict[str, Any], removed: tuple[str, ...], param: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        BodyPatch.of(values, removed)
    assert refused.value.param == param


def test_a_path_through_something_that_is_no_object_is_refused() -> None:
    with pytest.raises(
        RequestRefused, match=r"model\.x leads through a value that is not an object"
    ):
        patched({"model.x": 1})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("f=4096", 4096),
        ("f=other", "other"),
        ('f="4"', "4"),
        ("f=", ""),
        ("f=a=b", "a=b"),
        ('f={"type": "json_object"}', {"type": "json_object"}),
    ],
)
def test_a_value_on_the_command_line_is_json_or_text(text: str, value: object) -> None:
    assert parse_assignment(text) == ("f", value)


def test_an_assignment_without_a_value_is_refused() -> None:
    with pytest.raises(RequestRefused, match="sets nothing"):
        parse_assignment("max_tokens")
