"""``batchyard reconcile`` and ``expire-files``: run by hand what deployments run on a schedule."""

from __future__ import annotations

import asyncio

import typer
from rich.filesize import decimal

from batchyard.cli.ensure_runner import ensure_runner_if_prefect_is_set
from batchyard.cli.offline import offline_services
from batchyard.control import reconcile as reconciler
from batchyard.files import retention
from batchyard.services.storage_mark import mark_if_due

_FILES_AT_ONCE = 1000


def reconcile() -> None:
    """Stop overdue batches, clean up after crashed runners, and print what was found."""
    asyncio.run(_reconcile())


def expire_files() -> None:
    """Delete expired files and unreferenced objects, and print how many."""
    asyncio.run(_expire_files())


async def _reconcile() -> None:
    async with offline_services() as services:
        found = await reconciler.reconcile(services)
        lines = [f"batches overdue   {len(found.overdue):,}"]
        lines += [f"  {batch.id} {batch.status.value}" for batch in found.overdue]
        lines.append(f"runners lost      {len(found.lost_runners):,}")
        lines += [
            f"  {runner.id} {runner.model or runner.kind.value}" for runner in found.lost_runners
        ]
        lines.append(f"chunks put back   {found.chunks_put_back:,}")
        lines.append(f"batches free      {found.free_batches:,}")
        typer.echo("\n".join(lines))
        await mark_if_due(services)
        if found.free_batches:
            await ensure_runner_if_prefect_is_set(services, "What is free")


async def _expire_files() -> None:
    files = size_bytes = 0
    async with offline_services() as services:
        while True:
            expired = await retention.expire_files(services, _FILES_AT_ONCE)
            files += expired.files
            size_bytes += expired.bytes
            if expired.files < _FILES_AT_ONCE:
                break
        swept = await retention.sweep_orphans(services)
    typer.echo(
        f"files expired     {files:,} ({decimal(size_bytes)})\n"
        f"objects swept     {swept.objects:,} ({decimal(swept.bytes)})\n"
        f"unfinished swept  {swept.unfinished:,}"
    )
