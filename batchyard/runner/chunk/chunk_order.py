"""The order of a chunk's requests, once it is known how long their answers are."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from batchyard.plan.order import LONGEST_FIRST_REQUESTS, order_of
from batchyard.plan.records import RECORD

if TYPE_CHECKING:
    import numpy.typing as npt

    from batchyard.runner.meters.learning import BatchLengths

    _Planned = tuple[Any, npt.NDArray[Any]]


class ChunkOrder:
    """What is left of a chunk, long answers first. ``sorts``: its order is ours to decide."""

    def __init__(self, lengths: BatchLengths, *, sorts: bool) -> None:
        self._lengths = lengths
        self._sorts = sorts and lengths.requests <= LONGEST_FIRST_REQUESTS
        self._version = 0

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
