"""Requests for whole answers, to servers that stream them unless they are asked not to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from batchyard.engine.middleware.cache_salt import with_member

if TYPE_CHECKING:
    from batchyard.engine.base import EngineRequest

_FIELD: Final = "stream"
_STREAMED: Final = frozenset({"/v1/responses"})
"""There are servers that stream these. We know of none that streams others without being asked,
and bodies are only changed for a reason."""


def unstreamed(request: EngineRequest) -> bytes:
    """The request's body, with ``"stream": false`` where it does not say whether to stream."""
    body = request.body
    if request.url not in _STREAMED or request.content_type != "application/json":
        return body
    return body if _says_it(body) else with_member(body, _FIELD, value=False)


def _says_it(body: bytes) -> bool:
    if f'"{_FIELD}"'.encode() not in body and b"\\u" not in body:
        return False
    try:
        return _decode(body).stream is not msgspec.UNSET
    except (ValueError, RecursionError):
        return True  # the server cannot read it either


class _Body(msgspec.Struct):
    stream: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode: Final = msgspec.json.Decoder(_Body).decode
