"""Tell Prefect of objects that S3 says were created. examples/watch_prefix.py makes it react.

    python examples/s3_events.py < notification.json

``notification.json`` is what the object store sends: S3's event notification, as AWS, MinIO, Ceph
and others have it, or an event of Amazon EventBridge. In AWS Lambda, ``handler`` does the same. It
needs Prefect, ``PREFECT_API_URL``, and ``PREFECT_API_AUTH_STRING`` where the server has a login.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus

from prefect import get_client
from prefect.events import Event

if TYPE_CHECKING:
    from collections.abc import Iterator


def objects_in(notification: dict[str, Any]) -> Iterator[str]:
    """The addresses of the objects that were created."""
    if notification.get("detail-type") == "Object Created":  # EventBridge
        detail = notification["detail"]
        yield f"s3://{detail['bucket']['name']}/{detail['object']['key']}"
    for record in notification.get("Records", []):
        if "ObjectCreated" in record["eventName"]:
            s3 = record["s3"]
            yield f"s3://{s3['bucket']['name']}/{unquote_plus(s3['object']['key'])}"


async def tell(notification: dict[str, Any]) -> int:
    """Send an event for each object, and return how many. Raises if Prefect does not take them."""
    events = [
        Event(event="object.created", resource={"prefect.resource.id": address})
        for address in objects_in(notification)
    ]
    if events:
        async with get_client() as client:
            body = [event.model_dump(mode="json") for event in events]
            await client.request("POST", "/events", json=body)
    return len(events)


def handler(notification: dict[str, Any], _context: object = None) -> int:
    """The entry point for AWS Lambda."""
    return asyncio.run(tell(notification))


if __name__ == "__main__":
    print(handler(json.load(sys.stdin)))
