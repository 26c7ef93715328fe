"""The life of a batch without Prefect: the steps of process-batch and run-chunks, called bare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.control.batch_lease import LeasedBatch, Step, batch_lease
from batchyard.runner.run import Runner
from batchyard.services.leases.held_batches import BatchEnded
from batchyard.steps.collect.collect import collect_results
from batchyard.steps.collect.publish import publish_results
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.steps.prepare.prepare import preparing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.services.services import Services
    from batchyard.steps.prepare.prepare import Prepared
    from batchyard.store import BatchRecord


async def prepare_batch(services: Services, batch_id: str, epoch: int = 0) -> Prepared | None:
    """Validate the input, then plan it; None when the batch is past validation already."""
    async with preparing(services, batch_id, epoch) as preparation:
        if preparation is None:
            return None
        await preparation.validate()
        return await preparation.plan()


async def run_chunks(services: Services, model: str, *, batch_id: str | None = None) -> int:
    """Serve a model's chunks until there is nothing left to do; the requests answered."""
    async with Runner(services, model, batch_id=batch_id) as runner:
        return await runner.serve()


async def take_to_its_end(
    services: Services,
    batch_id: str,
    run: Callable[[LeasedBatch], Awaitable[object]] = LeasedBatch.until_run,
) -> BatchRecord:
    """The batch, ended. ``run`` has its chunks run; without it, others do."""
    try:
        async with batch_lease(services, batch_id) as lease:
            while (step := await lease.next_step()) is not Step.NOTHING:
                async with lease.doing(step):
                    match step:
                        case Step.PREPARE:
                            await lease.turn_to_fetch()
                            await lease.turn(size_bytes=await fetch_input(services, batch_id))
                            await prepare_batch(services, batch_id, lease.epoch)
                        case Step.RUN:
                            await run(lease)
                        case Step.FINISH:
                            await lease.turn()
                            collected = await collect_results(services, batch_id, lease.epoch)
                            await publish_results(services, batch_id, collected)
    except BatchEnded:
        pass
    return await services.store.batches.get(batch_id)
