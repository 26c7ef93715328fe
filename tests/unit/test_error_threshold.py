"""When so many requests have failed that the rest is not run."""

from __future__ import annotations

import pytest

from batchyard.batch.error_threshold import ErrorThreshold
from batchyard.errors import RequestRefused


@pytest.mark.parametrize(
    ("text", "finished", "failed", "total", "is_reached"),
    [
        ("3", 3, 3, 1000, True),
        ("3", 999, 2, 1000, False),
        ("5%", 100, 5, 1000, True),
        ("5%", 100, 4, 1000, False),
        ("5%", 99, 99, 1000, False),
        ("5%", 5, 1, 50, True),
        ("5%", 4, 4, 50, False),
        ("0.5%", 1000, 5, 100_000, True),
        ("0.5%", 1000, 4, 100_000, False),
        ("100%", 100, 100, 1000, True),
        ("100%", 100, 99, 1000, False),
        ("5%", 0, 0, 1, False),
    ],
)
def test_a_number_counts_at_once_and_a_share_when_enough_is_finished(
    text: str,
    finished: int,
    failed: int,
    total: int,
    is_reached: bool,
) -> None:
    threshold = ErrorThreshold.parse(text)
    assert threshold.is_reached(finished=finished, failed=failed, total=total) is is_reached


@pytest.mark.parametrize("text", ["", "0", "0%", "-1", "101%", "0.05", "5 %", "٥%", "1e3", "many"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(RequestRefused, match="for example 200") as refused:
        ErrorThreshold.parse(text)
    assert (refused.value.param, refused.value.refusal_code) == ("error_threshold", "invalid_value")
