"""What was seen of an engine that others use too. Where it comes from is said elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple


class Latencies(NamedTuple):
    """How many there were since the last observation, and how many of them were too long."""

    total: float
    late: float


NONE: Final = Latencies(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at an engine."""

    live: float
    """Requests of others that it runs, or that wait there."""
    waiting: float = 0.0
    """All requests that wait for a place."""
    first_token: Latencies = NONE
    """Times to first token; of all requests, where those of others cannot be told apart."""
    inter_token: Latencies = NONE
    """Times between two tokens of one answer; of all requests, too."""
