"""The ``Retry-After`` header."""

from __future__ import annotations

import contextlib
import email.utils
import math
from datetime import UTC, datetime


def retry_after_seconds(value: str | None) -> float | None:
    """Seconds to wait, from a number of seconds or an HTTP date; None if absent or neither."""
    if not value:
        return None
    with contextlib.suppress(ValueError):
        seconds = float(value)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        # The latter: a time zone of a million hours.
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
