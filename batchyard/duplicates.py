"""Which requests ask the same and leave nothing to chance, so that one answer serves all. Pure."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from batchyard.endpoints import ENDPOINTS, Repeats

DIGEST_BYTES: Final = 16
NO_DIGEST: Final = bytes(DIGEST_BYTES)
"""Of a request that shares its answer with no other."""

_encode = msgspec.json.encode


def answer_digest(url: str, body: dict[str, Any]) -> bytes:
    """16 bytes, the same for requests that may share an answer; :data:`NO_DIGEST`: with none.

    Bodies are the same whatever their spaces and the order of their own keys. Within a value the
    order counts: a tool's schema is rendered into the prompt as it is written.
    """
    repeats = ENDPOINTS[url].repeats
    if repeats is Repeats.OWN or (repeats is Repeats.SAMPLED and not _is_deterministic(body)):
        return NO_DIGEST
    whole = _encode((url, {key: body[key] for key in sorted(body)}))
    return hashlib.blake2b(whole, digest_size=DIGEST_BYTES).digest()


def _is_deterministic(body: dict[str, Any]) -> bool:
    """Greedy, or of a seed. What is absent is the engine's default, which is neither."""
    temperature, seed = body.get("temperature"), body.get("seed")
    # JSON's false equals 0 here; what an engine makes of it is its own affair.
    is_greedy = isinstance(temperature, int | float) and temperature == 0
    return (is_greedy and temperature is not False) or type(seed) is int
