"""One attempt of one delivery: what is sent is read from the database at that moment."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import urlsplit

from batchyard.delivery.redeliver import write_kept
from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectNotFound,
    ObjectTooLarge,
    RecordNotFound,
    RequestRefused,
    StorageError,
)
from batchyard.notify.answer import Answer
from batchyard.notify.email import GivenUp, batch_email, given_up_email
from batchyard.notify.event import batch_data, event_body
from batchyard.notify.smtp import Mailer
from batchyard.notify.webhook import WebhookSender
from batchyard.storage.web import WebAccess
from batchyard.store import FILE_EVENTS, WEBHOOK_GIVEN_UP, DeliveryKind

if TYPE_CHECKING:
    import ssl
    from email.message import EmailMessage

    from batchyard.delivery.redeliver import Kind
    from batchyard.services.services import Services
    from batchyard.settings import SmtpSettings
    from batchyard.store import DeliveryClaim, DeliveryRecord

TIMEOUT_SECONDS: Final = 15.0
_FILE_SECONDS: Final = 6 * 3600.0
"""A file of 5 GiB at 250 kB a second takes as long."""
_FINAL = (AccessDenied, LocationRefused, ObjectNotFound, ObjectTooLarge, RequestRefused)
"""A URL or a file with which no later attempt would go better."""
_AT_MOST_SECONDS: Final = 30.0
"""An attempt that is still under way then has a defect: it must not hold its place for ever."""


class Messenger:
    """Sends webhooks, e-mails and result files. Use as an async context manager.

    ``ssl_context``: instead of the system's trusted authorities.
    """

    def __init__(self, services: Services, *, ssl_context: ssl.SSLContext | None = None) -> None:
        self._services = services
        self._ssl_context = ssl_context
        self._exits = AsyncExitStack()
        self._webhooks = WebhookSender(
            services.settings.address_guard,
            timeout_seconds=TIMEOUT_SECONDS,
            ssl_context=ssl_context,
        )
        self._mailer = _mailer(services.settings.smtp, ssl_context)

    async def __aenter__(self) -> Self:
        await self._exits.enter_async_context(self._webhooks)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def send(self, claim: DeliveryClaim) -> Answer:
        """Make the attempt. Raises :class:`~batchyard.errors.StoreError`, nothing else."""
        is_file = claim.delivery.kind is DeliveryKind.FILE
        try:
            async with asyncio.timeout(_FILE_SECONDS if is_file else _AT_MOST_SECONDS):
                if is_file:
                    return await self._send_file(claim)
                if claim.delivery.kind is DeliveryKind.EMAIL:
                    return await self._send_email(claim.delivery)
                return await self._send_webhook(claim)
        except TimeoutError:
            return Answer(error="the attempt came to no end")

    async def _send_webhook(self, claim: DeliveryClaim) -> Answer:
        delivery = claim.delivery
        if claim.url is None:
            return Answer(error="its URL is gone, or no key opens it any more", is_final=True)
        batch = await self._services.store.batches.get(delivery.batch_id)
        is_full = self._services.settings.webhook_data == "full"
        body = event_body(
            event_id=delivery.event_id,
            event_type=delivery.event_type,
            created_at=delivery.event_at,
            data=batch_data(batch.to_wire(), full=is_full),
        )
        return await self._webhooks.send(
            claim.url, body, delivery_id=delivery.id, secrets=claim.secrets
        )

    async def _send_file(self, claim: DeliveryClaim) -> Answer:
        delivery, url = claim.delivery, claim.url
        if url is None:
            return Answer(error="no key opens its URL any more", is_final=True)
        batch = await self._services.store.batches.get(delivery.batch_id)
        # A client's, whoever made the batch.
        web = WebAccess(guard=self._services.settings.address_guard, ssl_context=self._ssl_context)
        kind: Kind = "output" if delivery.event_type == FILE_EVENTS["output"] else "error"
        try:
            access = replace(self._services.access, web=web)
            await write_kept(self._services, batch, kind, url, access)
        except _FINAL as error:
            return Answer(error=str(error), is_final=True)
        except (StorageError, OSError) as error:
            return Answer(error=str(error))
        return Answer()

    async def _send_email(self, delivery: DeliveryRecord) -> Answer:
        if self._mailer is None:
            return Answer(error="no mail server is set up: set BATCHYARD_SMTP__HOST")
        try:
            message = await self._compose(delivery)
        except ValueError:
            # Of an older version, or of somebody who wrote into the database.
            return Answer(error="the address is not one that can be written to", is_final=True)
        return await self._mailer.send(message)

    async def _compose(self, delivery: DeliveryRecord) -> EmailMessage:
        """Raises ``ValueError`` for an address that is not one."""
        to, sender = delivery.recipient or "", self._services.settings.smtp.from_address
        if delivery.event_type == WEBHOOK_GIVEN_UP:
            given_up = await self._given_up(delivery)
            return given_up_email(given_up, to=to, sender=sender, delivery_id=delivery.id)
        batch = await self._services.store.batches.get(delivery.batch_id)
        return batch_email(batch.to_wire(), to=to, sender=sender, delivery_id=delivery.id)

    async def _given_up(self, delivery: DeliveryRecord) -> GivenUp:
        deliveries = self._services.store.deliveries
        about = await deliveries.get(delivery.about_delivery_id or "")
        log = await deliveries.attempts(about.id)
        return GivenUp(
            delivery_id=about.id,
            batch_id=about.batch_id,
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
            endpoint = await self._services.store.webhook_endpoints.get(delivery.endpoint_id)
        except RecordNotFound:
            return None
        return urlsplit(endpoint.url).hostname


def _mailer(smtp: SmtpSettings, ssl_context: ssl.SSLContext | None) -> Mailer | None:
    if smtp.host is None:
        return None
    return Mailer(
        host=smtp.host,
        port=smtp.port,
        security=smtp.security,
        username=smtp.username,
        password=smtp.password.get_secret_value() if smtp.password else None,
        ssl_context=ssl_context,
        timeout_seconds=TIMEOUT_SECONDS,
    )
