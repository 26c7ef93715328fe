"""One attempt to deliver a webhook or an e-mail. It is tried again by the outbox, not from here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed

from batchyard.delivery.deliver import AttemptFailed
from batchyard.store import DeliveryKind

if TYPE_CHECKING:
    from batchyard.store import DeliveryRecord


async def deliver(attempt: Callable[[], Awaitable[None]], delivery: DeliveryRecord) -> None:
    """Make the attempt as a task run; one that is not accepted is a failed task run, no more."""
    what = "e-mail of " if delivery.kind is DeliveryKind.EMAIL else ""
    await _deliver(
        f"{what}{delivery.event_type}",
        delivery.batch_id,
        delivery.attempts + 1,
        attempt,
        return_state=True,
    )


@task(
    name="deliver",
    task_run_name="{event} for {batch_id} (attempt {number})",
    retries=0,
    persist_result=False,
    cache_policy=NO_CACHE,
)
async def _deliver(
    event: str,  # noqa: ARG001 - its run's name
    batch_id: str,  # noqa: ARG001 - its run's name
    number: int,  # noqa: ARG001 - its run's name
    attempt: Callable[[], Awaitable[None]],
) -> Any:
    try:
        await attempt()
    except AttemptFailed as error:
        # Raised, Prefect would log a traceback for what is a message.
        return Failed(message=str(error))
    return None
