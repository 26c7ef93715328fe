"""Which runners to start and which to drain: a plan from what is wanted and what there is.

Pure: the caller reads the database and Prefect, and carries the decision out. Whatever it sees
in between, the same view gives the same decision, so that two schedulers decide alike.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RUNNERS_PER_MODEL = 8
"""So many runners one model gets in a pool that has no limit of its own."""

_WORTH_SECONDS = 60.0
"""A further runner must have this long to do, or twice the time that it takes to load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """A model that has open chunks. Times are Unix seconds by the database's clock."""

    model: str
    pool: str
    free_chunks: int
    leased_chunks: int
    remaining_tokens: float
    deadline: float
    """The earliest of its batches."""
    served_at: float | None = None
    """When it last had a runner, as far as is known. None: not since it has work."""
    may_start: bool = True
    """False: its last runners got nowhere, and the next one has to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRunner:
    """A runner that exists or is about to: it has a place in its pool.

    One that is leaving, or whose process is gone, is draining: it keeps its place and serves
    nobody.
    """

    model: str
    pool: str
    runner_id: str | None = None
    """None: only a flow run so far, which cannot be drained."""
    is_draining: bool = False
    started_at: float = 0.0
    ready_at: float | None = None
    """When its model was loaded. None: it is loading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast one runner of a model was seen to be. None: not measured."""

    tokens_per_second: float | None = None
    load_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """``start``: a (model, pool) for each runner to start. ``drain``: ids of runners."""

    start: list[tuple[str, str]] = field(default_factory=list)
    drain: list[str] = field(default_factory=list)


def plan_runners(
    pools: Mapping[str, int | None],
    demand: Sequence[ModelWork],
    runners: Sequence[ActiveRunner],
    rates: Mapping[tuple[str, str], Rate],
    *,
    now: float,
    swap_seconds: float,
) -> Decision:
    """The runners to start and to drain now.

    ``pools`` has the concurrency limit of each pool, None for none; what is asked of another
    pool waits. ``rates`` go by (model, pool). No pool gets more runners than its limit. Every
    model has one before any has a second; those that were served longest ago go first, then the
    most urgent. Where a model has none and the pool is full, one runner for each such model is
    drained: of a model without work at once, any other once it has served for ``swap_seconds``
    and the waiting one has not been served for as long.
    """
    decision = Decision()
    for pool in sorted(pools):
        plan = _PoolPlan(
            limit=pools[pool],
            work=[work for work in demand if work.pool == pool],
            runners=[runner for runner in runners if runner.pool == pool],
            settled_before=now - swap_seconds,
        )
        decision.start.extend((model, pool) for model in plan.starts(rates))
        decision.drain.extend(plan.drains())
    return decision


def wanted_runners(work: ModelWork, rate: Rate | None) -> int:
    """How many runners the work deserves: at least one, at most one for each open chunk."""
    chunks = work.free_chunks + work.leased_chunks
    if rate is not None and rate.tokens_per_second:
        worth = max(_WORTH_SECONDS, 2 * (rate.load_seconds or 0.0))
        wanted = work.remaining_tokens / rate.tokens_per_second / worth
    else:
        wanted = chunks / 2
    return max(1, math.ceil(min(wanted, chunks)))


class _PoolPlan:
    """One pool's share of the plan. First :meth:`starts`, then :meth:`drains`."""

    def __init__(
        self,
        *,
        limit: int | None,
        work: Sequence[ModelWork],
        runners: Sequence[ActiveRunner],
        settled_before: float,
    ) -> None:
        self._limit = limit
        self._work = {entry.model: entry for entry in work}
        self._runners = runners
        self._settled_before = settled_before
        self._serving = Counter(runner.model for runner in runners if not runner.is_draining)
        self._places = math.inf if limit is None else limit - len(runners)
        self._waiting: list[str] = []

    def starts(self, rates: Mapping[tuple[str, str], Rate]) -> list[str]:
        """The models that get a runner now, one entry for each runner."""
        first = sorted(
            (
                work
                for work in self._work.values()
                if work.may_start and not self._serving[work.model]
            ),
            # What was swapped out must not take back the place that it has just left.
            key=lambda work: (work.served_at or 0.0, work.deadline, work.model),
        )
        started = [work.model for work in first if self._take_place(work.model)]
        self._waiting = [work.model for work in first if not self._serving[work.model]]
        while (model := self._next_to_grow(rates)) is not None and self._take_place(model):
            started.append(model)
        return started

    def drains(self) -> list[str]:
        """The runners that make room for the models that have none."""
        if self._limit is None:
            return []
        leaving = [runner.model for runner in self._runners if runner.is_draining]
        # Each that is leaving already makes room for one.
        wanted = min(len(self._waiting), self._limit) - len(leaving)
        # A model that was swapped out is not swapped in again before the others have served.
        entitled = [
            model
            for model in self._waiting
            if model not in leaving and (self._work[model].served_at or 0.0) <= self._settled_before
        ]
        wanted_of_working = min(wanted, len(entitled) - len(leaving))
        drained: list[str] = []
        serving = Counter(self._serving)
        left = [runner for runner in self._runners if self._may_drain(runner)]
        while left:
            chosen = min(left, key=lambda runner: self._worth(runner, serving))
            if len(drained) >= (wanted_of_working if chosen.model in self._work else wanted):
                break
            left.remove(chosen)
            serving[chosen.model] -= 1
            drained.append(str(chosen.runner_id))
        return drained

    def _take_place(self, model: str) -> bool:
        if self._places < 1:
            return False
        self._places -= 1
        self._serving[model] += 1
        return True

    def _next_to_grow(self, rates: Mapping[tuple[str, str], Rate]) -> str | None:
        """Of the models that deserve more runners: fewest runners first, then most urgent."""
        most = RUNNERS_PER_MODEL if self._limit is None else self._limit
        growing = [
            work
            for work in self._work.values()
            if work.may_start
            and work.free_chunks
            and 0
            < self._serving[work.model]
            < min(most, wanted_runners(work, rates.get((work.model, work.pool))))
        ]
        first = min(
            growing,
            key=lambda work: (self._serving[work.model], work.deadline, work.model),
            default=None,
        )
        return first.model if first else None

    def _may_drain(self, runner: ActiveRunner) -> bool:
        if runner.is_draining or runner.runner_id is None:
            return False
        if runner.model not in self._work:
            return True
        return runner.ready_at is not None and runner.ready_at <= self._settled_before

    def _worth(
        self, runner: ActiveRunner, serving: Counter[str]
    ) -> tuple[bool, bool, float, float, str]:
        """What is least is drained first."""
        ready_at = math.inf if runner.ready_at is None else runner.ready_at
        return (
            runner.model in self._work,
            serving[runner.model] < 2,
            ready_at,
            runner.started_at,
            str(runner.runner_id),
        )
