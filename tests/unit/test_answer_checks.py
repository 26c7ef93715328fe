"""Whether an answer is what its request asked for."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from batchyard.answer_checks import OutputCheck, TooMuchToCheck, finish_reasons

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "x": {"type": "integer"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/t"}},
    },
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"t": {"enum": ["a", "b"]}},
}


def chat(*texts: str | None, **message: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text, **message}} for text in texts]}


def asking(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ('{"x": 1}', True),
        (' {"x": 1, "tags": ["a", "b"]}\n', True),
        ('{"x": "1"}', False),
        ('{"x": 1, "y": 2}', False),
        ('{"x": 1, "tags": ["c"]}', False),
        ("[]", False),
        ('{"x": 1', False),
        ('```json\n{"x": 1}\n```', False),
        ("", False),
    ],
)
def test_an_answer_is_held_against_the_schema_of_its_own_request(text: str, is_good: bool) -> None:
    assert OutputCheck().is_good(asking(POINT), chat(text)) is is_good


@pytest.mark.parametrize(
    "body",
    [
        asking(POINT),
        {"text": {"format": {"type": "json_schema", "schema": POINT}}},
        {"structured_outputs": {"json": POINT}},
    ],
)
def test_each_way_to_ask_for_a_schema_is_known(body: dict[str, Any]) -> None:
    said = {
        "type": "message",
        "content": [{"type": "output_text", "text": '{"x":'}, {"text": "true}"}],
    }
    for answer in (chat('{"x": true}'), {"choices": [{"text": "{}"}]}, {"output": [said]}):
        assert not OutputCheck().is_good(body, answer)
    for answer in (chat('{"x": 1}'), {"choices": [{"text": '{"x": 1}'}]}):
        assert OutputCheck().is_good(body, answer)


def test_one_bad_choice_makes_a_bad_answer_and_a_call_of_a_tool_does_not() -> None:
    check = OutputCheck()
    assert not check.is_good({}, chat("{}", "no json"))
    assert not check.is_good({}, chat(None))
    assert check.is_good({}, chat(None, tool_calls=[{"id": "call_1"}]))
    assert check.is_good({}, {"data": [{"embedding": [0.5]}]})


def test_a_response_that_is_cut_off_counts_as_one_that_ended_by_its_length() -> None:
    assert finish_reasons(
        {"choices": [{"finish_reason": "stop"}, {"finish_reason": "length"}]}
    ) == {
        "stop",
        "length",
    }
    assert finish_reasons({"incomplete_details": {"reason": "max_output_tokens"}}) == {"length"}
    assert finish_reasons({"choices": 5, "incomplete_details": None}) == finish_reasons([]) == set()


NESTED = {
    f"a{n}": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "allOf": 2 * [{"$ref": f"#/$defs/a{n + 1}"}],
    }
    for n in range(40)
}


def test_a_schema_that_would_take_forever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchyard.answer_checks.STEPS_OF_ALL", 1000)
    schema = {"$ref": "#/$defs/a0", "$defs": NESTED | {"a40": {"type": "integer"}}}
    with pytest.raises(TooMuchToCheck):
        OutputCheck().is_good(asking(schema), chat("1"))


def test_a_schema_cannot_bring_another_validator() -> None:
    """One that knows ``pattern`` would find a fault here."""
    other = {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^x$"}
    assert OutputCheck().is_good(asking({"items": other}), chat('["y"]'))


def test_a_regular_expression_of_a_client_is_never_run() -> None:
    """Not even behind the name of another dialect."""
    slow = {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^(a+)+$"}
    keys = {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}
    text = json.dumps([{"a" * 40 + "b": "a" * 40 + "b"}])
    began = time.process_time()
    for schema in ({"items": {**keys, "allOf": [{"properties": {"a": slow}, "not": slow}]}}, keys):
        OutputCheck().is_good(asking({"items": schema}), chat(text))
        OutputCheck().is_good(asking({"allOf": [slow]}), chat('"' + "a" * 40 + 'b"'))
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5},
        {"properties": 5},
        {"$ref": 5},
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1:9/schema"},
        {"$id": "http://[", "$ref": "x"},
        {"allOf": ["x"]},
        {"multipleOf": 0},
    ],
)
def test_what_is_no_schema_says_nothing_about_an_answer(schema: Any) -> None:
    assert OutputCheck().is_good(asking(schema), chat("1"))
