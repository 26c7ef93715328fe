"""Webhooks: an event, signed and posted to an endpoint or to the batch's own URL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchyard.delivery.channel import AT_MOST_SECONDS
from batchyard.notify.event import batch_data, event_body
from batchyard.notify.outcome import SendOutcome

if TYPE_CHECKING:
    from batchyard.notify.webhook import WebhookSender
    from batchyard.services.services import Services
    from batchyard.store import DeliveryClaim, DeliveryRecord


@dataclass(frozen=True, slots=True)
class WebhookChannel:
    """A :class:`~batchyard.delivery.channel.Channel`: signed events to the URLs of receivers."""

    services: Services
    sender: WebhookSender
    at_most_seconds: float = AT_MOST_SECONDS

    async def compose(self, claim: DeliveryClaim) -> bytes | SendOutcome:
        delivery = claim.delivery
        if claim.url is None:
            return SendOutcome(
                error="its URL was removed, or no key can decrypt it any more", is_final=True
            )
        return event_body(
            event_id=delivery.event_id,
            event_type=delivery.event_type,
            created_at=delivery.event_at,
            data=await self._data(delivery),
        )

    async def _data(self, delivery: DeliveryRecord) -> dict[str, Any]:
        if delivery.response_id is not None:
            return {"id": delivery.response_id}
        batch = await self.services.store.batches.get(delivery.batch_id)
        return batch_data(batch.to_wire(), full=self.services.settings.webhook_data == "full")

    async def send(
        self, claim: DeliveryClaim, message: bytes, traceparent: str | None
    ) -> SendOutcome:
        assert claim.url is not None  # noqa: S101 - composed
        return await self.sender.send(
            claim.url,
            message,
            delivery_id=claim.delivery.id,
            secrets=claim.secrets,
            traceparent=traceparent,
        )
