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
        channel = self._channels[claim.delivery.kind]
        try:
            async with asyncio.timeout(channel.at_most_seconds):
                message = await channel.compose(claim)
                if isinstance(message, SendOutcome):
                    return message
                return await channel.send(claim, message)
        except TimeoutError:
            return SendOutcome(error="the attempt came to no end")


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
