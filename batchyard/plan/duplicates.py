"""Which requests ask the same and leave nothing to chance, so that one answer serves all."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.lines.endpoints import ENDPOINTS, Endpoint, Repeats
from batchyard.plan.records import PACKED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DIGEST_BYTES: Final = 16
NO_DIGEST: Final = bytes(DIGEST_BYTES)
"""The digest of a request that shares its answer with no other."""
_MOST_COPIES: Final = 65_535
"""The most copies of one request: a chunk holds them all, and a runner each chunk's records. The
next identical one runs again. A file of OpenAI's size has no more."""
_RANDOM_SEED: Final = -1
"""vLLM draws another one for each request, as without any."""

_encode = msgspec.json.encode


def answer_digest(url: str, body: dict[str, Any]) -> bytes:
    """16 bytes, the same for requests that may share an answer; :data:`NO_DIGEST`: with none.

    Bodies are the same whatever their spaces and the order of their own keys. Within a value the
    order counts: a tool's schema is rendered into the prompt as it is written.
    """
    if not _is_deterministic(ENDPOINTS[url], body):
        return NO_DIGEST
    whole = _encode((url, {key: body[key] for key in sorted(body)}))
    return hashlib.blake2b(whole, digest_size=DIGEST_BYTES).digest()


def with_copies(pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Take the digests off sorted keys, and the tokens off what another one's answer serves.

    Pairs of a key that ends with a NUL and an :func:`answer_digest`, and a record.
    """
    digest = NO_DIGEST
    copies = 0
    for key, packed in pairs:
        before, digest = digest, key[-DIGEST_BYTES:]
        copies = copies + 1 if digest == before != NO_DIGEST and copies < _MOST_COPIES else 0
        if copies:
            offset, length, ordinal, *_ = PACKED.unpack(packed)
            packed = PACKED.pack(offset, length, ordinal, 0, 0, 0, 0, 0)  # noqa: PLW2901 - a copy
        yield key[: -DIGEST_BYTES - 1], packed


def _is_deterministic(endpoint: Endpoint, body: dict[str, Any]) -> bool:
    if endpoint.repeats is not Repeats.SAMPLED:
        return endpoint.repeats is Repeats.SAME
    return _is_greedy(body) or (endpoint.takes_seed and _has_seed(body))


def _is_greedy(body: dict[str, Any]) -> bool:
    """What is absent is the engine's default, which is not."""
    temperature = body.get("temperature")
    # JSON's false equals 0 here; what an engine makes of it is its own affair.
    is_zero = isinstance(temperature, int | float) and temperature == 0
    return is_zero and temperature is not False


def _has_seed(body: dict[str, Any]) -> bool:
    seed = body.get("seed")
    return type(seed) is int and seed != _RANDOM_SEED
