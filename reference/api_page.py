"""docs/reference/api.md: every route, from docs/openapi.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reference.markdown import one_line, table

if TYPE_CHECKING:
    from collections.abc import Iterator

_DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "openapi.json"
_OURS: Final = (
    *("/v1/deliveries", "/v1/webhook_secret"),
    *("/v1/batches/{batch_id}/results", "/v1/batches/{batch_id}/events"),
    "/v1/batches/{batch_id}/ledger",
)
"""Routes that OpenAI's API does not have."""
OUR_FIELDS: Final = {
    "CreateBatch": {
        *(
            "requests",
            "template",
            "input_url",
            "output_url",
            "error_url",
            "output_upload",
            "error_upload",
            "priority",
        ),
        *(
            "webhook_url",
            "notify_email",
            "deduplicate",
            "ledger",
            "on_invalid",
            "on_invalid_output",
        ),
        "validation",
    }
}

_INTRODUCTION: Final = """\
# The API

The routes that a server has below `http://…:8000`, as in [openapi.json](../openapi.json), which \
the server gives out as `/openapi.json` and shows at `/docs`. **ours** marks what OpenAI's API \
does not have; routes below `/v1/messages` are Anthropic's, for \
[its SDKs](../how-to/use-anthropics-sdk.md); everything else is OpenAI's, and \
[its SDKs](../how-to/use-the-api.md) work unchanged. \
Single requests (`POST /v1/chat/completions`) are [live requests](../how-to/serve-live.md), \
which the operator must allow. Every route that answers GET answers HEAD as well, with the same \
status and headers and without a body.

Every request needs a [key](../how-to/use-the-api.md#keys-and-tenants), as \
`Authorization: Bearer` or `x-api-key`, and sees only its tenant's objects. Every \
answer has an `x-request-id`, which is also in the log. An error is \
`{"error": {"message", "type", "param", "code"}}`; [Errors](errors.md) lists the codes.
"""


def page() -> str:
    """The whole page."""
    document = json.loads(_DOCUMENT.read_text())
    parts = [_INTRODUCTION, "## Status codes\n", _statuses(document)]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            parts += _route(document, method.upper(), path, route)
    return "\n".join(parts)


def _statuses(document: dict[str, Any]) -> str:
    """What each status means; where a route says more of it, the route's own words are there."""
    found = {
        status: answer["description"]
        for methods in document["paths"].values()
        for route in methods.values()
        for status, answer in route["responses"].items()
        if status >= "400"
    }
    return table(("status", ""), sorted(found.items()))


def _route(
    document: dict[str, Any], method: str, path: str, route: dict[str, Any]
) -> Iterator[str]:
    ours = " **ours**" if path.startswith(_OURS) else ""
    yield f"## `{method} {path}`\n"
    yield f"{one_line(route.get('description') or route['summary'])}{ours}\n"
    rows = [
        (f"`{each['name']}`", each["in"], _kind(each["schema"]), each.get("description", ""))
        for each in route.get("parameters", [])
    ]
    if rows:
        yield table(("parameter", "in", "", ""), rows)
    for content_type, content in route.get("requestBody", {}).get("content", {}).items():
        name, schema = _resolved(document, content["schema"])
        fields = list(_fields(schema, name))
        if fields:
            yield f"Body, `{content_type}`:\n"
            yield table(("field", "", ""), fields)
    statuses = ", ".join(sorted(status for status in route["responses"] if status >= "400"))
    answer = route["responses"]["200"].get("content", {}).get("application/json", {})
    kind = answer.get("schema", {}).get("$ref", "").rpartition("/")[2]
    yield f"Answer: {f'a `{kind}`' if kind else 'the bytes of the file'}. Errors: {statuses}.\n"


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    reference = schema.get("$ref")
    if reference is None:
        return "", schema
    name = reference.rpartition("/")[2]
    return name, document["components"]["schemas"][name]


def _fields(schema: dict[str, Any], name: str) -> Iterator[tuple[str, str, str]]:
    required = set(schema.get("required", ()))
    for field, value in schema.get("properties", {}).items():
        marks = ["required"] if field in required else []
        marks += ["**ours**"] if field in OUR_FIELDS.get(name, ()) else []
        facts = ", ".join([_kind(value), *marks])
        yield f"`{field}`", facts, value.get("description", "")


def _kind(schema: dict[str, Any]) -> str:
    """The type in a word or two, and the values if they are few."""
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            kinds = (_kind(each) for each in schema[key] if each.get("type") != "null")
            return " or ".join(dict.fromkeys(kinds))
    kind = str(schema.get("type", "any"))
    if isinstance(schema.get("type"), list):
        kind = " or ".join(each for each in schema["type"] if each != "null")
    if kind == "array" and "items" in schema:
        return f"array of {_kind(schema['items'])}"
    return kind
