"""One attempt to deliver a webhook or an e-mail. Not Prefect's `@task` (ADR 74).

It belongs to the flow run of the batch, and a task of Prefect to the one that calls it. It is tried
again by the outbox, not from here.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from batchyard.delivery.deliver import AttemptFailed
from batchyard.errors import RecordNotFound, StoreError
from batchyard.services.story import story
from tasks.task_run import RecordedTask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.services.services import Services
    from batchyard.store import DeliveryRecord


async def deliver(
    services: Services, attempt: Callable[[], Awaitable[None]], delivery: DeliveryRecord
) -> None:
    """Make the attempt, as a task run of the batch's flow run and with a line in its log.

    One that is not accepted is a failed task run, no more.
    """
    what, number = delivery.kind.word, delivery.attempts + 1
    flow_run_id = await _flow_run_of(services, delivery)
    name = f"{what} {delivery.event_type} (attempt {number})"
    if flow_run_id is None:
        # Among the attempts of other batches.
        name += f" of {delivery.response_id or delivery.batch_id}"
    outcome = "was accepted"
    async with RecordedTask(what, name, flow_run_id=flow_run_id) as run:
        try:
            await attempt()
            run.message = outcome
        except AttemptFailed as error:
            run.has_failed, run.message = True, str(error)
            outcome = f"was not accepted: {error}"
    if flow_run_id is not None:
        story.notified(delivery.batch_id, flow_run_id, f"{name} {outcome}")


async def _flow_run_of(services: Services, delivery: DeliveryRecord) -> str | None:
    """The batch's; None where it has none, or the database does not say: the current one then."""
    with suppress(StoreError, RecordNotFound):
        return (await services.store.batches.get(delivery.batch_id)).flow_run_id
    return None
