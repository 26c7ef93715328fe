"""Which tenants share an engine's prefix cache: the salt of each batch's requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.services.patience import patiently

if TYPE_CHECKING:
    from batchyard.services.services import Services


class CacheIsolation:
    """The salts of the batches that one runner serves, remembered."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._salts: dict[str, str | None] = {}

    async def salt_of(self, batch_id: str) -> str | None:
        """What separates the batch's prompts from those of others in the cache; None: nothing."""
        if self._services.settings.cache_shared_by == "all":
            return None
        if batch_id not in self._salts:
            self._salts[batch_id] = await self._look_up(batch_id)
        return self._salts[batch_id]

    async def _look_up(self, batch_id: str) -> str | None:
        store = self._services.store
        batch = await patiently(lambda: store.batches.get(batch_id), "a batch")
        scope = self._services.settings.cache_scope(batch.tenant)
        if scope is None:
            return None
        return await patiently(lambda: store.cache_salts.get(scope), "a cache salt")
