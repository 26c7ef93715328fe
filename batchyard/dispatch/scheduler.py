"""The scheduler: starts runners of chunks, drains them, and says which models cannot be served.

The process that holds the named lease ``scheduler`` acts. If two processes believe for a moment
that they hold it, they still start each runner once, because the flow runs of a model in a pool
follow one another and each has one successor. They drain each runner once, because draining is
compare-and-set.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.dispatch.engine_blocks import EngineBlocks
from batchyard.dispatch.live_models import with_live
from batchyard.dispatch.lost_runs import end_lost_runs
from batchyard.dispatch.model_watch import ModelWatch
from batchyard.dispatch.prefect_api import RUN_CHUNKS
from batchyard.dispatch.queued_runs import QueuedRuns
from batchyard.dispatch.run_states import NO_SLOT
from batchyard.dispatch.runner_view import Pool, active_runners, why_behind, why_queued
from batchyard.dispatch.scheduler_lease import SchedulerLease
from batchyard.errors import DispatchFailed, EngineStartFailed, ModelNotFound, SettingsError
from batchyard.logs import event_logger
from batchyard.schedule.schedule import ActiveRunner, ModelWork, Rate, plan_runners
from batchyard.store import RunnerKind, RunnerStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from batchyard.dispatch.prefect_answers import FlowRun
    from batchyard.dispatch.prefect_api import PrefectApi
    from batchyard.errors import EngineError
    from batchyard.settings import Settings
    from batchyard.store import RunnerRecord, Store
    from batchyard.store.chunk.demand import ModelDemand

log = event_logger(__name__)

_END_LOST_SECONDS = 10.0
"""So long a flow run may take to end, once its runner has retired, before it counts as lost."""
_LIMIT_SECONDS = 10.0
"""So long a pool's limit counts as known: people change it seldom, and a look comes often."""
_NO_SLOT_SECONDS = 30.0
"""No runner is started in a pool for so long after one found every slot of its machine taken."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A model that no machine can serve. ``error`` says why, for its batches."""

    model: str
    error: EngineError


