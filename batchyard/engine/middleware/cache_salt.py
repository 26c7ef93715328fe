"""Which part of an engine's prefix cache a request may find: the salt, and how a body carries it.

vLLM mixes ``cache_salt`` into the hash of a prompt's first block, so that only requests with the
same salt share cached blocks. Loaded twice, as ``line_stream`` is: it imports the standard
library only.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any, Final

FIELD: Final = "cache_salt"
"""The field of vLLM's requests, in the body and in what it is parsed to."""


def combined(salt: str, own: Any = None) -> str:
    """``salt``, or a salt made of it and of the one that the body has already.

    The same two give the same result, and it cannot be computed without ``salt``.
    """
    if own is None:
        return salt
    text = own if isinstance(own, str) else json.dumps(own)
    digest = hmac.digest(salt.encode(), text.encode(errors="surrogatepass"), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def spliced(body: bytes, salt: str) -> bytes:
    """A JSON object with the salt as its last member, and otherwise the same bytes.

    Of a key that occurs twice the last one counts, so a ``cache_salt`` of the body's own has no
    effect but through :func:`combined`. What is not an object is returned as it is.
    """
    if not _is_object(body):
        return body
    return with_member(body, FIELD, combined(salt, _own_salt(body)))


def with_member(body: bytes, name: str, value: str | int) -> bytes:
    """A JSON object with one more member, the last one, and otherwise the same bytes.

    What is not an object is returned as it is.
    """
    if not _is_object(body):
        return body
    inside = body.rstrip()[:-1].rstrip()
    comma = b"" if inside == b"{" else b","
    member = f'"{name}":{json.dumps(value)}'
    return b"%b%b%b}" % (inside, comma, member.encode())


def _is_object(body: bytes) -> bool:
    end = body.rstrip()
    return end.startswith(b"{") and end.endswith(b"}")


def _own_salt(body: bytes) -> Any:
    if FIELD.encode() not in body and b"\\u" not in body:
        return None
    try:
        return json.loads(body).get(FIELD)
    except (ValueError, RecursionError):
        # The server will not read it either.
        return None
