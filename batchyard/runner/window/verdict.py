"""What an answer, or the loss of the engine, means for one request of the window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.engine.base import NoAnswer
from batchyard.errors import EngineLost
from batchyard.logs import event_logger
from batchyard.results.results import NoAnswerCode, answered, unanswered, unprocessed

if TYPE_CHECKING:
    from batchyard.engine.base import EngineAnswer
    from batchyard.results.results import ResultLine
    from batchyard.runner.window.window_request import WindowRequest

log = event_logger(__name__)

RETRIED_STATUSES = frozenset({408, 409, 425, 429})


def is_retriable(answer: EngineAnswer) -> bool:
    """Whether another attempt may go better: 408, 409, 425, 429, 5xx and lost connections."""
    if answer.status is None:
        return answer.no_answer is not NoAnswer.TIMEOUT
    return answer.status in RETRIED_STATUSES or answer.status >= 500


def result_of(request: WindowRequest, answer: EngineAnswer) -> ResultLine:
    """The result line of a request whose answer is final. Raises nothing, whatever it holds."""
    if answer.status is not None:
        try:
            return answered(
                request.custom_id,
                request.request_id,
                answer.status,
                answer.body,
                content_type=answer.content_type,
                location=answer.location,
            )
        except Exception as error:  # noqa: BLE001 - an answer may hold anything
            reason = type(error).__name__
            log.warning("answer.not_read", reason, request_id=request.request_id)
            return unprocessed(
                request.custom_id, f"Batchyard could not read the engine's answer ({reason})."
            )
    if answer.no_answer is NoAnswer.FAILED:
        return unprocessed(
            request.custom_id, f"Batchyard could not send this request ({answer.reason})."
        )
    if answer.no_answer is NoAnswer.EMPTY:
        return unprocessed(
            request.custom_id,
            "The engine answered this request with a good HTTP status and an empty body.",
        )
    timed_out = answer.no_answer is NoAnswer.TIMEOUT
    code = NoAnswerCode.TIMEOUT if timed_out else NoAnswerCode.SERVER_ERROR
    return unanswered(request.custom_id, code)


def given_up(request: WindowRequest, error: Exception) -> ResultLine:
    """The result line of a request that ended the stream with ``error`` each time it ran."""
    if isinstance(error, EngineLost):
        return unanswered(request.custom_id, NoAnswerCode.ENGINE_CRASH)
    return unprocessed(
        request.custom_id,
        f"Batchyard failed each time that it ran this request ({type(error).__name__}).",
    )
