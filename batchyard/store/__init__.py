"""The database is the truth. SQLModel tables and the only writers of state.

One file for each aggregate, over ``database`` (connections and transactions) and ``clock``.
Where an aggregate is large, ``*_rows`` has its table and values, and the plain name its writer.
"""

from batchyard.store.batch_rows import BatchLocations, BatchOptions, BatchRecord, NewBatch
from batchyard.store.batches import Batches
from batchyard.store.chunk_rows import ChunkRecord, ChunkStatus, ChunkSummary, NewChunk
from batchyard.store.chunks import ChunkLease, Chunks, LeaseKey
from batchyard.store.database import Database
from batchyard.store.files import FileRecord, Files, NewFile
from batchyard.store.runners import RunnerRecord, Runners, RunnerStatus
from batchyard.store.sealed import new_sealing_key
from batchyard.store.store import Store, open_store

__all__ = [
    "BatchLocations",
    "BatchOptions",
    "BatchRecord",
    "Batches",
    "ChunkLease",
    "ChunkRecord",
    "ChunkStatus",
    "ChunkSummary",
    "Chunks",
    "Database",
    "FileRecord",
    "Files",
    "LeaseKey",
    "NewBatch",
    "NewChunk",
    "NewFile",
    "RunnerRecord",
    "RunnerStatus",
    "Runners",
    "Store",
    "new_sealing_key",
    "open_store",
]
