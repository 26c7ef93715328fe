"""What the scheduler sees: pools of Prefect, and the runners that there are or will be in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.schedule.schedule import ActiveRunner, Decision, ModelWork
from batchyard.store import RunnerStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from batchyard.dispatch.prefect_answers import FlowRun
    from batchyard.store import RunnerRecord


@dataclass(frozen=True, slots=True)
class Pool:
    """What Prefect says of a pool."""

    active: list[FlowRun]
    limit: int | None


def active_runners(
    pools: Mapping[str, Pool],
    rows: Sequence[RunnerRecord],
    waiting: Collection[str],
    *,
    start_seconds: float,
) -> list[ActiveRunner]:
    """Runners, and flow runs that are not yet one, or no longer: each once."""
    runs = {run.id: (name, run) for name, pool in pools.items() for run in pool.active}
    merged = []
    for row in rows:
        _, run = runs.pop(row.flow_run_id or "", (None, None))
        is_cancelling = run is not None and run.state == "CANCELLING"
        merged.append(
            ActiveRunner(
                model=row.model or "",
                pool=row.pool,
                runner_id=row.id,
                is_draining=row.status is RunnerStatus.DRAINING or is_cancelling,
                started_at=row.started_at,
                ready_at=row.ready_at,
                waits_for_live=row.id in waiting,
            )
        )
    merged += [
        ActiveRunner(
            model=run.model or "",
            pool=name,
            is_draining=run.state == "CANCELLING" or run.is_late(pending_seconds=start_seconds),
        )
        for name, run in runs.values()
    ]
    return merged


def why_behind(
    work: Sequence[ModelWork], runners: Sequence[ActiveRunner], decision: Decision
) -> dict[str, str]:
    """Why models with nothing but background batches have no runner, though all is well."""
    served = {runner.model for runner in runners if not runner.is_draining}
    served.update(model for model, _ in decision.start)
    return {
        each.model: f"other models use the pool {each.pool}: it is a background batch"
        for each in work
        if each.is_background and each.model not in served
    }


def why_queued(pools: Mapping[str, Pool], rows: Sequence[RunnerRecord]) -> dict[str, str]:
    """Why models have no runner that have asked a cluster for one, in the cluster's words."""
    served = {row.model for row in rows}
    return {
        run.model: run.message
        for pool in pools.values()
        for run in pool.active
        if run.is_in_queue and run.model is not None and run.model not in served
    }
