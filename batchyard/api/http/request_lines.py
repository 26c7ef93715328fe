"""A JSON body with the lines of a batch among its values.

The lines are not turned into objects: each stays the bytes that the client wrote, without the
white space of one that is written over several lines. So 20 MiB of them need little more memory.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.body import (
    MAX_JSON_BYTES,
    json_too_large,
    not_json,
    parse_object,
    read_within,
    refuse_depth,
)
from batchyard.lines.framing import joined
from batchyard.processes.tenant_turns import TenantTurns
from batchyard.processes.threads import from_thread, in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.requests import Request

KEY: Final = "requests"

MAX_BODY_BYTES: Final = 20 * 1024**2
"""The body is in memory as a whole, and is sent again as a whole after a broken connection. What
is larger is uploaded as a file, which needs neither."""

_READ_SECONDS: Final = 300.0
_BODIES: Final = TenantTurns(None, of_each=8)
"""Large bodies of one tenant at a time: its others wait, so that none fills everybody's memory."""


class RequestLines:
    """The lines of a batch, each of them one JSON object without a line end."""

    def __init__(self, lines: list[msgspec.Raw]) -> None:
        self._lines = lines

    def parts(self) -> AsyncIterator[bytes]:
        """JSON Lines, in parts of about a mebibyte."""
        return from_thread(joined(self._written()))

    async def fingerprint(self) -> str:
        """A hash of what :meth:`parts` gives."""
        return await in_thread(self._hash)

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for line in self._written():
            digest.update(line)
        return digest.hexdigest()

    def _written(self) -> Iterator[bytes]:
        for raw in self._lines:
            line = bytes(raw)
            if b"\n" in line or b"\r" in line:
                line = msgspec.json.format(line, indent=-1)
            yield b"%b\n" % line


async def read_json_with_lines(request: Request, tenant: str, most_lines: int) -> dict[str, Any]:
    """The body, a JSON object of at most 1 MiB beside its ``requests``, which are given as
    :class:`RequestLines`. Raises 400, 408, 413 and 415.
    """
    async with _BODIES.turn(tenant):
        data = await read_within(request, MAX_BODY_BYTES, _READ_SECONDS)
        return await in_thread(parse_with_lines, data, most_lines)


def parse_with_lines(data: bytes, most_lines: int) -> dict[str, Any]:
    """The same for a body that has been read. Raises 400 and 413."""
    try:
        array = bytes(_find_lines(data).requests)
    except (ValueError, RecursionError):
        # It is no JSON, or no object; the other parser says which.
        array = b""
    if len(data) - len(array) > MAX_JSON_BYTES:
        # Before values are made of it, which need up to thirty times the memory of their text.
        raise json_too_large(MAX_JSON_BYTES)
    if not array:
        return parse_object(data)
    try:
        values = _decode_raw(data)
        del values[KEY]
        found = {key: msgspec.json.decode(value) for key, value in values.items()}
    except (ValueError, RecursionError):
        raise not_json() from None
    refuse_depth(found, data)
    return {**found, KEY: None if array == b"null" else _lines_in(array, most_lines)}


def _lines_in(array: bytes, most_lines: int) -> RequestLines:
    """Raises 400 unless it is an array of objects, not empty and not too long."""
    try:
        count = _count_objects(array, most_lines)
        if not count:
            raise _refused(f"'{KEY}' must not be empty.", code="empty_array")
        lines = _decode_array(array)
        for line in lines:
            str(line, "utf-8")
    except _TooManyLines:
        message = f"'{KEY}' may have {most_lines} requests: split the batch."
        raise _refused(message, code="array_above_max_length") from None
    except (UnicodeDecodeError, RecursionError):
        raise not_json() from None
    except msgspec.ValidationError:
        message = f"Invalid type for '{KEY}': it must be an array of objects."
        raise _refused(message, code="invalid_type") from None
    return RequestLines(lines)


class _TooManyLines(Exception):
    pass


def _count_objects(array: bytes, most: int) -> int:
    """How many objects are in it, without keeping them: ten million are no 20 MiB of text."""
    count = 0

    class Counted(msgspec.Struct):
        def __post_init__(self) -> None:
            nonlocal count
            count += 1
            if count > most:
                raise _TooManyLines

    msgspec.json.decode(array, type=list[Counted])
    return count


def _refused(message: str, *, code: str) -> ApiError:
    return ApiError(400, message, param=KEY, code=code)


class _Beside(msgspec.Struct):
    requests: msgspec.Raw = msgspec.Raw()


_find_lines = msgspec.json.Decoder(_Beside).decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
