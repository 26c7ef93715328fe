"""What deep validation refuses: what the engine would, and schemas and tools that are none."""

from __future__ import annotations

from typing import Any

import pytest

from batchyard.deep_checks import context_refusals, format_schemas, schema_refusals, tool_refusals
from batchyard.json_schemas import schema_defect

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


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": ["string", "null"], "format": "date", "minLength": 1.0, "x-own": [1]},
        {"properties": {"type": {"const": 1}, "items": {"enum": [None]}}, "required": ["type"]},
        # In drafts of their own.
        {"type": "number", "minimum": 1, "exclusiveMinimum": True},
        {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
        {"type": "array", "items": []},
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"not": {}}}},
    ],
)
def test_a_schema_of_any_draft_is_one(schema: Any) -> None:
    assert schema_defect(schema) is None


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ([], "the schema"),
        ({"type": "objekt"}, "type"),
        ({"type": []}, "type"),
        ({"type": [{}]}, "type"),
        ({"properties": {"a": {"items": {"type": 1}}}}, "properties.a.items.type"),
        ({"properties": {"a": 1}}, "properties"),
        ({"allOf": [{}, {"minLength": -1}]}, "allOf.minLength"),
        ({"anyOf": []}, "anyOf"),
        ({"enum": []}, "enum"),
        ({"required": "a"}, "required"),
        ({"maxItems": 1.5}, "maxItems"),
        ({"maxItems": True}, "maxItems"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"properties": {"secret words\n": {"pattern": 1}}}, "properties.secret?words?.pattern"),
    ],
)
def test_what_is_wrong_with_a_schema_is_said_with_its_place(schema: Any, place: str) -> None:
    defect = schema_defect(schema)
    assert defect is not None
    assert defect.startswith(f"{place} must")


def test_the_schema_of_an_answer_is_found_in_every_dialect() -> None:
    bad = {"type": "objekt"}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": bad}}
    bodies: list[dict[str, Any]] = [
        {"response_format": wanted},
        {"text": {"format": {"type": "json_schema", "schema": bad}}},
        {"structured_outputs": {"json": bad}},
        {"structured_outputs": {"json": '{"type": "objekt"}'}},
        {"structured_outputs": {"json": "{"}},
    ]
    for body in bodies:
        (asked,) = format_schemas(body)
        assert [each.code for each in schema_refusals(asked)] == ["invalid_json_schema"]
    unused = {"type": "text", "json_schema": {"schema": bad}}
    assert [*format_schemas({"text": "plain", "response_format": unused})] == []


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a-B_1"}}]}, []),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "f"}]}, []),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, []),
        ({"tools": [{"type": "custom", "name": "f", "input_schema": {}}]}, []),
        ({"tools": [{"type": "custom", "custom": {"name": "?"}}, {"type": "x", "name": []}]}, []),
        ({"tools": {}}, ["body.tools"]),
        ({"tools": [{"function": {"name": "x" * 65}}]}, ["body.tools[0].function.name"]),
        ({"tools": [{"type": "function"}]}, ["body.tools[0].name"]),
        (
            {"tools": [{"name": "f", "input_schema": {"type": 1}}]},
            ["body.tools[0].input_schema"],
        ),
        (
            {"tools": [{"type": "custom", "name": "?", "input_schema": {"type": 1}}]},
            ["body.tools[0].name", "body.tools[0].input_schema"],
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": []}}]},
            ["body.tools[0].function.parameters"],
        ),
    ],
)
def test_tools_are_functions_with_names_and_schemas(
    body: dict[str, Any], refused: list[str]
) -> None:
    assert [each.param for each in tool_refusals(body)] == refused


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "g"}},
        {"type": "function", "name": "g"},
        {"type": "tool", "name": "g"},
    ],
)
def test_a_choice_names_one_of_the_tools(choice: dict[str, Any]) -> None:
    def params(name: str) -> list[str]:
        body = {"tools": [{"function": {"name": name}}], "tool_choice": choice}
        return [each.param for each in tool_refusals(body)]

    assert params("f") == ["body.tool_choice"]
    assert params("g") == []


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "custom", "input_schema": {"type": "object"}},
        {"type": None, "input_schema": {"type": "object"}},
        {"type": "web_search_20250305"},
    ],
)
def test_a_choice_names_a_tool_of_any_type(tool: dict[str, Any]) -> None:
    choice = {"type": "tool", "name": "g"}
    assert [*tool_refusals({"tools": [tool | {"name": "g"}], "tool_choice": choice})] == []
    refused = tool_refusals({"tools": [tool | {"name": "f"}], "tool_choice": choice})
    assert [each.param for each in refused] == ["body.tool_choice"]
