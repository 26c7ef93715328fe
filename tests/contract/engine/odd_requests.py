"""Requests that people send by mistake, beside those that are meant: what vLLM says of each is what
deep validation has to say before."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.contract.engine.conftest import CHAT, MODEL

_MESSAGES: Final = [{"role": "user", "content": "hi"}]
_OBJECT: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
_FLAT: Final = {"type": "function", "name": "look", "parameters": {"type": "object"}}
_NAMED: Final = {"type": "function", "function": {"name": "look"}}
_ANTHROPIC: Final = {"name": "look", "input_schema": {"type": "object"}}


def tool(name: str = "look", **parameters: Any) -> dict[str, Any]:
    """A function as chats name it."""
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _of_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": MODEL, "messages": _MESSAGES, "max_tokens": 1, **fields}


def _completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": 1, **fields}


def _response(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 1, **fields}


def _message(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"model": MODEL, "messages": _MESSAGES, "max_tokens": 1, **fields}


FORMATS: Final[list[Any]] = [
    _OBJECT,
    {"type": "json_schema"},
    {"type": "json_schema", "schema": _OBJECT},
    {"type": "json_schema", "name": "a", "schema": _OBJECT},
    {"type": "json_schema", "json_schema": None},
    {"type": "json_schema", "json_schema": {"schema": _OBJECT}},
    {"type": "json_schema", "json_schema": {"name": "a"}},
    {"type": "json_object"},
    {"type": "json_object", "schema": _OBJECT},
    {"type": "text"},
    {"type": "grammar"},
    "json",
]
OUTPUTS: Final[list[Any]] = [
    *({}, {"guided_json": _OBJECT}, {"json": _OBJECT, "regex": "a"}),
    *({"json": json.dumps(_OBJECT)}, {"json": "{"}, {"choice": ["a", "b"]}, {"choice": []}),
    *({"regex": "[ab]+"}, {"regex": "["}, {"grammar": 'root ::= "a"'}, {"grammar": "root ::= "}),
]
SCHEMAS: Final[list[Any]] = [
    *(True, {}, {"type": "objekt"}, {"enum": []}, {"const": "a"}, {"not": {"type": "string"}}),
    *({"type": ["string", "null"]}, {"enum": ["a", 1, None]}, {"$ref": "#/$defs/none"}),
    {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}},
    *({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"allOf": [_OBJECT]}),
    *({"allOf": [_OBJECT, {"required": ["a"]}]}, {"oneOf": [{"type": "string"}, _OBJECT]}),
    {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
    *({"type": "array", "minItems": 1, "maxItems": 3}, {"type": "array", "contains": {}}),
    *({"type": "array", "items": [{"type": "string"}]}, {"type": "object", "minProperties": 1}),
    *({"type": "integer", "multipleOf": 5}, {"type": "integer", "minimum": 1, "maximum": 9}),
    *({"type": "string", "pattern": "^a+$"}, {"type": "string", "pattern": "("}),
    *({"type": "string", "pattern": "^\\p{L}+$"}, {"type": "string", "pattern": "\\ba\\b"}),
    *({"type": "string", "pattern": "^a+$", "maxLength": 5}, {"type": "string", "format": "date"}),
    *({"type": "string", "format": "frobnicate"}, {"type": "string", "nullable": True}),
    {"type": "object", "patternProperties": {"^a": {"type": "string"}}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}},
    {"if": {"type": "string"}, "then": {"minLength": 1}},
]
ODD_REQUESTS: Final[list[tuple[str, dict[str, Any]]]] = [
    *(_chat(response_format=each) for each in FORMATS),
    *(_chat(structured_outputs=each) for each in OUTPUTS),
    *(_chat(response_format=_of_schema(each)) for each in SCHEMAS),
    # tools
    *(_chat(tools=each) for each in ([], None, "none", [_FLAT], [tool()], [tool(type="foo")])),
    *(_chat(tools=[tool()], tool_choice=each) for each in ("none", "auto", "required", "any")),
    _chat(tools=[tool()], tool_choice=_NAMED),
    _chat(tools=[tool("other")], tool_choice=_NAMED),
    *(_chat(tools=[tool(type="foo")], tool_choice=each) for each in ("none", "required")),
    _chat(tools=[tool("no spaces")], tool_choice="none"),
    _chat(tools=[{"type": "function", "function": {}}], tool_choice="none"),
    *(_chat(tool_choice=each) for each in ("auto", "none")),
    *(_response(tools=each) for each in ([], [_FLAT], [tool()])),
    _response(tools=[_FLAT], tool_choice="required"),
    *(_message(tools=each) for each in ([], [_ANTHROPIC], [tool()])),
    *(_message(tools=[_ANTHROPIC], tool_choice={"type": each}) for each in ("any", "none")),
    # prompts
    *(_chat(messages=each) for each in ([], "hi", [{"content": "hi"}], [{"role": "user"}])),
    *(_chat(messages=[{"role": "user", "content": each}]) for each in (None, 7, "", [])),
    _chat(messages=[{"role": "bot", "content": "hi"}]),
    _chat(messages=[{"role": "user", "content": [{"type": "txt", "text": "a"}]}]),
    *(_completion(prompt=each) for each in ("", [])),
    _response(input=[]),
    *(_message(messages=[]), _message(max_tokens=0)),
    # options
    *(_chat(temperature=each) for each in ("hot", -1, "0.5")),
    *(_chat(max_tokens=each) for each in (0, -1, 1.5, "5", None)),
    *(_chat(top_p=2), _chat(n=0), _chat(seed="a"), _chat(repetition_penalty=0)),
    *(_chat(top_logprobs=3), _chat(logprobs=True, top_logprobs=21), _completion(logprobs=-1)),
    *(_chat(stop=[*"abcde"]), _chat(bad_words="x"), _chat(reasoning_effort="huge")),
    *(_chat(logit_bias={"x": 1}), _chat(logit_bias={"9999999": 1})),
    _chat(stream_options={"include_usage": True}),
    # fields that it ignores
    *(_chat(guided_choice=["a"]), _chat(extra_body={"top_k": 1}), _chat(max_token=1)),
    *(_completion(messages=_MESSAGES), _completion(best_of=2), _message(service_tier="auto")),
    *(_response(max_tokens=1), _response(response_format=_of_schema(_OBJECT))),
    _completion(response_format=_OBJECT),
    _response(text={"format": {"type": "json_schema", "name": "a", "schema": _OBJECT}}),
    _response(text={"format": {"type": "json_schema", "schema": _OBJECT}}),
    _response(text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}),
]
