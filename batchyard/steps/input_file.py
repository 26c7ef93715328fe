"""Which files a batch may read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.batch_error import BatchError
from batchyard.errors import InputRefused

if TYPE_CHECKING:
    from batchyard.store import BatchRecord, FileRecord


def check_input_file(batch: BatchRecord, file: FileRecord) -> None:
    """Refuse a file of another tenant, and one that has expired, as if it did not exist.

    Raises :class:`~batchyard.errors.InputRefused`, for a file of another purpose too.
    """
    if file.tenant != batch.tenant or (
        file.expires_at is not None and file.expires_at <= batch.created_at
    ):
        raise no_input_file(file.id)
    if file.purpose != "batch":
        raise _refused(
            f"File {file.id} was uploaded with purpose '{file.purpose}': upload it with purpose "
            "'batch'."
        )


def no_input_file(file_id: str) -> InputRefused:
    """The file does not exist, for this batch."""
    return _refused(
        f"Cannot find file {file_id}, or you do not have access to it: upload it, and create the "
        "batch again."
    )


def _refused(message: str) -> InputRefused:
    return InputRefused([BatchError("invalid_request", message, param="file_id")])
