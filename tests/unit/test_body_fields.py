"""Which fields the bodies of a file have, and which of them an engine ignores."""

from __future__ import annotations

from typing import Any

import pytest

from batchyard.lines.body_fields import FieldCounts, ignored_fields

CHAT = "/v1/chat/completions"


def counted(*bodies: dict[str, Any], url: str = CHAT) -> dict[str, dict[str, int]]:
    counts = FieldCounts()
    for body in bodies:
        counts.count(url, body)
    return counts.by_endpoint()


def test_lines_are_counted_by_field() -> None:
    """``null`` says nothing."""
    found = counted({"a": 1}, {"a": False, "b": 0}, {"b": None, "a": "x"})
    assert found == {CHAT: {"a": 3, "b": 1}}


def test_the_fields_of_a_response_format_are_counted_as_well() -> None:
    found = counted({"response_format": {"type": "json_object", "schema": {}}, "a": {"b": 1}})
    names = {"response_format", "response_format.type", "response_format.schema", "a"}
    assert found == {CHAT: dict.fromkeys(names, 1)}
    assert counted({"response_format": "json"}) == {CHAT: {"response_format": 1}}


def test_a_form_has_fields_that_the_engine_never_sees() -> None:
    assert counted({"file_url": "data:,"}, url="/v1/audio/transcriptions") == {}


def test_any_number_of_names_costs_little() -> None:
    """And a name that is a whole text is not kept."""
    found = counted(*({f"field{n}": 1, "model": "m"} for n in range(5000)), {"x" * 99 + "\n": 1})
    assert found[CHAT]["model"] == 5000
    assert len(found[CHAT]) == 200
    assert counted({"what is\nthis? " + "x" * 99: 1}) == {CHAT: {"what?is?this??" + "x" * 26: 1}}


GIVEN = {"model": 9, "guided_choice": 2, "response_format": 3, "response_format.schema": 1}


@pytest.mark.parametrize(
    ("taken", "ignored"),
    [
        (None, set()),
        ({"model", "response_format", "response_format.type"}, {"guided_choice", "schema"}),
        ({"model", "response_format", "response_format.*"}, {"guided_choice"}),
        ({"model"}, {"guided_choice", "response_format"}),
    ],
)
def test_an_engine_ignores_what_is_not_among_its_fields(
    taken: set[str] | None, ignored: set[str]
) -> None:
    routes = {CHAT: None if taken is None else frozenset(taken)}
    found = ignored_fields({CHAT: GIVEN, "/v1/other": {"x": 1}}, routes)
    assert {name.removeprefix("response_format.") for name in found} == ignored
    assert all(found[name] == GIVEN[name] for name in found)


def test_lines_of_several_endpoints_are_added_up() -> None:
    routes = {CHAT: frozenset({"model"}), "/v1/completions": frozenset({"model"})}
    given = {CHAT: {"model": 1, "x": 2}, "/v1/completions": {"x": 3}}
    assert ignored_fields(given, routes) == {"x": 5}
