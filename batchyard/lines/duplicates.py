"""Lines with the ``custom_id`` of an earlier line. Reads a local file."""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from batchyard.lines.framing import read_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from batchyard.lines.rules import Limits

_HELD: Final = 512 * 1024
"""So many hashes are in memory; more are in a temporary file."""
_ADDED: Final = 8192
"""So many are written to it together."""


class IdHashes:
    """Hashes of the ``custom_id`` of each line, of which equal ones are found.

    Memory is four mebibytes, twice that while they are compared. ``spool``: a folder for a file
    with those of larger inputs; None: that of the system. Methods raise ``OSError``.
    """

    def __init__(self, spool: Path | None = None) -> None:
        self._file = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed in suspects
            8 * _HELD, dir=None if spool is None else str(spool), prefix="ids-"
        )
        self._new = array("Q")
        self._written = 0

    def add(self, custom_id: str) -> None:
        """Take the next line's."""
        self._new.append(hash_of(custom_id))
        if len(self._new) == _ADDED:
            self._write()

    def suspects(self) -> set[int]:
        """The hashes that were added more than once. Nothing can be added afterwards."""
        import numpy as np  # noqa: PLC0415 - most processes validate nothing

        self._write()
        suspects: set[int] = set()
        groups = self._written // _HELD + 1
        with self._file as file:
            for group in range(groups):
                file.seek(0)
                found = []
                while block := file.read(8 * _ADDED):
                    hashes = np.frombuffer(block, dtype=np.uint64)
                    found.append(hashes[hashes % groups == group])
                some = np.concatenate([*found, np.empty(0, np.uint64)])
                some.sort()
                suspects.update(some[1:][some[1:] == some[:-1]].tolist())
        return suspects

    def _write(self) -> None:
        self._file.write(self._new.tobytes())
        self._written += len(self._new)
        del self._new[:]


def duplicate_lines(
    file: BinaryIO,
    limits: Limits,
    go_on: Callable[[], object] = lambda: None,
    *,
    spool: Path | None = None,
) -> list[int]:
    """The numbers of lines with a ``custom_id`` of an earlier line, in their order.

    Earlier lines count whatever else is wrong with them. ``go_on`` is called for each line, and
    may raise. ``file`` is at its start before and afterwards. ``spool`` as in :class:`IdHashes`.
    """
    hashes = IdHashes(spool)
    for physical in islice(read_lines(file, limits.max_line_bytes), limits.max_requests):
        go_on()
        custom_id = _custom_id_of(physical.data)
        if custom_id is not None:
            hashes.add(custom_id)
    numbers = list(repeated_lines(file, hashes, limits))
    file.seek(0)
    return numbers


def repeated_lines(file: BinaryIO, id_hashes: IdHashes, limits: Limits) -> Iterator[int]:
    """Compare 64-bit hashes; only where two are equal is the file read once more."""
    suspects = id_hashes.suspects()
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
