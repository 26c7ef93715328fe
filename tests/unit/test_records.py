"""What is read from a table or written into one is a frozen value."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from batchyard.database.columns import Record
from batchyard.store import DeliveryRecord, NewBatch, RateRecord, WebhookEndpointRecord

RATE = {
    "model": "m",
    "pool": "p",
    "tokens_per_second": 5.0,
    "work_per_second": None,
    "answer_tokens_per_second": None,
    "prompt_tokens_per_second": None,
    "prompt_weight": None,
    "load_seconds": None,
}


def every_record(base: type[Record] = Record) -> list[type[Record]]:
    return [base, *(found for each in base.__subclasses__() for found in every_record(each))]


@pytest.mark.parametrize("record", every_record(), ids=lambda record: record.__name__)
def test_every_record_is_frozen(record: type[Record]) -> None:
    assert record.model_config["frozen"]


def test_a_record_is_not_changed() -> None:
    rate = RateRecord.read({**RATE, "measured_at": 1.0})
    with pytest.raises(ValidationError, match="frozen"):
        rate.pool = "another"  # type: ignore[misc]  # that is what is tried


def test_a_record_is_read_from_a_row_that_may_have_more() -> None:
    row = {**RATE, "measured_at": 1.0, "another": 2}
    assert RateRecord.read(row) == RateRecord(**RATE, measured_at=1.0)


def test_the_repr_of_a_record_has_no_address_and_no_url() -> None:
    hidden = {
        NewBatch: "notify_email",
        DeliveryRecord: "recipient",
        WebhookEndpointRecord: "url",
    }
    for record, name in hidden.items():
        assert name in record.model_fields
        assert not record.model_fields[name].repr


def test_an_error_does_not_quote_a_wrong_value() -> None:
    """It may be a presigned URL, and errors end up in logs."""
    with pytest.raises(ValidationError) as refused:
        NewBatch(endpoint=["https://bucket.example/?signature=secret"])  # type: ignore[arg-type]
    assert "bucket.example" not in str(refused.value)
