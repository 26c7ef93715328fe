"""``batchyard watch``: follow a batch until it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

from batchyard import intervals
from batchyard.batch.prices import cost_words
from batchyard.cli.batches.batch_view import batch_object
from batchyard.cli.batches.summary import summarise
from batchyard.cli.terminal import options
from batchyard.cli.terminal.as_json import OBJECT, print_object
from batchyard.cli.terminal.exit_status import ExitStatus, batch_status
from batchyard.cli.terminal.offline import offline_services
from batchyard.cli.terminal.progress import ProgressDisplay
from batchyard.cli.terminal.say import say
from batchyard.errors import StoreUnavailable
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.logs.time_words import relative
from batchyard.services.services import Progress

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

_PHASES = {
    BatchStatus.VALIDATING: "validating",
    BatchStatus.IN_PROGRESS: "running",
    BatchStatus.FINALIZING: "publishing",
    BatchStatus.CANCELLING: "cancelling",
}


def watch(
    batch_id: Annotated[str, options.BATCH], as_json: Annotated[bool, OBJECT] = False
) -> None:
    """Show the progress of a batch until it has ended, and then how it ended.

    The exit status is 0 if the batch is completed and at least one request succeeded, else 1.
    Ctrl-C ends only the command: the batch continues.
    """
    try:
        ended = asyncio.run(_watch(batch_id, as_json))
    except KeyboardInterrupt:
        say(
            f"batchyard: The batch continues. To see it again: batchyard watch {batch_id}", err=True
        )
        sys.exit(ExitStatus.INTERRUPTED)
    sys.exit(batch_status(ended))


async def _watch(batch_id: str, as_json: bool) -> BatchRecord:
    async with offline_services() as services:
        batch = await follow(services, batch_id)
        if as_json:
            print_object(batch_object(batch))
        else:
            say(await summarise(services, batch))
        return batch


async def follow(services: Services, batch_id: str) -> BatchRecord:
    """Show the progress on standard error, until the batch has ended.

    Raises :class:`~batchyard.errors.RecordNotFound`.
    """
    batch, now = await _look(services, batch_id)
    if batch.status not in TERMINAL:
        with ProgressDisplay() as display:
            while batch.status not in TERMINAL:
                display(_progress(batch, now))
                await asyncio.sleep(intervals.LOOK_SECONDS)
                # While the database is away, nothing new is known, and the batch is what counts.
                with contextlib.suppress(StoreUnavailable):
                    batch, now = await _look(services, batch_id)
            if batch_status(batch):
                display.fail()
    return batch


async def _look(services: Services, batch_id: str) -> tuple[BatchRecord, float]:
    return await services.store.batches.get(batch_id), await services.store.database.now()


def _progress(batch: BatchRecord, now: float) -> Progress:
    counts = batch.counts
    phase = _PHASES[batch.status]
    if batch.status is not BatchStatus.IN_PROGRESS:
        return Progress(batch.id, phase, message=_message(batch, now))
    done = counts.completed + counts.failed
    return Progress(batch.id, phase, done, counts.total, _message(batch, now))


def _message(batch: BatchRecord, now: float) -> str:
    """Why it stands still or, if it does not, when it will probably be done; what it costs."""
    return ", ".join(filter(None, (_pace(batch, now), cost_words(batch))))


def _pace(batch: BatchRecord, now: float) -> str:
    if batch.paused_at is not None:
        return "paused"
    if batch.wait_reason is not None:
        return f"waits: {batch.wait_reason}"
    if batch.eta_at is not None:
        return f"done {relative(max(0.0, batch.eta_at - now))}"
    return ""
