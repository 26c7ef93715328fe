"""The inputs of batches as local files of one runner."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batchyard.services.keys import file_key

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.services.services import Services


class Inputs:
    """Fetches each input once, however many chunks ask; after a failure, again."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._fetches: dict[str, asyncio.Task[Path]] = {}

    async def path(self, batch_id: str) -> Path:
        """A local file with the batch's input.

        Raises :class:`~batchyard.errors.StoreError` and :class:`~batchyard.errors.StorageError`.
        """
        fetch = self._fetches.get(batch_id)
        if fetch is None:
            fetch = asyncio.create_task(self._fetch(batch_id), name=f"input of {batch_id}")
            self._fetches[batch_id] = fetch
        try:
            # One chunk that is cancelled must not end the fetch under the others.
            return await asyncio.shield(fetch)
        finally:
            if fetch.done() and (fetch.cancelled() or fetch.exception() is not None):
                self.forget(batch_id)

    def forget(self, batch_id: str) -> None:
        """Fetch the input again for the next chunk that needs it."""
        fetch = self._fetches.get(batch_id)
        if fetch is not None and fetch.done():
            del self._fetches[batch_id]

    async def close(self) -> None:
        """End the fetches that still run."""
        fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    async def _fetch(self, batch_id: str) -> Path:
        batch = await self._services.store.batches.get(batch_id)
        key = file_key(batch.input_file_id)
        return await self._services.storage.local_path(key, self._services.spool)
