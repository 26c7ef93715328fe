"""E-mail: what became of a batch, or of a webhook that failed for good, to one address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from batchyard.delivery.channel import AT_MOST_SECONDS
from batchyard.errors import RecordNotFound
from batchyard.notify.email import GivenUp, batch_email, given_up_email
from batchyard.notify.outcome import SendOutcome
from batchyard.store import WEBHOOK_GIVEN_UP

if TYPE_CHECKING:
    from email.message import EmailMessage

    from batchyard.notify.smtp import Mailer
    from batchyard.services.services import Services
    from batchyard.store import DeliveryClaim, DeliveryRecord


@dataclass(frozen=True, slots=True)
class EmailChannel:
    """A :class:`~batchyard.delivery.channel.Channel`: e-mails about batches and webhooks."""

    services: Services
    mailer: Mailer | None
    """The mail server; None: none is set up."""
    at_most_seconds: float = AT_MOST_SECONDS

    async def compose(self, claim: DeliveryClaim) -> EmailMessage | SendOutcome:
        if self.mailer is None:
            return SendOutcome(error="no mail server is set up: set BATCHYARD_SMTP__HOST")
        try:
            return await self._message(claim.delivery)
        except ValueError:
            # Of an older version, or written into the database by hand.
            return SendOutcome(error="no e-mail can be sent to this address", is_final=True)

    async def send(self, _: DeliveryClaim, message: EmailMessage, __: str | None) -> SendOutcome:
        assert self.mailer is not None  # noqa: S101 - composed
        return await self.mailer.send(message)

    async def _message(self, delivery: DeliveryRecord) -> EmailMessage:
        """Raises ``ValueError`` for an address that is not one."""
        to, sender = delivery.recipient or "", self.services.settings.smtp.from_address
        if delivery.event_type == WEBHOOK_GIVEN_UP:
            given_up = await self._given_up(delivery)
            return given_up_email(given_up, to=to, sender=sender, delivery_id=delivery.id)
        batch = await self.services.store.batches.get(delivery.batch_id)
        errors = batch.options.error_counts
        return batch_email(batch.to_wire(), errors, to=to, sender=sender, delivery_id=delivery.id)

    async def _given_up(self, delivery: DeliveryRecord) -> GivenUp:
        deliveries = self.services.store.deliveries
        about = await deliveries.get(delivery.about_delivery_id or "")
        log = await deliveries.attempts(about.id)
        return GivenUp(
            delivery_id=about.id,
            batch_id=about.batch_id,
            response_id=about.response_id,
            event_type=about.event_type,
            endpoint_id=about.endpoint_id,
            host=await self._host_of(about),
            attempts=about.attempts,
            status_code=log[-1].status_code if log else None,
            error=log[-1].error if log else None,
        )

    async def _host_of(self, delivery: DeliveryRecord) -> str | None:
        if delivery.endpoint_id is None:
            return delivery.destination
        try:
            endpoint = await self.services.store.webhook_endpoints.get(delivery.endpoint_id)
        except RecordNotFound:
            return None
        return urlsplit(endpoint.url or "").hostname
