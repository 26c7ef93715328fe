"""The API's own description: ``/openapi.json``, and ``/docs`` to read it.

Written by hand, for FastAPI does not see bodies that are read as streams. The shapes of answers
are those of ``wire``, so they cannot differ from what is sent. A test compares the paths with
the routes, and has requests made from all of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Response
from fastapi.openapi.docs import get_swagger_ui_html

from batchyard import __version__
from batchyard.api.answer import answer
from batchyard.api.batches import DEFAULT_BATCHES, MAX_KEY_CHARS, MOST_BATCHES
from batchyard.api.openapi_operations import REF, headers, operation, paging, path, query
from batchyard.api.openapi_webhooks import WEBHOOK_STRUCTS, webhook_paths
from batchyard.api.served_models import Model, ModelList
from batchyard.wire import Batch, File, FileDeleted, Upload, UploadPart

Json = dict[str, Any]

router = APIRouter()

_STRUCTS = (Batch, File, FileDeleted, Upload, UploadPart, Model, ModelList, *WEBHOOK_STRUCTS)
_LISTED = ("Batch", "Delivery", "File", "WebhookEndpoint")
_MAY_BE_ABSENT = {("BatchUsage", "deduplicated_requests"), ("Upload", "file")}

_ERRORS: Final = {
    "400": "What was asked is not possible as it is; `param` and `code` say why.",
    "401": "No API key, or one that is unknown or revoked.",
    "404": "Nothing of this id, or it is another tenant's.",
    "405": "The path has no such method.",
    "408": "The body arrived too slowly.",
    "409": "The state of things does not allow it; trying again does not help.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "416": "The range begins behind the end of the file.",
    "429": "Too much at a time; `Retry-After` says how many seconds to wait.",
    "500": "A defect of the server.",
    "503": "The database or the storage is away; `Retry-After` says how many seconds to wait.",
}


@router.get("/openapi.json", include_in_schema=False)
async def openapi() -> Response:
    return answer(document())


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    return get_swagger_ui_html(openapi_url="/openapi.json", title="Batchyard")


@cache
def document() -> Json:
    """The whole description, as OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Batchyard",
            "version": __version__,
            "description": "OpenAI's Files, Uploads, Batches and Webhooks, on your own GPUs.",
        },
        "servers": [{"url": "/"}],
        "security": [{"ApiKey": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"ApiKey": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
            "responses": {status: _error(text) for status, text in _ERRORS.items()},
            "headers": {
                "RequestId": {
                    "description": "Names the request in the server's log.",
                    "required": True,
                    "schema": {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
                }
            },
        },
    }


def _paths() -> Json:
    return {
        "/v1/files": {
            "post": operation("createFile", "Upload a file", "File", body=True),
            "get": operation(
                "listFiles",
                "List files",
                "FileList",
                query("purpose", {"type": "string"}),
                *paging(10_000, 10_000),
                query("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
            ),
        },
        "/v1/files/{file_id}": {
            "get": operation("retrieveFile", "Look at a file", "File", path("file_id")),
            "delete": operation("deleteFile", "Delete a file", "FileDeleted", path("file_id")),
        },
        "/v1/files/{file_id}/content": {"get": _download()},
        "/v1/uploads": {
            "post": operation("createUpload", "Begin a file in parts", "Upload", body=True)
        },
        "/v1/uploads/{upload_id}/parts": {
            "post": operation(
                "addUploadPart", "Send a part", "UploadPart", path("upload_id"), body=True
            )
        },
        "/v1/uploads/{upload_id}/complete": {
            "post": operation(
                "completeUpload", "Join the parts", "Upload", path("upload_id"), body=True
            )
        },
        "/v1/uploads/{upload_id}/cancel": {
            "post": operation(
                "cancelUpload", "Drop the parts", "Upload", path("upload_id"), body=True
            )
        },
        "/v1/batches": {
            "post": operation(
                "createBatch",
                "Create a batch",
                "Batch",
                _idempotency_key(),
                body=True,
                errors=("409", "429"),
            ),
            "get": operation(
                "listBatches",
                "List batches, the newest first",
                "BatchList",
                *paging(MOST_BATCHES, DEFAULT_BATCHES),
            ),
        },
        "/v1/batches/{batch_id}": {
            "get": operation("retrieveBatch", "Look at a batch", "Batch", path("batch_id"))
        },
        "/v1/batches/{batch_id}/cancel": {
            "post": operation(
                "cancelBatch",
                "Cancel a batch",
                "Batch",
                path("batch_id"),
                body=True,
                errors=("409",),
            )
        },
        "/v1/batches/{batch_id}/results": {
            "post": operation(
                "deliverResults",
                "Deliver the results of an ended batch to other URLs",
                "DeliveryList",
                path("batch_id"),
                body=True,
                errors=("409",),
            )
        },
        "/v1/models": {"get": operation("listModels", "List the models on offer", "ModelList")},
        "/v1/models/{model}": {
            "get": operation("retrieveModel", "Look at a model", "Model", path("model"))
        },
        **webhook_paths(),
    }


def _download() -> Json:
    ranged = {
        "name": "Range",
        "in": "header",
        "description": "One range of bytes, such as `bytes=0-1023`; anything else is ignored.",
        "schema": {"type": "string"},
    }
    described: Json = operation(
        "downloadFile",
        "Download a file",
        "File",
        path("file_id"),
        ranged,
        errors=("416",),
    )
    # Never JSON, which it may well hold: clients would parse it.
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    for status, text in (("200", "The whole file."), ("206", "The range.")):
        described["responses"][status] = {
            "description": text,
            "headers": headers(),
            "content": content,
        }
    return described


def _idempotency_key() -> Json:
    return {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "For 24 hours, the same key and body give the same batch.",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS},
    }


def _error(description: str) -> Json:
    schema = {"$ref": REF.format(name="Error")}
    return {
        "description": description,
        "headers": headers(),
        "content": {"application/json": {"schema": schema}},
    }


def _schemas() -> Json:
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template=REF)
    for name, schema in schemas.items():
        if "properties" in schema:
            _require_all(name, schema)
    for shape in _LISTED:
        schemas[f"{shape}List"] = _list_of(shape)
    schemas["Error"] = _error_shape()
    return dict(sorted(schemas.items()))


def _require_all(name: str, schema: Json) -> None:
    """We send every key, whatever its default, but for those that are absent when unset."""
    schema["required"] = [key for key in schema["properties"] if (name, key) not in _MAY_BE_ABSENT]
    schema["additionalProperties"] = False
    for value in schema["properties"].values():
        value.pop("default", None)


def _list_of(shape: str) -> Json:
    id_or_null = {"type": ["string", "null"]}
    properties = {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"$ref": REF.format(name=shape)}},
        "first_id": id_or_null,
        "last_id": id_or_null,
        "has_more": {"type": "boolean"},
    }
    return {
        "title": f"{shape}List",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _error_shape() -> Json:
    text_or_null = {"type": ["string", "null"]}
    properties = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": text_or_null,
        "code": text_or_null,
    }
    inner = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "title": "Error",
        "type": "object",
        "properties": {"error": {**inner, "additionalProperties": False}},
        "required": ["error"],
        "additionalProperties": False,
    }
