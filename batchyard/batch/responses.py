"""Background responses: which there are, and what their clients see of them. Pure.

Before its end a response is what was asked for, in the shape of OpenAI's object; afterwards it is
the engine's own object under our id.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.intervals import DAY_SECONDS, HOUR_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

ENDPOINT: Final = "/v1/responses"
SOONEST: Final = "soonest"
WINDOWS: Final = {SOONEST: DAY_SECONDS, "2h": 2 * HOUR_SECONDS, "8h": 8 * HOUR_SECONDS}
"""The completion windows, and how many seconds each of them has."""
FLEX: Final = "flex"
"""The service tier of OpenAI's whose requests may wait; and, of responses of this tier that ask for
no window, the kind that is collected together."""
BATCH_WINDOWS: Final = {SOONEST: "24h", "2h": "2h", "8h": "8h", FLEX: "background"}
"""The completion window of the batch that holds such responses."""

_SERVER_ERROR: Final = "server_error"
_ENGINE_SAYS: Final = {400: "invalid_prompt", 413: "invalid_prompt", 422: "invalid_prompt"}
_ENGINE_SAYS_TOO_MUCH: Final = 429
_DEFAULTS: Final[dict[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "model": "",
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": None,
    "temperature": None,
    "text": None,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": None,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""What of a request is shown before the engine has answered, and what stands for its absence."""

_ITEM_IDS: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
"""The beginnings of items' ids, by their types."""
_INPUT_TEXT: Final = {"type": "input_text"}


class ResponseStatus(StrEnum):
    """The status as OpenAI has it. ``in_progress`` is never stored: it follows from the batch's
    chunks."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDS: Final = frozenset(ResponseStatus) - {ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS}
ANSWERED: Final = frozenset({ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE})
"""The ends that have an object of the engine's."""


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed. ``code`` is one of OpenAI's."""

    code: str
    message: str


class ResponseEnd(msgspec.Struct, frozen=True):
    """How one response ended."""

    id: str
    status: ResponseStatus
    error: ResponseError | None = None


class _ResponseBody(msgspec.Struct):
    status: str | None = None
    error: Any = None


