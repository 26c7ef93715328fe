"""The database is the truth. SQLModel tables and the only writers of state.

A package for each aggregate, over ``database`` (connections and transactions), ``aggregate``
(methods that are one transaction each), ``columns`` and ``leasing`` (what tables and leases are).
Where an aggregate is large, ``rows`` has its tables and records, and the plain name its writer.
"""

from batchyard.batch.batch_options import DeliveryKind
from batchyard.database.connection_limits import ConnectionLimits, connection_limits
from batchyard.database.database import PATIENCE_SECONDS, Database
from batchyard.database.page import Order, Page
from batchyard.database.reseal import Resealed, reseal
from batchyard.database.sealed import new_sealing_key
from batchyard.database.sealing_proof import SealingProof
from batchyard.store.batch.batches import Batches
from batchyard.store.batch.completions import CompletionRecord, Completions, NewCompletion
from batchyard.store.batch.history import BatchHistory, BatchPoint
from batchyard.store.batch.leases import BatchLease, BatchLeases, BatchSnapshot
from batchyard.store.batch.schedule import BatchSchedule
from batchyard.store.batch.status_changes import StatusChange, StatusChanges
from batchyard.store.chunk.chunks import ChunkAction, Chunks
from batchyard.store.chunk.demand import ModelDemand
from batchyard.store.chunk.places import Host
from batchyard.store.delivery.deliveries import Deliveries
from batchyard.store.file.files import Files
from batchyard.store.leases import Leases
from batchyard.store.overview import Overview
from batchyard.store.response.responses import Responses
from batchyard.store.runner.live_engines import LiveEngine, LiveEngines
from batchyard.store.runner.rates import RateRecord, Rates
from batchyard.store.runner.runners import (
    EngineLoad,
    RunnerKind,
    RunnerRecord,
    Runners,
    RunnerStatus,
)
from batchyard.store.schema import upgrade
from batchyard.store.storage_mark import Mark, StorageMark
from batchyard.store.store import Store, open_store
from batchyard.store.tables.audit import AuditRecord, act_as, acting_as
from batchyard.store.tables.batch import BatchLocations, BatchRecord, NewBatch
from batchyard.store.tables.batch_options import BatchOptions, Kept, UrlFacts
from batchyard.store.tables.chunk import ChunkLease, ChunkStatus, ChunkSummary, LeaseKey, NewChunk
from batchyard.store.tables.delivery import (
    FILE_EVENTS,
    WEBHOOK_GIVEN_UP,
    Attempt,
    AttemptRecord,
    DeliveryClaim,
    DeliveryLimits,
    DeliveryRecord,
    DeliveryStatus,
)
from batchyard.store.tables.file import FileRecord, HiddenFor, NewFile
from batchyard.store.tables.response import NewResponse, ResponseKind, ResponseRecord, Waiting
from batchyard.store.tables.upload import NewPart, NewUpload, PartRecord, UploadRecord
from batchyard.store.tables.webhook import EndpointWithSecret, WebhookEndpointRecord
from batchyard.store.tenant.api_keys import ApiKeyRecord, ApiKeys, Holder, NewKey
from batchyard.store.tenant.idempotency import NEW_FILES, Idempotency, IdempotencyKey
from batchyard.store.tenant.lengths import FORGOTTEN_SECONDS, LearnedLengths
from batchyard.store.tenant.sessions import Sessions
from batchyard.store.tenant.tenants import Quota, Tenants, TenantUsage, WhenFull
from batchyard.store.tenant.usage import LiveUse, UsageRecord, UsageTotal
from batchyard.store.upload.uploads import Uploads
from batchyard.store.webhook.endpoints import WebhookEndpoints

__all__ = [
    "FILE_EVENTS",
    "FORGOTTEN_SECONDS",
    "NEW_FILES",
    "PATIENCE_SECONDS",
    "WEBHOOK_GIVEN_UP",
    "ApiKeyRecord",
    "ApiKeys",
    "Attempt",
    "AttemptRecord",
    "AuditRecord",
    "BatchHistory",
    "BatchLease",
    "BatchLeases",
    "BatchLocations",
    "BatchOptions",
    "BatchPoint",
    "BatchRecord",
    "BatchSchedule",
    "BatchSnapshot",
    "Batches",
    "ChunkAction",
    "ChunkLease",
    "ChunkStatus",
    "ChunkSummary",
    "Chunks",
    "CompletionRecord",
    "Completions",
    "ConnectionLimits",
    "Database",
    "Deliveries",
    "DeliveryClaim",
    "DeliveryKind",
    "DeliveryLimits",
    "DeliveryRecord",
    "DeliveryStatus",
    "EndpointWithSecret",
    "EngineLoad",
    "FileRecord",
    "Files",
    "HiddenFor",
    "Holder",
    "Host",
    "Idempotency",
    "IdempotencyKey",
    "Kept",
    "LearnedLengths",
    "LeaseKey",
    "Leases",
    "LiveEngine",
    "LiveEngines",
    "LiveUse",
    "Mark",
    "ModelDemand",
    "NewBatch",
    "NewChunk",
    "NewCompletion",
    "NewFile",
    "NewKey",
    "NewPart",
    "NewResponse",
    "NewUpload",
    "Order",
    "Overview",
    "Page",
    "PartRecord",
    "Quota",
    "RateRecord",
    "Rates",
    "Resealed",
    "ResponseKind",
    "ResponseRecord",
    "Responses",
    "RunnerKind",
    "RunnerRecord",
    "RunnerStatus",
    "Runners",
    "SealingProof",
    "Sessions",
    "StatusChange",
    "StatusChanges",
    "StorageMark",
    "Store",
    "TenantUsage",
    "Tenants",
    "UploadRecord",
    "Uploads",
    "UrlFacts",
    "UsageRecord",
    "UsageTotal",
    "Waiting",
    "WebhookEndpointRecord",
    "WebhookEndpoints",
    "WhenFull",
    "act_as",
    "acting_as",
    "connection_limits",
    "new_sealing_key",
    "open_store",
    "reseal",
    "upgrade",
]
