"""One attempt of one delivery, by the channel that its kind names."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from batchyard.delivery.channel import TIMEOUT_SECONDS
from batchyard.delivery.email_channel import EmailChannel
from batchyard.delivery.file_channel import FileChannel
from batchyard.delivery.webhook_channel import WebhookChannel
from batchyard.notify.outcome import SendOutcome
from batchyard.notify.smtp import Mailer
from batchyard.notify.webhook import WebhookSender
from batchyard.services.batch_span import batch_span
from batchyard.store import DeliveryKind

if TYPE_CHECKING:
    from batchyard.delivery.channel import Channel
    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from batchyard.store import DeliveryClaim


class Messenger:
    """Sends webhooks, e-mails and result files. Use as an async context manager."""

    def __init__(self, services: Services) -> None:
        settings = services.settings
        self._services = services
        self._exits = AsyncExitStack()
        self._webhooks = WebhookSender(
            settings.address_guard,
            timeout_seconds=TIMEOUT_SECONDS,
            ssl_context=settings.tls_context,
        )
        self._channels: dict[DeliveryKind, Channel[Any]] = {
            DeliveryKind.WEBHOOK: WebhookChannel(services, self._webhooks),
            DeliveryKind.EMAIL: EmailChannel(services, _mailer(settings)),
            DeliveryKind.FILE: FileChannel(services),
        }

    async def __aenter__(self) -> Self:
        await self._exits.enter_async_context(self._webhooks)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def send(self, claim: DeliveryClaim) -> SendOutcome:
        """Make the attempt. Raises :class:`~batchyard.errors.StoreError`, nothing else."""
        delivery = claim.delivery
        channel = self._channels[delivery.kind]
        name, number = f"{delivery.kind.value}.send", delivery.attempts + 1
        try:
            async with (
                asyncio.timeout(channel.at_most_seconds),
                batch_span(self._services, name, delivery.batch_id, attempt=number) as span,
            ):
                message = await channel.compose(claim)
                if isinstance(message, SendOutcome):
                    outcome = message
                else:
                    outcome = await channel.send(claim, message, span.traceparent)
                span.note(http_status=outcome.status_code)
                if not outcome.is_accepted:
                    span.fail("not_accepted")
                return outcome
        except TimeoutError:
            return SendOutcome(error="the attempt did not end")


def _mailer(settings: Settings) -> Mailer | None:
    smtp = settings.smtp
    if smtp.host is None:
        return None
    return Mailer(
        host=smtp.host,
        port=smtp.port,
        security=smtp.security,
        username=smtp.username,
        password=smtp.password.get_secret_value() if smtp.password else None,
        ssl_context=settings.tls_context,
        timeout_seconds=TIMEOUT_SECONDS,
    )
