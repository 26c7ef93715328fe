"""What is known of failed lines: their codes and counts, without what an engine says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchyard.results.line_errors import ErrorCount, ErrorCounter, count_words, error_of
from batchyard.results.results import NoAnswerCode, answered, unanswered

SECRET = "Tell me about Alice's illness"


def failed(status: int, body: Any) -> bytes:
    return answered("a", "req", status, json.dumps(body).encode()).line


def counted(*lines: bytes) -> tuple[ErrorCount, ...]:
    counter = ErrorCounter()
    counter.add(lines)
    return counter.counts()


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (unanswered("a", NoAnswerCode.TIMEOUT).line, "request_timeout", "The engine did not"),
        (failed(503, {"error": {"message": "Busy.", "type": "server_error"}}), "503 server_error",
         "Busy."),
        (failed(400, {"error": {"message": "No.", "type": "BadRequestError", "code": 400}}),
         "400 BadRequestError", "No."),
        (failed(404, {"message": "No.", "code": "model_not_found"}), "404 model_not_found", "No."),
        (failed(422, {"detail": "No."}), "422", ""),
        (failed(500, ["No."]), "500", "['No.']"),
        (b"{", "unreadable", ""),
        (b"[]", "error", "None"),
    ],
)  # fmt: skip
def test_an_error_has_the_status_and_the_code(line: bytes, code: str, message: str) -> None:
    found = error_of(line)
    assert found.code == code
    assert found.message.startswith(message)


@pytest.mark.parametrize("code", [SECRET, "x" * 65, {"a": SECRET}, [SECRET]])
def test_what_is_no_code_is_not_taken_for_one(code: Any) -> None:
    """Codes are in e-mails and in Prefect's records."""
    assert error_of(failed(400, {"error": {"message": "No.", "code": code}})).code == "400"


def test_the_commonest_come_first_and_those_of_rare_codes_are_one() -> None:
    """An engine may invent a code for each line."""
    lines = [failed(500, {"error": {"code": f"c{n}"}}) for n in range(3_000)]
    counts = counted(*[failed(503, {"error": {"code": "busy"}})] * 2, *lines)
    assert counts[0] == ErrorCount("503 busy", 2)
    assert counts[-1].code == "other"
    assert len(counts) == 21
    assert sum(each.count for each in counts) == 3_002


def test_three_codes_are_named_and_nothing_that_an_engine_said() -> None:
    lines = [failed(status, {"error": {"message": SECRET}}) for status in (400, 400, 404, 409, 422)]
    assert count_words(counted(*lines)) == "2 × 400, 1 × 404, 1 × 409, 1 with other errors"
    assert count_words(()) == ""
