"""Accept a background response: check what was asked, write the row. Acknowledged is durable."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.batch.responses import ENDPOINT, FLEX, SOONEST, WINDOWS, given_object
from batchyard.errors import InputRefused, RequestRefused
from batchyard.lines.lines import Validator
from batchyard.lines.prompt import expected_output_tokens, prompt_key
from batchyard.lines.rules import Rules
from batchyard.plan.records import BYTES_PER_TOKEN
from batchyard.schedule.forecast import OpenWork
from batchyard.services.quotas import default_quota
from batchyard.steps.create.create import check_metadata
from batchyard.steps.forecast.forecast import check_window
from batchyard.store import NewResponse
from batchyard.wire import new_response_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.services.services import Services
    from batchyard.store import ResponseRecord

_OURS: Final = frozenset({"background", "background_options", "store", "stream", "stream_options"})
"""The fields of a body that are for the API and not for the engine."""
_OPTIONS: Final = frozenset({"completion_window", "continuation_id"})
_IMPOSSIBLE: Final = {
    "stream": "A background response cannot be streamed: leave out 'stream', and retrieve the "
    "response until it has ended.",
    "previous_response_id": "'previous_response_id' is not supported for background responses: "
    "engines do not know one another's answers. Send the earlier items in 'input'.",
    "conversation": "'conversation' is not supported: send the earlier items in 'input'.",
}


async def accept_response(services: Services, tenant: str, body: dict[str, Any]) -> ResponseRecord:
    """Write the response's row; ``body`` is that of the request. Nothing has been run yet.

    Raises :class:`~batchyard.errors.RequestRefused`, for too much at a time its
    :class:`~batchyard.errors.QuotaExceeded` and
    :class:`~batchyard.errors.WindowUnattainable`. Whether the model is offered is not asked.
    """
    window = window_of(body)
    if window == SOONEST and body.get("service_tier") == FLEX:
        window = FLEX
    _refuse_impossible(body)
    response_id = new_response_id()
    line_body = {name: value for name, value in body.items() if name not in _OURS}
    line = _line(response_id, line_body)
    _check_line(services, line)
    _check_metadata(body.get("metadata"))
    new = NewResponse(
        id=response_id,
        tenant=tenant,
        model=body["model"],
        completion_window=window,
        window_seconds=WINDOWS[SOONEST if window == FLEX else window],
        given=msgspec.json.encode(given_object(response_id, body, window=window)),
        token_estimate=_token_estimate(line_body),
        line=line,
    )
    await _check_backlog(services, new)
    return await services.store.responses.create(new, quota=default_quota(services))


def window_of(body: Mapping[str, Any]) -> str:
    """The completion window that a body asks for, in the background or not.

    Raises :class:`~batchyard.errors.RequestRefused`.
    """
    options = body.get("background_options")
    if options is None:
        return SOONEST
    if not isinstance(options, dict):
        raise _invalid("background_options", "must be an object", code="invalid_type")
    for name in sorted(options.keys() - _OPTIONS):
        param = f"background_options.{name[:64]}"
        message = f"Unknown parameter: '{param}'."
        raise RequestRefused(message, param=param, code="unknown_parameter")
    window = options.get("completion_window") or SOONEST
    if window not in list(WINDOWS):
        offered = ", ".join(WINDOWS)
        raise _invalid("background_options.completion_window", f"must be one of {offered}")
    if window != SOONEST and body.get("background") is not True:
        raise _invalid("background_options.completion_window", "needs 'background': true")
    return str(window)


def _invalid(param: str, what: str, *, code: str = "invalid_value") -> RequestRefused:
    return RequestRefused(f"'{param}' {what}.", param=param, code=code)


def _refuse_impossible(body: Mapping[str, Any]) -> None:
    if body.get("background") is not True:
        raise _invalid("background", "must be a boolean", code="invalid_type")
    for name, message in _IMPOSSIBLE.items():
        if body.get(name):
            raise RequestRefused(message, param=name, code="unsupported_parameter")
    if body.get("store") is False:
        raise RequestRefused(
            "A background response is stored until it is deleted: leave out 'store', or set it "
            "to true.",
            param="store",
            code="invalid_value",
        )


def _line(response_id: str, body: dict[str, Any]) -> bytes:
    """The response as a line of an input file."""
    line = {"custom_id": response_id, "method": "POST", "url": ENDPOINT, "body": body}
    # Not msgspec, which cannot write the large integers that it reads.
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _check_line(services: Services, line: bytes) -> None:
    """Refuse what preparing a batch would refuse, by the same rule."""
    settings = services.settings
    rules = Rules(
        endpoint=ENDPOINT,
        limits=settings.limits.to_limits(of_client=True),
        policy=settings.bodies.to_policy(),
    )
    file = io.BytesIO(line)
    validator = Validator(rules)
    for _ in validator.lines(file):
        pass
    try:
        validator.finish(file)
    except InputRefused as refused:
        error = refused.entries[0]
        raise RequestRefused(
            error.message.replace("body.", "", 1) if error.param else error.message,
            param=error.param and error.param.removeprefix("body."),
            code=error.code,
        ) from None


def _check_metadata(metadata: Any) -> None:
    if metadata is not None and not isinstance(metadata, dict):
        raise _invalid("metadata", "must be an object", code="invalid_type")
    check_metadata(metadata)


def _token_estimate(body: dict[str, Any]) -> int:
    """The tokens as the plan of its batch will count them."""
    _, prompt_bytes = prompt_key(ENDPOINT, body)
    return prompt_bytes // BYTES_PER_TOKEN + 1 + expected_output_tokens(ENDPOINT, body)


async def _check_backlog(services: Services, new: NewResponse) -> None:
    now = int(await services.store.database.now())
    work = OpenWork(
        new.id,
        new.model,
        new.tenant,
        now + new.window_seconds,
        0,
        now,
        float(new.token_estimate),
        is_background=new.completion_window == FLEX,
    )
    await check_window(services, work, new.completion_window)
