"""Background responses: what clients see of them, and what their result lines say."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response

from batchyard.batch.responses import (
    ResponseEnd,
    ResponseError,
    ResponseStatus,
    answered_object,
    end_of,
    given_object,
    input_items,
    response_object,
)
from batchyard.results.results import NoAnswerCode, ResultLine, answered, unanswered

BODY: dict[str, Any] = {
    "model": "m",
    "input": "hello",
    "instructions": "Be short.",
    "metadata": {"a": "b"},
    "temperature": 0.5,
}


def line(status: int, body: Any) -> bytes:
    return answered("resp_1", "req_1", status, msgspec.json.encode(body)).line


def parsed(value: dict[str, Any]) -> Response:
    """As the SDK reads it, but strictly."""
    return Response.model_validate(value, strict=True)


@pytest.mark.parametrize("status", [ResponseStatus.QUEUED, ResponseStatus.FAILED])
def test_a_response_without_an_answer_is_what_the_sdk_expects(status: ResponseStatus) -> None:
    error = ResponseError("server_error", "No.") if status is ResponseStatus.FAILED else None
    given = given_object("resp_1", BODY)
    shown = parsed(response_object(given, status, created_at=1.5, error=error))
    assert (shown.id, shown.status, shown.output, shown.background) == ("resp_1", status, [], True)
    assert (shown.instructions, shown.metadata, shown.temperature) == (
        "Be short.",
        {"a": "b"},
        0.5,
    )
    assert (shown.error and shown.error.message) == (error and "No.")
    assert (shown.created_at, shown.completed_at, shown.usage) == (1, None, None)


def test_an_answer_is_the_engines_object_under_our_id_and_times() -> None:
    body = {"id": "resp_engine", "created_at": 99, "status": "completed", "output": [], "new": 1}
    body |= {"background": False, "metadata": None, "temperature": 1.0}
    shown = answered_object(
        given_object("resp_1", BODY),
        line(200, body),
        ResponseStatus.COMPLETED,
        created_at=1.5,
        ended_at=7,
    )
    assert (shown["id"], shown["created_at"], shown["completed_at"]) == ("resp_1", 1, 7)
    assert (shown["background"], shown["metadata"]) == (True, {"a": "b"})
    assert (shown["temperature"], shown["new"]) == (1.0, 1)


@pytest.mark.parametrize(
    ("status", "body", "end"),
    [
        (200, {"status": "completed"}, ResponseStatus.COMPLETED),
        (200, {"status": "incomplete"}, ResponseStatus.INCOMPLETE),
        (400, {"error": {"message": "Too long."}}, ("invalid_prompt", "Too long.")),
        (404, {"message": "No model."}, ("server_error", "No model.")),
        (429, {}, ("rate_limit_exceeded", "The engine answered with the HTTP status 429.")),
        (200, {"status": "failed", "error": {"message": "Oh."}}, ("server_error", "Oh.")),
        (200, [], ("server_error", "The engine's answer is not a response.")),
    ],
)
def test_an_answer_of_the_engine_says_how_the_response_ended(
    status: int, body: Any, end: ResponseStatus | tuple[str, str]
) -> None:
    found = end_of(line(status, body))
    if isinstance(end, ResponseStatus):
        assert found == ResponseEnd("resp_1", end)
    else:
        assert found == ResponseEnd("resp_1", ResponseStatus.FAILED, ResponseError(*end))


ODD_BODIES = {
    "a number that is too large": b'{"status": "completed", "error": {"message": "x"}, "n": 1e400}',
    "a number that is too long": b'{"status": "completed", "n": %s}' % (b"1" * 5_000),
}


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("body", ODD_BODIES.values(), ids=ODD_BODIES.keys())
def test_an_answer_that_cannot_be_read_fails_its_own_response(status: int, body: bytes) -> None:
    found = end_of(
        b'{"custom_id":"resp_1","response":{"status_code":%d,"body":%s}}' % (status, body)
    )
    assert found is not None
    assert (found.id, found.status) == ("resp_1", ResponseStatus.FAILED)


def test_a_line_without_an_answer_is_a_failure_unless_its_batch_was_cancelled() -> None:
    def end(code: NoAnswerCode) -> ResponseEnd:
        made: ResultLine = unanswered("resp_1", code)
        return end_of(made.line)

    assert end(NoAnswerCode.CANCELLED).status is ResponseStatus.CANCELLED
    crashed = end(NoAnswerCode.ENGINE_CRASH)
    assert crashed.status is ResponseStatus.FAILED
    assert crashed.error == ResponseError(
        "server_error", "The engine went down each time that it ran this request."
    )


def items_of(given: Any) -> list[dict[str, Any]]:
    asked = {"custom_id": "resp_1", "body": {"model": "m", "input": given}}
    return input_items("resp_1", json.dumps(asked).encode())


def test_a_text_is_one_message_of_the_users_with_an_id_that_stays() -> None:
    (item,) = items_of("hello")
    assert item.pop("id").startswith("msg_")
    content = [{"type": "input_text", "text": "hello"}]
    assert item == {"type": "message", "role": "user", "status": "completed", "content": content}
    assert items_of("hello") == items_of("hello")


def test_items_are_as_they_were_given_with_ids_of_their_own_kind() -> None:
    parts = [{"type": "input_text", "text": "a"}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    named = {"type": "reasoning", "id": "rs_mine", "summary": []}
    system, user, answer, *rest = items_of(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "Yes."},
            call,
            result,
            named,
            {"type": "new"},
        ]
    )
    assert system["content"] == [{"type": "input_text", "text": "Be brief."}]
    assert user["content"] == parts
    assert answer["content"] == [{"type": "output_text", "annotations": [], "text": "Yes."}]
    prefixes = [each["id"].partition("_")[0] for each in (system, user, answer, *rest)]
    assert prefixes == ["msg", "msg", "msg", "fc", "fco", "rs", "item"]
    assert [{**each, "id": None} for each in rest[:2]] == [
        {**call, "id": None},
        {**result, "id": None},
    ]
    assert rest[2] == named
    assert len({each["id"] for each in (system, user, answer)}) == 3
