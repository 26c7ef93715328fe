"""Whether an answer is what its request asked for."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from batchyard.results.answer_checks import (
    MOST_SECONDS,
    SECONDS_AT_ONCE,
    SECONDS_OF_ANSWER,
    Fault,
    OutputCheck,
    TimeBudget,
    TooMuchToCheck,
    finish_reasons,
)

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


def is_good(body: Any, answer: Any) -> bool:
    return OutputCheck().fault_of(json.dumps(body).encode(), answer) is None


@pytest.mark.parametrize(
    ("text", "fits"),
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
def test_an_answer_is_held_against_the_schema_of_its_own_request(text: str, fits: bool) -> None:
    assert is_good(asking(POINT), chat(text)) is fits


@pytest.mark.parametrize(
    "body",
    [
        asking(POINT),
        {"text": {"format": {"type": "json_schema", "schema": POINT}}},
        {"output_config": {"format": {"type": "json_schema", "schema": POINT}}},
        {"structured_outputs": {"json": POINT}},
    ],
)
def test_each_way_to_ask_for_a_schema_is_known(body: dict[str, Any]) -> None:
    said = {
        "type": "message",
        "content": [{"type": "output_text", "text": '{"x":'}, {"text": "true}"}],
    }
    written = {"content": [{"type": "thinking"}, {"type": "text", "text": '{"x": null}'}]}
    for answer in (chat('{"x": true}'), {"choices": [{"text": "{}"}]}, {"output": [said]}, written):
        assert not is_good(body, answer)
    for answer in (chat('{"x": 1}'), {"choices": [{"text": '{"x": 1}'}]}):
        assert is_good(body, answer)


def test_one_bad_choice_makes_a_bad_answer_and_a_call_of_a_tool_does_not() -> None:
    assert not is_good({}, chat("{}", "no json"))
    assert not is_good({}, chat(None))
    assert is_good({}, chat(None, tool_calls=[{"id": "call_1"}]))
    assert is_good({}, {"data": [{"embedding": [0.5]}]})


def test_a_refusal_is_an_answer_without_a_text() -> None:
    """OpenAI's way to say that the model will not write what fits the schema."""
    assert is_good(asking(POINT), chat(None, refusal="I cannot help with that."))
    part = {"type": "refusal", "refusal": "I cannot help with that."}
    assert is_good(asking(POINT), {"output": [{"type": "message", "content": [part]}]})
    assert not is_good(asking(POINT), chat(None, refusal=None))
    assert not is_good(asking(POINT), chat("no json", refusal="I cannot help with that."))
    assert not is_good(asking(POINT), chat(None, refusal=""))
    assert not is_good(asking(POINT), {"output": [{"type": "message", "content": []}]})


def test_a_response_that_is_cut_off_counts_as_one_that_ended_by_its_length() -> None:
    assert finish_reasons(
        {"choices": [{"finish_reason": "stop"}, {"finish_reason": "length"}]}
    ) == {
        "stop",
        "length",
    }
    assert finish_reasons({"incomplete_details": {"reason": "max_output_tokens"}}) == {"length"}
    assert finish_reasons({"stop_reason": "max_tokens"}) == {"length"}
    assert finish_reasons({"choices": 5, "incomplete_details": None}) == finish_reasons([]) == set()


NESTED = {
    f"a{n}": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "allOf": 2 * [{"$ref": f"#/$defs/a{n + 1}"}],
    }
    for n in range(40)
}


def test_a_schema_that_would_take_forever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchyard.results.answer_checks.STEPS_OF_ALL", 1000)
    schema = {"$ref": "#/$defs/a0", "$defs": NESTED | {"a40": {"type": "integer"}}}
    with pytest.raises(TooMuchToCheck):
        is_good(asking(schema), chat("1"))


