"""The row of a runner that serves every batch of its model, and what it reports there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from batchyard.errors import EngineStartFailed, RecordNotFound, StoreError
from batchyard.logs import event_logger
from batchyard.plan.lengths import PROMPT_WORK
from batchyard.processes.beside import beside
from batchyard.services.patience import patiently
from batchyard.store import RunnerKind, RunnerStatus

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from batchyard.runner.meters.pace import Pace
    from batchyard.runner.meters.prompt_cost import PromptCost
    from batchyard.services.services import Services
    from batchyard.store import EngineLoad

log = event_logger(__name__)


class Drained(EngineStartFailed):
    """Another runner has, or gets, the place of one that was loading its model."""


async def loaded(start: Coroutine[Any, Any, None], draining: asyncio.Event) -> None:
    """Let the engine start, unless its runner is to drain first: then :class:`Drained` is raised.

    Raises what ``start`` does.
    """
    async with (
        beside(start, name="start") as starting,
        beside(draining.wait(), name="draining") as told,
    ):
        await asyncio.wait((starting, told), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            raise Drained("it has to give up its place.")
        starting.result()


@dataclass(frozen=True, slots=True)
class Registration:
    """A registered runner: the scheduler counts on it, and may ask it to drain."""

    services: Services
    model: str
    id: str

    @classmethod
    async def create(cls, services: Services, model: str, flow_run_id: str | None) -> Self:
        """Register a runner that is loading. Raises :class:`~batchyard.errors.StoreError`."""
        record = await services.store.runners.register(
            kind=RunnerKind.CHUNKS,
            model=model,
            pool=services.settings.pool,
            flow_run_id=flow_run_id,
            machine=services.settings.this_machine.identity,
        )
        return cls(services, model, record.id)

    async def loaded(self, load_seconds: float) -> None:
        """Record that the engine is ready, and how long it took to load.

        Waits while the database cannot be reached: what was loaded for minutes is kept. Raises
        :class:`~batchyard.errors.StoreError` if the database refuses.
        """
        store, pool = self.services.store, self.services.settings.pool
        record = partial(store.rates.record, self.model, pool, load_seconds=load_seconds)
        await patiently(partial(store.runners.ready, self.id), "a runner's start")
        await patiently(record, "a model's load time")

    async def must_drain(self, answered: int, load: EngineLoad | None = None) -> bool:
        """Send the heartbeat; whether another runner has or gets this one's place.

        ``answered``: requests answered so far; ``load``: what its engine has to do. Raises
        :class:`~batchyard.errors.StoreError`.
        """
        try:
            status = await self.services.store.runners.heartbeat(
                self.id, answered=answered, load=load
            )
        except RecordNotFound:
            # Its heartbeat was missing for so long that another runner has its place.
            status = RunnerStatus.DRAINING
        return status is RunnerStatus.DRAINING

    async def prompt_weight(self) -> float:
        """What a token of a prompt cost in earlier runs; a guess if the database refuses."""
        try:
            rate = await self.services.store.rates.get(self.model, self.services.settings.pool)
        except StoreError as error:
            log.warning("runner.rate_not_read", error, runner=self.id)
            return PROMPT_WORK
        return PROMPT_WORK if rate is None or rate.prompt_weight is None else rate.prompt_weight

    async def report(self, tokens_per_second: float, pace: Pace, cost: PromptCost) -> None:
        """Record the throughput for forecasts, and what else was measured with it.

        Raises :class:`~batchyard.errors.StoreError`.
        """
        pool = self.services.settings.pool
        rates = self.services.store.rates
        await rates.record(
            self.model,
            pool,
            tokens_per_second=tokens_per_second,
            work_per_second=pace.work_rate,
            answer_tokens_per_second=pace.answer_speed,
            prompt_tokens_per_second=pace.prompt_rate,
            prompt_weight=cost.weight if cost.is_measured else None,
        )

    async def retire(self, answered: int) -> None:
        """Record the end of the runner and what it answered. Logs an error of the database."""
        try:
            await self.services.store.runners.retire(self.id, answered=answered)
        except StoreError as error:
            # The reconciler marks it as lost. What ends the runner must be raised, not this.
            log.warning("runner.not_retired", error, runner=self.id)
