"""The store as one object: it is opened, passed on and closed. No SQL here."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.batch.prices import NO_PRICES, Prices
from batchyard.database.database import PATIENCE_SECONDS, Database
from batchyard.database.sealing_proof import SealingProof
from batchyard.store.batch.batches import Batches
from batchyard.store.batch.completions import Completions
from batchyard.store.batch.effects import BatchEffects
from batchyard.store.batch.history import BatchHistory
from batchyard.store.batch.leases import BatchLeases
from batchyard.store.batch.messages import MessageBatches
from batchyard.store.batch.places import BatchPlaces
from batchyard.store.batch.queue_room import QueueRoom
from batchyard.store.batch.schedule import BatchSchedule
from batchyard.store.batch.status_changes import StatusChanges
from batchyard.store.chain.chains import Chains
from batchyard.store.chunk.chunks import Chunks
from batchyard.store.clock_steps import ClockSteps
from batchyard.store.delivery.deliveries import Deliveries
from batchyard.store.figures import FiguresReader
from batchyard.store.file.files import Files
from batchyard.store.leases import Leases
from batchyard.store.overview import Overview
from batchyard.store.response.responses import Responses
from batchyard.store.runner.hours import EngineHours
from batchyard.store.runner.live_engines import LiveEngines
from batchyard.store.runner.rates import Rates
from batchyard.store.runner.runners import Runners
from batchyard.store.schema import check, upgrade
from batchyard.store.storage_mark import StorageMark
from batchyard.store.tables.audit import AuditLog
from batchyard.store.tenant.api_keys import ApiKeys
from batchyard.store.tenant.cache_salts import CacheSalts
from batchyard.store.tenant.idempotency import Idempotency
from batchyard.store.tenant.lengths import LearnedLengths
from batchyard.store.tenant.sessions import Sessions
from batchyard.store.tenant.tenants import Tenants
from batchyard.store.tenant.usage import Usage
from batchyard.store.upload.uploads import Uploads
from batchyard.store.webhook.endpoints import WebhookEndpoints

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


@dataclass(frozen=True, slots=True)
class Store:
    """The writers of one open database, one for each aggregate."""

    database: Database
    api_keys: ApiKeys
    sessions: Sessions
    files: Files
    uploads: Uploads
    batches: Batches
    message_batches: MessageBatches
    batch_places: BatchPlaces
    batch_effects: BatchEffects
    queue_room: QueueRoom
    batch_leases: BatchLeases
    batch_schedule: BatchSchedule
    batch_history: BatchHistory
    completions: Completions
    responses: Responses
    chains: Chains
    chunks: Chunks
    runners: Runners
    live_engines: LiveEngines
    leases: Leases
    clock_steps: ClockSteps
    rates: Rates
    lengths: LearnedLengths
    engine_hours: EngineHours
    tenants: Tenants
    cache_salts: CacheSalts
    usage: Usage
    idempotency: Idempotency
    webhook_endpoints: WebhookEndpoints
    deliveries: Deliveries
    status_changes: StatusChanges
    sealing_proof: SealingProof
    figures: FiguresReader
    overview: Overview
    storage_mark: StorageMark
    audit: AuditLog


@asynccontextmanager
async def open_store(
    url: str,
    *,
    keys: Sequence[str] = (),
    migrate: bool = False,
    patience_seconds: float = PATIENCE_SECONDS,
    prices: Prices = NO_PRICES,
) -> AsyncIterator[Store]:
    """The store at ``sqlite:///path`` or ``postgresql://user@host/name``.

    ``keys`` seal locations and secrets: the first seals, all open; see
    :func:`~.sealed.new_sealing_key`.
    ``migrate`` brings the tables up to date first, however many processes start at once.
    ``patience_seconds`` is how long one call waits for a busy or absent database before
    :class:`~batchyard.errors.StoreUnavailable`. ``prices``: what batches that end here cost.

    Raises :class:`~batchyard.errors.SettingsError` for a URL or key that cannot be used, and
    :class:`~batchyard.errors.OtherTables` where the tables are not this version's.
    """
    if migrate:
        await upgrade(url, patience_seconds=patience_seconds)
    database = Database(url, keys=keys, patience_seconds=patience_seconds)
    try:
        await check(database)
        yield Store(
            database=database,
            api_keys=ApiKeys(database),
            sessions=Sessions(database),
            files=Files(database),
            uploads=Uploads(database),
            batches=Batches(database, prices),
            message_batches=MessageBatches(database),
            batch_places=BatchPlaces(database, prices),
            batch_effects=BatchEffects(database),
            queue_room=QueueRoom(database),
            batch_leases=BatchLeases(database),
            batch_schedule=BatchSchedule(database),
            batch_history=BatchHistory(database),
            completions=Completions(database),
            responses=Responses(database),
            chains=Chains(database),
            chunks=Chunks(database),
            runners=Runners(database),
            live_engines=LiveEngines(database),
            leases=Leases(database),
            clock_steps=ClockSteps(database),
            rates=Rates(database),
            lengths=LearnedLengths(database),
            engine_hours=EngineHours(database),
            tenants=Tenants(database),
            cache_salts=CacheSalts(database),
            usage=Usage(database, prices),
            idempotency=Idempotency(database),
            webhook_endpoints=WebhookEndpoints(database),
            deliveries=Deliveries(database),
            status_changes=StatusChanges(database),
            sealing_proof=SealingProof(database),
            figures=FiguresReader(database),
            overview=Overview(database, prices),
            storage_mark=StorageMark(database),
            audit=AuditLog(database),
        )
    finally:
        await database.close()
