"""What the users of a live server are promised while a batch runs beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from batchyard.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Objective:
    """``quantile`` of the latencies shall not be longer than these; None: no promise.

    Raises :class:`~batchyard.errors.SettingsError` for numbers that promise nothing.
    """

    first_token_seconds: float | None = None
    inter_token_seconds: float | None = None
    quantile: float = 0.99

    def __post_init__(self) -> None:
        if self.first_token_seconds is None and self.inter_token_seconds is None:
            raise SettingsError("an objective has a time to first token or a time between tokens")
        for seconds in (self.first_token_seconds, self.inter_token_seconds):
            if seconds is not None and not 0 < seconds < math.inf:
                raise SettingsError("a latency objective must be longer than 0 ms")
        if not 0.5 <= self.quantile < 1:
            raise SettingsError("the quantile of a latency objective is from 0.5 to below 1")

    @classmethod
    def of(cls, ttft_ms: float | None, itl_ms: float | None, quantile: float) -> Self | None:
        """From what an operator writes, in milliseconds; None without any latency."""
        if ttft_ms is None and itl_ms is None:
            return None
        return cls(
            None if ttft_ms is None else ttft_ms / 1000,
            None if itl_ms is None else itl_ms / 1000,
            quantile,
        )
