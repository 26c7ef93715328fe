"""When each running batch will probably be done, from what was measured and what is open."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from batchyard.errors import WindowUnattainable
from batchyard.logs import event_logger
from batchyard.schedule.forecast import Capacity, OpenWork, forecast
from batchyard.schedule.hours import ALWAYS, why_closed
from batchyard.store import RunnerKind, RunnerStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, RateRecord

log = event_logger(__name__)


async def update_forecasts(services: Services) -> list[BatchRecord]:
    """Write the forecast of every batch in progress; returns those that are newly at risk."""
    work = await services.store.batch_schedule.open_work()
    now = await services.store.database.now()
    etas = forecast(work, await _capacity(services, {item.model for item in work}), now)
    at_risk = await services.store.batch_schedule.record_forecast(etas)
    for batch in at_risk:
        log.warning(
            "batch.at_risk", batch=batch.id, late_seconds=(batch.eta_at or 0) - batch.expires_at
        )
    return at_risk


async def check_window(services: Services, new: OpenWork, completion_window: str) -> None:
    """Refuse work that by forecast, or by its engine's hours, would be done after its deadline.

    Only if ``admission`` is ``refuse`` and the batch is not a background batch. There is a forecast
    only if the model's speed is known; ``new`` may name an adapter of it. Raises
    :class:`~batchyard.errors.WindowUnattainable`.
    """
    if services.settings.admission == "off" or new.is_background:
        return
    # What is known of adapters will do: of an unknown name nothing is forecast.
    new = replace(new, model=(await services.find_offer(())).model_of(new.model))
    if late := await late_hours(services, new.model, new.deadline):
        raise WindowUnattainable(f"{late[0].upper()}{late[1:]}: give it a longer one.")
    work = [*await services.store.batch_schedule.open_work(), new]
    now = await services.store.database.now()
    eta_at = forecast(work, await _capacity(services, [new.model]), now).get(new.batch_id)
    if eta_at is not None and eta_at > new.deadline:
        raise WindowUnattainable(
            f"By forecast the batch would be done in {_hours(eta_at - now)}, and its completion "
            f"window of {completion_window} ends in {_hours(new.deadline - now)}: give it a "
            "longer one, make it smaller, or submit it when less is waiting."
        )


async def late_hours(services: Services, model: str, deadline: float) -> str | None:
    """What to say of a batch whose window ends before batches may use its engine; None: nothing."""
    hours, now = await services.store.engine_hours.of(model)
    opening = hours.opening(now)
    if opening is not None and opening < deadline:
        return None
    return f"{why_closed(model, hours, now)}, when the completion window of the batch has ended"


async def _capacity(services: Services, models: Sequence[str] | set[str]) -> dict[str, Capacity]:
    """The runners that serve each model now, or one that would first have to load it."""
    store, settings = services.store, services.settings
    live = await store.runners.live(kind=RunnerKind.CHUNKS, within_seconds=settings.lease_seconds)
    ready = Counter(
        runner.model
        for runner in live
        if runner.ready_at is not None and runner.status is RunnerStatus.LIVE
    )
    rates = {(rate.model, rate.pool): rate for rate in await store.rates.all()}
    hours = await store.engine_hours.all()
    capacity = {}
    for model in models:
        rate = rates.get((model, settings.pool_of(model)))
        if rate is not None and rate.tokens_per_second:
            capacity[model] = replace(
                capacity_of(rate),
                runners=max(1, ready[model]),
                loading_seconds=0.0 if ready[model] else rate.load_seconds or 0.0,
                hours=hours.get(model, ALWAYS),
            )
    return capacity


def capacity_of(rate: RateRecord) -> Capacity:
    """One runner of this rate that is ready; of a model that was never measured it does nothing."""
    return Capacity(
        rate.tokens_per_second or 0.0,
        1,
        answer_tokens_per_second=rate.answer_tokens_per_second,
        work_per_second=rate.work_per_second,
        prompt_tokens_per_second=rate.prompt_tokens_per_second,
        prompt_weight=rate.prompt_weight,
    )


def _hours(seconds: float) -> str:
    minutes = max(0, math.ceil(seconds / 60))
    return f"{minutes // 60} h {minutes % 60} min"
