"""Chains: batches whose answers become requests of a further stage, line by line. Pure.

The first stage is the batch's own input. Each further stage has an endpoint, a model and a template
that makes a request body of what is known of the line by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from batchyard.errors import RequestRefused
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.lines.templates import BodyNotMade, TemplateRefused, check_template
from batchyard.results.answer_checks import text_of
from batchyard.wire import RequestCounts, file_id_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_STAGES: Final = 8
"""The most stages behind the first."""
VARIABLES: Final = ("request", "response", "content", "custom_id", "first")
"""The variables of a template: the body of the line's request in the stage before, the body of its
answer, the text of that, the line's ``custom_id``, and the body of its request in the first
stage."""

_decode = msgspec.json.Decoder().decode


class Stage(msgspec.Struct, frozen=True):
    """A stage behind the first."""

    endpoint: str
    template: str
    model: str | None = None
    """The model of this stage; None: that of the first stage."""


class BatchStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a batch: what it asks, and how far its lines are.

    ``total`` of the counts are the lines that have come as far. Of ``output_file_id``, the
    answers, there is none before the batch has ended; the last stage's is the batch's.
    """

    object: Literal["batch.stage"] = "batch.stage"
    stage: int
    endpoint: str
    model: str | None = None
    request_counts: RequestCounts
    output_file_id: str | None = None


class BatchStages(msgspec.Struct, frozen=True):
    """All stages of a batch, in their order."""

    object: Literal["list"] = "list"
    data: tuple[BatchStage, ...] = ()


def stage_file_id(batch_id: str, stage: int) -> str:
    """The id of the file with a stage's answers, counted from 1: always the same."""
    return file_id_of(f"{batch_id} stage {stage}")


def stages_of(asked: Sequence[Mapping[str, Any]]) -> tuple[Stage, ...]:
    """The stages as a user has written them. Raises RequestRefused."""
    unknown = sorted({key for each in asked for key in each} - {*Stage.__struct_fields__})
    if unknown:
        raise _unreadable(f"a stage has no '{unknown[0]}'")
    try:
        return msgspec.convert(list(asked), tuple[Stage, ...])
    except msgspec.ValidationError as error:
        raise _unreadable(str(error)) from None


def _unreadable(why: str) -> RequestRefused:
    return RequestRefused(f"The stages cannot be read: {why}.", param="then", code="invalid_value")


class _Response(msgspec.Struct):
    body: msgspec.Raw


class _Answered(msgspec.Struct):
    response: _Response


class _Request(msgspec.Struct):
    # As in framing: of a repeated key a typed field would check each value.
    custom_id: Any
    body: msgspec.Raw


_answered = msgspec.json.Decoder(_Answered).decode
_request = msgspec.json.Decoder(_Request).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_stages(stages: Sequence[Stage]) -> None:
    """Raise :class:`~batchyard.errors.RequestRefused` for what can never run."""
    if len(stages) > MAX_STAGES:
        raise RequestRefused(
            f"A chain may have {MAX_STAGES} stages after the first.",
            param="then",
            code="invalid_value",
        )
    for number, stage in enumerate(stages):
        if stage.endpoint not in ENDPOINTS:
            raise RequestRefused(
                f"The endpoint of a stage must be one of {', '.join(ENDPOINTS)}.",
                param=f"then[{number}].endpoint",
                code="invalid_value",
            )
        try:
            check_template(stage.template, VARIABLES)
        except TemplateRefused as error:
            raise RequestRefused(
                f"The template cannot be used: {error}.",
                param=f"then[{number}].template",
                code="invalid_template",
            ) from None


def variables_of(request_line: bytes, result_line: bytes, first_line: bytes) -> dict[str, Any]:
    """The variables of the next stage's template, for a line with an answer.

    Values that are objects in JSON are still JSON: the template's process opens them. Raises
    :class:`~batchyard.lines.templates.BodyNotMade` for a request or an answer that cannot be read.
    """
    try:
        request, first = _request(request_line), _request(first_line)
    except (ValueError, RecursionError):
        raise BodyNotMade("the request to be rendered cannot be read") from None
    try:
        answer = _answered(result_line).response.body
        text = text_of(_decode(answer))
    except (ValueError, RecursionError):
        raise BodyNotMade("the answer to be rendered cannot be read") from None
    return {
        "request": request.body,
        "response": answer,
        "content": text,
        "custom_id": first.custom_id,
        "first": first.body,
    }


def line_or_refusal(
    custom_id: str, endpoint: str, body: bytes | BodyNotMade, model: str
) -> bytes | BodyNotMade:
    """The line of a stage's input, newline included; or why there is none.

    A ``body`` without a model gets the stage's.
    """
    if isinstance(body, BodyNotMade):
        return body
    fields = _fields(body)
    named = fields.get("model")
    if named is None:
        body = msgspec.json.encode({**fields, "model": model})
    elif _decode(named) != model:
        return BodyNotMade(f"its model is not {model}, which is the stage's")
    head = msgspec.json.encode({"custom_id": custom_id, "method": "POST", "url": endpoint})
    return head[:-1] + b',"body":' + body + b"}\n"


def of_stage(line: bytes, stage: int) -> bytes:
    """An error line that says in which stage its request failed, counted from 1."""
    return line[:-2] + b',"stage":%d}\n' % stage
