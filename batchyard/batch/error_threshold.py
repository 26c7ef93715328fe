"""How many requests of a batch may fail before the rest is not run. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from batchyard.errors import RequestRefused

LEAST_LINES: Final = 100
"""A share is judged when as many lines are finished, or a tenth of a smaller batch."""
_FORM: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)%|([1-9][0-9]{0,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class ErrorThreshold:
    """A share of the finished lines, in percent, or a number of lines; the other is None."""

    percent: float | None = None
    lines: int | None = None

    @classmethod
    def parse(cls, text: str) -> ErrorThreshold:
        """Parse ``5%`` or ``200``. Raises :class:`~batchyard.errors.RequestRefused`."""
        match = _FORM.fullmatch(text)
        if match is not None and match.group(2):
            return cls(lines=int(match.group(2)))
        if match is not None and 0 < float(match.group(1)) <= 100:
            return cls(percent=float(match.group(1)))
        raise RequestRefused(
            "error_threshold must be a number of lines, for example 200, or a share of those that "
            "are finished, for example 5%.",
            param="error_threshold",
            code="invalid_value",
        )

    def is_reached(self, *, finished: int, failed: int, total: int) -> bool:
        """Whether so many of the ``finished`` lines have ``failed``; the batch has ``total``."""
        if self.lines is not None:
            return failed >= self.lines
        assert self.percent is not None  # noqa: S101 - one of the two is there
        least = min(LEAST_LINES, -(-total // 10))
        return finished >= least and failed * 100 >= self.percent * finished > 0
