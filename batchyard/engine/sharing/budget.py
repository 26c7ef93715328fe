"""How much of what an objective allows to be late has been late, in the last while."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from batchyard.engine.sharing.observation import Latencies

HORIZON_SECONDS: Final = 30.0
"""An objective shall hold in each stretch of this length."""


class Budget:
    """``allowed``: the share that may be late."""

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._seen: deque[tuple[float, Latencies]] = deque()
        self._total = 0.0
        self._late = 0.0

    def add(self, now: float, seen: Latencies) -> None:
        """Count what was seen, and forget what is long ago."""
        if seen.total:
            self._seen.append((now, seen))
            self._total += seen.total
            self._late += seen.late
        while self._seen and self._seen[0][0] < now - HORIZON_SECONDS:
            _, old = self._seen.popleft()
            self._total -= old.total
            self._late -= old.late

    @property
    def is_known(self) -> bool:
        """Whether anything was seen."""
        return self._total > 0

    @property
    def used(self) -> float:
        """1: just as much as is allowed."""
        return self._late / (self._allowed * self._total) if self.is_known else 0.0
