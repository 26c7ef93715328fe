"""Numbers, times and names as the page shows them: short, and the same everywhere."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from rich.filesize import decimal

from batchyard.lifecycle import STOPPABLE, BatchStatus
from batchyard.logs.time_words import duration

if TYPE_CHECKING:
    from batchyard.store import BatchRecord

NOTHING: Final = "–"
_NAME_KEYS: Final = ("name", "title", "job", "run", "description")
_MOST_NAME_CHARS: Final = 60
_UNITS: Final = ((1_000_000_000, "B"), (1_000_000, "M"), (1_000, "k"))


def count(number: float) -> str:
    """Format a number as ``1,234``."""
    return f"{number:,.0f}"


def line_count(number: int) -> str:
    """``1 line``, ``1,234 lines``."""
    return f"{count(number)} line{'' if number == 1 else 's'}"


def compact(number: float) -> str:
    """``950``, ``1.2 k``, ``34 M``: at most three digits and a unit."""
    for size, unit in _UNITS:
        # Half a unit below, because 999,950 would be rounded up to 1,000 k.
        if abs(number) >= size * 0.9995:
            scaled = number / size
            return f"{scaled:.1f} {unit}" if abs(scaled) < 9.95 else f"{scaled:.0f} {unit}"
    return f"{number:.0f}"


def size(number: int) -> str:
    """``812 B``, ``1.4 MB``: as the commands say it, with a short unit."""
    return re.sub("bytes?$", "B", decimal(number))


def percent(part: float, whole: float) -> str:
    """``37 %``; 100 only for all, and 0 only for none, so that a few are never shown as none."""
    if not whole:
        return NOTHING
    share = 100 * part / whole
    if 0 < share < 1:
        return "<1 %"
    if 99 < share < 100:
        return ">99 %"
    return f"{share:.0f} %"


def clock_time(seconds: float, now: float) -> str:
    """``20:41 UTC``; of another day ``Nov 22, 20:41 UTC``."""
    then, today = (datetime.fromtimestamp(each, UTC) for each in (seconds, now))
    return then.strftime("%H:%M UTC" if then.date() == today.date() else "%b %-d, %H:%M UTC")


def short_duration(seconds: float) -> str:
    """``45 s``, ``16 min``, ``3 h 12 min``, ``6 d 23 h``: from a minute on without seconds."""
    whole = max(0, round(seconds))
    return f"{whole // 60} min" if 60 <= whole < 3600 else duration(whole)


def ago(seconds: float) -> str:
    """``16 min ago``, ``now``."""
    return "now" if seconds < 1 else f"{short_duration(seconds)} ago"


def name_of(batch: BatchRecord) -> str | None:
    """The name in the batch's metadata."""
    for key in _NAME_KEYS:
        text = ((batch.metadata or {}).get(key) or "").strip()
        if text:
            return short(text)
    return None


def short(text: str, most_chars: int = _MOST_NAME_CHARS) -> str:
    """The beginning of a name that is too long."""
    return text if len(text) <= most_chars else f"{text[: most_chars - 1]}…"


def model_of(batch: BatchRecord) -> str:
    """The model, or what it may be; before the input was read it is not known."""
    return ", ".join(batch.models) or NOTHING


def status_of(batch: BatchRecord, *, is_running: bool) -> tuple[str, str]:
    """One word for its look, and the words for people."""
    match batch.status:
        case status if batch.paused_at is not None and status in STOPPABLE:
            return "paused", "paused"
        case BatchStatus.VALIDATING:
            return "waiting", "validating"
        case BatchStatus.IN_PROGRESS:
            return ("running", "running") if is_running else ("waiting", "waiting")
        case BatchStatus.FINALIZING:
            return "running", "writing files"
        case BatchStatus.CANCELLING:
            return "waiting", "cancelling"
        case BatchStatus.FAILED | BatchStatus.EXPIRED as status:
            return "failed", status.value
        case BatchStatus.CANCELLED:
            return "cancelled", "cancelled"
    return "completed", "completed"
