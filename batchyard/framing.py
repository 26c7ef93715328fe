"""Lines of a JSONL file as bytes: cut, located, and opened as far as a runner needs. Pure.

A line ends at byte 0x0A alone: U+2028, a bare CR or VT inside a string ends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class PhysicalLine:
    """A line of the file. ``data`` is without line end and BOM, ``None`` if it is too long."""

    number: int
    """1-based."""
    offset: int
    """Of the first byte of ``data`` in the file."""
    data: bytes | None


def read_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[PhysicalLine]:
    """Cut ``file``, read from its start, at 0x0A; at most one line is in memory."""
    offset = 0
    number = 0
    while raw := file.readline(max_line_bytes + 2):
        number += 1
        start, length = offset, len(raw)
        if number == 1 and raw.startswith(_BOM):
            raw = raw[len(_BOM) :]
            start += len(_BOM)
        data: bytes | None = raw.rstrip(b"\r\n") if raw.endswith((b"\n", b"\r")) else raw
        if data is not None and len(data) > max_line_bytes:
            data = None
        while not raw.endswith(b"\n") and (raw := file.readline(1 << 20)):
            length += len(raw)
            data = None
        offset += length
        yield PhysicalLine(number, start, data)


class Envelope(msgspec.Struct, frozen=True):
    """A request line as the runner needs it: the body stays the bytes that the user wrote."""

    custom_id: str
    url: str
    body: msgspec.Raw


parse_envelope = msgspec.json.Decoder(Envelope).decode
"""``bytes`` of a line that has passed validation to its :class:`Envelope`."""
