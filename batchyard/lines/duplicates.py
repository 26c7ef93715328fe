"""Lines with the ``custom_id`` of an earlier line. Pure; reads a local file."""

from __future__ import annotations

import hashlib
from array import array
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from batchyard.lines.framing import read_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchyard.lines.rules import Limits

_COMPARED: Final = 65_536
"""So many hashes are compared at once."""


def duplicate_lines(
    file: BinaryIO, limits: Limits, go_on: Callable[[], object] = lambda: None
) -> list[int]:
    """The numbers of lines with a ``custom_id`` of an earlier line, in their order.

    Earlier lines count whatever else is wrong with them. ``go_on`` is called for each line, and
    may raise. ``file`` is at its start before and afterwards.
    """
    hashes = array("Q")
    for physical in islice(read_lines(file, limits.max_line_bytes), limits.max_requests):
        go_on()
        custom_id = _custom_id_of(physical.data)
        if custom_id is not None:
            hashes.append(hash_of(custom_id))
    numbers = list(repeated_lines(file, hashes, limits))
    file.seek(0)
    return numbers


def repeated_lines(file: BinaryIO, id_hashes: array[int], limits: Limits) -> Iterator[int]:
    """Compare 64-bit hashes; only where two are equal is the file read once more.

    ``id_hashes`` has another order afterwards.
    """
    import numpy as np  # noqa: PLC0415 - most processes validate nothing

    # In place: there are eight bytes for each line of the file.
    hashes = np.frombuffer(id_hashes, dtype=np.uint64)
    hashes.sort()
    suspects: set[int] = set()
    for first in range(0, len(hashes), _COMPARED):
        some = hashes[first : first + _COMPARED + 1]
        suspects.update(some[1:][some[1:] == some[:-1]].tolist())
    if not suspects:
        return
    file.seek(0)
    seen: set[str] = set()
    # No more than was read before: a file may have any number of lines behind its limit.
    for physical in islice(read_lines(file, limits.max_line_bytes), limits.max_requests):
        custom_id = _custom_id_of(physical.data)
        if custom_id is None or hash_of(custom_id) not in suspects:
            continue
        if custom_id in seen:
            yield physical.number
        seen.add(custom_id)


def hash_of(text: str) -> int:
    """64 bits of a ``custom_id``: few different ones have the same."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _custom_id_of(data: bytes | None) -> str | None:
    try:
        line = msgspec.json.decode(data or b"")
    except (ValueError, RecursionError):
        return None
    custom_id = line.get("custom_id") if isinstance(line, dict) else None
    return custom_id if isinstance(custom_id, str) else None