@pytest.mark.parametrize(
    "keyword",
    [
        {"items": {}},
        {"additionalProperties": {}},
        {"propertyNames": {}},
        {"const": [[[0] * 4_000]]},
        {"enum": [[[0] * 4_000]]},
    ],
    ids=lambda keyword: next(iter(keyword)),
)
def test_what_a_schema_looks_at_in_an_answer_counts(
    keyword: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred such keywords take a second for an answer with some thousand values."""
    monkeypatch.setattr("batchyard.results.answer_checks.STEPS_OF_ALL", 100_000)
    answer: Any = {f"k{n}": 0 for n in range(4_000)}
    all_are_looked_at = "allOf"
    if "items" in keyword:
        answer = [0] * 4_000
    elif keyword.keys() <= {"const", "enum"}:
        answer, all_are_looked_at = [[[0] * 3_999 + [1]]], "anyOf"
    with pytest.raises(TooMuchToCheck):
        is_good(asking({all_are_looked_at: [keyword] * 60}), chat(json.dumps(answer)))


def test_a_schema_cannot_bring_another_validator() -> None:
    """One that knows ``pattern`` would find a fault here."""
    other = {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^x$"}
    assert is_good(asking({"items": other}), chat('["y"]'))


def test_a_regular_expression_of_a_client_is_never_run() -> None:
    """Not even behind the name of another dialect, or in what is no schema until a reference."""
    slow = {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^(a+)+$"}
    keys = {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}
    text = json.dumps([{"a" * 40 + "b": "a" * 40 + "b"}])
    began = time.process_time()
    for schema in ({"items": {**keys, "allOf": [{"properties": {"a": slow}, "not": slow}]}}, keys):
        is_good(asking({"items": schema}), chat(text))
    for schema in ({"allOf": [slow]}, {"$ref": "#/x/const", "x": {"const": slow}}):
        is_good(asking(schema), chat('"' + "a" * 40 + 'b"'))
    assert time.process_time() - began < 5


@pytest.mark.parametrize("divisor", [0.01, 0.1, 0.05])
def test_a_multiple_is_one_of_decimals(divisor: float) -> None:
    """Of floats, 0.07 is no multiple of 0.01."""
    body = asking({"items": {"multipleOf": divisor}})
    cents = int(divisor * 100)
    prices = [f"{price // 100}.{price % 100:02}" for price in range(0, 10_001, cents)]
    assert is_good(body, chat(f"[{', '.join(prices)}]"))
    assert not is_good(body, chat("[0.071]"))


@pytest.mark.parametrize(
    ("value", "divisor", "fits"),
    [
        ("6", 3, True),
        ("6.0", 3, True),
        ("7", 3, False),
        ("-7.5", 2.5, True),
        ("1e-300", 1, False),
        ('"7"', 3, True),
        # What cannot be divided, or is not known to its last digit.
        ("1e308", 0.01, True),
        ("1", 1e-300, True),
        ("9007199254740993.5", 2, True),
        (str(10**60 + 1), 7.5, True),
        (str(10**60 + 1), 10, False),
        (str(7 * (10**60 + 3)), 10**60 + 3, True),
        ("7", 0, True),
        ("7", "3", True),
        ("7", True, True),
    ],
)
def test_what_cannot_be_divided_counts_as_a_multiple(value: str, divisor: Any, fits: bool) -> None:
    assert is_good(asking({"multipleOf": divisor}), chat(value)) is fits


ORDER, INVOICE = {"pattern": "^ORD-"}, {"pattern": "^INV-"}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "not": {"pattern": "^ *$"}}, '"Ada"'),
        ({"not": {"type": "array", "uniqueItems": True}}, "[1, 1]"),
        ({"not": {"not": {"type": "string", "not": ORDER}}}, '"Ada"'),
        ({"oneOf": [ORDER, INVOICE]}, '"ORD-12"'),
        ({"oneOf": [{"if": {}, "then": {"required": ["b"]}}, {"required": ["a"]}]}, '{"a": 1}'),
        (
            {"oneOf": [{"properties": {"a": ORDER}}, {"properties": {"a": INVOICE}}]},
            '{"a": "INV-"}',
        ),
        ({"contains": {"type": "string"}, "minContains": 0, "maxContains": 1}, '["a", 1]'),
        ({"patternProperties": {"^x": {}}, "additionalProperties": False}, '{"x": 1}'),
        # In draft 4 these are no numbers.
        ({"maximum": 100, "exclusiveMaximum": True}, "50"),
        ({"minimum": 0, "exclusiveMinimum": True}, "0.5"),
        ({"minimum": -5, "exclusiveMinimum": False}, "-3"),
    ],
)
def test_what_fits_does_not_miss_a_keyword_that_is_not_checked(schema: Any, text: str) -> None:
    assert is_good(asking({"type": "array", "items": schema}), chat(f"[{text}]"))


def test_what_fits_no_branch_is_found() -> None:
    body = asking({"oneOf": [{"type": "string", **ORDER}, {"type": "integer"}]})
    assert not is_good(body, chat("0.5"))


def test_a_property_may_have_the_name_of_the_dialect() -> None:
    """As in what describes a chart of Vega."""
    named = {"$schema": "https://vega.github.io/schema/vega-lite/v5.json"}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"$schema": {"type": "string"}, "like": {"enum": [named]}, "as": named},
        "required": ["$schema"],
        "additionalProperties": False,
    }
    assert is_good(asking(schema), chat(json.dumps({**named, "like": named, "as": 1})))
    assert is_good(asking({"const": named}), chat(json.dumps(named)))
    assert not is_good(asking(schema), chat('{"$schema": 5}'))
    assert not is_good(asking({"const": named}), chat("{}"))


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
    assert is_good(asking(schema), chat("1"))


def taking(seconds: list[float]) -> tuple[TimeBudget, list[float]]:
    """A budget on a clock that goes on by ``seconds[0]`` each time it is looked at."""
    now = [0.0]

    def clock() -> float:
        now[0] += seconds[0]
        return now[0]

    return TimeBudget(clock), now


def test_a_check_that_takes_long_is_given_up_for_this_answer_only() -> None:
    step = [MOST_SECONDS / 2]
    check = OutputCheck(taking(step)[0])
    for _ in range(2):
        with pytest.raises(TooMuchToCheck):
            check.fault_of(json.dumps(asking(POINT)).encode(), chat('{"x": "1"}'))
    step[0] = 0.0
    assert check.fault_of(json.dumps(asking(POINT)).encode(), chat('{"x": "1"}'))


def test_what_the_checks_of_many_answers_take_has_a_limit_for_each() -> None:
    """Without a schema nothing of it is taken."""
    budget, now = taking([0.0005])
    check, body = OutputCheck(budget), json.dumps(asking(POINT)).encode()
    refused = 0
    for _ in range(1000):
        try:
            check.fault_of(body, chat('{"x": 1, "tags": ["a"]}'))
        except TooMuchToCheck:
            refused += 1
    assert 0 < refused < 1000
    assert now[0] < SECONDS_AT_ONCE + 1000 * (SECONDS_OF_ANSWER + 0.001)
    assert check.fault_of(b"{}", chat("no json"))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"$ref": "#/$defs/a0", "$defs": NESTED | {"a40": {"type": "integer"}}}, "1"),
        ({"items": {"enum": [[n] for n in range(2000)]}}, json.dumps([[-n] for n in range(2000)])),
        ({"anyOf": 4000 * [{"type": "string"}]}, json.dumps({"x": list(range(9000))})),
        ({"allOf": 900 * [{"items": {}}]}, json.dumps([0] * 20_000)),
        ({"items": {"multipleOf": 1e-20}}, json.dumps([1e15] * 20_000)),
        ({"properties": {f"p{n}": {"type": "integer"} for n in range(9999)}}, "{}"),
    ],
)
def test_no_schema_keeps_a_runner_for_long(schema: Any, text: str) -> None:
    """A check of each would take seconds, or minutes."""
    check = OutputCheck(TimeBudget(), most_bytes=64 * 1024)
    check.load()
    body, answer = json.dumps(asking(schema)).encode(), chat(text)
    began = time.thread_time()
    for _ in range(20):
        with contextlib.suppress(TooMuchToCheck):
            check.fault_of(body, answer)
    assert time.thread_time() - began < 1


def test_only_so_large_a_schema_and_text_are_held_against_each_other() -> None:
    check = OutputCheck(most_bytes=1000)
    large = json.dumps(asking({"type": "string", "title": "x" * 1000})).encode()
    small = json.dumps(asking({"type": "string"})).encode()
    for body, text in ((large, "1"), (small, json.dumps(["x" * 1000]))):
        with pytest.raises(TooMuchToCheck):
            check.fault_of(body, chat(text))
    assert check.fault_of(small, chat("1")) is Fault.NOT_OF_ITS_SCHEMA
    assert check.fault_of(large, chat("words")) is Fault.NOT_JSON
