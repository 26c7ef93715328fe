"""Lines of a JSONL file as bytes: cut, located, and opened as far as a runner needs. Pure.

A line ends only at byte 0x0A: U+2028, a bare CR or VT inside a string ends nothing.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from batchyard.errors import BrokenLine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BOM = b"\xef\xbb\xbf"
_OTHER_FORMATS = {
    b"\x1f\x8b": "the file is compressed with gzip, so decompress it first",
    b"\x28\xb5\x2f\xfd": "the file is compressed with zstd, so decompress it first",
    b"PK\x03\x04": "the file is a zip archive, so unpack it first",
    b"PAR1": "the file is Parquet, which needs a template of the requests (`--template`)",
    b"\xff\xfe": "the file is UTF-16, so save it as UTF-8",
    b"\xfe\xff": "the file is UTF-16, so save it as UTF-8",
    # Without a byte-order mark.
    b"{\x00": "the file is UTF-16, so save it as UTF-8",
    b"\x00{": "the file is UTF-16, so save it as UTF-8",
}
_BYTE = re.compile(r"\(byte (\d+)\)")
"""Where a line stops being JSON, as msgspec says it: there, or one byte before."""
_LONG_RUN = 16
"""After so many blank lines in a row, those that follow are skipped in blocks."""
_BLOCK_BYTES = 1 << 16
_PART_BYTES = 1 << 20


def other_format(start: bytes) -> str | None:
    """What a file is that begins like this and is no JSONL, and what helps; None: not known."""
    known = (said for magic, said in _OTHER_FORMATS.items() if start.startswith(magic))
    return next(known, None)


def stray_mark(data: bytes) -> str | None:
    """In words, that the line is no JSON because of a byte-order mark; None: it is not.

    Files that begin with one have been joined. Inside a string it is a character like others.
    """
    try:
        _decode_any(data)
    except (ValueError, RecursionError) as error:
        found = _BYTE.search(str(error))
        if found is not None and _BOM in data[max(0, int(found[1]) - 1) :][:4]:
            return "it has a byte-order mark (U+FEFF) where another file was appended, so remove it"
    return None


class PhysicalLine(msgspec.Struct, frozen=True):
    """A line of the file. ``data`` is without line end and BOM, ``None`` if it is too long."""

    number: int
    """The number of the line, from 1."""
    offset: int
    """The offset in the file of the first byte of ``data``."""
    data: bytes | None


def read_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[PhysicalLine]:
    """Cut ``file``, read from its start, at 0x0A; at most one line is in memory.

    Blank lines count for ``number`` and are left out, however long they are.
    """
    offset = number = blank_lines = 0
    while raw := file.readline(max_line_bytes + 2):
        number += 1
        start, length = offset, len(raw)
        if number == 1 and raw.startswith(_BOM):
            raw = raw[len(_BOM) :]
            start += len(_BOM)
        is_blank = not raw or raw.isspace()
        data: bytes | None = raw.rstrip(b"\r\n") if raw.endswith((b"\n", b"\r")) else raw
        if data is not None and len(data) > max_line_bytes:
            data = None
        while not raw.endswith(b"\n") and (raw := file.readline(1 << 20)):
            length += len(raw)
            data = None
            is_blank = is_blank and raw.isspace()
        offset += length
        if not is_blank:
            blank_lines = 0
            yield PhysicalLine(number, start, data)
            continue
        blank_lines += 1
        if blank_lines >= _LONG_RUN:
            skipped_bytes, skipped_lines = _skip_blank_lines(file)
            offset += skipped_bytes
            number += skipped_lines


def _skip_blank_lines(file: BinaryIO) -> tuple[int, int]:
    """Move past the blank lines that come next, a block at a time: the bytes and the lines.

    A file of 200 MiB may consist of line ends; one by one they would take two minutes.
    """
    skipped_bytes = skipped_lines = 0
    while block := file.read(_BLOCK_BYTES):
        blank_bytes = len(block) - len(block.lstrip())
        end = block.rfind(b"\n", 0, blank_bytes) + 1
        file.seek(end - len(block), os.SEEK_CUR)
        skipped_bytes += end
        skipped_lines += block.count(b"\n", 0, end)
        if end < len(block):
            break
    return skipped_bytes, skipped_lines


class Envelope(msgspec.Struct, frozen=True):
    """A request line as the runner needs it: the body stays the bytes that the user wrote."""

    custom_id: str
    url: str
    body: msgspec.Raw


def parse_envelope(data: bytes) -> Envelope:
    """Open a line that has passed validation. Raises :class:`~batchyard.errors.BrokenLine`.

    It reads whatever the validator lets pass, with the same values: of a key that stands twice
    only the last value counts, and the ones before may have any type.
    """
    try:
        line = _decode_line(data)
    except (ValueError, RecursionError):
        raise BrokenLine(_UNREADABLE) from None
    if not (isinstance(line.custom_id, str) and isinstance(line.url, str)):
        raise BrokenLine(_UNREADABLE)
    return Envelope(line.custom_id, line.url, line.body)


def joined(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines, joined to parts of about a mebibyte; none is empty."""
    part: list[bytes] = []
    size = 0
    for line in lines:
        part.append(line)
        size += len(line)
        if size >= _PART_BYTES:
            yield b"".join(part)
            part, size = [], 0
    if part:
        yield b"".join(part)


def custom_id_of(data: bytes) -> str:
    """The ``custom_id`` of a line, whatever else is wrong with it; empty where there is none.

    For those who name lines and must not stop at one of them. No other value is made: as objects,
    a line of 16 MiB can take a gigabyte, and a process that serves others ten seconds.
    """
    try:
        custom_id = _decode_named(data).custom_id
        if not data.isascii():
            data.decode()  # what is not made is not decoded
    except (ValueError, RecursionError):
        return ""
    return custom_id if isinstance(custom_id, str) else ""


class _Line(msgspec.Struct):
    # A typed field would check each value of a repeated key, where the validator's dict sees the
    # last one only.
    custom_id: Any
    url: Any
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: Any = None


_decode_any = msgspec.json.Decoder().decode
_decode_named = msgspec.json.Decoder(_Named).decode
_decode_line = msgspec.json.Decoder(_Line).decode
_UNREADABLE = (
    "A line of the input cannot be read, although it passed validation: the file was changed in "
    "the object store, or another version of Batchyard validated it."
)
