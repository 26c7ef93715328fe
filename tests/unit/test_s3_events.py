"""examples/s3_events.py: which objects a notification names."""

from __future__ import annotations

from typing import Any

import pytest

from examples.s3_events import handler, objects_in


def record(name: str, key: str) -> dict[str, Any]:
    return {"eventName": name, "s3": {"bucket": {"name": "data"}, "object": {"key": key}}}


def of_eventbridge(kind: str) -> dict[str, Any]:
    detail = {"bucket": {"name": "data"}, "object": {"key": "in/a b+c.jsonl"}}
    return {"detail-type": kind, "detail": detail}


@pytest.mark.parametrize(
    ("notification", "addresses"),
    [
        (
            {
                "Records": [
                    record("ObjectCreated:Put", "in/a+b%2B%C3%A4.jsonl"),
                    record("s3:ObjectCreated:CompleteMultipartUpload", "in/c.jsonl"),
                    record("ObjectRemoved:Delete", "in/d.jsonl"),
                ]
            },
            ["s3://data/in/a b+ä.jsonl", "s3://data/in/c.jsonl"],
        ),
        (of_eventbridge("Object Created"), ["s3://data/in/a b+c.jsonl"]),
        (of_eventbridge("Object Deleted"), []),
    ],
    ids=["S3", "EventBridge", "a deletion"],
)
def test_a_notification_names_the_objects_that_were_created(
    notification: dict[str, Any], addresses: list[str]
) -> None:
    """S3 writes keys as in a query, EventBridge as they are."""
    assert list(objects_in(notification)) == addresses


def test_the_event_by_which_s3_tests_its_receiver_is_no_object() -> None:
    """Nothing is sent then, and Prefect is not asked."""
    assert handler({"Service": "Amazon S3", "Event": "s3:TestEvent"}) == 0
