"""The answers to the requests of one chunk: their lines are kept, and their lengths are learned."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from batchyard.results.results import Outcome
from batchyard.runner.chunk.chunk_rest import ChunkRest
from batchyard.runner.chunk.copies import Copies

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from batchyard.plan.records import PlannedRequest
    from batchyard.results.results import ResultLine
    from batchyard.runner.chunk.chunk_plan import ChunkPlan
    from batchyard.runner.chunk.finished_lines import FinishedLines
    from batchyard.runner.meters.seats import Seats
    from batchyard.runner.window.window_request import WindowRequest


class Done(NamedTuple):
    """What the engine had to do for an answer: all tokens, and those that the line needs of it."""

    tokens: int
    answer_tokens: int


class ChunkAnswers:
    """Takes answers, each once. ``on_answer`` gets what the request was to do, and its line.

    That is its prompt by the plan's estimate, and its tokens as the engine says.
    """

    def __init__(
        self,
        finished: FinishedLines,
        seats: Seats,
        on_answer: Callable[[Done, ResultLine], None],
    ) -> None:
        self.copies = Copies()
        self.on_line: Callable[[], object] = lambda: None
        """Called when there is another finished line, or a copy whose answer is there."""
        self._finished = finished
        self._seats = seats
        self._on_answer = on_answer
        self._sent: dict[int, WindowRequest] = {}
        """The requests that are on their way, by their ordinals."""
        self._plan: ChunkPlan | None = None
        self._rest: ChunkRest | None = None

    def begin(self, plan: ChunkPlan) -> None:
        """This is to be done; what is finished of it counts."""
        for entry in plan.finished:
            self._finished.tally.count(entry.outcome, entry.usage)
        left = [each for each, _ in plan.left]
        self._rest = self._finished.rest = ChunkRest(plan.lengths, self._seats, plan.records, left)
        self._plan = plan

    def close(self) -> None:
        """The runner is not at the chunk any more."""
        if self._rest is not None:
            self._rest.close()

    def follow(
        self, request: WindowRequest, planned: PlannedRequest, copies: npt.NDArray[Any]
    ) -> None:
        """The request is about to be sent, for itself and for its copies."""
        self._sent[request.ordinal] = request
        if self._rest is not None:
            self._rest.send(request, planned)
        if len(copies):
            request.deliver = partial(self._deliver_to_all, request.custom_id, copies)

    def deliver(self, ordinal: int, result: ResultLine) -> None:
        """A request has its result."""
        self._finished.keep(ordinal, result)
        self._finished.has_run = True
        self.on_line()
        self._on_answer(self._learn(ordinal, result), result)

    async def make_copies(self) -> None:
        """Make the lines of some copies whose answer is there."""
        assert self._plan is not None  # noqa: S101 - there is an answer
        for ordinal, result in await self.copies.take_some(self._plan.input_path):
            self.deliver(ordinal, result)

    def _deliver_to_all(
        self, custom_id: str, copies: npt.NDArray[Any], ordinal: int, result: ResultLine
    ) -> None:
        self.deliver(ordinal, result)
        self.copies.add(custom_id, result, copies)
        self.on_line()

    def _learn(self, ordinal: int, result: ResultLine) -> Done:
        """Count the length of the answer; returns what the engine had to do.

        Of several, the first is the one that such a request gets. The work has only that one, as
        have the estimates of what is left: so the rate says how fast lines are finished.
        """
        request = self._sent.pop(ordinal, None)
        if request is None or self._plan is None or self._rest is None:
            return Done(0, 0)  # it could not be read, so it was not sent
        expected = self._rest.answer(request)
        used = result.first_usage or result.usage
        output = used.output_tokens
        self._seats.count(request, output)
        if output:
            self._plan.lengths.count(expected.length_class, output)
        elif result.outcome is Outcome.OUTPUT:
            output = expected.output_tokens  # the engine says nothing of them
        if result.choices is not None and result.choices < request.sequences:
            self._finished.fewer_answers += 1
        more = result.usage.output_tokens - used.output_tokens
        return Done(expected.prompt_tokens + output + more, output)
