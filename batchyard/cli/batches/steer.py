"""``batchyard pause``, ``unpause`` and ``priority``: when a batch runs, not whether."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from batchyard.cli.batches.batch_view import batch_object, status_words
from batchyard.cli.terminal import options
from batchyard.cli.terminal.as_json import OBJECT, print_object
from batchyard.cli.terminal.offline import offline_services
from batchyard.steps.create.create import check_priority

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.store import BatchRecord, BatchSchedule


def pause(
    batch_id: Annotated[str, options.BATCH], as_json: Annotated[bool, OBJECT] = False
) -> None:
    """Start no more requests of a batch until it is unpaused. Its completion window continues."""
    asyncio.run(_steer(lambda schedule: schedule.pause(batch_id), as_json))


def unpause(
    batch_id: Annotated[str, options.BATCH], as_json: Annotated[bool, OBJECT] = False
) -> None:
    """Continue a paused batch."""
    asyncio.run(_steer(lambda schedule: schedule.unpause(batch_id), as_json))


def priority(
    batch_id: Annotated[str, options.BATCH],
    value: Annotated[
        int,
        typer.Argument(metavar="N", help="The highest number runs first."),
    ],
    as_json: Annotated[bool, OBJECT] = False,
) -> None:
    """Set a batch's priority within its tenant. It applies from the batch's next chunk."""
    check_priority(value)
    asyncio.run(_steer(lambda schedule: schedule.set_priority(batch_id, value), as_json))


async def _steer(change: Callable[[BatchSchedule], Awaitable[BatchRecord]], as_json: bool) -> None:
    async with offline_services() as services:
        batch = await change(services.store.batch_schedule)
    if as_json:
        print_object(batch_object(batch))
    else:
        typer.echo(f"{status_words(batch)}, priority {batch.priority}")
