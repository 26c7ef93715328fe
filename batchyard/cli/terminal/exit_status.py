"""The exit status of each command: one table, for programs that call `batchyard`."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from batchyard import errors
from batchyard.lifecycle import BatchStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.store import BatchRecord


class ExitStatus(IntEnum):
    """What a command's exit status means. Statuses of signals are 128 and the signal's number."""

    DONE = 0
    FAILED = 1
    WRONG_COMMAND_LINE = 2
    REFUSED = 3
    NOT_FOUND = 4
    AWAY = 5
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS: Final[Mapping[ExitStatus, str]] = {
    ExitStatus.DONE: "The command has done what was asked.",
    ExitStatus.FAILED: "It failed: for example the batch did not end as completed, none of its "
    "requests succeeded, an engine did not start, a setting has no usable value, or a disk is "
    "full.",
    ExitStatus.WRONG_COMMAND_LINE: "The command line is wrong.",
    ExitStatus.REFUSED: "It was refused: the input or a value is not valid, a quota or access "
    "right does not allow it, or the batch's status does not.",
    ExitStatus.NOT_FOUND: "There is no such batch, file, object, key, endpoint or model.",
    ExitStatus.AWAY: "The database, the object store, Prefect or another server cannot be "
    "reached, or the database is not migrated yet: try again later.",
    ExitStatus.INTERRUPTED: "Ctrl-C ended it.",
    ExitStatus.TERMINATED: "SIGTERM ended it.",
}

OF_ERRORS: Final[Mapping[type[errors.BatchyardError], ExitStatus]] = {
    errors.BatchyardError: ExitStatus.FAILED,
    errors.RequestRefused: ExitStatus.REFUSED,
    errors.InputRefused: ExitStatus.REFUSED,
    errors.DatasetRefused: ExitStatus.REFUSED,
    errors.IllegalTransition: ExitStatus.REFUSED,
    errors.TransitionConflict: ExitStatus.REFUSED,
    errors.IdempotencyConflict: ExitStatus.REFUSED,
    errors.AccessDenied: ExitStatus.REFUSED,
    errors.LocationRefused: ExitStatus.REFUSED,
    errors.ObjectTooLarge: ExitStatus.REFUSED,
    errors.RecordNotFound: ExitStatus.NOT_FOUND,
    errors.ObjectNotFound: ExitStatus.NOT_FOUND,
    errors.ModelNotFound: ExitStatus.NOT_FOUND,
    errors.OlderTables: ExitStatus.AWAY,
    errors.StoreUnavailable: ExitStatus.AWAY,
    errors.StorageUnavailable: ExitStatus.AWAY,
    errors.DispatchFailed: ExitStatus.AWAY,
}
"""The status of an error class and of those below it that are not named here."""


def exit_status(error: BaseException) -> ExitStatus:
    """The exit status of a command that this error has ended."""
    found = (OF_ERRORS[each] for each in type(error).__mro__ if each in OF_ERRORS)
    return next(found, ExitStatus.FAILED)


def batch_status(batch: BatchRecord) -> ExitStatus:
    """The exit status of a command that has waited for the batch's end."""
    is_done = batch.status is BatchStatus.COMPLETED and batch.completed > 0
    return ExitStatus.DONE if is_done else ExitStatus.FAILED


def in_a_line() -> str:
    """All of them, for the help."""
    words = (f"{each.value} {each.name.lower().replace('_', ' ')}" for each in ExitStatus)
    return f"Exit status: {', '.join(words)}."
