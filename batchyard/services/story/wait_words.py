"""Why a batch waits after a temporary error, for everybody who may see the batch."""

from __future__ import annotations

from typing import Final

from batchyard.errors import (
    AccessDenied,
    BatchyardError,
    DispatchFailed,
    ObjectNotFound,
    QueueFull,
    StorageError,
    StorageFull,
    StoreError,
)

_WORDS: Final[tuple[tuple[type[BatchyardError], str], ...]] = (
    (QueueFull, "earlier batches fill the tenant's quota"),
    (StorageFull, "the object store has no room"),
    (AccessDenied, "the object store refuses access"),
    (ObjectNotFound, "an object of it is not in the object store"),
    (StorageError, "the object store cannot be reached, or fails"),
    (StoreError, "the database cannot be reached, or refuses"),
    (DispatchFailed, "Prefect cannot be reached, or refuses"),
)
"""The first class that an error has."""
TOO_SLOW: Final = "the object store takes finished lines too slowly"


def why_it_waits(error: BaseException) -> str:
    """In a few words that name no object, place or host: they may be another tenant's.

    The error itself is in the log.
    """
    known = (words for kind, words in _WORDS if isinstance(error, kind))
    return next(known, f"its last step failed ({type(error).__name__}) and is repeated")
