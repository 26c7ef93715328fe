"""The records of a plan, as bytes, as an array and one by one."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from batchyard.plan.lengths import unshared_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import numpy.typing as npt

RECORD = np.dtype(
    [
        ("offset", "<u8"),  # of the line in the input file, bytes
        ("length", "<u4"),  # of the line, bytes
        ("ordinal", "<u4"),  # 0-based position among the input's requests
        ("prompt_tokens", "<u4"),  # estimate; at least 1, and 0 for a copy
        ("output_tokens", "<u4"),  # estimate
        ("shared_bytes", "<u2"),  # of the prompt key, shared with the one before in prefix order
        ("length_class", "<u2"),  # its number in the plan's table of classes; 0: no answer to learn
        ("rank", "<u4"),  # 0-based position in prefix order
    ]
)
"""32 bytes, little-endian."""

PACKED: Final = struct.Struct("<QIIIIHHI")
"""The format of one record."""
MOST_SHARED_BYTES: Final = 2**16 - 1
"""What fits into ``shared_bytes``."""
BYTES_PER_TOKEN: Final = 4
"""What prompts are taken for: English text has about as many."""


def read_records(data: bytes) -> npt.NDArray[Any]:
    """The records in a slice of a plan file, as a structured array of :data:`RECORD`."""
    return np.frombuffer(data, dtype=RECORD)


def split(packed: bytes) -> Iterator[bytes]:
    """The records, one by one."""
    size = RECORD.itemsize
    return (packed[start : start + size] for start in range(0, len(packed), size))


class PlannedRequest(NamedTuple):
    """A record of the plan as Python's own numbers, in the order of :data:`RECORD`.

    Of a numpy record each field that is read takes as long as all of these together.
    """

    offset: int
    length: int
    ordinal: int
    prompt_tokens: int
    output_tokens: int
    shared_bytes: int
    length_class: int
    rank: int

    @classmethod
    def of(cls, record: Any) -> Self:
        """Make one from a record of :func:`read_records`."""
        return cls._make(record.item())

    @property
    def unshared_tokens(self) -> int:
        """See :func:`batchyard.plan.lengths.unshared_tokens`."""
        return unshared_tokens(self.prompt_tokens, self.shared_bytes // BYTES_PER_TOKEN)


def left_to_run(
    records: npt.NDArray[Any], finished: Collection[int]
) -> list[tuple[Any, npt.NDArray[Any]]]:
    """Each request of a chunk that is to run, with its copies; less the ordinals in ``finished``.

    Where the request itself is finished and copies are not, the first of these runs in its place.
    """
    groups = np.cumsum(records["prompt_tokens"] > 0)
    if finished:
        ordinals = np.fromiter(finished, dtype="<u4", count=len(finished))
        is_left = ~np.isin(records["ordinal"], ordinals)
        records, groups = records[is_left], groups[is_left]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    return [
        (records[start], records[start + 1 : end])
        for start, end in pairwise([*starts.tolist(), len(records)])
    ]
