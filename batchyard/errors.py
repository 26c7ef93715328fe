"""Every exception that Batchyard raises, and nothing else.

::

    BatchyardError
    ├── SettingsError                 a setting has no usable value
    │   └── WrongSealingKey           no key of this process is one of the database's
    ├── RequestRefused                the request cannot be accepted; names the parameter
    │   ├── QuotaExceeded             the tenant would have too many requests or tokens enqueued
    │   │   ├── BatchLimitExceeded    the tenant would have too many active batches
    │   │   └── StorageLimitExceeded  the tenant would have too many bytes stored
    │   ├── BatchRateExceeded         the tenant creates batches faster than it may
    │   └── WindowUnattainable        by forecast it cannot be done in its completion window
    ├── QueueFull                     a batch waits for room in its tenant's quota
    ├── InputRefused                  the batch's input breaks the format; carries every entry
    ├── InputNotRead                  the process that reads the batch's input does not live
    ├── DatasetRefused                a dataset, its template or its table cannot be made sense of
    ├── KeyExpired                    the API key's end has passed
    ├── UnexpectedError               a defect of Batchyard that occurred in one batch
    ├── IllegalTransition             the lifecycle does not allow this change of status
    ├── StoreError                    the database
    │   ├── RecordNotFound
    │   ├── TransitionConflict        another process changed the row first
    │   ├── IdempotencyConflict       the key was used for another request
    │   ├── OtherTables               the tables are another version's
    │   │   └── OlderTables           they are not migrated yet
    │   ├── TablesInUse               a migration has to wait for those who use the tables
    │   ├── OtherState                the object store was used with a newer, or another, database
    │   ├── LeaseLost                 this epoch no longer owns the batch, chunk or delivery
    │   ├── StoreAccessDenied         user, password, database name or rights are not right
    │   └── StoreUnavailable          *retriable*
    ├── StorageError                  the bytes
    │   ├── ObjectNotFound
    │   ├── ObjectChanged             the remote object is not the one that we began to read
    │   ├── AccessDenied              401 or 403, an expired signature, a file mode
    │   ├── LocationRefused           a URL, path or redirect that is not allowed
    │   ├── ObjectTooLarge
    │   ├── BrokenLine                of an input that passed validation
    │   ├── StorageFull               no space left on the device
    │   └── StorageUnavailable        *retriable*: time-outs, 5xx, unreachable hosts
    ├── DispatchFailed                *retriable*: a call of Prefect's API failed
    │   └── FlowRunNotMade            the work has not begun
    └── EngineError                   inference
        ├── EngineStartFailed         carries the end of the engine's own log
        │   └── EngineNotReady        somebody else's server is away, and may come back
        ├── ModelNotFound             no engine is set up for it
        └── EngineLost                *retriable*: the engine crashed with requests in flight
            └── EngineNotReached      *retriable*: it was lost, and no request is to blame

A message names the thing that failed and says what to do. It never contains a secret: URLs are
shown without their query, and request bodies are not shown.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.batch_error import BatchError


class BatchyardError(Exception):
    """The root of the tree. ``code`` is what a failed batch shows in ``errors.data[].code``."""

    code: ClassVar[str] = "server_error"
    is_retriable: ClassVar[bool] = False


class SettingsError(BatchyardError):
    """A setting has no usable value; the message names the variable."""

    code = "invalid_setting"


class WrongSealingKey(SettingsError):
    """This process has none of the database's keys, so it must not use the database."""


class RequestRefused(BatchyardError):
    """The request cannot be accepted. ``param`` is the parameter that is wrong."""

    def __init__(self, message: str, *, param: str | None, code: str) -> None:
        self.param = param
        self.refusal_code = code
        super().__init__(message)


class QuotaExceeded(RequestRefused):
    """The tenant's quota does not allow it now. ``code`` and ``refusal_code`` are the same."""

    code = "token_limit_exceeded"

    def __init__(self, message: str) -> None:
        super().__init__(message, param=None, code=self.code)


class QueueFull(BatchyardError):
    """The tenant's quota has no room for a batch now, and the batch waits until it has."""


class BatchLimitExceeded(QuotaExceeded):
    """The tenant already has as many active batches as its quota allows."""

    code = "batch_limit_exceeded"


class StorageLimitExceeded(QuotaExceeded):
    """The tenant's files and uploads would have more bytes than its quota allows."""

    code = "storage_limit_exceeded"


