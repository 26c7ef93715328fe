"""What the requests of the API may hold, for its description: a request body by operation."""

from __future__ import annotations

from typing import Any, Final

from batchyard.endpoints import ENDPOINTS
from batchyard.files.upload import LEAST_LIFETIME_SECONDS, MOST_LIFETIME_SECONDS, PURPOSES
from batchyard.notify.event import EVENT_TYPES
from batchyard.services.webhook_checks import MAX_NAME_CHARS, MAX_URL_CHARS

Json = dict[str, Any]

_TEXT: Final[Json] = {"type": "string"}
_BINARY: Final[Json] = {"type": "string", "format": "binary"}
_PURPOSE: Final[Json] = {"type": "string", "enum": list(PURPOSES)}
_SECONDS: Final[Json] = {
    "type": "integer",
    "minimum": LEAST_LIFETIME_SECONDS,
    "maximum": MOST_LIFETIME_SECONDS,
}
_ANCHOR: Final[Json] = {"type": "string", "const": "created_at"}


def _object(properties: Json, *required: str, nullable: bool = False) -> Json:
    return {
        "type": ["object", "null"] if nullable else "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _json(schema: Json, *, required: bool = True) -> Json:
    return {"required": required, "content": {"application/json": {"schema": schema}}}


def _form(schema: Json) -> Json:
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}


def _nullable(schema: Json, description: str) -> Json:
    return {**schema, "type": [schema["type"], "null"], "description": description}


def _url(description: str) -> Json:
    return _nullable({"type": "string", "format": "uri", "maxLength": MAX_URL_CHARS}, description)


_EXPIRY = _object({"anchor": _ANCHOR, "seconds": _SECONDS}, "anchor", "seconds", nullable=True)

_BATCH = {
    **_object(
        {
            "input_file_id": _nullable(
                {"type": "string", "maxLength": 256}, "A file that was uploaded for batches."
            ),
            "endpoint": {"type": "string", "enum": list(ENDPOINTS)},
            "completion_window": {
                "type": "string",
                "pattern": "^[1-9][0-9]{0,4}[mhd]$",
                "description": "`24h`, or another number of minutes, hours or days, `30d` at most.",
            },
            "metadata": {
                "type": ["object", "null"],
                "maxProperties": 16,
                "propertyNames": {"maxLength": 64},
                "additionalProperties": {"type": "string", "maxLength": 512},
            },
            "output_expires_after": _EXPIRY,
            "input_url": _url("Instead of `input_file_id`: where the input is fetched from."),
            "output_url": _url("A presigned URL that the output file is PUT to as well."),
            "error_url": _url("Likewise for the error file."),
            "webhook_url": _url("An https URL that is told of the batch's end."),
            "notify_email": _nullable(
                {"type": "string", "format": "email", "maxLength": 254},
                "Who gets a message at the batch's end, where the server sends e-mail.",
            ),
            "priority": _nullable(
                {"type": "integer", "minimum": -1_000_000, "maximum": 1_000_000},
                "Among the batches of one tenant, the higher goes first.",
            ),
            "deduplicate": _nullable(
                {"type": "boolean"},
                "Identical deterministic requests run once, for all their lines.",
            ),
        },
        "endpoint",
        "completion_window",
    ),
    # One of the two; null is as good as absent.
    "oneOf": [
        {
            "required": ["input_file_id"],
            "properties": {"input_file_id": {"type": "string"}, "input_url": {"type": "null"}},
        },
        {
            "required": ["input_url"],
            "properties": {"input_url": {"type": "string"}, "input_file_id": {"type": "null"}},
        },
    ],
}

_EVENT_TYPE: Final[Json] = {"type": "string", "enum": list(EVENT_TYPES)}
_ENDPOINT: Final[dict[str, Json]] = {
    "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
    "url": {"type": "string", "format": "uri", "maxLength": MAX_URL_CHARS},
    "event_types": {"type": "array", "items": _EVENT_TYPE, "minItems": 1},
}
_KEEP_OLD = _object(
    {
        "keep_old_secret_active_for_24_hours": _nullable(
            {"type": "boolean"}, "Sign with the old secret as well for another day."
        )
    }
)

BODIES: Final[dict[str, Json]] = {
    "createFile": _form(
        _object(
            {
                "file": _BINARY,
                "purpose": _PURPOSE,
                "expires_after[anchor]": _ANCHOR,
                "expires_after[seconds]": _SECONDS,
            },
            "file",
            "purpose",
        )
    ),
    "createUpload": _json(
        _object(
            {
                "filename": _TEXT,
                "purpose": _PURPOSE,
                "bytes": {"type": "integer", "minimum": 1},
                "mime_type": {"type": "string", "maxLength": 256},
                "expires_after": _EXPIRY,
            },
            "filename",
            "purpose",
            "bytes",
            "mime_type",
        )
    ),
    "addUploadPart": _form(_object({"data": _BINARY}, "data")),
    "completeUpload": _json(
        _object(
            {
                "part_ids": {"type": "array", "items": _TEXT},
                "md5": {"type": ["string", "null"], "pattern": "^[0-9a-fA-F]{32}$"},
            },
            "part_ids",
        )
    ),
    "cancelUpload": _json({"type": "object"}, required=False),
    "createBatch": _json(_BATCH),
    "cancelBatch": _json({"type": "object"}, required=False),
    "deliverResults": _json(
        {
            **_object(
                {
                    "output_url": _url("A presigned URL that the output file is PUT to."),
                    "error_url": _url("Likewise for the error file."),
                }
            ),
            # One of the two at least; null is as good as absent.
            "anyOf": [
                {"required": [key], "properties": {key: {"type": "string"}}}
                for key in ("output_url", "error_url")
            ],
        }
    ),
    "createWebhookEndpoint": _json(_object(_ENDPOINT, *_ENDPOINT)),
    "updateWebhookEndpoint": _json(
        _object({key: _nullable(shape, "Unless null.") for key, shape in _ENDPOINT.items()}),
        required=False,
    ),
    "rotateWebhookEndpointSecret": _json(_KEEP_OLD, required=False),
    "testWebhookEndpoint": _json(_object({"event_type": _EVENT_TYPE}, "event_type")),
    "rotateWebhookSecret": _json(_KEEP_OLD, required=False),
    "replayDelivery": _json(_object({}), required=False),
}
