"""Every failure as one envelope: ``{"error": {message, type, param, code}}``.

On the paths of Anthropic's API it is theirs instead (``message_errors``). The SDKs read nothing
else, and retry 408, 409, 429 and 5xx unless a header tells them not to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from batchyard.api.http.api_error import INVALID_REQUEST, ApiError
from batchyard.api.http.message_errors import is_for_messages, message_error_response
from batchyard.errors import (
    BatchLimitExceeded,
    BatchyardError,
    ObjectTooLarge,
    QuotaExceeded,
    RecordNotFound,
    RequestRefused,
    StorageLimitExceeded,
    TransitionConflict,
)
from batchyard.logs import event_logger
from batchyard.services.patience import PASSING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import FastAPI, Request, Response
    from starlette.types import Scope

log = event_logger(__name__)

RETRY_AFTER_SECONDS: Final = 5
FULL_RETRY_AFTER_SECONDS: Final = 60
"""More than 60 is not obeyed by every SDK."""

SERVER_FAILED: Final = 500
"""The status of a defect. What passes is 503."""

SERVER_ERROR: Final = "server_error"

_NOT_ON_THE_WIRE = frozenset({"invalid_purpose", "invalid_file_format"})
"""Refusals that carry no code at OpenAI."""

_WANTED: Final = {
    "string_type": "a string without NUL",
    "int_type": "an integer",
    "bool_type": "a boolean",
    "list_type": "an array of strings",
    "objects_type": "an array of objects",
    "dict_type": "an object",
    "model_type": "an object",
}
"""What a value had to be, by the type of pydantic's error or of one of ours."""

_WANTED_LIST: Final = {
    "string_type": _WANTED["list_type"],
    "model_type": _WANTED["objects_type"],
}
"""What a list had to be, by the type of an element's error."""

_STATUS_MESSAGES = {404: "Invalid URL ({} {}).", 405: "Not allowed to {} on {}."}


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
        SERVER_FAILED,
        "The server had an error while processing your request.",
        type=SERVER_ERROR,
    )


def as_api_error(error: BatchyardError) -> ApiError:
    """One of our exceptions, as the answer that it means."""
    match error:
        case StorageLimitExceeded():
            # Not 429: to wait and try again, as the SDKs do then, frees nothing.
            return ApiError(413, str(error), param="file", code=error.code)
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
            return ApiError(409, "Another request changed this at the same time: read it again.")
        case ObjectTooLarge():
            return ApiError(413, str(error), param="file", code=error.code)
        case _ if error.is_retriable:
            return _unavailable(error, RETRY_AFTER_SECONDS)
        case _ if isinstance(error, PASSING):
            # An operator has to do something, which takes longer.
            return _unavailable(error, FULL_RETRY_AFTER_SECONDS)
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


def error_response(error: ApiError, scope: Scope) -> Response:
    """The answer to the request, in the shape of the API that its path belongs to."""
    if is_for_messages(scope["path"]):
        return message_error_response(error, scope["state"]["request_id"])
    return error.to_response()


async def _api_error(request: Request, error: Any) -> Response:
    return error_response(error, request.scope)


async def _batchyard_error(request: Request, error: Any) -> Response:
    answered = as_api_error(error)
    log_failure(request, error, answered)
    return error_response(answered, request.scope)


def log_failure(request: Request, error: BatchyardError, answered: ApiError) -> None:
    """Log an error of ours, with its reason, which the answer does not say."""
    if answered.status < SERVER_FAILED:
        return
    # For a temporary error the message is enough; a defect needs its traceback.
    defect = error if answered.status == SERVER_FAILED else None
    log.error(
        "api.failed",
        error,
        cause=defect,
        request=request.state.request_id,
        method=request.method,
        path=request.url.path,
    )


async def _http_exception(request: Request, error: Any) -> Response:
    template = _STATUS_MESSAGES.get(error.status_code)
    message = template.format(request.method, request.url.path) if template else str(error.detail)
    answered = ApiError(
        error.status_code,
        message,
        type=INVALID_REQUEST if error.status_code < 500 else SERVER_ERROR,
        headers=error.headers,
    )
    return error_response(answered, request.scope)


async def _validation_error(request: Request, error: Any) -> Response:
    return error_response(as_openai_says(error.errors()[0]), request.scope)


def as_openai_says(error: Mapping[str, Any]) -> ApiError:
    """An error of pydantic's with the message, the parameter and the code that OpenAI has."""
    path = error["loc"][1:]
    is_element = bool(path) and isinstance(path[-1], int)
    limits = error.get("ctx", {})
    param = _param(path)
    wanted = (_WANTED_LIST if is_element else _WANTED).get(error["type"])
    if error["type"] == "string_too_short":
        what = f"'{param}' must not have an empty text." if is_element else f"'{param}' is empty."
        return ApiError(400, what, param=param, code="empty_string")
    if error["type"] == "missing" or (wanted and error["input"] is None and not is_element):
        return missing(limits.get("key", param))
    if wanted:
        message, code = f"Invalid type for '{param}': it must be {wanted}.", "invalid_type"
        return ApiError(400, message, param=param, code=code)
    match error["type"]:
        case "extra_forbidden":
            param = _param((*path, limits["key"][:64]))
            message, code = f"Unknown parameter: '{param}'.", "unknown_parameter"
        case "string_too_long":
            what = f"A text in '{param}'" if is_element else f"'{param}'"
            message = f"{what} may have {limits['max_length']} characters."
            code = "string_above_max_length"
        case "too_short":
            message, code = f"'{param}' must not be empty.", "empty_array"
        case "too_long":
            message = f"'{param}' may have {limits['max_length']} elements."
            code = "array_above_max_length"
        case "greater_than_equal":
            message = f"'{param}' must be at least {limits['ge']}."
            code = "integer_below_min_value"
        case _:
            message, code = error["msg"], "invalid_value"
    return ApiError(400, message, param=param or None, code=code)


def _param(path: Sequence[str | int]) -> str:
    """The parameter at this path, as in ``then[0].model``; of an element, the list that has it."""
    named = path[:-1] if path and isinstance(path[-1], int) else path
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in named)
    return "".join(parts).removeprefix(".")
