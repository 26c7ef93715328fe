"""The engines: what each has to do, and if it has nothing, why not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from batchyard.page.charts import sparkline
from batchyard.page.words import NOTHING, compact, count, percent, short_duration
from batchyard.store import RunnerStatus

if TYPE_CHECKING:
    from batchyard.page.charts import Sparkline
    from batchyard.store import EngineLoad, RunnerRecord
    from batchyard.store.overview import Engines, ModelQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """A runner with its engine, or a model with work that has none. Texts; empty: not known."""

    model: str
    where: str
    look: str
    state: str
    why: str
    """Why it is idle or not ready; empty: it runs."""
    batches: str = NOTHING
    speed: str = NOTHING
    spark: Sparkline | None = None
    hit_rate: str = NOTHING
    cache_used: str = NOTHING
    running: str = NOTHING
    waiting: str = NOTHING
    window: str = NOTHING


def engine_rows(engines: Engines, now: float) -> list[EngineRow]:
    """Runners first, by model; then the models whose work no runner takes."""
    rows = [
        _row(runner, engines.queues.get(runner.model or ""), engines.batches.get(runner.id, 0), now)
        for runner in engines.runners
    ]
    served = {runner.model for runner in engines.runners}
    rows += [
        EngineRow(
            model=queue.model,
            where="no engine",
            look="waiting",
            state="not running",
            why=_why_none(queue),
        )
        for name, queue in sorted(engines.queues.items())
        if name not in served
    ]
    return rows


def _row(runner: RunnerRecord, queue: ModelQueue | None, batches: int, now: float) -> EngineRow:
    load = runner.load
    look, state, why = _state(runner, queue, now)
    where = (runner.machine or "").partition("@")[0]
    row = EngineRow(
        model=runner.model or NOTHING,
        where=f"{where} · {runner.pool}" if where else runner.pool,
        look=look,
        state=state,
        why=why,
        batches=count(batches),
    )
    return row if load is None or runner.ready_at is None else _loaded(row, load)


def _loaded(row: EngineRow, load: EngineLoad) -> EngineRow:
    return replace(
        row,
        speed=compact(load.speeds[-1]) if load.speeds else NOTHING,
        spark=sparkline(load.speeds, load.every_seconds) if len(load.speeds) > 1 else None,
        hit_rate=percent(load.cached_tokens, load.input_tokens),
        cache_used=NOTHING if load.cache_used is None else percent(load.cache_used, 1),
        running=count(load.running),
        waiting=count(load.waiting),
        window=count(load.window),
    )


def _state(runner: RunnerRecord, queue: ModelQueue | None, now: float) -> tuple[str, str, str]:
    """Its look, its state and, where it does not run requests, why."""
    load = runner.load
    is_busy = load is not None and load.running > 0
    if runner.status is RunnerStatus.DRAINING:
        why = "another model gets its slot" if is_busy else "it ends: another model gets its slot"
        return "waiting", "draining", why
    if runner.ready_at is None:
        return "waiting", "loading", f"loads the model, {short_duration(now - runner.started_at)}"
    if is_busy:
        return "running", "running", ""
    if load is not None and load.waiting:
        return "waiting", "held back", "live traffic: the server's own users go first"
    return "idle", "idle", _why_idle(queue)


def _why_idle(queue: ModelQueue | None) -> str:
    if queue is None:
        return "no work: nothing is open for this model"
    if queue.free:
        return "work is about to start"
    if queue.pausing:
        return "waits a moment after an error"
    if queue.paused and not queue.leased:
        return "paused: all its batches are"
    return "no work: all of it is with other engines" if queue.leased else "no work"


def _why_none(queue: ModelQueue) -> str:
    if queue.wait_reason:
        return queue.wait_reason
    if queue.free:
        return "no slot yet: a runner is started for it"
    if queue.pausing:
        return "waits a moment after an error"
    return "paused: all its batches are" if queue.paused else "no work that may run now"
