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
FLEX_HEADER: Final = "x-batchyard-flex"
"""From the API to the runner: the request may wait until the engine has a place to spare."""
FLEX_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/responses"})
"""The endpoints that have service tiers."""
RETRY_AFTER_SECONDS: Final = 5
"""When to ask again for an engine that is not there."""
USAGE_ON_REQUEST: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""The endpoints whose streams have their usage only if ``stream_options`` says so."""
MAX_KEPT_BYTES: Final = 32 * 1024**2
"""The most bytes of an answer that is no stream, and of one event of a stream."""

_DONE: Final = b"[DONE]"
_NO_TIER: Final = b'"service_tier":null'
_FLEX: Final = b'"service_tier":"flex"'
_EVENT_START: Final = b"data: {"


def is_flex(path: str, body: Mapping[str, Any]) -> bool:
    """Whether the request may wait, as OpenAI's ``service_tier`` says."""
    return path in FLEX_PATHS and body.get("service_tier") == "flex"


def said_flex(answer: bytes) -> bytes:
    """A JSON object, or an event that has one, which says that its tier was flex.

    Quotes within texts are escaped, so what stands here for a key is one.
    """
    if b'"service_tier":"' in answer:
        return answer
    if _NO_TIER in answer:
        return answer.replace(_NO_TIER, _FLEX, 1)
    inside = answer.rstrip()
    if not inside.endswith(b"}") or not inside.startswith((b"{", _EVENT_START)):
        return answer
    inside = inside[:-1].rstrip()
    return inside + (b"" if inside.endswith(b"{") else b",") + _FLEX + b"}"


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
    that has nothing but the usage is not passed on. ``says_flex``: what is passed on says that its
    service tier was flex. :meth:`feed` gives the bytes to pass on.
    """

    def __init__(self, *, request_bytes: int, hide_usage: bool, says_flex: bool = False) -> None:
        self._is_stream = False
        self._request_bytes = request_bytes
        self._hide_usage = hide_usage
        self._says_flex = says_flex
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
                whole = bytes(self._unread)
                self._unread.clear()
                return whole if self._says_flex else data
            return b"" if self._says_flex else data
        end = self._unread.rfind(b"\n\n")
        if end < 0:
            if len(self._unread) > MAX_KEPT_BYTES:
                raise ValueError("an event of the stream is too long")
            return b""
        events = bytes(self._unread[: end + 2])
        del self._unread[: end + 2]
        passing = [each for each in events.split(b"\n\n") if each and self._passes(each)]
        if self._says_flex:
            passing = [said_flex(each) for each in passing]
        return b"".join(each + b"\n\n" for each in passing)

    def rest(self) -> bytes:
        """What is left when the answer has ended: of a stream, an event without its end."""
        if self._is_stream:
            return bytes(self._unread)
        if self._is_too_long:
            return b""
        whole = bytes(self._unread)
        self._usage = usage_of(whole)
        return said_flex(whole) if self._says_flex else b""

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
