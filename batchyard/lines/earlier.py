"""What earlier batches made of a line, in the line itself.

A retry that merges has all lines of the batch before it. Each of them has one more key, behind
those of the user: which batches have run it and how they ended, and whether the answer of the last
one is kept. The key counts only in the input of such a retry: a client may send any keys.
"""

from __future__ import annotations

from typing import Final

import msgspec

EARLIER: Final = "earlier"
STATUS_OF_CODE: Final = {"batch_expired": "expired", "batch_cancelled": "cancelled"}
"""Of a line that was not run; any other one without an answer has failed."""
MOST_EARLIER_BYTES: Final = 64 * 1024
"""What it may add to a line: some hundred attempts."""


class Attempt(msgspec.Struct, frozen=True):
    """One batch that ran the line, and what came of it."""

    batch_id: str
    status: str
    """``succeeded``, ``failed``, ``expired`` or ``cancelled``."""
    error_code: str | None = None


class Earlier(msgspec.Struct, frozen=True):
    """``attempts``: the oldest first. ``is_kept``: the line does not run again."""

    attempts: tuple[Attempt, ...] = ()
    is_kept: bool = False


class _Line(msgspec.Struct):
    earlier: Earlier = Earlier()


_decode = msgspec.json.Decoder(_Line).decode
_BEGINNING: Final = b'"%s":{"attempts":[' % EARLIER.encode()


def earlier_of(line: bytes) -> Earlier:
    """What :func:`with_earlier` has written; nothing where it could not."""
    try:
        return _decode(line).earlier
    except (ValueError, RecursionError):
        return Earlier()


def with_earlier(line: bytes, earlier: Earlier) -> bytes:
    """The line with this as its last key, which is the one that counts if there are two.

    What is no JSON object stays as it is: it is a bad line, and runs in no batch.
    """
    line = line.rstrip()
    if not (line.startswith(b"{") and line.endswith(b"}")):
        return line
    others = line[:-1]
    comma = b"" if others.rstrip() == b"{" else b","
    return b'%s%s"%s":%s}' % (others, comma, EARLIER.encode(), msgspec.json.encode(earlier))


def without_earlier(line: bytes) -> bytes:
    """The line as it was before :func:`with_earlier`."""
    others, found, _ = line.rpartition(_BEGINNING)
    return others.removesuffix(b",") + b"}" if found else line