class RunnerScheduler:
    """Starts and drains runners for every model that has work or is live.

    Call :meth:`look` every few seconds.

    If Prefect cannot be reached or has lost its database, that is logged once, and the next call
    tries again.
    """

    def __init__(self, api: PrefectApi, store: Store, settings: Settings, owner: str) -> None:
        self._api = api
        self._store = store
        self._settings = settings
        self._lease = SchedulerLease(store, owner)
        self._blocks = EngineBlocks(api, store)
        self._queued_runs = QueuedRuns(api, settings)
        self._closed: dict[str, str] = {}
        """Why models that have work wait for their engines' hours."""
        self._behind: dict[str, str] = {}
        """Why models that have only background batches wait for a place."""
        self._queued: dict[str, str] = {}
        """Why models whose runners are jobs of a cluster wait for a node."""
        self._unread: dict[str, str] = {}
        """Why Prefect does not tell of the pools of models that have no runner."""
        self._watches: dict[str, ModelWatch] = {}
        self._troubles: dict[str, str] = {}
        self._suspects: set[str] = set()
        self._lost_ended_at = -math.inf
        self._no_slot_until: dict[str, float] = {}
        self._pool_limits: dict[str, tuple[float, int | None]] = {}
        """Until when each pool's limit counts as known, and the limit."""
        self.is_acting = False
        """Whether it was our turn at the last look."""

    async def look(self) -> Sequence[GivenUp]:
        """Start and drain runners as needed, if this process holds the scheduler's lease.

        Returns the models that no machine can serve: all runners failed for the time that the
        settings give, and none is left or about to start; or the model has no engine block and
        never had one. Each is returned once. The caller stops its batches before the next call; a
        model that has work again by then is tried again. Raises
        :class:`~batchyard.errors.StoreError`.
        """
        self.is_acting = await self._is_ours()
        if not self.is_acting:
            self._watches.clear()
            return ()
        async with self._lease.going_on():
            return await self._look()

    async def _look(self) -> Sequence[GivenUp]:
        now = await self._store.database.now()
        await self._blocks.look(now)
        live = self._blocks.live
        demand = with_live(await self._store.chunks.demand(), live)
        models = {entry.model for entry in demand}
        self._closed = await self._blocks.closed(models, now)
        needed = None if live is None else live | (models - self._closed.keys())
        await self._end_lost(needed, now)
        self._watch(demand)
        # Runners that are no longer wanted are drained too, unless Prefect has not said which are.
        waiting = frozenset() if live is None else await self._store.live_engines.runners()
        wanted = {self._settings.pool_of(entry.model) for entry in demand}
        if waiting:
            wanted |= {row.pool for row in await self._runners() if row.id in waiting}
        pools = await self._read_pools(wanted, now)
        self._unread = await self._unread_of(demand, pools)
        if not pools:
            return ()
        # The database after Prefect: a flow run that has become a runner since is counted once.
        rows = await self._runners()
        self._queued = why_queued(pools, rows)
        unsure = await self._unsure(live or (), [row for row in rows if row.id in waiting], now)
        if unsure:
            live = unsure.union(live or ())
            demand = with_live(demand, unsure)
            self._watch(demand)
        ended = await self._ended(pools, rows)
        now = await self._store.database.now()
        # Prefect may have taken its time.
        if ended is None or not await self._is_ours():
            return ()
        left = [row for row in rows if row.flow_run_id not in ended]
        runners = active_runners(
            pools, left, waiting, start_seconds=self._settings.runner_start_seconds
        )
        active = {runner.model for runner in runners}
        given_up = await self._count_ends(demand, ended, active, now)
        self._note(runners, pools, rows, now)
        work = self._work(demand, {entry.model for entry in given_up}, live or frozenset(), now)
        decision = plan_runners(
            self._limits(pools, runners, now),
            work,
            runners,
            await self._rates(),
            now=now,
            swap_seconds=self._settings.swap_seconds,
        )
        # The runner of a live model stays, and lets its batches wait.
        closed = {row.id for row in rows if row.model in self._closed.keys() - (live or set())}
        await self._drain([row for row in rows if row.id in closed.union(decision.drain)])
        await self._start(decision.start, pools, now)
        self._behind = why_behind(work, runners, decision)
        for entry in given_up:
            self._watches.pop(entry.model, None)
        return given_up

    @property
    def again_after_seconds(self) -> float | None:
        """When to call :meth:`look` again to end the runs that it missed; None: there are none."""
        return _END_LOST_SECONDS if self._suspects else None

    @property
    def waits(self) -> dict[str, str]:
        """Why models that have work are not served now; models that are served are not named."""
        reasons = {model: watch.reason for model, watch in self._watches.items() if watch.reason}
        return self._behind | self._unread | reasons | self._queued | self._closed

    async def close(self) -> None:
        """Release the scheduler's lease."""
        await self._lease.release()

    async def _is_ours(self) -> bool:
        return await self._lease.claim()

    # -- what there is ----------------------------------------------------------------------

    async def _end_lost(self, needed: Collection[str] | None, now: float) -> None:
        # A clock that was set back must not keep this from happening until it has caught up; the
        # same holds for all that is limited by time here.
        if 0 <= now - self._lost_ended_at < _END_LOST_SECONDS:
            return
        self._lost_ended_at = now
        try:
            await end_lost_runs(
                self._api,
                self._store,
                silent_seconds=self._settings.lease_seconds,
                start_seconds=self._settings.runner_start_seconds,
                seen=self._suspects,
            )
            if needed is not None:
                await self._queued_runs.cancel_unneeded(needed, now)
        except (DispatchFailed, SettingsError) as error:
            self._say("lost flow runs", error)
        else:
            self._troubles.pop("lost flow runs", None)

    async def _read_pools(self, names: set[str], now: float) -> dict[str, Pool]:
        """The pools that Prefect can tell us about."""
        pools: dict[str, Pool] = {}
        for name in sorted(names):
            deployment = f"{RUN_CHUNKS}/{name}"
            try:
                limit = await self._limit_of(name, now)
                active = await self._api.active(deployment)
            except (DispatchFailed, SettingsError) as error:
                self._say(name, error)
                continue
            self._troubles.pop(name, None)
            pools[name] = Pool(active, limit)
        return pools

    async def _unread_of(
        self, demand: Sequence[ModelDemand], pools: Collection[str]
    ) -> dict[str, str]:
        pool_of = {entry.model: self._settings.pool_of(entry.model) for entry in demand}
        unread = {model: pool for model, pool in pool_of.items() if pool not in pools}
        served = {row.model for row in await self._runners()} if unread else set()
        return {
            model: self._troubles[pool] for model, pool in unread.items() if model not in served
        }

    async def _limit_of(self, pool: str, now: float) -> int | None:
        until, limit = self._pool_limits.get(pool, (now, None))
        if not now < until <= now + _LIMIT_SECONDS:
            limit = await self._api.pool_limit(pool)
            self._pool_limits[pool] = (now + _LIMIT_SECONDS, limit)
        return limit

    async def _ended(
        self, pools: Mapping[str, Pool], rows: Sequence[RunnerRecord]
    ) -> dict[str, FlowRun] | None:
        """The flow runs that we know of and that have ended; None: Prefect does not say."""
        known = {run for watch in self._watches.values() for run in watch.runs}
        known.update(row.flow_run_id for row in rows if row.flow_run_id)
        known.difference_update(run.id for pool in pools.values() for run in pool.active)
        try:
            found = await self._api.find(known)
        except (DispatchFailed, SettingsError) as error:
            self._say("flow runs", error)
            return None
        self._troubles.pop("flow runs", None)
        return {run.id: run for run in found if run.has_ended}

    async def _unsure(
        self, live: Collection[str], waiting: Sequence[RunnerRecord], now: float
    ) -> frozenset[str]:
        """The models of ``waiting`` that are not ``live``, unless Prefect says so once more.

        A Prefect that has lost its database names no model until `batchyard deploy` has made the
        blocks again, and the pools after them: blocks that were read before the pools may be those
        of the empty database.
        """
        found = {row.model or "" for row in waiting if row.status is RunnerStatus.LIVE}
        ending = found.difference(live)
        has_said = bool(ending) and await self._blocks.look_again(now)
        is_certain = has_said and self._blocks.live == frozenset(live)
        return frozenset() if is_certain else frozenset(ending)

    async def _runners(self) -> list[RunnerRecord]:
        return await self._store.runners.live(
            kind=RunnerKind.CHUNKS, within_seconds=self._settings.lease_seconds
        )

    async def _rates(self) -> dict[tuple[str, str], Rate]:
        return {
            (row.model, row.pool): Rate(
                tokens_per_second=row.tokens_per_second, load_seconds=row.load_seconds
            )
            for row in await self._store.rates.all()
        }

    # -- what we remember -------------------------------------------------------------------

    def _watch(self, demand: Sequence[ModelDemand]) -> None:
        """A model without work is forgotten: what happens later is not held against it.

        Nor is the time in which its engine's hours are over.
        """
        known = {
            model: watch for model, watch in self._watches.items() if model not in self._closed
        }
        self._watches = {
            entry.model: known.get(entry.model) or ModelWatch.of(entry) for entry in demand
        }

    async def _count_ends(
        self,
        demand: Sequence[ModelDemand],
        ended: Mapping[str, FlowRun],
        active: set[str],
        now: float,
    ) -> list[GivenUp]:
        """Count the runners that ended. ``active``: models that have one, or are to have one."""
        given_up: list[GivenUp] = []
        for entry in demand:
            watch = self._watches[entry.model]
            watch.see(entry)
            for flow_run_id in sorted(watch.runs & ended.keys()):
                watch.runs.discard(flow_run_id)
                await self._count_end(entry.model, ended[flow_run_id], now)
            if entry.model not in active and (reason := await self._verdict(entry.model)):
                given_up.append(reason)
        return given_up

    async def _count_end(self, model: str, run: FlowRun, now: float) -> None:
        if run.state_name == NO_SLOT:
            self._no_slot_until[self._settings.pool_of(model)] = now + _NO_SLOT_SECONDS
            return
        watch = self._watches[model]
        watch.count_end(run, await self._store.runners.of_flow_run(run.id), now)
        log.warning(
            "runner.ended",
            watch.reason,
            model=model,
            flow_run=run.id,
            state=run.state_name or run.state,
        )

    async def _verdict(self, model: str) -> GivenUp | None:
        watch = self._watches[model]
        # A model that was served once may be again, though Prefect has forgotten its block.
        if watch.is_unknown and not await self._store.rates.knows(model):
            if await self._is_offered(model):
                return None
            return GivenUp(model, ModelNotFound(watch.reason))
        if watch.has_failed_for(self._settings.give_up_seconds):
            return GivenUp(model, EngineStartFailed(watch.verdict(model)))
        return None

    async def _is_offered(self, model: str) -> bool:
        """Whether some engine block serves the model; True where Prefect does not say."""
        try:
            return any(offered.name == model for offered in await self._api.offered_models())
        except (DispatchFailed, SettingsError):
            return True

    def _note(
        self,
        runners: Sequence[ActiveRunner],
        pools: Mapping[str, Pool],
        rows: Sequence[RunnerRecord],
        now: float,
    ) -> None:
        """Remember which models were served, and which runners to watch: none that is drained."""
        for runner in runners:
            if (watch := self._watches.get(runner.model)) is not None:
                watch.served_at = now
        draining = {row.flow_run_id for row in rows if row.status is RunnerStatus.DRAINING}
        for watch in self._watches.values():
            watch.runs -= draining
            # If the clock was set back, the model would wait until this moment comes again.
            watch.served_at = watch.served_at and min(watch.served_at, now)
        for pool in pools.values():
            for run in pool.active:
                watch_of = self._watches.get(run.model or "")
                if watch_of is not None and run.id not in draining:
                    watch_of.runs.add(run.id)

    def _say(self, about: str, error: Exception) -> None:
        """Log a trouble once, until it changes."""
        self._lease.note(error)
        if self._troubles.get(about) != str(error):
            self._troubles[about] = str(error)
            log.warning("scheduler.waiting", error, about=about)

    # -- what to do -------------------------------------------------------------------------

    def _work(
        self,
        demand: Sequence[ModelDemand],
        given_up: set[str],
        live: Collection[str],
        now: float,
    ) -> list[ModelWork]:
        return [
            ModelWork(
                model=entry.model,
                pool=self._settings.pool_of(entry.model),
                free_chunks=0 if entry.model in self._closed else entry.foremost.free,
                leased_chunks=entry.foremost.leased,
                remaining_tokens=entry.foremost.remaining_tokens,
                deadline=entry.deadline,
                is_background=entry.is_background and entry.model not in live,
                served_at=self._watches[entry.model].served_at,
                may_start=self._watches[entry.model].may_start(now),
                is_live=entry.model in live,
            )
            for entry in demand
            if entry.model not in given_up
            and (entry.model in live or entry.model not in self._closed)
        ]

    def _limits(
        self, pools: Mapping[str, Pool], runners: Sequence[ActiveRunner], now: float
    ) -> dict[str, int | None]:
        """Prefect's limits; a pool whose engine slots are all taken gets nothing more."""
        limits = {name: pool.limit for name, pool in pools.items()}
        active = Counter(runner.pool for runner in runners)
        for name, until in self._no_slot_until.items():
            limit = limits.get(name)
            is_taken = now < until <= now + _NO_SLOT_SECONDS
            if name in limits and is_taken and (limit is None or limit > active[name]):
                limits[name] = active[name]
        return limits

    async def _drain(self, rows: Sequence[RunnerRecord]) -> None:
        for row in rows:
            if row.status is not RunnerStatus.LIVE:
                continue
            if await self._store.runners.drain(row.id):
                log.info("runner.draining", model=row.model, runner=row.id)
                for watch in self._watches.values():
                    watch.runs.discard(row.flow_run_id or "")

    async def _start(
        self, wanted: Sequence[tuple[str, str]], pools: Mapping[str, Pool], now: float
    ) -> None:
        for (model, pool), count in Counter(wanted).items():
            try:
                await self._start_runners(model, pool, count, pools[pool].active)
            except (DispatchFailed, SettingsError) as error:
                self._say(f"start on {pool}", error)
                # It may be the model's name that Prefect does not take: the others are next.
                self._watches[model].count_refusal(error, now)
                return
            self._troubles.pop(f"start on {pool}", None)

    async def _start_runners(
        self, model: str, pool: str, count: int, active: Sequence[FlowRun]
    ) -> None:
        deployment = f"{RUN_CHUNKS}/{pool}"
        last = await self._api.latest(deployment, tag=model)
        if last is not None and last.is_active and last.id not in {run.id for run in active}:
            # Another scheduler was faster; the next look counts what it has started.
            return
        for _ in range(count):
            last = await self._api.start_after(
                deployment, {"model": model}, name=model, last=last.id if last else None
            )
            self._watches[model].runs.add(last.id)
            log.info("runner.started", model=model, pool=pool, flow_run=last.id)
