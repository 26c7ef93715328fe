"""Errors in the shape of Anthropic's API, for the paths that its SDKs use.

``{"type": "error", "error": {type, message}, "request_id"}``, with the same id in ``request-id``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from batchyard.api.http.json_response import JsonResponse

if TYPE_CHECKING:
    from fastapi import Response

    from batchyard.api.http.api_error import ApiError

MESSAGES: Final = "/v1/messages"
"""The endpoint, and what all paths of Anthropic's API here begin with."""
INVALID: Final = "invalid_request_error"
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class MessageErrorDetails(msgspec.Struct, frozen=True):
    """The kind of error, which its HTTP status decides, and what to do about it."""

    type: str
    message: str


class MessageError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer to Anthropic's SDKs that is an error, and the error of a request."""

    type: Literal["error"] = "error"
    error: MessageErrorDetails
    request_id: str | None


def is_for_messages(path: str) -> bool:
    """Whether errors on this path have Anthropic's shape."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def message_error(status: int, message: str, request_id: str | None) -> MessageError:
    """The error that an HTTP status means."""
    kind = _KINDS.get(status) or (INVALID if status < 500 else "api_error")
    return MessageError(error=MessageErrorDetails(kind, message), request_id=request_id)


def message_error_response(error: ApiError, request_id: str) -> Response:
    """The HTTP response."""
    body = message_error(error.status, error.message, request_id)
    return JsonResponse(body, status=error.status, headers=error.answer_headers)
