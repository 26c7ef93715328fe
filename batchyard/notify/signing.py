"""Standard Webhooks signatures, as OpenAI's SDKs check them in ``client.webhooks.unwrap()``."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from standardwebhooks import Webhook

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime


def signed_headers(
    body: bytes, *, delivery_id: str, at: datetime, secrets: Sequence[str]
) -> dict[str, str]:
    """The three headers of one attempt.

    ``delivery_id`` is the same for every attempt; ``at``, in UTC, is this one's time. One
    signature for each of ``secrets`` (``whsec_…``), of which a receiver needs to know one.
    Raises ``ValueError`` without any.
    """
    if not secrets:
        raise ValueError("A webhook is signed with at least one secret.")
    # The library takes the clock's face for UTC, whatever the time zone.
    if at.utcoffset() != timedelta(0):
        raise ValueError("The time of a signature is in UTC.")
    text = body.decode()
    signatures = [Webhook(secret).sign(delivery_id, at, text) for secret in secrets]
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(signatures),
    }
