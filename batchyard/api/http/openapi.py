"""The OpenAPI document: FastAPI's own, with the shapes of answers and bodies among its schemas.

The shapes of answers are those of ``wire``, so they cannot differ from what is sent.
``docs/openapi.json`` is this document; ``python -m batchyard.server`` writes it.
"""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from pydantic.json_schema import models_json_schema

from batchyard.api.http.api_error import Error
from batchyard.api.http.message_errors import MessageError
from batchyard.api.http.route import (
    ERRORS,
    HEADERS,
    MESSAGE_ERROR,
    REF,
    Route,
    component_name,
    json_of,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

Json = dict[str, Any]

_REQUEST_ID: Final = {
    "description": "Names the request in the server's log.",
    "required": True,
    "schema": {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
}


class DescribedApi(FastAPI):
    """FastAPI, whose document has everything that routes of :class:`Route` say of themselves."""

    def openapi(self) -> Json:
        """The OpenAPI document as a JSON object, made at the first call."""
        if not self.openapi_schema:
            document = super().openapi()
            routes = [each.original_route for each in iter_route_contexts(self.routes)]
            components = document["components"]
            components["schemas"] = _schemas([each for each in routes if isinstance(each, Route)])
            components["headers"] = {"RequestId": _REQUEST_ID}
            components["responses"] = _refusals("{}", Error, HEADERS) | _refusals(
                MESSAGE_ERROR, MessageError, {**HEADERS, "request-id": HEADERS["x-request-id"]}
            )
            for methods in document["paths"].values():
                for operation in methods.values():
                    # FastAPI's own refusal. Ours is a 400.
                    operation["responses"].pop("422", None)
            self.openapi_schema = document
        return self.openapi_schema


def _refusals(name: str, shape: type[msgspec.Struct], headers: Json) -> Json:
    """The answers that are errors, of one shape, by the name that has their status in it."""
    return {
        name.format(status): {
            "description": text,
            "headers": headers,
            "content": json_of(shape.__name__),
        }
        for status, text in ERRORS.items()
    }


def _schemas(routes: list[Route]) -> Json:
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (each.model, "validation") for each in routes if each.model is not None
    ]
    _, described = models_json_schema(models, ref_template=REF.format(name="{model}"))
    shapes = dict.fromkeys(
        [Error, MessageError, *(each.shape for each in routes if each.shape is not None)]
    )
    return dict(sorted({**described["$defs"], **_shapes(list(shapes))}.items()))


def _shapes(shapes: list[Any]) -> Json:
    roots, schemas = msgspec.json.schema_components(shapes, ref_template=REF)
    for shape, root in zip(shapes, roots, strict=True):
        name = component_name(shape)
        schemas[name] = schemas.pop(root["$ref"].rpartition("/")[2]) | {"title": name}
    for schema in schemas.values():
        if "properties" in schema:
            _as_sent(schema)
    return schemas


def _as_sent(schema: Json) -> None:
    """We send every key, whatever its default; only one without any is absent when unset."""
    optional = set(schema["properties"]) - set(schema["required"])
    unset = {key for key in optional if "default" not in schema["properties"][key]}
    schema["required"] = [key for key in schema["properties"] if key not in unset]
    schema["additionalProperties"] = False
    if "description" in schema:
        schema["description"] = inspect.cleandoc(schema["description"])
    for value in schema["properties"].values():
        value.pop("default", None)


def document_text(app: FastAPI) -> str:
    """The document as it is kept in ``docs/openapi.json``."""
    return json.dumps(app.openapi(), indent=2, ensure_ascii=False) + "\n"
