"""The order of execution, made of the prefix order: what goes first so that the end is short."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from batchyard.plan.records import BYTES_PER_TOKEN, RECORD, read_records
from batchyard.plan.tail import kind_starts, longest_first, samples_first

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

LONGEST_FIRST_REQUESTS: Final = 65_536
"""The most requests that are put in this order. Of more, the end is a small part: 40 requests for
each of an engine's sequences are enough."""
_LEAST_OUTPUT: Final = 0.25
"""The least part of all tokens that are those of answers. Where they are fewer, their lengths
decide little."""


def order_of(
    records: npt.NDArray[Any], output_tokens: npt.NDArray[Any], unknown: Collection[int] = ()
) -> npt.NDArray[np.intp] | None:
    """The order of execution of records that are in prefix order, as indices; None: leave them.

    ``records`` are of :data:`RECORD`. ``output_tokens``, one number for each of them, are what is
    expected; of each class in ``unknown`` some go first.
    """
    shared = records["shared_bytes"] // BYTES_PER_TOKEN
    order = longest_first(records["prompt_tokens"], shared, output_tokens)
    if not unknown or not _answers_decide(records, output_tokens):
        return order
    place = np.arange(len(records)) if order is None else order
    work = _work(records, output_tokens)
    first = samples_first(records["length_class"][place], unknown, shared[place], work)
    return order if first is None else place[first]


def with_a_short_end(
    packed: bytes, adapter_starts: Sequence[int], unknown: Collection[int]
) -> bytes:
    """The records of a plan, which are in prefix order, in the order of execution.

    Within each adapter, so that its requests stay together: ``adapter_starts`` are the numbers of
    the records at which another one begins. ``unknown`` as in :func:`order_of`.
    """
    size = RECORD.itemsize
    cuts = [0, *(size * start for start in adapter_starts if start), len(packed)]
    parts = (_with_a_short_end(packed[start:end], unknown) for start, end in pairwise(cuts))
    return b"".join(parts)


def chunk_starts(packed: bytes, unknown: Collection[int], *, least: int) -> dict[int, int]:
    """Where a chunk of one kind of answers is to begin, and the turn of the chunk.

    By the number of a record in the order of execution. See :func:`.kind_starts`.
    """
    records = read_records(packed)
    places = np.flatnonzero(records["prompt_tokens"])
    run = records[places]
    if not unknown or not _answers_decide(run, run["output_tokens"]):
        return {}
    starts = kind_starts(
        run["length_class"],
        unknown,
        run["shared_bytes"] // BYTES_PER_TOKEN,
        _work(run, run["output_tokens"]),
        least=least,
    )
    return {int(places[start]): turn for start, turn in starts.items()}


def _with_a_short_end(packed: bytes, unknown: Collection[int]) -> bytes:
    records = read_records(packed)
    starts = np.flatnonzero(records["prompt_tokens"])
    run = records[starts]
    order = order_of(run, run["output_tokens"], unknown)
    if order is None:
        return packed
    if len(run) < len(records):
        order = _expanded(order, starts, len(records))
    return records[order].tobytes()


def _expanded(
    order: npt.NDArray[np.intp], starts: npt.NDArray[np.intp], count: int
) -> npt.NDArray[np.intp]:
    """The order of ``count`` records, from that of those at ``starts``, which others follow."""
    sizes = np.diff(starts, append=count)[order]
    within = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    expanded: npt.NDArray[np.intp] = np.repeat(starts[order], sizes) + within
    return expanded


def _work(records: npt.NDArray[Any], output_tokens: npt.NDArray[Any]) -> int:
    """All tokens, less those of prompts that the request before has as well."""
    shared = int((records["shared_bytes"] // BYTES_PER_TOKEN).sum())
    return int(records["prompt_tokens"].sum()) - shared + int(output_tokens.sum())


def _answers_decide(records: npt.NDArray[Any], output_tokens: npt.NDArray[Any]) -> bool:
    """Whether enough of the work is answers for their lengths to matter."""
    return int(output_tokens.sum()) >= _LEAST_OUTPUT * _work(records, output_tokens)
