"""What becomes of a delivery after an attempt."""

from __future__ import annotations

import pytest

from batchyard.delivery.schedule import SCHEDULE_SECONDS, verdict
from batchyard.notify.outcome import SendOutcome
from batchyard.store import DeliveryKind, DeliveryRecord, DeliveryStatus

DELIVERY = DeliveryRecord(
    id="wh_1",
    kind=DeliveryKind.WEBHOOK,
    tenant="default",
    event_id="evt_1",
    event_type="batch.completed",
    event_at=0,
    batch_id="batch_1",
    endpoint_id="whe_1",
    recipient=None,
    about_delivery_id=None,
    destination="whe_1",
    created_at=0,
    status=DeliveryStatus.PENDING,
    attempts=0,
    due_at=0.0,
    ended_at=None,
)
BROKEN = SendOutcome(status_code=500, error="the receiver answered 500")
GONE = SendOutcome(status_code=410, error="gone", is_final=True)


def test_what_is_accepted_is_delivered() -> None:
    end = verdict(DELIVERY, SendOutcome(status_code=204))
    assert (end.status, end.again_after_seconds) == (DeliveryStatus.DELIVERED, None)


@pytest.mark.parametrize("attempts", range(len(SCHEDULE_SECONDS)))
def test_what_fails_is_tried_again_by_the_schedule(attempts: int) -> None:
    end = verdict(DELIVERY.model_copy(update={"attempts": attempts}), BROKEN)
    pause = SCHEDULE_SECONDS[attempts]
    assert end.status is DeliveryStatus.PENDING
    assert end.again_after_seconds is not None
    assert pause <= end.again_after_seconds <= 1.1 * pause


def test_what_failed_at_once_does_not_come_back_at_once() -> None:
    assert len({verdict(DELIVERY, BROKEN).again_after_seconds for _ in range(20)}) > 1


def test_the_schedule_lasts_for_three_days() -> None:
    assert sum(SCHEDULE_SECONDS) >= 72 * 3600


def test_the_tenth_attempt_is_the_last_and_its_owner_is_told() -> None:
    end = verdict(DELIVERY.model_copy(update={"attempts": 9}), BROKEN)
    assert end.status is DeliveryStatus.FAILED
    assert end.tell_owner
    assert not end.disables_endpoint


def test_a_receiver_may_ask_to_be_left_alone_for_longer() -> None:
    busy = SendOutcome(status_code=503, error="busy", retry_after_seconds=600.0)
    assert verdict(DELIVERY, busy).again_after_seconds == 600.0


def test_a_receiver_cannot_ask_to_be_tried_sooner() -> None:
    eager = SendOutcome(status_code=503, error="busy", retry_after_seconds=1.0)
    again = verdict(DELIVERY.model_copy(update={"attempts": 1}), eager).again_after_seconds
    assert again is not None
    assert again >= SCHEDULE_SECONDS[1]


def test_an_endpoint_that_is_gone_is_disabled_and_its_owner_told() -> None:
    end = verdict(DELIVERY, GONE)
    assert (end.status, end.disables_endpoint, end.tell_owner) == (
        DeliveryStatus.FAILED,
        True,
        True,
    )


def test_a_batch_has_no_endpoint_to_disable() -> None:
    end = verdict(DELIVERY.model_copy(update={"endpoint_id": None}), GONE)
    assert (end.status, end.disables_endpoint) == (DeliveryStatus.FAILED, False)


def test_nobody_is_told_of_a_url_that_was_taken_away() -> None:
    end = verdict(DELIVERY, SendOutcome(error="its URL is gone", is_final=True))
    assert (end.status, end.tell_owner) == (DeliveryStatus.FAILED, False)
