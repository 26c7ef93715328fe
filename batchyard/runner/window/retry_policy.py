"""When a request is tried again, and after which pause."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

_MOST_DOUBLINGS = 64
"""Many more would not fit into a float."""
_LONGEST_ASKED_SECONDS: Final = 86_400.0
"""A server may be wrong about when it is back, so it is asked once a day."""


def honoured(asked_seconds: float | None) -> float | None:
    """How much of a ``Retry-After`` to wait; None: there is none, or it is no number."""
    if asked_seconds is None or not math.isfinite(asked_seconds):
        return None
    return min(asked_seconds, _LONGEST_ASKED_SECONDS)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a request is tried again: 408, 429, 5xx and lost connections, never other 4xx.

    Pauses double from ``first_pause_seconds`` to ``longest_pause_seconds``, with jitter. A
    ``Retry-After`` from the engine is honoured even if it is longer.
    """

    attempts: int = 5
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 30.0

    def pause_seconds(self, attempt: int, asked_seconds: float | None) -> float:
        """The pause after attempt number ``attempt`` (from 1), in seconds.

        ``asked_seconds`` is the engine's ``Retry-After``; None: it sent none.
        """
        doublings = min(attempt - 1, _MOST_DOUBLINGS)
        backoff = min(math.ldexp(self.first_pause_seconds, doublings), self.longest_pause_seconds)
        asked = honoured(asked_seconds)
        if asked is not None:
            return max(asked, backoff)
        return backoff * random.uniform(0.75, 1.0)  # noqa: S311 - jitter, not a secret
