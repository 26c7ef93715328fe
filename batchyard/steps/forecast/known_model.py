"""What the database knows of a model, for estimates: its speed, hours and lengths of answers."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.errors import StoreError
from batchyard.logs import event_logger
from batchyard.processes.threads import in_thread
from batchyard.schedule.hours import ALWAYS, Hours, OpenTime
from batchyard.services.machine.secret_key import key_file, read_secret_keys
from batchyard.steps.forecast.forecast import capacity_of
from batchyard.steps.forecast.known_lengths import KnownLengths, nothing_learned, read_lengths
from batchyard.store import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.settings import Settings
    from batchyard.steps.estimate import Estimate
    from batchyard.store import RateRecord, Store

log = event_logger(__name__)

_STORE_PATIENCE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Known:
    """What the database knows of a model's engine."""

    rate: RateRecord | None = None
    """How fast the model was seen to run; None: it was not."""
    hours: Hours = ALWAYS
    now: float = 0.0
    """The time, by the clock that the hours go by."""

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of one engine; None: not measured."""
        return None if self.rate is None else self.rate.tokens_per_second or None

    def seconds_for(self, found: Estimate) -> float | None:
        """How long a file takes on one engine that has nothing else to do, loading included.

        None: not known.
        """
        if self.rate is None or self.tokens_per_second is None:
            return None
        one = capacity_of(self.rate)
        amount = one.amount(found.planned_tokens, found.planned_work, found.planned_prompts)
        return amount / one.rate + (self.rate.load_seconds or 0.0)

    def done_in(self, found: Estimate) -> float | None:
        """In how many seconds it is done, if that begins now; None: not known, or never."""
        seconds = self.seconds_for(found)
        if seconds is None:
            return None
        later = OpenTime(self.hours, self.now).later(0.0, seconds)
        return later if math.isfinite(later) else None


async def known_of(settings: Settings, model: str) -> Known:
    """What is known of the model; nothing where there is no database, or nothing in it.

    It creates no database and changes none. Raises :class:`~batchyard.errors.StoreError`.
    """
    async with _store_if_there(settings) as store:
        return Known() if store is None else await known_in(store, settings, model)


async def known_in(store: Store, settings: Settings, model: str) -> Known:
    """What this database knows of the model. Raises :class:`~batchyard.errors.StoreError`."""
    rate = await store.rates.get(model, settings.pool_of(model))
    return Known(rate, *await store.engine_hours.of(model))


async def learned_lengths(settings: Settings, tenant: str, model: str) -> KnownLengths:
    """How long the tenant's answers of the model were; nothing where there is no database.

    It creates no database and no key. Where the database refuses, nothing is known either.
    """
    try:
        async with _store_if_there(settings) as store:
            if store is not None:
                return await read_lengths(store, tenant, model)
    except StoreError as error:
        log.warning("lengths.not_read", error, tenant=tenant)
    return await nothing_learned(model)


@asynccontextmanager
async def _store_if_there(settings: Settings) -> AsyncIterator[Store | None]:
    url = settings.database
    if url.startswith("sqlite:///") and not await in_thread(
        Path(url.removeprefix("sqlite:///")).exists
    ):
        yield None
        return
    has_keys = settings.secret_key is not None or await in_thread(key_file(settings).exists)
    keys = await in_thread(read_secret_keys, settings) if has_keys else []
    async with open_store(url, keys=keys, patience_seconds=_STORE_PATIENCE_SECONDS) as store:
        yield store
