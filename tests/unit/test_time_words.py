"""Times and durations as people read them."""

from __future__ import annotations

import pytest

from batchyard.logs.time_words import bare_moment, duration, moment, relative


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (969, "16 min 9 s"),
        (3 * 3600 + 12 * 60 + 59, "3 h 12 min"),
        (86_400, "1 d 0 h"),
        (7 * 86_400 - 1, "6 d 23 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_moment_is_in_utc() -> None:
    assert moment(1_763_844_118.9) == "2025-11-22 20:41:58 UTC"
    assert bare_moment(1_763_844_118.9) == "2025-11-22 20:41:58"


def test_a_moment_is_ahead_or_past() -> None:
    assert relative(75) == "in 1 min 15 s"
    assert relative(-75) == "1 min 15 s ago"
