"""The entries of a segment, decoded as arrays: some readers read millions of them.

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
"""The header of an entry, as an array's element."""
_ANY_ORDINAL: Final = 2**32
_LENGTH = struct.Struct(f"<{HEADER.itemsize - 4}xI")


class Headers(NamedTuple):
    """The entries of a segment as arrays of one length, in its order."""

    segment: bytes
    """The bytes, with the lines themselves."""
    headers: npt.NDArray[Any]
    """An array of :data:`HEADER`, with plain outcomes."""
    is_copy: npt.NDArray[np.bool_]
    positions: npt.NDArray[np.int64]
    """Where the lines begin in the segment, bytes."""
    is_whole: bool
    """False: the segment is damaged, and what comes after the damage is left out."""

    def lines(self) -> list[bytes]:
        """The lines, in the order of the entries."""
        ends = self.positions + self.headers["length"]
        return [
            self.segment[start:end]
            for start, end in zip(self.positions.tolist(), ends.tolist(), strict=True)
        ]

    def pick(self, chosen: npt.NDArray[np.bool_]) -> Headers:
        """The headers of the entries that are chosen."""
        return self._replace(
            headers=self.headers[chosen],
            is_copy=self.is_copy[chosen],
            positions=self.positions[chosen],
        )


def decode_headers(segment: bytes, requests: int = _ANY_ORDINAL) -> Headers:
    """The entries of a segment, up to the first that no batch of so many requests can have."""
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
    return Headers(segment, headers[:sound], is_copy[:sound], at[:sound] + size, is_whole)
