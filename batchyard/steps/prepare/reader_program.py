"""Reads one large input in a process of its own (:mod:`.reader_process` is the other side).

Requests and answers are pickles. The first request is a :class:`~.input_reader.ReadingJob`. An
answer is a pair of an order's result and the error that it raised; one of them is None.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from batchyard.steps.prepare.input_reader import Check, InputReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.processes.child_loop import Answers


def answers(requests: Iterator[bytes]) -> Answers:
    """The answer to each order."""
    values = map(pickle.loads, requests)  # our parent's
    reader = InputReader(next(values))
    for order in values:
        answer: tuple[Any, Exception | None]
        try:
            if isinstance(order, Check):
                answer = reader.check(order, _go_on), None
            else:
                answer = reader.write_plan(order), None
        except Exception as error:  # noqa: BLE001 - it is raised on the other side
            answer = None, error
        yield True, pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)


def _go_on() -> None:
    """The process is killed to stop it."""
