"""Answers that are not what was asked for: their requests are sent again, with other parameters.

A line has one result: that of its last attempt, or what the batch says instead. Until it is there
the attempts before it are known to this process only: the next owner of the chunk begins with the
first one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from batchyard.errors import RequestRefused
from batchyard.lines.endpoints import ENDPOINTS, takes_form
from batchyard.logs import event_logger
from batchyard.processes.threads import in_thread
from batchyard.results.answer_checks import OutputCheck, TimeBudget, TooMuchToCheck, finish_reasons
from batchyard.results.results import NoAnswerCode, Outcome, unanswered
from batchyard.runner.window.verdict import result_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.engine.base import EngineAnswer
    from batchyard.results.output_rules import OnInvalidOutput
    from batchyard.results.results import ResultLine
    from batchyard.runner.window.window_request import WindowRequest
    from batchyard.wire import TokenUsage

    _Deliver = Callable[[int, ResultLine], None]

log = event_logger(__name__)

_MOST_CHECKED_BYTES = 64 * 1024
"""Of a schema, and of texts that are held against it: one step of a check reads all of it."""

_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class _Earlier:
    """The bad answers to a request until now. ``deliver`` takes its result."""

    custom_id: str
    deliver: _Deliver
    answers: list[TokenUsage] = field(default_factory=list)
    """What each used, of those after which it was sent again."""
    kept: ResultLine | None = None
    """The last of these, if the batch keeps it where nothing better comes."""
    fault: str = ""
    """What is wrong with the last answer, in words that quote nothing of it."""


class OutputRetries:
    """Those of one chunk, by the rule of its batch."""

    def __init__(self, rule: OnInvalidOutput, batch_id: str) -> None:
        self._rule = rule
        self._batch_id = batch_id
        self._patch = rule.patch
        self._is_kept = rule.then == "keep"
        self._check = OutputCheck(TimeBudget(), most_bytes=_MOST_CHECKED_BYTES)
        self._earlier: dict[int, _Earlier] = {}
        """By ordinal, of the requests that were sent again and have no result."""
        self._has_told = False

    async def prepare(self) -> None:
        """Load what the checks need."""
        if self._rule.invalid_json:
            await in_thread(self._check.load)

    def follow(self, request: WindowRequest) -> None:
        """Judge the answers to the request, if they are text. To be called before it is sent."""
        if ENDPOINTS[request.url].writes_tokens and not takes_form(request.url):
            deliver = request.deliver
            request.again = partial(self._is_sent_again, request, deliver)
            request.deliver = partial(self._deliver_last, deliver)

    def deliver_kept(self) -> None:
        """Nothing is sent again any more: the answers that the batch keeps are the last ones."""
        for ordinal, earlier in self._earlier.items():
            if earlier.kept is not None:
                earlier.deliver(ordinal, self._result(earlier, None))
        self._earlier.clear()

    def _is_sent_again(
        self, request: WindowRequest, deliver: _Deliver, answer: EngineAnswer
    ) -> bool:
        try:
            return self._judge(request, deliver, answer)
        except Exception as error:  # noqa: BLE001 - an answer may hold anything
            # It is what it was without the rule.
            log.warning("answer.not_judged", type(error).__name__, request_id=request.request_id)
            return False

    def _judge(self, request: WindowRequest, deliver: _Deliver, answer: EngineAnswer) -> bool:
        """Whether the answer is bad and the request, which is changed then, is sent again."""
        earlier = self._earlier.get(request.ordinal)
        repeats = 0 if earlier is None else len(earlier.answers)
        is_last = repeats == self._rule.attempts
        if answer.status is None or not 200 <= answer.status < 300 or (is_last and self._is_kept):
            return False
        if earlier is not None:
            earlier.fault = ""  # that of the answer before
        fault = self._fault_of(request, answer)
        if not fault:
            return False
        if earlier is None:
            earlier = self._earlier[request.ordinal] = _Earlier(request.custom_id, deliver)
        earlier.fault = fault
        if is_last or not (repeats or self._is_changed(request)):
            return False
        result = result_of(request, answer)
        earlier.answers.append(result.usage)
        earlier.kept = result if self._is_kept else None
        return True

    def _fault_of(self, request: WindowRequest, answer: EngineAnswer) -> str:
        """What is wrong with the answer; nothing, where that takes too long to find out."""
        decoded = _decode(answer.body)
        bad = finish_reasons(decoded).intersection(self._rule.finish_reasons)
        if bad:
            return f"ended with the finish_reason {min(bad)}"
        if not self._rule.invalid_json:
            return ""
        try:
            return self._check.fault_of(request.body, decoded) or ""
        except TooMuchToCheck:
            if not self._has_told:
                log.warning("output.not_checked", batch=self._batch_id)
            self._has_told = True
            return ""

    def _is_changed(self, request: WindowRequest) -> bool:
        try:
            request.body = self._patch.applied_to_body(request.body)
        except RequestRefused:
            return False  # half a patch is not what was asked for
        return True

    def _deliver_last(self, deliver: _Deliver, ordinal: int, result: ResultLine) -> None:
        earlier = self._earlier.pop(ordinal, None)
        deliver(ordinal, result if earlier is None else self._result(earlier, result))

    def _result(self, earlier: _Earlier, result: ResultLine | None) -> ResultLine:
        """What becomes of a line. ``result`` None: its last attempt has none."""
        used = [*earlier.answers, *([] if result is None else [result.usage])]
        total = used[0]
        for each in used[1:]:
            total = total.plus(each)
        if result is None or (earlier.kept is not None and result.outcome is Outcome.ERROR):
            assert earlier.kept is not None  # noqa: S101 - see deliver_kept
            result = earlier.kept
        elif earlier.fault and result.outcome is Outcome.OUTPUT and not self._is_kept:
            why = f"The last one {earlier.fault}."
            result = unanswered(earlier.custom_id, NoAnswerCode.INVALID_OUTPUT, why)
        return replace(result, usage=total, first_usage=used[0])
