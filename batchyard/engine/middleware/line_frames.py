"""The frames of ``line_stream``: requests in and answers out over one HTTP connection.

One POST to :data:`PATH` carries any number of requests. Both directions are frames, a header line
and a body of exactly ``LENGTH`` bytes::

    request   TAG URL LENGTH REQUEST_ID CONTENT_TYPE CACHE_SALT TRACEPARENT\\n body
              (the last words may be missing: no trace, no salt, JSON; CACHE_SALT ``-``: none)
    abort     TAG - 0 -\\n
    answer    TAG STATUS LENGTH RETRY_AFTER\\n body       (RETRY_AFTER is ``-`` where there is none)

``STATUS`` is an HTTP status or one of :data:`TIMED_OUT`, :data:`ENGINE_DEAD`, :data:`ALIVE`,
:data:`ABORTED`. The client decides how many requests are in flight: it sends the next one when it
wants to, each under a tag that none in flight has. Every request has exactly one answer; an abort
for a tag that is not in flight is ignored.

The frames are our own, because one HTTP request per line costs a third of the speed (decision 3),
and HTTP/2 or WebSockets would need a package in the engine's environment. Loaded twice, by
Batchyard's client and in the engine's process, so it imports the standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PATH: Final = "/batchyard/stream"
TIMEOUT_HEADER: Final = "x-batchyard-timeout-seconds"

SERVER_HEADER: Final = "x-batchyard-server"
"""Of the answer: which of the engine's API servers has the stream, as the id of its process."""

TIMED_OUT: Final = 0
"""The request outlasted its time and was aborted."""
ENGINE_DEAD: Final = 1
"""The engine below has died; nothing else comes on this stream. The tag means nothing."""
ALIVE: Final = 2
"""A sign of life while no answer is due. The tag means nothing."""
ABORTED: Final = 3
"""The client's abort ended the request."""
ALIVE_INTERVAL_SECONDS: Final = 5.0
"""How often :data:`ALIVE` is sent while no answer is."""

JSON: Final = "application/json"
MOST_WORDS: Final = 7
NO_SALT: Final = "-"
"""In place of a salt, where another word follows."""
ABORT_URL: Final = "-"
"""In place of a URL: the frame aborts the request in flight that has its tag."""
NO_RETRY_AFTER: Final = b"-"
"""In place of the engine's ``Retry-After``, where it sent none."""

_NO_WORD: Final = "the words of a header must be printable ASCII without spaces"
MAX_HEADER_BYTES: Final = 16_384
MAX_DIGITS: Final = 20


class FrameError(ValueError):
    """The bytes are not a sequence of frames."""


def request_frame(
    tag: int,
    url: str,
    body: bytes,
    request_id: str,
    content_type: str = JSON,
    *,
    cache_salt: str | None = None,
    traceparent: str | None = None,
) -> bytes:
    """One request. Raises :class:`FrameError` for any word with a space in it."""
    if url == ABORT_URL:
        raise FrameError("the URL would make it an abort")
    if not (_is_word(url) and _is_word(request_id) and _is_word(content_type)):
        raise FrameError(_NO_WORD)
    words = [str(tag), url, str(len(body)), request_id]
    if content_type != JSON or cache_salt is not None or traceparent is not None:
        words.append(content_type)
    if cache_salt is not None:
        if cache_salt == NO_SALT or not _is_word(cache_salt):
            raise FrameError(_NO_WORD)
        words.append(cache_salt)
    if traceparent is not None:
        if not _is_word(traceparent):
            raise FrameError(_NO_WORD)
        words += [traceparent] if cache_salt is not None else [NO_SALT, traceparent]
    return b"%b\n%b" % (" ".join(words).encode(), body)


def abort_frame(tag: int) -> bytes:
    """The end of one request."""
    return b"%d %s 0 -\n" % (tag, ABORT_URL.encode())


def answer_frame(
    tag: int, status: int, body: bytes = b"", retry_after: bytes = NO_RETRY_AFTER
) -> bytes:
    """One answer; ``retry_after`` is the header's own text."""
    return b"%d %d %d %s\n%b" % (tag, status, len(body), retry_after, body)


def _is_word(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def _is_number(word: bytes) -> bool:
    return word.isdigit() and len(word) <= MAX_DIGITS


class FrameParser:
    """Cuts a stream of bytes, however it is sliced, into frames of four words.

    ``most_words`` 7: a frame may have three more.
    """

    def __init__(self, most_words: int = 4) -> None:
        self._most_words = most_words
        self._buffer = bytearray()
        self._header: list[bytes] | None = None
        self._body_bytes = 0

    @property
    def is_between_frames(self) -> bool:
        """Whether the stream may end here."""
        return not self._buffer and self._header is None

    def feed(self, data: bytes) -> Iterator[tuple[list[bytes], bytes]]:
        """Yield the words and the body of each frame that ``data`` completes.

        Raises ``FrameError`` when the bytes are no frame.
        """
        buffer = self._buffer
        buffer += data
        while True:
            if self._header is None:
                end = buffer.find(b"\n", 0, MAX_HEADER_BYTES)
                if end < 0:
                    if len(buffer) >= MAX_HEADER_BYTES:
                        raise FrameError("header line too long")
                    return
                self._header = self._parse_header(bytes(buffer[:end]))
                del buffer[: end + 1]
            if len(buffer) < self._body_bytes:
                return
            body = bytes(buffer[: self._body_bytes])
            del buffer[: self._body_bytes]
            header, self._header = self._header, None
            yield header, body

    def _parse_header(self, line: bytes) -> list[bytes]:
        words = line.split(b" ")
        if not 4 <= len(words) <= self._most_words or not (
            _is_number(words[0]) and _is_number(words[2])
        ):
            raise FrameError("not a frame header")
        self._body_bytes = int(words[2])
        return words
