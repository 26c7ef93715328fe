"""Objects of the object store as local files, for as long as they are read."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.processes.threads import in_thread
from batchyard.storage.file import os_errors_as_ours

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.services.services import Services


@asynccontextmanager
async def local_copy(services: Services, key: str) -> AsyncIterator[Path]:
    """A local file with the object's content, for the block; never write to it.

    Where the object store has no local files, it is a new copy, which is deleted afterwards: one
    that stayed would fill the disk of a process that runs for weeks, and a result file that is
    made again under the same key has other content. Raises
    :class:`~batchyard.errors.StorageError`.
    """
    with os_errors_as_ours(str(services.spool)):
        folder = Path(await in_thread(tempfile.mkdtemp, dir=services.spool, prefix="copy-"))
    try:
        yield await services.storage.local_path(key, folder)
    finally:
        await in_thread(shutil.rmtree, folder, ignore_errors=True)
