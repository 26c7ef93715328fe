"""The error of a route, and its body in OpenAI's shape: ``{"error": {message, type, …}}``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from batchyard.api.http.json_response import JsonResponse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import Response

INVALID_REQUEST: Final = "invalid_request_error"


class ErrorDetails(msgspec.Struct, frozen=True):
    """What went wrong, its kind, and the parameter that caused it."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, frozen=True):
    """The body of every answer that is an error."""

    error: ErrorDetails


class ApiError(Exception):
    """An answer that is an error. ``headers`` go out with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,  # noqa: A002 — the key's name on the wire
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(message)

    @property
    def answer_headers(self) -> dict[str, str]:
        """All headers of the answer that are the error's."""
        # The SDKs would send the same conflict three times.
        return ({"x-should-retry": "false"} if self.status == 409 else {}) | self.headers

    def to_response(self) -> Response:
        """The HTTP response, with the error in OpenAI's shape."""
        error = ErrorDetails(self.message, self.type, self.param, self.code)
        return JsonResponse(Error(error), status=self.status, headers=self.answer_headers)
