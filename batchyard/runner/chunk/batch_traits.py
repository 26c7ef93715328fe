"""What holds for all requests of a batch: from its row, its tenant and the settings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from batchyard.engine.base import BatchTraits
from batchyard.services.cache_salt import cache_salt_of
from batchyard.services.patience import patiently

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.results.output_rules import OnInvalidOutput
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

_MOST_BATCHES: Final = 512
"""That are remembered: a runner may live for months."""


class BatchFacts(NamedTuple):
    """What is the same for all chunks of a batch."""

    traits: BatchTraits
    """What its requests carry into the engine."""
    on_invalid_output: OnInvalidOutput | None
    """When an answer is bad; None: it never is."""
    plan_key: str


class TraitsOfBatches:
    """Those of the batches that one runner serves, remembered. ``on_first`` gets each batch when
    it is read, once."""

    def __init__(
        self, services: Services, on_first: Callable[[BatchRecord], Awaitable[None]]
    ) -> None:
        self._services = services
        self._on_first = on_first
        self._traits: dict[str, BatchFacts] = {}

    async def of(self, batch_id: str) -> BatchFacts:
        """Those of one batch. Raises what the store raises, if it does so for long."""
        if batch_id not in self._traits:
            batches = self._services.store.batches
            batch = await patiently(lambda: batches.get(batch_id), "a batch")
            await self._on_first(batch)
            salting = partial(cache_salt_of, self._services, batch.tenant)
            salt = await patiently(salting, "a cache salt")
            is_awaited = batch.is_parent or batch.part_of is not None
            traits = BatchTraits(cache_salt=salt, is_awaited=is_awaited)
            while len(self._traits) >= _MOST_BATCHES:
                del self._traits[next(iter(self._traits))]
            self._traits[batch_id] = BatchFacts(
                traits, batch.options.on_invalid_output, str(batch.plan_key)
            )
        return self._traits[batch_id]