class BatchRateExceeded(RequestRefused):
    """The tenant has created as many batches in the last hour as its quota allows."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message, param=None, code=self.code)


class WindowUnattainable(RequestRefused):
    """The batch would probably not be done within its completion window."""

    code = "window_unattainable"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="completion_window", code=self.code)


class KeyExpired(BatchyardError):
    """The API key was valid, until ``expired_at`` (Unix seconds)."""

    code = "invalid_api_key"

    def __init__(self, expired_at: int) -> None:
        self.expired_at = expired_at
        when = datetime.fromtimestamp(expired_at, UTC)
        super().__init__(f"The API key expired on {when:%Y-%m-%d at %H:%M} UTC.")


class InputRefused(BatchyardError):
    """The input file breaks the format. ``entries`` is the (capped) list for ``errors.data``."""

    code = "invalid_request"

    def __init__(self, entries: Sequence[BatchError]) -> None:
        self.entries = tuple(entries)
        first = self.entries[0]
        where = f"line {first.line}: " if first.line is not None else ""
        super().__init__(f"{where}{first.message}")


class InputNotRead(BatchyardError):
    """The process that reads the batch's input was ended again and again, as for lack of memory."""

    code = "input_not_read"


class DatasetRefused(BatchyardError):
    """A dataset cannot be read, its template cannot be used, or no table can be made.

    ``refusal_code`` says which of these.
    """

    code = "invalid_dataset"

    def __init__(self, message: str, *, code: str) -> None:
        self.refusal_code = code
        super().__init__(message)


class UnexpectedError(BatchyardError):
    """A defect of Batchyard. The message says where it occurred, without data of the batch."""


class IllegalTransition(BatchyardError):
    """The lifecycle does not allow this change of status."""


class StoreError(BatchyardError):
    """The database refused or failed."""


class RecordNotFound(StoreError):
    """No such file, batch, chunk, upload, API key, webhook endpoint or delivery."""

    code = "not_found"


class TransitionConflict(StoreError):
    """A compare-and-set write found another status (or epoch) than it expected."""


class IdempotencyConflict(StoreError):
    """The idempotency key belongs to an earlier request that asked for something else."""

    code = "idempotency_conflict"


class OtherTables(StoreError):
    """The database has the tables of another version, so this one must not use it."""

    code = "store_unavailable"


class OlderTables(OtherTables):
    """The database has no tables, or an older version's: `batchyard migrate` makes ours."""


class TablesInUse(StoreError):
    """Processes could not use the tables after the migration, or a transaction uses them now."""


class OtherState(StoreError):
    """The object store was used with a newer state of this database, or with another one.

    Then the database does not know what may be deleted.
    """


class LeaseLost(StoreError):
    """A later epoch owns it, so this owner's unsaved work is discarded."""


class StoreAccessDenied(StoreError):
    """The database does not let this process in, or not do this: user, password or rights.

    With SQLite: by the owner or the mode of its file.
    """

    code = "store_unavailable"


class StoreUnavailable(StoreError):
    """The database cannot be reached, stays locked or only lets read."""

    code = "store_unavailable"
    is_retriable = True


class StorageError(BatchyardError):
    """The object store, a local path or a URL failed."""

    code = "storage_error"
    is_of_input = False
    """Whether it is a place that the user named as the input, and not our object store."""


class ObjectNotFound(StorageError):
    """Nothing is stored under this key, path or URL."""

    code = "object_not_found"


class ObjectChanged(StorageError):
    """The object changed while it was read, so what was read must not be used."""

    code = "object_changed"


class AccessDenied(StorageError):
    """Access was refused: 401, 403, an expired presigned URL, a file mode.

    Also what S3 refuses whatever the object is, such as expired credentials.
    """

    code = "access_denied"


class LocationRefused(StorageError):
    """A URL, path or redirect that Batchyard does not follow."""

    code = "location_refused"


class ObjectTooLarge(StorageError):
    """The object is larger than the limit that the caller gave."""

    code = "file_too_large"


class BrokenLine(StorageError):
    """A line of an input that passed validation is not what it was, or cannot be read."""


class StorageFull(StorageError):
    """There is no space left on the device."""

    code = "storage_full"


class StorageUnavailable(StorageError):
    """A time-out, a 5xx or an unreachable host, after every retry."""

    code = "storage_unavailable"
    is_retriable = True
    wait_seconds = 0.0
    """How long the server has asked to wait, if it has."""


class DispatchFailed(BatchyardError):
    """Prefect's API cannot be reached or refused."""

    code = "dispatch_failed"
    is_retriable = True


class FlowRunNotMade(DispatchFailed):
    """Prefect made no flow run for the work, so it has not begun."""


class EngineError(BatchyardError):
    """The inference engine failed."""

    code = "engine_error"


class EngineStartFailed(EngineError):
    """The engine did not become ready; the message ends with its own log's last lines."""

    code = "engine_start_failed"


class EngineNotReady(EngineStartFailed):
    """A remote engine cannot be reached, or says 5xx: its operator may be restarting it."""


class ModelNotFound(EngineError):
    """The requests name a model for which there is no engine.

    ``remedy`` is for operators only: it names what is theirs.
    """

    code = "model_not_found"

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.remedy = remedy
        super().__init__(message)


class EngineLost(EngineError):
    """The engine was lost with requests in flight."""

    code = "engine_lost"
    is_retriable = True


class EngineNotReached(EngineLost):
    """The engine was lost before a request was sent to it, has the model or our key no more, or has
    lost one of its machines: no request can be the cause."""
