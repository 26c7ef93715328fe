"""A client deletes its file: the row is marked, then the bytes go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.errors import StorageError
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import FileRecord

log = event_logger(__name__)


async def delete_file(services: Services, tenant: str, file_id: str) -> FileRecord:
    """Delete the file. It is no longer found; its bytes are deleted unless a batch reads them.

    A batch that runs keeps its input: the sweep wipes that once the batch has ended. Raises
    :class:`~batchyard.errors.RecordNotFound`, for a second time too.
    """
    files = services.store.files
    file = await files.delete(file_id, tenant=tenant)
    # In this order: a batch that is created from now on finds no file.
    is_read = await files.is_input(file.id)
    if not is_read and not await files.storage_keys([file.storage_key]):
        try:
            await services.storage.delete(file.storage_key)
        except StorageError as error:
            # The client has what it asked for, and the sweep finds what is left.
            log.warning("file.bytes_left", error, file=file.id)
    return file
