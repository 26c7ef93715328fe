"""``batchyard reconcile`` and ``expire-files``: run by hand what deployments run on a schedule."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from batchyard.cli.terminal.as_json import OBJECT, print_object
from batchyard.cli.terminal.ensure_runner import ensure_runner_if_prefect_is_set
from batchyard.cli.terminal.offline import offline_services
from batchyard.control import reconcile as reconciler
from batchyard.files import retention
from batchyard.services.restore.storage_mark import mark_if_due

if TYPE_CHECKING:
    from collections.abc import Iterator


def reconcile(as_json: Annotated[bool, OBJECT] = False) -> None:
    """Stop overdue batches, clean up after crashed runners, and print what was found."""
    asyncio.run(_reconcile(as_json))


def expire_files(as_json: Annotated[bool, OBJECT] = False) -> None:
    """Delete expired files and unreferenced objects, and print how many."""
    asyncio.run(_expire_files(as_json))


async def _reconcile(as_json: bool) -> None:
    async with offline_services() as services:
        found = await reconciler.reconcile(services)
        if as_json:
            print_object(
                {
                    "batches_overdue": [batch.id for batch in found.overdue],
                    "runners_lost": [runner.id for runner in found.lost_runners],
                    "chunks_put_back": found.chunks_put_back,
                    "batches_free": found.free_batches,
                }
            )
        else:
            typer.echo("\n".join(_found_lines(found)))
        await mark_if_due(services)
        if found.free_batches:
            await ensure_runner_if_prefect_is_set(services, "What is free")


def _found_lines(found: reconciler.Reconciled) -> Iterator[str]:
    yield f"batches overdue   {len(found.overdue):,}"
    yield from (f"  {batch.id} {batch.status.value}" for batch in found.overdue)
    yield f"runners lost      {len(found.lost_runners):,}"
    for runner in found.lost_runners:
        yield f"  {runner.id} {runner.model or runner.kind.value}"
    yield f"chunks put back   {found.chunks_put_back:,}"
    yield f"batches free      {found.free_batches:,}"


async def _expire_files(as_json: bool) -> None:
    async with offline_services() as services:
        expired, swept = await retention.clean_up(services)
    if as_json:
        expired_object = {"files_expired": expired.files, "bytes_expired": expired.bytes}
        print_object({**expired_object, "swept": asdict(swept)})
        return
    typer.echo(
        f"files expired     {expired.files:,} ({decimal(expired.bytes)})\n"
        f"objects deleted   {swept.objects:,} ({decimal(swept.bytes)})\n"
        f"unfinished files  {swept.unfinished:,}"
    )
