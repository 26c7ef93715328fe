"""The order of a chunk's requests, once it is known how long their answers are."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from batchyard.plan.order import LONGEST_FIRST_REQUESTS, order_of
from batchyard.plan.records import BYTES_PER_TOKEN, RECORD

if TYPE_CHECKING:
    import numpy.typing as npt

    from batchyard.plan.records import PlannedRequest
    from batchyard.runner.learning import BatchLengths

    _Planned = tuple[Any, npt.NDArray[Any]]


_LONGER_THAN_EXPECTED: Final = 1.5
"""Of some twenty answers several may be longer than expected at the same time."""


class ChunkOrder:
    """What is left of a chunk, long answers first. ``sorts``: its order is ours to decide."""

    def __init__(self, lengths: BatchLengths, *, sorts: bool) -> None:
        self._lengths = lengths
        self._sorts = sorts and lengths.requests <= LONGEST_FIRST_REQUESTS
        self._version = 0
        self._last_rank = -1

    def reordered(self, left: deque[_Planned]) -> deque[_Planned]:
        """``left`` as it is, or in another order if more was learned since the last time."""
        version = self._lengths.version
        if not self._sorts or version == self._version or len(left) < 2:
            return left
        self._version = version
        records = np.array([record for record, _ in left], dtype=RECORD)
        by_prefix = np.argsort(records["rank"], kind="stable")
        records = records[by_prefix]
        rank = self._lengths.rank_tokens
        pairs = zip(
            records["length_class"].tolist(), records["output_tokens"].tolist(), strict=True
        )
        outputs = np.array([rank(number, planned) for number, planned in pairs])
        order = order_of(records, outputs)
        if order is None:
            return left
        planned = list(left)
        return deque(planned[place] for place in by_prefix[order])

    def held_tokens(self, request: PlannedRequest) -> tuple[int, int]:
        """What it holds of the engine's cache, at least 1, and how much of that is its answer's.

        It is sent after the one of the call before this one.
        """
        follows, self._last_rank = request.rank == self._last_rank + 1, request.rank
        shared = request.shared_bytes // BYTES_PER_TOKEN if follows else 0
        prompt = max(1, request.prompt_tokens - shared)
        answer = self._lengths.held(request.length_class, request.output_tokens)
        growth = round(_LONGER_THAN_EXPECTED * answer)
        return round(prompt * self._lengths.prompt_scale) + growth or 1, growth
