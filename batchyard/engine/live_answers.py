"""Live requests and their answers as bytes: what is asked for besides, and what was used. Pure.

A stream of server-sent events tells its usage in its last event, and vLLM only if the request says
so. So that is put into the request, and what the client did not ask for is taken out again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.plan.records import BYTES_PER_TOKEN
from batchyard.results.results import usage_of
from batchyard.wire import NO_USAGE, TokenUsage

if TYPE_CHECKING:
    from collections.abc import Mapping

TENANT_HEADER: Final = "x-batchyard-tenant"
"""From the API to the runner: for whom a request is counted, percent-encoded."""
HIDE_USAGE_HEADER: Final = "x-batchyard-hide-usage"
"""From the API to the runner: the client has not asked for the usage of its stream."""
RETRY_AFTER_SECONDS: Final = 5
"""When to ask again for an engine that is not there."""
USAGE_ON_REQUEST: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""The endpoints whose streams have their usage only if ``stream_options`` says so."""
MAX_KEPT_BYTES: Final = 32 * 1024**2
"""The most bytes of an answer that is no stream, and of one event of a stream."""

_DONE: Final = b"[DONE]"


def hides_usage(path: str, body: Mapping[str, Any]) -> bool:
    """Whether the answer is a stream whose client has not asked for its usage."""
    if path not in USAGE_ON_REQUEST or body.get("stream") is not True:
        return False
    options = body.get("stream_options")
    return not (isinstance(options, dict) and options.get("include_usage") is True)


def asking_for_usage(raw: bytes, body: Mapping[str, Any]) -> bytes:
    """The same JSON object with ``stream_options`` that ask for usage, as its last member.

    Of a key that occurs twice the last one counts. ``body`` is ``raw``, parsed.
    """
    options = body.get("stream_options")
    # What is no object is left to the engine's own refusal.
    if options is not None and not isinstance(options, dict):
        return raw
    asked = msgspec.json.encode({**(options or {}), "include_usage": True})
    inside = raw.rstrip()[:-1].rstrip()
    return b'%b,"stream_options":%b}' % (inside, asked)


class AnswerMeter:
    """Reads an answer as it passes, and says what it used.

    ``request_bytes`` estimate the prompt of a request that is broken off. ``hide_usage``: the event
    that has nothing but the usage is not passed on. :meth:`feed` gives the bytes to pass on.
    """

    def __init__(self, *, request_bytes: int, hide_usage: bool) -> None:
        self._is_stream = False
        self._request_bytes = request_bytes
        self._hide_usage = hide_usage
        self._unread = bytearray()
        self._is_too_long = False
        self._usage = NO_USAGE
        self._events = 0

    def begin(self, *, is_stream: bool) -> None:
        """The answer begins; ``is_stream``: as server-sent events."""
        self._is_stream = is_stream

    def feed(self, data: bytes) -> bytes:
        """The bytes to pass on now: of a stream, whole events. Raises ``ValueError`` for one that
        is longer than :data:`MAX_KEPT_BYTES`.
        """
        if self._is_too_long:
            return data
        self._unread += data
        if not self._is_stream:
            if len(self._unread) > MAX_KEPT_BYTES:
                self._is_too_long = True
                self._unread.clear()
            return data
        end = self._unread.rfind(b"\n\n")
        if end < 0:
            if len(self._unread) > MAX_KEPT_BYTES:
                raise ValueError("an event of the stream is too long")
            return b""
        events = bytes(self._unread[: end + 2])
        del self._unread[: end + 2]
        return b"".join(
            event + b"\n\n" for event in events.split(b"\n\n") if event and self._passes(event)
        )

    def rest(self) -> bytes:
        """What is left when the answer has ended: of a stream, an event without its end."""
        if self._is_stream:
            return bytes(self._unread)
        if not self._is_too_long:
            self._usage = usage_of(bytes(self._unread))
        return b""

    @property
    def usage(self) -> TokenUsage:
        """What the answer has said of it; of a whole stream that has not, an estimate."""
        if self._is_stream and self._events:
            return self.estimate()
        return self._usage

    def estimate(self) -> TokenUsage:
        """What was used, if the answer has not said so: by the bytes and the events so far."""
        if self._usage != NO_USAGE:
            return self._usage
        inputs = self._request_bytes // BYTES_PER_TOKEN + 1
        return TokenUsage(
            input_tokens=inputs,
            output_tokens=self._events,
            total_tokens=inputs + self._events,
        )

    def _passes(self, event: bytes) -> bool:
        data = b"".join(
            line[5:].lstrip() for line in event.splitlines() if line.startswith(b"data:")
        )
        if not data or data == _DONE:
            return True
        # Each has a token, or a few; the first of a chat has the role only.
        self._events += 1
        if b'"usage"' not in data:
            return True
        try:
            said = _decode(data)
        except (ValueError, RecursionError):
            return True
        inner = said.response if said.response is not msgspec.UNSET else data
        usage = usage_of(bytes(inner))
        if usage != NO_USAGE:
            self._usage = usage
        return not (self._hide_usage and usage != NO_USAGE and said.choices == [])


class _Event(msgspec.Struct):
    choices: list[Any] | None = None
    response: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """The answer of the Responses API, whose last event holds the whole answer."""


_decode = msgspec.json.Decoder(_Event).decode
