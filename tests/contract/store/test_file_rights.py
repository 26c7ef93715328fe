"""A file of SQLite that this process may not use, for a while: another user owns it, or its disk
can only be read.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import StoreAccessDenied
from batchyard.services.patience import PASSING
from batchyard.store import open_store
from tests.contract.store.samples import new_batch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import Store


@pytest.fixture
async def store(empty_database: Path, tmp_path: Path) -> AsyncIterator[Store]:
    path = shutil.copy(empty_database, tmp_path)
    async with open_store(f"sqlite:///{path}") as opened:
        yield opened


async def test_a_connection_that_only_reads_is_replaced(store: Store) -> None:
    """Opened while the file could only be read, it would refuse all that is written to it."""

    async def only_read(connection: AsyncConnection) -> None:
        await connection.exec_driver_sql("PRAGMA query_only = 1")

    await store.database.read(only_read)
    with pytest.raises(StoreAccessDenied, match="check its owner and mode"):
        await store.batches.create(new_batch())
    await store.batches.create(new_batch())


async def test_a_file_that_cannot_be_opened_is_waited_for(store: Store) -> None:
    """No batch is stopped for it, and no line fails."""

    async def open_another(connection: AsyncConnection) -> None:
        await connection.exec_driver_sql("ATTACH '/no/such/folder/batchyard.db' AS another")

    with pytest.raises(PASSING, match="unable to open database"):
        await store.database.read(open_another)
