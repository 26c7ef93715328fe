"""The inputs of batches as local files of one runner."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

from batchyard.processes.threads import in_thread
from batchyard.services.keys import file_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from batchyard.services.services import Services

KEPT_SECONDS: Final = 600.0
"""How long the copy of an input is kept while the runner has no chunk of its batch: the next chunk
is probably soon claimed."""


class Inputs:
    """Fetches each input once, however many chunks ask; after a failure, again."""

    def __init__(self, services: Services, clock: Callable[[], float] = time.monotonic) -> None:
        self._services = services
        self._clock = clock
        self._fetches: dict[str, asyncio.Task[Path]] = {}
        self._used_at: dict[str, float] = {}

    async def path(self, batch_id: str) -> Path:
        """A local file with the batch's input.

        Raises :class:`~batchyard.errors.StoreError` and :class:`~batchyard.errors.StorageError`.
        """
        self._used_at[batch_id] = self._clock()
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

    async def remove_unused(self, in_use: Collection[str]) -> None:
        """Remove the copies of inputs whose batches have not been ``in_use`` for a while.

        A runner may live for months, and serve more inputs than its disk has room for. What is the
        object itself, and no copy, stays.
        """
        now = self._clock()
        self._used_at |= dict.fromkeys(self._used_at.keys() & set(in_use), now)
        if not all(fetch.done() for fetch in self._fetches.values()):
            return  # one that still runs may have found a copy that is there
        unused = {each for each, at in self._used_at.items() if now - at >= KEPT_SECONDS}
        paths = {each: fetch.result() for each, fetch in self._fetches.items() if _has_path(fetch)}
        # Two batches may have the same input.
        kept = {path for each, path in paths.items() if each not in unused}
        # Nothing is awaited before the last copy has lost its name, so no new fetch finds it.
        removed = [
            _renamed(path)
            for path in {paths[each] for each in unused & paths.keys()} - kept
            if path.is_relative_to(self._services.spool)
        ]
        for each in unused:
            del self._used_at[each]
            self._fetches.pop(each, None)
        for path in filter(None, removed):
            await in_thread(path.unlink, missing_ok=True)

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


def _has_path(fetch: asyncio.Task[Path]) -> bool:
    return not fetch.cancelled() and fetch.exception() is None


def _renamed(path: Path) -> Path | None:
    """Where a file is that is about to be removed, which may take long for a large one."""
    with contextlib.suppress(OSError):
        return path.replace(path.with_name(f"{path.name}.unused"))
    return None
