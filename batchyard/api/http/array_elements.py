"""A JSON array that is too large to be held, cut into its elements as it arrives."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

from batchyard.api.http.api_error import ApiError

_HEAD_BYTES: Final = 1024
_HEAD: Final = re.compile(rb'\s*\{\s*"requests"\s*:\s*\[')
_SPACE: Final = re.compile(rb"[ \t\r\n]*")
_OUTSIDE_OF_TEXT: Final = re.compile(rb'"[^"\\]*"|["{}\[\]]')
"""Most texts are there at once, and have no escape."""
_INSIDE_OF_TEXT: Final = re.compile(rb'["\\]')


class _State(Enum):
    """Where in the body the reading is."""

    HEAD = auto()
    FIRST = auto()
    FURTHER = auto()
    REQUEST = auto()
    BEHIND_REQUEST = auto()
    TAIL = auto()
    END = auto()


_WANTED: Final = {
    _State.FIRST: b"{]",
    _State.FURTHER: b"{",
    _State.BEHIND_REQUEST: b",]",
    _State.TAIL: b"}",
    _State.END: b"",
}
"""The characters that may come next, outside of a request."""
_NEXT: Final = {b",": _State.FURTHER, b"]": _State.TAIL, b"}": _State.END}
"""What is next behind such a character."""


def request_too_large(index: int, most_bytes: int) -> ApiError:
    """One request of the array has too many bytes."""
    return ApiError(413, f"requests.{index}: a request may have {most_bytes} bytes here.")


class ArrayElements:
    """Cuts ``{"requests": [{…}, {…}]}`` into its requests, whatever parts it arrives in.

    Only the ends of the requests are found here; what is in them is for a JSON parser. The time is
    linear: where it waits for bytes, it goes on from there.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._buffer = bytearray()
        self._at = 0
        """Up to where the buffer has been looked at."""
        self._place = _State.HEAD
        self._depth = 0
        self._is_text = False
        self._count = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The requests that are complete now. Raises 400, and 413 for one that is too large."""
        self._buffer += data
        found = []
        while self._go_on():
            if self._place is _State.REQUEST and not self._depth:
                found.append(bytes(self._buffer[: self._at]))
                self._count += 1
                self._move(_State.BEHIND_REQUEST)
        if self._place is _State.REQUEST and len(self._buffer) > self._most_bytes:
            raise request_too_large(self._count, self._most_bytes)
        return found

    def finish(self) -> None:
        """Raise 400 unless the object is complete."""
        if self._place is _State.HEAD:
            raise ApiError(400, 'requests: it is required, as {"requests": […]}, and nothing else.')
        if self._place is not _State.END:
            raise ApiError(400, "The body is not complete JSON.")

    def _go_on(self) -> bool:
        """Go on by one step; False: what it needs has not arrived."""
        match self._place:
            case _State.HEAD:
                return self._take_head()
            case _State.REQUEST:
                return self._find_end()
            case _:
                return self._take_one()

    def _take_head(self) -> bool:
        head = _HEAD.match(self._buffer)
        if head is None:
            if len(self._buffer) > _HEAD_BYTES:
                self.finish()
            return False
        self._at = head.end()
        self._move(_State.FIRST)
        return True

    def _take_one(self) -> bool:
        """What comes outside of a request: a character of which only a few are possible."""
        space = _SPACE.match(self._buffer)
        self._at = space.end() if space else 0
        self._move(self._place)
        found = bytes(self._buffer[:1])
        if not found:
            return False
        if found not in _WANTED[self._place]:
            raise ApiError(400, self._surprise())
        if found == b"{":
            # It stays, for the request begins with it.
            self._place, self._at, self._depth = _State.REQUEST, 1, 1
            return True
        self._at = 1
        self._move(_NEXT[found])
        return True

    def _surprise(self) -> str:
        if self._place in (_State.FIRST, _State.FURTHER):
            return f"requests.{self._count}: it must be an object."
        if self._place is _State.TAIL:
            return "The body may have 'requests' and nothing else."
        return f"The body is not valid JSON behind requests.{self._count - 1}."

    def _find_end(self) -> bool:
        """Look on for the end of the request that begins the buffer; there the depth is 0."""
        while True:
            pattern = _INSIDE_OF_TEXT if self._is_text else _OUTSIDE_OF_TEXT
            found = pattern.search(self._buffer, self._at)
            if found is None:
                self._at = len(self._buffer)
                return False
            char = found[0]
            if char == b"\\":
                if found.end() == len(self._buffer):
                    # What it escapes has not arrived.
                    self._at = found.start()
                    return False
                self._at = found.end() + 1
                continue
            self._at = found.end()
            if len(char) > 1:
                continue
            if char == b'"':
                self._is_text = not self._is_text
                continue
            self._depth += 1 if char in b"{[" else -1
            if not self._depth:
                return True

    def _move(self, place: _State) -> None:
        """Drop what has been looked at, and be there."""
        del self._buffer[: self._at]
        self._at = 0
        self._place = place
