"""What an event says, byte for byte."""

from __future__ import annotations

import json

import pytest

from batchyard.lifecycle import BatchStatus
from batchyard.notify.event import BATCH_EVENTS, EVENT_TYPES, batch_data, ended_at, event_body
from tests.unit.notify.batches import BATCH_ID, CREATED_AT, ended_batch


def test_there_is_one_event_for_each_way_in_which_a_batch_or_a_response_ends() -> None:
    assert (
        *("batch.cancelled", "batch.completed", "batch.expired", "batch.failed"),
        *("response.cancelled", "response.completed", "response.failed", "response.incomplete"),
    ) == EVENT_TYPES


def test_a_thin_event_has_openais_keys_and_no_more() -> None:
    data = batch_data(ended_batch(), full=False)
    body = event_body(
        event_id="evt_1", event_type="batch.completed", created_at=1_750_861_210, data=data
    )

    assert body == (
        b'{"id":"evt_1","object":"event","created_at":1750861210,"type":"batch.completed",'
        b'"data":{"id":"batch_0123456789abcdef0123456789abcdef"}}'
    )


def test_a_full_event_says_how_the_batch_ended() -> None:
    assert batch_data(ended_batch(), full=True) == {
        "id": BATCH_ID,
        "status": "completed",
        "endpoint": "/v1/chat/completions",
        "model": "tiny-chat",
        "request_counts": {"total": 1200, "completed": 1190, "failed": 10},
        "usage": {
            "input_tokens": 34_000,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 5600,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 39_600,
        },
        "output_file_id": "file-output",
        "error_file_id": "file-error",
        "created_at": CREATED_AT,
        "ended_at": CREATED_AT + 3723,
    }


def test_no_event_holds_the_users_own_text() -> None:
    batch = ended_batch(metadata={"customer": "canary"})

    assert "canary" not in json.dumps(batch_data(batch, full=True))


@pytest.mark.parametrize("event_type", BATCH_EVENTS)
def test_a_batch_has_ended_at_the_time_of_its_last_status(event_type: str) -> None:
    batch = ended_batch(BatchStatus(event_type.removeprefix("batch.")))

    assert ended_at(batch) == CREATED_AT + 3723


def test_a_batch_that_runs_has_not_ended() -> None:
    assert ended_at(ended_batch(completed_at=None)) is None
