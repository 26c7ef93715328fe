"""What a deep validation finds in a request that is valid by the other rules. Pure.

Tokens are counted elsewhere, and how long the engine's context is comes from there too. Nothing is
refused here that vLLM 0.32 would run, but for tools and schemas that are none, which it may ignore.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.body_policy import Refusal
from batchyard.endpoints import ENDPOINTS
from batchyard.json_schemas import schema_defect

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PROMPT_FIELDS: Final = ("messages", "prompt", "input")
_SCHEMA_PATHS: Final = (
    (("response_format",), ("json_schema", "schema")),
    (("text", "format"), ("schema",)),
    ((), ("structured_outputs", "json")),
)
"""The object that says that there is a schema, by its type, and where it is in that."""
_LIMITS: Final[dict[str, tuple[str, ...]]] = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
"""Of an answer's tokens, by endpoint: the first one that is given counts."""


@dataclass(frozen=True, slots=True)
class FormatSchema:
    """The schema that an answer shall have, and the field that has it."""

    param: str
    schema: Any


def context_refusals(
    url: str, body: dict[str, Any], longest: int | None, context: int | None
) -> Iterator[Refusal]:
    """What does not fit in a context of so many tokens; nothing where that is not known.

    ``longest``: the body's longest prompt has at least so many tokens; None: it was not counted.
    vLLM shortens an answer that would not fit behind its prompt, so their sum is not refused. It
    refuses a limit that is larger than the whole context, and a prompt that leaves no room for
    one token of an answer.
    """
    endpoint = ENDPOINTS.get(url)
    if context is None or endpoint is None:
        return
    if endpoint.writes_tokens:
        limits = _LIMITS.get(url, ())
        name = next((name for name in limits if body.get(name) is not None), None)
        limit = body.get(name or "")
        if type(limit) is int and limit > context:
            yield Refusal(
                "context_length_exceeded",
                f"body.{name} is {limit}, which is more than this model's maximum context length "
                f"of {context} tokens.",
                f"body.{name}",
            )
    most = context - 1 if endpoint.writes_tokens else context
    if longest is None or longest <= most or _is_truncated(body):
        return
    room = " and the answer needs at least 1" if longest == context else ""
    yield Refusal(
        "context_length_exceeded",
        f"This model's maximum context length is {context} tokens. However, your prompt has at "
        f"least {longest} tokens{room}. Please reduce the length of the prompt.",
        next((f"body.{name}" for name in _PROMPT_FIELDS if name in body), "body"),
    )


def _is_truncated(body: dict[str, Any]) -> bool:
    """Whether the engine is asked to cut the prompt."""
    truncation = body.get("truncation") not in (None, "disabled")
    return truncation or body.get("truncate_prompt_tokens") is not None


def format_schemas(body: dict[str, Any]) -> Iterator[FormatSchema]:
    """The schemas that the answer shall have; there should be one at most."""
    for holder, path in _SCHEMA_PATHS:
        format_ = _at(body, holder)
        if holder and _at(format_, ("type",)) != "json_schema":
            continue
        found = _at(format_, path)
        if found is not None:
            yield FormatSchema(".".join(("body", *holder, *path)), found)


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def schema_refusals(asked: FormatSchema) -> Iterator[Refusal]:
    """What is wrong with the schema of an answer by itself."""
    schema = asked.schema
    if asked.param == "body.structured_outputs.json" and isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except ValueError:
            schema = None
    defect = schema_defect(schema)
    if defect is not None:
        yield Refusal("invalid_json_schema", f"{asked.param} is not valid: {defect}.", asked.param)


def engine_refusal(asked: FormatSchema, why: str) -> Refusal:
    """What the engine says of a schema that it cannot use."""
    message = f"The engine cannot use {asked.param}: {why}"
    return Refusal("invalid_json_schema", message, asked.param)


def tool_refusals(body: dict[str, Any]) -> Iterator[Refusal]:
    """What is wrong with the functions that the answer may call, and with its choice of one."""
    tools = body.get("tools")
    if tools is None:
        return
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        yield Refusal("invalid_type", "body.tools must be a list of objects.", "body.tools")
        return
    names = set()
    for place, tool in enumerate(tools):
        is_nested = isinstance(tool.get("function"), dict)
        function = tool["function"] if is_nested else tool
        names.add(str(function.get("name")))
        if is_nested or _is_function(tool):
            param = f"body.tools[{place}]" + (".function" if is_nested else "")
            yield from _function_refusals(param, function)
    chosen = _chosen_tool(body.get("tool_choice"))
    if chosen is not None and chosen not in names:
        yield Refusal(
            "invalid_value", "body.tool_choice names none of body.tools.", "body.tool_choice"
        )


def _is_function(tool: dict[str, Any]) -> bool:
    """Whether the client calls it, and no server that brings it along.

    In Anthropic's dialect it has an ``input_schema``, and the type ``custom`` or none.
    """
    return "input_schema" in tool or tool.get("type", "function") == "function"


def _function_refusals(param: str, function: dict[str, Any]) -> Iterator[Refusal]:
    name = function.get("name")
    if not isinstance(name, str) or _TOOL_NAME.fullmatch(name) is None:
        yield Refusal(
            "invalid_value",
            f"{param}.name must be 1 to 64 letters, digits, underscores or hyphens.",
            f"{param}.name",
        )
    for key in ("parameters", "input_schema"):
        schema = function.get(key)
        if schema is None:
            continue
        defect = schema_defect(schema) if isinstance(schema, dict) else "it must be an object"
        if defect is not None:
            yield Refusal(
                "invalid_function_parameters",
                f"{param}.{key} is not a valid JSON schema: {defect}.",
                f"{param}.{key}",
            )


def _chosen_tool(choice: Any) -> str | None:
    """The name that ``tool_choice`` has, in any dialect; None: it names none."""
    if not isinstance(choice, dict) or choice.get("type") not in (None, "function", "tool"):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    return name if isinstance(name, str) else None
