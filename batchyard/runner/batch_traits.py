"""What all requests of a batch carry into the engine: from its row, its tenant and the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.engine.base import BatchTraits
from batchyard.services.patience import patiently

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord


class TraitsOfBatches:
    """Those of the batches that one runner serves, remembered."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._traits: dict[str, BatchTraits] = {}

    async def of(self, batch_id: str) -> BatchTraits:
        """The batch's. Raises what the store raises, if it does so for long."""
        if batch_id not in self._traits:
            batches = self._services.store.batches
            batch = await patiently(lambda: batches.get(batch_id), "a batch")
            self._traits[batch_id] = BatchTraits(cache_salt=await self._salt(batch))
        return self._traits[batch_id]

    async def _salt(self, batch: BatchRecord) -> str | None:
        """What separates the batch's prompts from those of others in the cache; None: nothing."""
        store = self._services.store
        scope = self._services.settings.cache_scope(batch.tenant)
        if scope is None:
            return None
        return await patiently(lambda: store.cache_salts.get(scope), "a cache salt")
