"""Which runners to start and which to drain: a plan from what is wanted and what there is.

Pure: the caller reads the database and Prefect, and carries the decision out. Whatever it sees
in between, the same view gives the same decision, so that two schedulers decide alike.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RUNNERS_PER_MODEL = 8
"""So many runners one model gets in a pool that has no limit of its own."""

_WORTH_SECONDS = 60.0
"""A further runner must have this long to do, or twice the time that it takes to load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """A model that has open chunks, or is live. Times are Unix seconds by the database's clock."""

    model: str
    pool: str
    free_chunks: int
    leased_chunks: int
    remaining_tokens: float
    deadline: float
    """The earliest of its batches."""
    served_at: float | None = None
    """When it last had a runner, as far as is known. None: not since it has work."""
    is_background: bool = False
    """All of it can wait for every model of which that is not so."""
    may_start: bool = True
    """False: its last runners got nowhere, and the next one has to wait."""
    is_live: bool = False
    """It takes live requests as well: it has a runner also without chunks, and its last one is not
    drained for another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRunner:
    """A runner that exists or is about to: it has a place in its pool.

    One that is leaving, or whose process is gone, is draining: it keeps its place and serves
    no batch.
    """

    model: str
    pool: str
    runner_id: str | None = None
    """None: only a flow run so far, which cannot be drained."""
    is_draining: bool = False
    started_at: float = 0.0
    ready_at: float | None = None
    """When its model was loaded. None: it is loading."""
    waits_for_live: bool = False
    """It does not end by itself when there are no chunks."""


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
    and the waiting one has not been served for as long. A runner that waits for live requests for
    a model that is wanted no more is drained at once.

    Models with nothing but background batches get the places that all others leave, and of these
    runners one is drained at once for each that another model would start.
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


class _Worth(IntEnum):
    """What a runner is used for. The least is drained first."""

    IDLE = 0
    """The runner is used for nothing."""
    BACKGROUND = 1
    """Background batches. For others of these it goes only once it has served for long enough."""
    NEW_BACKGROUND = 2
    """Background batches, and not for long."""
    WORKING = 3


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
        self._wanted_places = 0
        """Runners of other than background work for which there is no place."""

    def starts(self, rates: Mapping[tuple[str, str], Rate]) -> list[str]:
        """The models that get a runner now, one entry for each runner."""
        started: list[str] = []
        for is_background in (False, True):
            work = [each for each in self._work.values() if each.is_background is is_background]
            started += self._starts_of(work, rates)
            if not is_background:
                self._wanted_places = len(self._waiting) + self._wanted_to_grow(work, rates)
        return started

    def _starts_of(
        self, work: Sequence[ModelWork], rates: Mapping[tuple[str, str], Rate]
    ) -> list[str]:
        first = sorted(
            (each for each in work if each.may_start and not self._serving[each.model]),
            # What was swapped out must not take back the place that it has just left.
            key=lambda each: (each.served_at or 0.0, each.deadline, each.model),
        )
        started = [each.model for each in first if self._take_place(each.model)]
        self._waiting += [each.model for each in first if not self._serving[each.model]]
        while (model := self._next_to_grow(work, rates)) is not None and self._take_place(model):
            started.append(model)
        return started

    def drains(self) -> list[str]:
        """The runners that are not needed, and those that make room for models that have none."""
        unwanted = [
            str(runner.runner_id)
            for runner in self._runners
            if runner.waits_for_live
            and runner.runner_id is not None
            and not runner.is_draining
            and runner.model not in self._work
        ]
        return unwanted + [each for each in self._swaps() if each not in unwanted]

    def _swaps(self) -> list[str]:
        if self._limit is None:
            return []
        leaving = [runner.model for runner in self._runners if runner.is_draining]
        # Each that is leaving already makes room for one.
        wanted = min(len(self._waiting), self._limit) - len(leaving)
        # A model that was swapped out is not swapped in again before the others have served.
        entitled = [
            self._work[model]
            for model in self._waiting
            if model not in leaving and (self._work[model].served_at or 0.0) <= self._settled_before
        ]
        of_background = max(self._wanted_places, len(entitled))
        of_working = sum(not each.is_background for each in entitled)
        most = {
            _Worth.IDLE: wanted,
            _Worth.NEW_BACKGROUND: min(self._wanted_places, self._limit) - len(leaving),
            _Worth.BACKGROUND: min(of_background, self._limit) - len(leaving),
            _Worth.WORKING: min(wanted, of_working - len(leaving)),
        }
        drained: list[str] = []
        serving = Counter(self._serving)
        left = [runner for runner in self._runners if self._may_drain(runner)]
        while left := [runner for runner in left if not self._is_kept(runner, serving)]:
            chosen = min(left, key=lambda runner: self._worth(runner, serving))
            left.remove(chosen)
            if len(drained) < most[self._kind(chosen)]:
                serving[chosen.model] -= 1
                drained.append(str(chosen.runner_id))
        return drained

    def _take_place(self, model: str) -> bool:
        if self._places < 1:
            return False
        self._places -= 1
        self._serving[model] += 1
        return True

    def _next_to_grow(
        self, work: Sequence[ModelWork], rates: Mapping[tuple[str, str], Rate]
    ) -> str | None:
        """The next of the models that deserve more runners: fewest runners first, then most
        urgent."""
        first = min(
            (each for each in work if self._missing(each, rates)),
            key=lambda each: (self._serving[each.model], each.deadline, each.model),
            default=None,
        )
        return first.model if first else None

    def _wanted_to_grow(
        self, work: Sequence[ModelWork], rates: Mapping[tuple[str, str], Rate]
    ) -> int:
        return sum(self._missing(each, rates) for each in work)

    def _missing(self, work: ModelWork, rates: Mapping[tuple[str, str], Rate]) -> int:
        """How many further runners the model deserves; one without any waits for its first."""
        serving = self._serving[work.model]
        if not (work.may_start and work.free_chunks and serving):
            return 0
        most = RUNNERS_PER_MODEL if self._limit is None else self._limit
        wanted = wanted_runners(work, rates.get((work.model, work.pool)))
        return max(0, min(most, wanted) - serving)

    def _may_drain(self, runner: ActiveRunner) -> bool:
        if runner.is_draining or runner.runner_id is None:
            return False
        return self._kind(runner) is not _Worth.WORKING or self._is_settled(runner)

    def _is_settled(self, runner: ActiveRunner) -> bool:
        return runner.ready_at is not None and runner.ready_at <= self._settled_before

    def _kind(self, runner: ActiveRunner) -> _Worth:
        work = self._work.get(runner.model)
        if work is None:
            return _Worth.IDLE
        if not work.is_background:
            return _Worth.WORKING
        return _Worth.BACKGROUND if self._is_settled(runner) else _Worth.NEW_BACKGROUND

    def _is_kept(self, runner: ActiveRunner, serving: Counter[str]) -> bool:
        """Whether it is the last one of a live model: who calls from outside cannot wait."""
        work = self._work.get(runner.model)
        return work is not None and work.is_live and serving[runner.model] < 2

    def _worth(
        self, runner: ActiveRunner, serving: Counter[str]
    ) -> tuple[_Worth, bool, float, float, str]:
        """What is least is drained first."""
        ready_at = math.inf if runner.ready_at is None else runner.ready_at
        return (
            self._kind(runner),
            serving[runner.model] < 2,
            ready_at,
            runner.started_at,
            str(runner.runner_id),
        )
