"""The entries of a segment as arrays, for those who read millions of them.

Not in :mod:`batchyard.services.segments.segments`, which commands import that need no NumPy.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from batchyard.results.results import Outcome
from batchyard.services.segments.segments import IS_COPY
from batchyard.wire import TokenUsage

if TYPE_CHECKING:
    import numpy.typing as npt

HEADER: Final = np.dtype(
    [
        ("ordinal", "<u4"),
        ("outcome", "u1"),
        ("usage", "<u4", (len(TokenUsage._fields),)),
        ("length", "<u4"),
    ]
)
"""Of an entry, as an array's element."""
_LENGTH = struct.Struct(f"<{HEADER.itemsize - 4}xI")


class Headers(NamedTuple):
    """The entries of a segment as arrays of one length, in its order."""

    headers: npt.NDArray[Any]
    """Of :data:`HEADER`, with plain outcomes."""
    is_copy: npt.NDArray[np.bool_]
    positions: npt.NDArray[np.int64]
    """Where the lines begin in the segment, bytes."""
    is_whole: bool
    """False: the segment is damaged, and what comes after the damage is left out."""


def decode_headers(segment: bytes, requests: int) -> Headers:
    """The entries of a segment, up to the first that no batch of so many requests can have.

    The same as :func:`~.segments.decode_entries`, without an object for each.
    """
    size, end = HEADER.itemsize, len(segment)
    read_length = _LENGTH.unpack_from
    starts = []
    position = 0
    while position + size <= end:
        starts.append(position)
        position += size + read_length(segment, position)[0]
    at = np.array(starts, dtype=np.int64)
    rows = np.frombuffer(segment, dtype=np.uint8)[at[:, None] + np.arange(size)]
    headers = np.ascontiguousarray(rows).view(HEADER).reshape(-1)
    is_copy = (headers["outcome"] & IS_COPY) > 0
    headers["outcome"] &= ~IS_COPY & 0xFF
    is_sound = (
        (headers["ordinal"] < requests)
        & np.isin(headers["outcome"], list(Outcome))
        & (headers["length"] > 0)
        & (at + size + headers["length"] <= end)
    )
    sound = len(at) if is_sound.all() else int(np.argmin(is_sound))
    is_whole = sound == len(at) and position == end
    return Headers(headers[:sound], is_copy[:sound], at[:sound] + size, is_whole)
