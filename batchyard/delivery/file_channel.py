"""Result files that are written to a URL once more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from batchyard.delivery.redeliver import write_kept
from batchyard.errors import (
    AccessDenied,
    DatasetRefused,
    LocationRefused,
    ObjectNotFound,
    ObjectTooLarge,
    RequestRefused,
    StorageError,
)
from batchyard.locations.location import parse_location
from batchyard.notify.outcome import SendOutcome
from batchyard.store import FILE_EVENTS

if TYPE_CHECKING:
    from batchyard.delivery.redeliver import Kind
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, DeliveryClaim

_FILE_SECONDS: Final = 6 * 3600.0
"""A file of 5 GiB at 250 kB a second takes as long."""
_FINAL = (
    *(AccessDenied, DatasetRefused, LocationRefused, ObjectNotFound, ObjectTooLarge),
    RequestRefused,
)
"""A URL or a file with which no later attempt would go better."""


@dataclass(frozen=True, slots=True)
class FileChannel:
    """A :class:`~batchyard.delivery.channel.Channel`: result files to the URLs of clients."""

    services: Services
    at_most_seconds: float = _FILE_SECONDS

    async def compose(self, claim: DeliveryClaim) -> BatchRecord | SendOutcome:
        if claim.url is None:
            return SendOutcome(error="no key can decrypt its URL any more", is_final=True)
        return await self.services.store.batches.get(claim.delivery.batch_id)

    async def send(self, claim: DeliveryClaim, message: BatchRecord, _: str | None) -> SendOutcome:
        assert claim.url is not None  # noqa: S101 - composed
        # A client's, even if an operator made the batch.
        access = replace(self.services.access, web=self.services.public_web)
        kind: Kind = "output" if claim.delivery.event_type == FILE_EVENTS["output"] else "error"
        try:
            await write_kept(self.services, message, kind, parse_location(claim.url), access)
        except _FINAL as error:
            return SendOutcome(error=str(error), is_final=True)
        except (StorageError, OSError) as error:
            return SendOutcome(error=str(error))
        return SendOutcome()