class _HttpAnswer(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _NoAnswer(msgspec.Struct):
    code: str = _SERVER_ERROR
    message: str = ""


class _Line(msgspec.Struct):
    custom_id: str | None = None
    response: _HttpAnswer | None = None
    error: _NoAnswer | None = None


_parse_line = msgspec.json.Decoder(_Line).decode
_parse = msgspec.json.Decoder().decode


def given_object(
    response_id: str, body: Mapping[str, Any], *, window: str = SOONEST
) -> dict[str, Any]:
    """What was asked for, as the response shows it until the engine has answered.

    ``window``: the kind that it is collected with, which is its service tier.
    """
    shown = {name: body.get(name) for name in _DEFAULTS}
    if shown["service_tier"] == FLEX and window != FLEX:
        shown["service_tier"] = "default"
    return {
        "id": response_id,
        "object": "response",
        "background": True,
        "metadata": body.get("metadata") or {},
        **{name: _DEFAULTS[name] if value is None else value for name, value in shown.items()},
        "previous_response_id": None,
        "store": True,
    }


def input_items(response_id: str, line: bytes) -> list[dict[str, Any]]:
    """The input of a response, whose input line is ``line``, as OpenAI's list of items has it.

    A text is one message of the user's. An item without an id gets one that is always the same.
    """
    given = _parse(line)["body"].get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    found = items if isinstance(items, list) else []
    return [
        _item(response_id, number, item)
        for number, item in enumerate(found)
        if isinstance(item, dict)
    ]


def _item(response_id: str, number: int, given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("type") or "message"
    item = {"type": kind, **given}
    if not isinstance(given.get("id"), str) or not given["id"]:
        prefix = _ITEM_IDS.get(kind, "item") if isinstance(kind, str) else "item"
        digest = hashlib.sha256(f"{response_id} {number}".encode()).hexdigest()
        item["id"] = f"{prefix}_{digest[:32]}"
    if kind == "message":
        item.setdefault("status", "completed")
        if isinstance(text := given.get("content"), str):
            is_answer = given.get("role") == "assistant"
            part = {"type": "output_text", "annotations": []} if is_answer else _INPUT_TEXT
            item["content"] = [{**part, "text": text}]
    return item


def response_object(
    given: Mapping[str, Any],
    status: ResponseStatus,
    *,
    created_at: float,
    ended_at: int | None = None,
    error: ResponseError | None = None,
) -> dict[str, Any]:
    """The response without an answer: it waits, or it ended as ``failed`` or ``cancelled``.

    ``given`` is what :func:`given_object` made; times are Unix seconds.
    """
    return {
        **given,
        **_times(status, created_at, ended_at),
        "status": status.value,
        "error": None if error is None else msgspec.to_builtins(error),
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }


def answered_object(
    given: Mapping[str, Any],
    line: bytes,
    status: ResponseStatus,
    *,
    created_at: float,
    ended_at: int | None,
) -> dict[str, Any]:
    """The engine's object, which is in the result ``line``, under our id."""
    answer = _parse_line(line).response
    assert answer is not None  # noqa: S101 - only such a line ends a response with an answer
    ours = {name: given[name] for name in ("id", "object", "background", "metadata", "store")}
    if given.get("service_tier") is not None:
        ours["service_tier"] = given["service_tier"]
    times = _times(status, created_at, ended_at)
    return {**given, **_parse(answer.body), **ours, **times, "status": status.value}


def _times(status: ResponseStatus, created_at: float, ended_at: int | None) -> dict[str, Any]:
    is_complete = status is ResponseStatus.COMPLETED
    return {"created_at": int(created_at), "completed_at": ended_at if is_complete else None}


def end_of(line: bytes) -> ResponseEnd | None:
    """How the response ended whose result line this is; None: the line does not say whose."""
    parsed = _parse_line(line)
    answer = parsed.response
    if parsed.custom_id is None:
        return None
    if answer is None:
        why = parsed.error or _NoAnswer()
        if why.code == "batch_cancelled":
            return ResponseEnd(parsed.custom_id, ResponseStatus.CANCELLED)
        return failed(parsed.custom_id, _SERVER_ERROR, why.message)
    if not 200 <= answer.status_code < 300:
        return failed(parsed.custom_id, _code_of(answer.status_code), _message_in(answer))
    try:
        # All of it, as its client will get it: a number may be too large to be read.
        said = msgspec.convert(_parse(answer.body), _ResponseBody)
    except (ValueError, RecursionError):
        return failed(parsed.custom_id, _SERVER_ERROR, "The engine's answer is not a response.")
    if said.status in ANSWERED:
        return ResponseEnd(parsed.custom_id, ResponseStatus(said.status))
    if said.status == ResponseStatus.CANCELLED:
        return failed(parsed.custom_id, _SERVER_ERROR, "The engine stopped the response.")
    return failed(parsed.custom_id, _SERVER_ERROR, _message_in(answer))


def failed(response_id: str, code: str, message: str) -> ResponseEnd:
    """It ended without an answer, for this reason."""
    error = ResponseError(code, message or "The response could not be generated.")
    return ResponseEnd(response_id, ResponseStatus.FAILED, error)


def _code_of(status_code: int) -> str:
    if status_code == _ENGINE_SAYS_TOO_MUCH:
        return "rate_limit_exceeded"
    return _ENGINE_SAYS.get(status_code, _SERVER_ERROR)


def _message_in(answer: _HttpAnswer) -> str:
    """The engine's own words: ``error.message``, or ``message`` as older servers have it."""
    try:
        body = _parse(answer.body)
    except (ValueError, RecursionError):
        body = None
    for place in (body.get("error"), body) if isinstance(body, dict) else ():
        message = place.get("message") if isinstance(place, dict) else None
        if isinstance(message, str) and message:
            return message
    return f"The engine answered with the HTTP status {answer.status_code}."
