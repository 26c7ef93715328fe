"""The parts of which the API's description is made: operations, parameters, lists."""

from __future__ import annotations

from typing import Any, Final

from batchyard.api.openapi_bodies import BODIES

Json = dict[str, Any]

REF: Final = "#/components/schemas/{name}"

_ALWAYS = ("400", "401", "500", "503")
_WITH_BODY = ("408", "413", "415")


def operation(
    name: str,
    summary: str,
    shape: str,
    *parameters: Json,
    body: bool = False,
    errors: tuple[str, ...] = (),
) -> Json:
    """``body``: it has the one of this ``name`` in ``openapi_bodies``."""
    is_in_path = any(parameter["in"] == "path" for parameter in parameters)
    statuses = [*_ALWAYS, *(_WITH_BODY if body else ()), *(["404"] if is_in_path else ()), *errors]
    described: Json = {
        "operationId": name,
        "summary": summary,
        "parameters": list(parameters),
        "responses": {
            "200": {
                "description": "Done.",
                "headers": headers(),
                "content": {"application/json": {"schema": {"$ref": REF.format(name=shape)}}},
            },
            **{status: {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)},
        },
    }
    if body:
        described["requestBody"] = BODIES[name]
    return described


def path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def query(name: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "schema": schema}


def paging(most: int, default: int) -> tuple[Json, Json]:
    limit = {"type": "integer", "minimum": 0, "maximum": most, "default": default}
    after = {"type": "string", "description": "The id that the page begins behind."}
    return query("limit", limit), query("after", after)


def headers() -> Json:
    return {"x-request-id": {"$ref": "#/components/headers/RequestId"}}
