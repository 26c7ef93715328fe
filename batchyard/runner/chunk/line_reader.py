"""Request lines of a local input file, where the plan says that they are.

A line that cannot be read is that line's own failure. A file that is shorter than its plan says
fails the chunk: another copy of the file may be whole.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.errors import ObjectChanged
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.lines.framing import Envelope, custom_id_of, parse_envelope
from batchyard.lines.prompt import prompt_key
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterable

    from batchyard.runner.chunk.chunk_plan import Planned

log = event_logger(__name__)

_READ_AHEAD: Final = 64
"""Requests read from the input at a time."""
_READ_AHEAD_BYTES: Final = 4 * 1024**2
"""After so many bytes no more are read at that time."""


@dataclass(frozen=True, slots=True)
class UnreadableLine:
    """A line that the runner cannot read, with its ``custom_id``, if that much can be read."""

    custom_id: str
    reason: str
    """In our words, with no text of the line."""


def take_next(left: deque[Planned]) -> list[Planned]:
    """Take the requests that are read next, at least one."""
    some: list[Planned] = []
    size_bytes = 0
    while left and len(some) < _READ_AHEAD and size_bytes < _READ_AHEAD_BYTES:
        some.append(left.popleft())
        size_bytes += int(some[-1][0]["length"])
    return some


def read_envelope(descriptor: int, record: Any) -> Envelope | UnreadableLine:
    """The request of a plan record. Raises :class:`~batchyard.errors.ObjectChanged`."""
    data = _read(descriptor, record)
    try:
        envelope = parse_envelope(data)
        # An engine's connection carries any other URL as what it is not.
        if envelope.url in ENDPOINTS:
            return envelope
        reason = "its url is not an endpoint that a batch may name"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is about this line only
        reason = type(error).__name__
    log.warning("line.not_read", reason, ordinal=record["ordinal"])
    return UnreadableLine(
        custom_id_of(data),
        f"Batchyard could not read this line of the input ({reason}).",
    )


def read_envelopes(descriptor: int, records: Iterable[Any]) -> list[Envelope | UnreadableLine]:
    """The request of each record. Raises :class:`~batchyard.errors.ObjectChanged`."""
    return [read_envelope(descriptor, record) for record in records]


def read_custom_ids(descriptor: int, records: Iterable[Any]) -> list[str]:
    """The ``custom_id`` of each record. Raises :class:`~batchyard.errors.ObjectChanged`."""
    return [read_envelope(descriptor, record).custom_id for record in records]


def prompt_of(envelope: Envelope, model: str) -> bytes:
    """Its place in prefix order. ``model``: the engine's; another name is an adapter's."""
    body = msgspec.json.decode(envelope.body)
    return prompt_key(envelope.url, body, "" if body["model"] == model else body["model"])[0]


def _read(descriptor: int, record: Any) -> bytes:
    length = int(record["length"])
    data = os.pread(descriptor, length, int(record["offset"]))
    if len(data) < length:
        raise ObjectChanged("The input is shorter than it was when its batch was planned.")
    return data
