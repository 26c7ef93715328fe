"""expire-files: deletes files whose time is over. On the control pool, once an hour."""

from __future__ import annotations

from prefect import flow
from prefect.states import Completed, State

from batchyard.files import retention
from flows.process.worker import worker_services


@flow(name="expire-files", persist_result=False)
async def expire_files() -> State:
    """Delete expired files, and objects that nothing refers to."""
    async with worker_services() as services:
        expired, swept = await retention.clean_up(services)
    return Completed(
        message=f"{expired.files:,} files of {expired.bytes:,} bytes expired, "
        f"{swept.objects:,} objects of {swept.bytes:,} bytes swept"
    )
