"""Processes that look for work more often than the product's, so that tests need not wait."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from batchyard import intervals
from batchyard.control.chains import chain_relay

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def hurried(
    *, look_seconds: float = 0.05, poll_seconds: float = 0.02, retry_seconds: float = 0.01
) -> Iterator[None]:
    """Shorten :mod:`batchyard.intervals` in this process for the time of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "LOOK_SECONDS", look_seconds)
        patch.setattr(intervals, "POLL_SECONDS", poll_seconds)
        patch.setattr(intervals, "RETRY_SECONDS", retry_seconds)
        patch.setattr(intervals, "RESPONSES_SECONDS", look_seconds)
        patch.setattr(chain_relay, "HAND_ON_SECONDS", look_seconds)
        patch.setattr(intervals, "LENGTHS_SECONDS", look_seconds)
        patch.setattr(intervals, "ESTIMATE_SECONDS", look_seconds)
        yield
