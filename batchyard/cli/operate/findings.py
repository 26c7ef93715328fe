"""What a check of `batchyard doctor` finds: how bad it is, and in words what to do."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.errors import (
    DispatchFailed,
    StorageUnavailable,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from batchyard.errors import BatchyardError

_MAY_CONNECT = "and that this machine may connect to it."


class Level(enum.StrEnum):
    """How bad it is; only what failed makes the exit status 1."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found, and what to do."""

    level: Level
    what: str
    text: str


def ok(what: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(Level.OK, what, text)


def warning(what: str, text: str) -> Finding:
    """A check that found something which works now and may fail later."""
    return Finding(Level.WARNING, what, text)


def failed(what: str, text: str) -> Finding:
    """A check that found something which does not work."""
    return Finding(Level.FAILED, what, text)


def with_advice(error: BatchyardError) -> str:
    """Its message. If that says only what has happened, also where to look."""
    match error:
        case StoreUnavailable():
            advice = f"Check that it runs, that BATCHYARD_DATABASE_URL is right, {_MAY_CONNECT}"
        case StorageUnavailable():
            advice = (
                "Check that it runs, that BATCHYARD_STORAGE and its variables (for s3:// "
                "AWS_ENDPOINT_URL, for az:// AZURE_STORAGE_ACCOUNT_NAME, for gs:// "
                f"GOOGLE_SERVICE_ACCOUNT_KEY) are right, {_MAY_CONNECT}"
            )
        case DispatchFailed() if error.__cause__ is not None:
            advice = f"Check that it runs, that PREFECT_API_URL is right, {_MAY_CONNECT}"
        case _:
            return str(error)
    return f"{str(error).rstrip('.')}. {advice}"
