"""Every failure as one envelope: ``{"error": {message, type, param, code}}``.

The SDKs read nothing else, and retry 408, 409, 429 and 5xx unless a header tells them not to.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from batchyard.api.answer import answer
from batchyard.errors import (
    BatchLimitExceeded,
    BatchyardError,
    ObjectTooLarge,
    QuotaExceeded,
    RecordNotFound,
    RequestRefused,
    StorageFull,
    TransitionConflict,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI, Request, Response

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS: Final = 5
FULL_RETRY_AFTER_SECONDS: Final = 60
"""More than 60 is not obeyed by every SDK."""

INVALID_REQUEST: Final = "invalid_request_error"
SERVER_ERROR: Final = "server_error"

_NOT_ON_THE_WIRE = frozenset({"invalid_purpose", "invalid_file_format"})
"""Refusals that carry no code at OpenAI."""

_STATUS_MESSAGES = {404: "Invalid URL ({} {}).", 405: "Not allowed to {} on {}."}


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

    def to_response(self) -> Response:
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        headers = dict(self.headers)
        if self.status == 409:
            # The SDKs would send the same conflict three times.
            headers.setdefault("x-should-retry", "false")
        return answer({"error": error}, status=self.status, headers=headers)


def missing(param: str) -> ApiError:
    """A required parameter that is not there."""
    return ApiError(
        400,
        f"Missing required parameter: '{param}'.",
        param=param,
        code="missing_required_parameter",
    )


def server_failed() -> ApiError:
    """What a client sees of a defect of ours; the log has the rest, under the request's id."""
    return ApiError(
        500, "The server had an error while processing your request.", type=SERVER_ERROR
    )


def as_api_error(error: BatchyardError) -> ApiError:
    """One of our exceptions, as the answer that it means."""
    match error:
        case QuotaExceeded():
            kind = "requests" if isinstance(error, BatchLimitExceeded) else "tokens"
            return ApiError(
                429,
                str(error),
                type=kind,
                code="rate_limit_exceeded",
                headers={"retry-after": str(FULL_RETRY_AFTER_SECONDS)},
            )
        case RequestRefused():
            code = None if error.refusal_code in _NOT_ON_THE_WIRE else error.refusal_code
            return ApiError(400, str(error), param=error.param, code=code)
        case RecordNotFound():
            return ApiError(404, str(error))
        case TransitionConflict():
            return ApiError(409, "Somebody else changed this at the same time; look at it again.")
        case ObjectTooLarge():
            return ApiError(413, str(error), param="file", code=error.code)
        case StorageFull():
            return _unavailable(error, FULL_RETRY_AFTER_SECONDS)
        case _ if error.is_retriable:
            return _unavailable(error, RETRY_AFTER_SECONDS)
        case _:
            return server_failed()


def _unavailable(error: BatchyardError, retry_after_seconds: int) -> ApiError:
    # The error's own message may name hosts and paths of the installation: it is for the log.
    return ApiError(
        503,
        "The service is overloaded or cannot reach its database or storage; try again later.",
        type=SERVER_ERROR,
        code=error.code,
        headers={"retry-after": str(retry_after_seconds)},
    )


def handle_errors(app: FastAPI) -> None:
    """Replace every handler of FastAPI's, whose bodies the SDKs cannot read."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(BatchyardError, _batchyard_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)


async def _api_error(_: Request, error: Any) -> Response:
    response: Response = error.to_response()
    return response


async def _batchyard_error(request: Request, error: Any) -> Response:
    answered = as_api_error(error)
    if answered.status >= 500:
        where = (request.state.request_id, request.method, request.url.path)
        # Of what will pass the message is enough; a defect needs its traceback.
        defect = None if error.is_retriable else error
        logger.error("api.failed %s %s %s: %s", *where, error, exc_info=defect)
    return answered.to_response()


async def _http_exception(request: Request, error: Any) -> Response:
    template = _STATUS_MESSAGES.get(error.status_code)
    message = template.format(request.method, request.url.path) if template else str(error.detail)
    return ApiError(
        error.status_code,
        message,
        type=INVALID_REQUEST if error.status_code < 500 else SERVER_ERROR,
        headers=error.headers,
    ).to_response()


async def _validation_error(_: Request, error: Any) -> Response:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or None
    if first["type"] == "missing" and where:
        return missing(where).to_response()
    return ApiError(400, first["msg"], param=where, code="invalid_value").to_response()
