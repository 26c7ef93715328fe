"""Which requests go first so that the end of a batch is short. Pure.

When the last requests are long ones, most of an engine idles while they are written. So what is
expected to write much goes first, in groups that keep the prefix order inside, and only where
hardly any shared prefix is read twice for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

    Tokens = npt.NDArray[np.integer]
    """One number for each request."""

_MOST_LOST = 0.02
"""The part of all tokens that may be read again for the sake of the end."""
_LEAST_SAMPLES, _MOST_SAMPLES = 8, 32
"""Requests of each class that go first where nothing is known of its answers. By eight answers
whose lengths are log-normal with sigma 0.4 their mean is known to within 15 %, by 32 to 7 %."""
_LEAST_TO_SAMPLE = 512
"""The fewest requests with samples. Of fewer, most are in the window by the time the first ones are
answered."""
_MOST_SAMPLED = 16
"""One request of so many may go first for that."""
_LEAST_PIECE, _MOST_PIECES = 64, 64
"""The fewest requests of a piece of unknown length, and about how many pieces there are at most.
Each is a chunk, and an engine cannot leave one that it has begun."""


def longest_first(
    prompt_tokens: Tokens, shared_tokens: Tokens, output_tokens: Tokens
) -> npt.NDArray[np.intp] | None:
    """The order of requests that are sorted by prefix, as indices; None: leave them.

    ``shared_tokens`` with the request before. A group ends where little is shared: the smaller
    the groups the better, the finest being a request each. They go by their longest output, in
    powers of two: a small difference is not worth a jump away from a warm prefix.
    """
    if len(prompt_tokens) < 2:
        return None
    shared = np.minimum(shared_tokens, prompt_tokens).astype(np.int64)
    shared[0] = 0
    length = np.frexp(output_tokens.astype(np.float64))[1].astype(np.int8)
    work = int(prompt_tokens.sum()) - int(shared.sum()) + int(output_tokens.sum())
    lowest = _Lowest(shared)
    limit = int(shared.max())
    while True:
        starts = np.flatnonzero(shared <= limit)
        longest = np.maximum.reduceat(length, starts)
        if longest.min() == longest.max():
            return None
        groups = np.argsort(-longest, kind="stable")
        ends = np.append(starts[1:], len(shared))
        left, right = ends[groups[:-1]] - 1, starts[groups[1:]]
        # What two prompts share is the least that any neighbours between them share.
        kept = lowest.between(np.minimum(left, right) + 1, np.maximum(left, right))
        if shared[starts].sum() - kept.sum() <= _MOST_LOST * work:
            sizes = (ends - starts)[groups]
            within = np.arange(len(shared)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            return np.repeat(starts[groups], sizes) + within
        limit //= 4


def samples_first(
    classes: Tokens, unknown: Collection[int], shared_tokens: Tokens, work: int
) -> npt.NDArray[np.intp] | None:
    """The order in which some requests of each ``unknown`` class go first; None: leave them.

    All arrays are in the order of execution; ``work`` is the tokens of all. So the lengths of a
    class are known before the order of its other requests is decided. None where there is one
    class only, and no order to decide, or few requests.
    """
    numbers, counts = np.unique(classes, return_counts=True)
    if len(numbers) < 2 or len(classes) < _LEAST_TO_SAMPLE:
        return None
    wanted = len(classes) // _MOST_SAMPLED // max(1, len(unknown))
    samples = max(_LEAST_SAMPLES, min(_MOST_SAMPLES, wanted))
    is_first = np.zeros(len(classes), dtype=bool)
    lost = sampled = 0
    for number in numbers[np.argsort(-counts, kind="stable")]:
        if int(number) not in unknown:
            continue
        places = np.flatnonzero(classes == number)[:samples]
        after = min(int(places[-1]) + 1, len(classes) - 1)
        lost += int(shared_tokens[after])
        sampled += len(places)
        if lost > _MOST_LOST * work or sampled * _MOST_SAMPLED > len(classes):
            break
        is_first[places] = True
    if not is_first.any():
        return None
    return np.concatenate([np.flatnonzero(is_first), np.flatnonzero(~is_first)])


def kind_starts(
    classes: Tokens, unknown: Collection[int], shared_tokens: Tokens, work: int, *, least: int
) -> dict[int, int]:
    """The places at which a chunk is to begin, so that its answers are of one kind: place to turn.

    The arrays are as in :func:`samples_first`. A kind is at least ``least`` requests of an
    ``unknown`` class that stand side by side, and is cut into pieces: the order of chunks can still
    change when lengths are known, and what is in a chunk cannot. Until then kinds take turns: the
    first pieces of all go before their second ones, and so on. Without a second kind there is
    nothing to decide.
    """
    starts = np.concatenate([[0], np.flatnonzero(np.diff(classes)) + 1])
    sizes = np.diff(starts, append=len(classes))
    is_kind = (sizes >= least) & np.isin(classes[starts], list(unknown))
    if not is_kind.any() or len(np.unique(classes)) < 2:
        return {}
    kinds = list(zip(starts[is_kind].tolist(), sizes[is_kind].tolist(), strict=True))
    most = max(_LEAST_PIECE, len(classes) // _MOST_PIECES)
    while most < 2 * len(classes):
        found = _pieces(kinds, most, len(classes))
        if int(shared_tokens[list(found)].sum()) <= _MOST_LOST * work:
            return found
        most *= 2
    return {}


def _pieces(kinds: Sequence[tuple[int, int]], most: int, end: int) -> dict[int, int]:
    """Where each piece of a kind, or what stands between two kinds, begins, and its turn."""
    found = {}
    for start, size in kinds:
        count = max(1, round(size / most))
        found.update({start + size * turn // count: turn for turn in range(count)})
        if start + size < end:
            found.setdefault(start + size, 0)
    found.pop(0, None)
    return dict(sorted(found.items()))


class _Lowest:
    """The least of any range of numbers, by the least of every range of 1, 2, 4, … of them."""

    def __init__(self, numbers: npt.NDArray[np.int64]) -> None:
        self._rows = [numbers]
        width = 1
        while 2 * width <= len(numbers):
            row = self._rows[-1]
            self._rows.append(np.minimum(row[:-width], row[width:]))
            width *= 2

    def between(
        self, first: npt.NDArray[np.intp], last: npt.NDArray[np.intp]
    ) -> npt.NDArray[np.int64]:
        """The least from each ``first`` to its ``last``, both included."""
        found = np.empty(len(first), dtype=np.int64)
        level = np.frexp((last - first + 1).astype(np.float64))[1] - 1
        for number, row in enumerate(self._rows):
            here = level == number
            found[here] = np.minimum(row[first[here]], row[last[here] - 2**number + 1])
        return found
