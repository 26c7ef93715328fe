"""How much of a chunk is left to do: which requests those are, and what is expected of each.

The database knows how many requests of a chunk are answered. Because long ones run first, the same
share of them is not the same share of the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from batchyard.plan.records import BYTES_PER_TOKEN, RECORD

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from batchyard.plan.records import PlannedRequest
    from batchyard.runner.meters.learning import BatchLengths
    from batchyard.runner.meters.seats import Seated, Seats


class ChunkRest:
    """The requests of a chunk that are not answered. ``seats``: those of its engine.

    ``records`` are those that run, of the whole chunk; ``left`` those of them without an answer.
    """

    def __init__(
        self,
        lengths: BatchLengths,
        seats: Seats,
        records: npt.NDArray[Any],
        left: Sequence[Any],
    ) -> None:
        self._lengths = lengths
        self._seats = seats
        self._all = _Work(records)
        self._left = _Work(np.array(left, dtype=RECORD))
        self._in_flight: dict[Seated, PlannedRequest] = {}
        lengths.under_way.add(self)

    def close(self) -> None:
        """The runner is not at the chunk any more."""
        self._lengths.under_way.discard(self)

    def written(self, number: int) -> list[float]:
        """Tokens of each answer of a class that the engine writes now."""
        return [
            self._seats.written(request)
            for request, planned in self._in_flight.items()
            if planned.length_class == number and request.seated_at is not None
        ]

    def send(self, request: Seated, planned: PlannedRequest) -> None:
        """The request is on its way to the engine."""
        self._in_flight[request] = planned

    def answer(self, request: Seated) -> PlannedRequest:
        """The request is answered."""
        planned = self._in_flight.pop(request)
        self._left.remove(planned)
        return planned

    @property
    def share(self) -> float:
        """Of the chunk's work, what is left: 0 to 1."""
        weight = self._seats.prompt_cost.weight
        whole = max(1.0, self._all.tokens(self._lengths, weight))
        left = self._left.tokens(self._lengths, weight) - self._done(weight)
        return max(0.0, min(1.0, left / whole))

    def _done(self, prompt_weight: float) -> float:
        """What is done of those that are not answered."""
        done = 0.0
        for request, planned in self._in_flight.items():
            if request.seated_at is not None:
                lacks = self._lengths.lacks(planned, self._seats.written(request))
                done += self._lengths.answer_tokens(planned) - lacks
                done += prompt_weight * planned.unshared_tokens
        return done


class _Work:
    """Requests and their tokens."""

    def __init__(self, records: npt.NDArray[Any]) -> None:
        # A copy of another request has no tokens, and does not run.
        run = records[records["prompt_tokens"] > 0]
        classes, shared = run["length_class"], run["shared_bytes"] // BYTES_PER_TOKEN
        unshared = np.maximum(1, run["prompt_tokens"].astype(np.int64) - shared)
        self._unshared = int(unshared.sum())
        self._runs = np.bincount(classes, minlength=1).tolist()
        self._planned = np.bincount(classes, run["output_tokens"], minlength=1).tolist()

    def remove(self, planned: PlannedRequest) -> None:
        """The request is answered."""
        self._unshared -= planned.unshared_tokens
        self._runs[planned.length_class] -= 1
        self._planned[planned.length_class] -= planned.output_tokens

    def tokens(self, lengths: BatchLengths, prompt_weight: float) -> float:
        """All of them, in tokens of answers, of which one of a prompt costs so many."""
        expected = lengths.expected()
        answers: float = sum(
            expected[number].tokens * runs if number in expected else self._planned[number]
            for number, runs in enumerate(self._runs)
        )
        return prompt_weight * self._unshared + answers
