"""What a tenant sees of its deliveries, and a sample event to try a webhook endpoint."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from batchyard.errors import RequestRefused
from batchyard.intervals import DAY_SECONDS
from batchyard.lifecycle import BatchStatus
from batchyard.notify.event import RESPONSE_EVENTS, batch_data, event_body
from batchyard.notify.webhook import WebhookSender
from batchyard.store import DeliveryKind, DeliveryStatus
from batchyard.wire import Batch, RequestCounts, new_delivery_id, new_event_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.services.services import Services
    from batchyard.store import AttemptRecord, DeliveryRecord


_WINDOW_SECONDS = DAY_SECONDS


def secret_hint(secret: str) -> str:
    """What may be shown of a signing secret, to tell it from others."""
    return f"whsec_…{secret[-4:]}"


async def send_test(
    services: Services, endpoint_id: str, event_type: str, *, tenant: str | None = None
) -> int:
    """Send a signed sample event to the endpoint now, once; the status of its answer.

    Raises :class:`~batchyard.errors.RequestRefused` when there is none, and
    :class:`~batchyard.errors.RecordNotFound`. Nothing of it is kept.
    """
    settings = services.settings
    endpoint = await services.store.webhook_endpoints.get(endpoint_id, tenant)
    signed_by = await services.store.webhook_endpoints.secrets(endpoint_id, tenant)
    if endpoint.url is None:
        raise _not_sent("no key can decrypt its URL any more: set a new URL")
    if not signed_by:
        raise _not_sent("no key can decrypt its signing secret any more: make a new secret")
    now = int(await services.store.database.now())
    body = event_body(
        event_id=new_event_id(),
        event_type=event_type,
        created_at=now,
        data=_sample_data(event_type, now, full=settings.webhook_data == "full"),
    )
    async with WebhookSender(settings.address_guard, ssl_context=settings.tls_context) as sender:
        answer = await sender.send(
            endpoint.url, body, delivery_id=new_delivery_id(), secrets=signed_by
        )
    if answer.status_code is None:
        raise _not_sent(answer.error)
    return answer.status_code


def _not_sent(reason: str | None) -> RequestRefused:
    return RequestRefused(
        f"The event did not arrive: {reason}.", param=None, code="webhook_endpoint_unreachable"
    )


def _sample_data(event_type: str, now: int, *, full: bool) -> dict[str, Any]:
    if event_type in RESPONSE_EVENTS:
        return {"id": f"resp_test{secrets.token_hex(14)}"}
    return batch_data(_sample_batch(event_type, now), full=full)


def _sample_batch(event_type: str, now: int) -> Batch:
    """A batch that there never was; its id says so."""
    status = BatchStatus(event_type.removeprefix("batch."))
    times: dict[str, Any] = {status.timestamp_field or "": now}
    return Batch(
        id=f"batch_test{secrets.token_hex(14)}",
        endpoint="/v1/chat/completions",
        input_file_id="file-test",
        completion_window="24h",
        status=status,
        created_at=now,
        expires_at=now + _WINDOW_SECONDS,
        request_counts=RequestCounts(total=1),
        **times,
    )


class DeliveryAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt in the log. ``status_code`` null: there was no answer."""

    number: int
    at: int
    duration_ms: int
    status_code: int | None
    error: str | None


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be told or given to one receiver, and how far that is.

    ``recipient``: of an e-mail its address, of a batch's own webhook and of a file the host.
    ``attempt_count`` begins again when a delivery is replayed, the numbers of its attempts do not.
    """

    id: str
    object: Literal["delivery"] = "delivery"
    kind: DeliveryKind
    event_id: str
    event_type: str
    batch_id: str | None
    response_id: str | None
    webhook_endpoint_id: str | None
    recipient: str | None
    about_delivery_id: str | None
    file_id: str | None
    status: DeliveryStatus
    attempt_count: int
    next_attempt_at: int | None
    created_at: int
    ended_at: int | None


class DeliveryWithAttempts(Delivery, frozen=True, kw_only=True):
    """A delivery and its log, the oldest attempt first."""

    attempts: tuple[DeliveryAttempt, ...]


def delivery_object(delivery: DeliveryRecord) -> Delivery:
    """The delivery as its tenant sees it: no URL, no secret."""
    return Delivery(**_values(delivery))


def delivery_with_attempts(
    delivery: DeliveryRecord, attempts: Sequence[AttemptRecord]
) -> DeliveryWithAttempts:
    """The delivery as its tenant sees it, with its log."""
    return DeliveryWithAttempts(
        **_values(delivery),
        attempts=tuple(
            DeliveryAttempt(
                number=each.number,
                at=each.at,
                duration_ms=each.duration_ms,
                status_code=each.status_code,
                error=each.error,
            )
            for each in attempts
        ),
    )


def _values(delivery: DeliveryRecord) -> dict[str, Any]:
    is_pending = delivery.status is DeliveryStatus.PENDING
    is_at_host = delivery.endpoint_id is None and delivery.recipient is None
    return {
        "id": delivery.id,
        "kind": delivery.kind,
        "event_id": delivery.event_id,
        "event_type": delivery.event_type,
        "batch_id": delivery.batch_id or None,
        "response_id": delivery.response_id,
        "webhook_endpoint_id": delivery.endpoint_id,
        "recipient": delivery.destination if is_at_host else delivery.recipient,
        "about_delivery_id": delivery.about_delivery_id,
        "file_id": delivery.file_id,
        "status": delivery.status,
        "attempt_count": delivery.attempts,
        "next_attempt_at": int(delivery.due_at) if is_pending else None,
        "created_at": delivery.created_at,
        "ended_at": delivery.ended_at,
    }
