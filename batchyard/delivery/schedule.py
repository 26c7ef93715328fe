"""The result of an attempt: the delivery is done, has failed, or is tried again, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from batchyard.store import DeliveryStatus

if TYPE_CHECKING:
    from batchyard.notify.outcome import SendOutcome
    from batchyard.store import DeliveryRecord

SCHEDULE_SECONDS: Final = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""The pauses after the attempts 1 to 9; after the tenth a delivery has failed. About 75 hours."""

_JITTER: Final = 0.1
"""Pauses are up to so much longer: what failed at once does not come back at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a delivery. The defaults are those of one that has arrived."""

    status: DeliveryStatus = DeliveryStatus.DELIVERED
    again_after_seconds: float | None = None
    tell_owner: bool = False
    """Whether its owner is notified that it failed for good."""
    disables_endpoint: bool = False


def verdict(delivery: DeliveryRecord, answer: SendOutcome) -> Verdict:
    """What ``answer`` means for ``delivery``, whose attempts are those before this one."""
    if answer.is_accepted:
        return Verdict()
    is_last = delivery.attempts >= len(SCHEDULE_SECONDS)
    if answer.is_final or is_last:
        is_gone = answer.status_code == HTTPStatus.GONE and delivery.endpoint_id is not None
        return Verdict(
            status=DeliveryStatus.FAILED,
            # Without a status there was no URL any more: its owner has removed it.
            tell_owner=is_last or answer.status_code is not None,
            disables_endpoint=answer.is_final and is_gone,
        )
    pause = SCHEDULE_SECONDS[delivery.attempts] * (1 + _JITTER * random.random())  # noqa: S311 - no secret
    return Verdict(
        status=DeliveryStatus.PENDING,
        again_after_seconds=max(pause, answer.retry_after_seconds or 0.0),
    )
