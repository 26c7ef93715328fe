"""The body of ``POST /batches``: OpenAI's parameters and ours, each checked by its name.

What holds for every way in (endpoint, window, metadata, priority, who is told) is checked in
``steps.create``.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.api.errors import ApiError, missing
from batchyard.errors import RequestRefused, StorageError
from batchyard.files.upload import checked_lifetime
from batchyard.services.webhook_checks import MAX_URL_CHARS
from batchyard.steps.create import BatchRequest
from batchyard.storage.location import check_output, parse_location
from batchyard.storage.presigned import check_not_expired

if TYPE_CHECKING:
    from batchyard.api.body import JsonObject
    from batchyard.delivery.redeliver import Kind
    from batchyard.settings import Settings

OPENAI_KEYS: Final = (
    "input_file_id",
    "endpoint",
    "completion_window",
    "metadata",
    "output_expires_after",
)
EXTENSION_KEYS: Final = (
    "input_url",
    "output_url",
    "error_url",
    "webhook_url",
    "notify_email",
    "priority",
    "deduplicate",
)
"""What the SDKs send with ``extra_body``."""

_MAX_ID_CHARS = 256


async def read_batch(asked: JsonObject, tenant: str, settings: Settings) -> BatchRequest:
    """What the client asks for. Raises 400, and ``RequestRefused`` for ``output_expires_after``."""
    asked.only({*OPENAI_KEYS, *EXTENSION_KEYS})
    input_file_id = _text(asked, "input_file_id", _MAX_ID_CHARS)
    input_url = await _url(asked, "input_url", settings)
    if input_file_id is None and input_url is None:
        raise missing("input_file_id")
    if input_file_id is not None and input_url is not None:
        raise _invalid("input_url", "Give 'input_file_id' or 'input_url', not both.")
    return BatchRequest(
        tenant=tenant,
        input_file_id=input_file_id,
        input=input_url,
        endpoint=asked.text("endpoint"),
        completion_window=asked.text("completion_window"),
        metadata=_metadata(asked),
        output_lifetime_seconds=_lifetime(asked),
        output=await _url(asked, "output_url", settings),
        error=await _url(asked, "error_url", settings),
        webhook=asked.optional_text("webhook_url"),
        notify_email=asked.optional_text("notify_email"),
        priority=asked.optional_integer("priority") or 0,
        deduplicate=asked.optional_boolean("deduplicate") or False,
        public_urls=True,
    )


async def read_places(asked: JsonObject, settings: Settings) -> dict[Kind, str]:
    """Where the result files of an ended batch are to go: one URL or both."""
    asked.only({"output_url", "error_url"})
    output = await _url(asked, "output_url", settings)
    error = await _url(asked, "error_url", settings)
    if output is None and error is None:
        raise missing("output_url")
    if output == error:
        raise _invalid("error_url", "'output_url' and 'error_url' must be two URLs.")
    places: dict[Kind, str] = {}
    if output is not None:
        places["output"] = output
    if error is not None:
        places["error"] = error
    return places


def fingerprint(asked: JsonObject) -> str:
    """A hash of the body that is the same however its keys are ordered and spaced."""
    return hashlib.sha256(msgspec.json.encode(asked.values, order="deterministic")).hexdigest()


def _metadata(asked: JsonObject) -> dict[str, Any] | None:
    pairs = asked.optional_object("metadata")
    return None if pairs is None else pairs.values


def _lifetime(asked: JsonObject) -> int | None:
    expiry = asked.optional_object("output_expires_after")
    if expiry is None:
        return None
    expiry.only({"anchor", "seconds"})
    try:
        return checked_lifetime(expiry.optional_text("anchor"), expiry.optional_integer("seconds"))
    except RequestRefused as error:
        # The rules are those of a file's own `expires_after`; the name is another.
        raise ApiError(
            400,
            str(error).replace("expires_after", "output_expires_after"),
            param=f"output_{error.param}",
            code=error.refusal_code,
        ) from None


async def _url(asked: JsonObject, key: str, settings: Settings) -> str | None:
    """An https URL, which is a secret from here on; http where the operator allows it."""
    text = _text(asked, key, MAX_URL_CHARS)
    if text is None:
        return None
    schemes = "https?" if settings.allow_private_urls else "https"
    # Never a path or an s3:// of this machine's.
    if not re.match(rf"{schemes}://", text, re.IGNORECASE):
        raise _invalid(key, f"'{key}' must be an https:// URL.")
    try:
        location = parse_location(text)
        if key in {"output_url", "error_url"}:
            await check_output(location)
        elif key == "input_url":
            check_not_expired(text)
    except StorageError as error:
        raise _invalid(key, f"'{key}' cannot be used: {error}.") from None
    return text


def _text(asked: JsonObject, key: str, most_chars: int) -> str | None:
    text = asked.optional_text(key)
    if text is not None and len(text) > most_chars:
        raise ApiError(
            400,
            f"'{key}' may have {most_chars} characters.",
            param=key,
            code="string_above_max_length",
        )
    return text


def _invalid(key: str, message: str) -> ApiError:
    return ApiError(400, message, param=key, code="invalid_value")
