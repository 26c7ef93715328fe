"""The runner: leases that it keeps, loses and gives back, and when it ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from batchyard import intervals
from batchyard.control.reconcile import Watch, reconcile
from batchyard.engine.base import Occupancy
from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import EngineLost, StoreUnavailable
from batchyard.metrics.metric_families import INFLIGHT, LEASES_LOST, QUEUED, READY, REFUSING, WINDOW
from batchyard.runner.run import Runner
from batchyard.services import patience
from batchyard.store import ChunkStatus, RunnerKind
from tests.contract.store.samples import chunks_in
from tests.lifecycle import run_chunks
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line
from tests.steps.outages import Outage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchyard.store import ChunkLease

SOON_SECONDS = 20.0
LEASE_SECONDS = 20.0
MODEL = "stub-model"


def lines(count: int, name: str = "id") -> list[dict[str, Any]]:
    return [chat_line(f"{name}-{n}", f"question {n} of {name}") for n in range(count)]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while not is_so():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)


@pytest.fixture
async def pool(yard: Yard) -> AsyncIterator[PoolRunner]:
    yard.set(runner_idle_seconds=3600.0, lease_seconds=LEASE_SECONDS)
    runner = PoolRunner(yard)
    yield runner
    await runner.cancel()


class PoolRunner:
    """A runner of the pool as a task; it has no batch of its own."""

    def __init__(self, yard: Yard) -> None:
        self.yard = yard
        self.task: asyncio.Task[int] | None = None

    def start(self, **engine: Any) -> StubEngine:
        stub = StubEngine(MODEL, **engine)
        self.yard.use(stub)
        self.task = asyncio.create_task(run_chunks(self.yard.services, MODEL))
        return stub

    async def ended(self) -> int:
        assert self.task is not None
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            return await self.task

    async def cancel(self) -> None:
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])


async def done(yard: Yard, batch_id: str, chunks: int) -> None:
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while (await yard.services.store.chunks.summary(batch_id)).done < chunks:  # noqa: ASYNC110 - the database tells nobody
            await asyncio.sleep(0.01)


async def test_what_is_claimed_while_the_database_is_asked_is_not_lost(
    yard: Yard, pool: PoolRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer does not know of that chunk yet."""
    batch_id = await yard.prepared(lines(20))
    chunks = yard.services.store.chunks
    claim, held = chunks.claim, chunks.held
    asked = asyncio.Event()
    claims = 0

    async def claim_later(**wanted: Any) -> Any:
        nonlocal claims
        claims += 1
        if claims == 2:
            await asked.wait()
        return await claim(**wanted)

    async def answer_slowly(owner: str) -> Any:
        found = await held(owner)
        if not asked.is_set() and found:
            asked.set()
            await until(lambda: engine.running == 20)
        return found

    monkeypatch.setattr(chunks, "claim", claim_later)
    monkeypatch.setattr(chunks, "held", answer_slowly)
    engine = pool.start(max_num_seqs=32, latency=1.0)
    await done(yard, batch_id, 2)
    assert [chunk.epoch for chunk in await chunks_in(yard.services.store, batch_id)] == [1, 1]
    assert (engine.executed, engine.aborted) == (20, 0)


@pytest.mark.parametrize("call", ["claim", "entry"])
async def test_a_claim_that_raises_what_nobody_expects_ends_no_engine(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A driver raises such errors on a connection that breaks at a bad moment."""
    batch_id = await yard.prepared(lines(4))
    chunks = yard.services.store.chunks
    work, has_failed = getattr(chunks, call), False

    async def fails_once(*words: Any, **options: Any) -> Any:
        nonlocal has_failed
        if not has_failed:
            has_failed = True
            raise AttributeError("'NoneType' object has no attribute 'send'")
        return await work(*words, **options)

    monkeypatch.setattr(chunks, call, fails_once)
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        assert await run_chunks(yard.services, MODEL, batch_id=batch_id) == 4
    assert has_failed


async def test_a_runner_that_was_taken_for_dead_ends(yard: Yard, pool: PoolRunner) -> None:
    """Another has its place by now."""
    pool.start()
    runners = yard.services.store.runners
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while not await runners.lose(-60):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)
    assert await pool.ended() == 0


async def test_a_runner_reports_how_full_the_cache_of_its_engine_is(
    yard: Yard, pool: PoolRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the engine says so: one that does not answer is not as full as it was."""
    monkeypatch.setattr(intervals, "OCCUPANCY_SECONDS", 0.01)
    said: list[float | Exception] = [0.375]

    async def occupancy(_: StubEngine) -> Occupancy:
        if isinstance(answer := said[-1], Exception):
            raise answer
        return Occupancy(1, 0, answer)

    monkeypatch.setattr(StubEngine, "occupancy", occupancy)
    pool.start()
    await reports_of_cache(yard, 0.375)
    said.append(EngineLost("the engine was lost"))
    await reports_of_cache(yard, None)
    said.append(0.5)
    await reports_of_cache(yard, 0.5)


async def reports_of_cache(yard: Yard, used: float | None) -> None:
    """Return once the runner's row says so."""
    runners = yard.services.store.runners
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while True:
            rows = await runners.live(kind=RunnerKind.CHUNKS, within_seconds=60)
            if [each.load.cache_used for each in rows if each.load] == [used]:
                return
            await asyncio.sleep(0.01)


async def test_a_chunk_that_was_being_claimed_when_its_runner_is_to_drain_is_released(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells the runner a second time after a signal to stop."""
    batch_id = await yard.prepared(lines(5))
    store, engine = yard.services.store, StubEngine(MODEL)
    yard.use(engine)
    claim = store.chunks.claim
    async with Runner(yard.services, MODEL) as runner:

        async def claim_meanwhile(**claimed: Any) -> list[ChunkLease]:
            leases = await claim(**claimed)
            runner.drain()
            return leases

        monkeypatch.setattr(store.chunks, "claim", claim_meanwhile)
        assert await runner.serve() == 0
    assert engine.executed == 0
    (chunk,) = await chunks_in(store, batch_id)
    assert (chunk.epoch, chunk.status) == (1, ChunkStatus.PENDING)


@pytest.mark.parametrize("method", ["claim", "entry"])
async def test_a_runner_that_is_cancelled_as_it_claims_a_chunk_keeps_no_lease(
    yard: Yard, pool: PoolRunner, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A write that has begun ends by itself, so the claim is not undone."""
    batch_id = await yard.prepared(lines(5))
    store, is_claimed = yard.services.store, asyncio.Event()
    call = getattr(store.chunks, method)

    async def slow(*args: Any, **named: Any) -> Any:
        answer = await call(*args, **named)
        is_claimed.set()
        await asyncio.sleep(0.05)
        return answer

    monkeypatch.setattr(store.chunks, method, slow)
    pool.start()
    await is_claimed.wait()
    await pool.cancel()
    (chunk,) = await chunks_in(store, batch_id)
    assert (chunk.epoch, chunk.status) == (1, ChunkStatus.PENDING)


async def test_a_runner_that_is_told_to_drain_takes_no_more(yard: Yard, pool: PoolRunner) -> None:
    batch_id = await yard.prepared(lines(40))
    engine = pool.start(max_num_seqs=4, latency=0.2)
    await until(lambda: engine.running == 4)
    runners = yard.services.store.runners
    (runner,) = await runners.live(kind=RunnerKind.CHUNKS, within_seconds=60)
    assert await runners.drain(runner.id)
    await pool.ended()
    left = await yard.services.store.chunks.summary(batch_id)
    assert left.pending > 0
    assert left.leased == 0


async def test_one_renewal_that_fails_is_not_the_last(
    yard: Yard, pool: PoolRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = yard.services.store.chunks
    renew = chunks.renew
    tried = 0

    async def away_at_first(*args: Any) -> Any:
        nonlocal tried
        tried += 1
        if tried == 1:
            raise StoreUnavailable("The database is away.")
        return await renew(*args)

    monkeypatch.setattr(chunks, "renew", away_at_first)
    # A runner that claims renews as well.
    monkeypatch.setattr(intervals, "POLL_SECONDS", 3600.0)
    yard.set(lease_seconds=0.6)
    pool.start()
    await until(lambda: tried >= 3)


async def test_a_runner_keeps_its_chunks_when_the_database_was_away_for_longer_than_a_lease(
    yard: Yard, pool: PoolRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the reconciler, nor another runner, nor its own next claim takes them from it."""
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.01)
    outage, watch = Outage(yard, monkeypatch), Watch(every_seconds=10.0)
    batch_id = await yard.prepared(lines(4))
    engine = pool.start(max_num_seqs=32, latency=3600.0)
    await until(lambda: engine.running == 4)
    neighbour = PoolRunner(yard)
    try:
        other = neighbour.start()
        await until(lambda: other.starts == 1)
        await reconcile(yard.services, watch)
        async with outage.away("chunks", LEASE_SECONDS):
            await outage.refuses(20)
        await reconcile(yard.services, watch)
        await outage.answers(50)
    finally:
        await neighbour.cancel()
    (chunk,) = await chunks_in(yard.services.store, batch_id)
    assert (chunk.epoch, chunk.deaths) == (1, 0)
    assert (engine.running, engine.aborted, other.executed) == (4, 0, 0)


async def test_a_runner_that_cannot_renew_its_leases_claims_nothing(
    yard: Yard, pool: PoolRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be its own chunk, of which it does not know that it was lost."""
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.01)
    outage, chunks = Outage(yard, monkeypatch), yard.services.store.chunks
    renew, tried = chunks.renew, 0

    async def fail(*_: object) -> Any:
        nonlocal tried
        tried += 1
        raise StoreUnavailable("The rows are locked.")

    engine = pool.start(max_num_seqs=32, latency=3600.0)
    await until(lambda: engine.starts == 1)
    monkeypatch.setattr(chunks, "renew", fail)
    outage.pass_by(LEASE_SECONDS)
    batch_id = await yard.prepared(lines(4))
    await until(lambda: tried >= 3)
    assert [chunk.epoch for chunk in await chunks_in(yard.services.store, batch_id)] == [0]
    monkeypatch.setattr(chunks, "renew", renew)
    await until(lambda: engine.running == 4)


async def test_after_an_outage_a_runner_lets_others_renew_their_leases_before_it_claims_them(
    yard: Yard, pool: PoolRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody had is claimed at once."""
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.01)
    outage, store = Outage(yard, monkeypatch), yard.services.store
    held = await yard.prepared(lines(4, "held"))
    assert await store.chunks.claim(model=MODEL, owner="other", lease_seconds=3600.0)
    engine = pool.start(max_num_seqs=32, latency=3600.0)
    await until(lambda: engine.starts == 1)
    async with outage.away("chunks", LEASE_SECONDS):
        await outage.refuses(3)
    free = await yard.prepared(lines(4, "free"))
    await until(lambda: engine.running >= 4)
    assert [chunk.epoch for chunk in await chunks_in(store, free)] == [1]
    assert [chunk.epoch for chunk in await chunks_in(store, held)] == [1]
    outage.pass_by(LEASE_SECONDS * 0.4)
    await until(lambda: engine.running == 8)
    (chunk,) = await chunks_in(store, held)
    assert (chunk.epoch, chunk.deaths) == (2, 1)


async def test_an_engine_that_is_ready_while_the_database_is_away_serves_when_it_is_back(
    yard: Yard, pool: PoolRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model may have loaded for minutes."""
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.01)
    runners, rates = yard.services.store.runners, yard.services.store.rates
    monkeypatch.setattr(runners, "ready", away_at_first(runners.ready))
    monkeypatch.setattr(rates, "record", away_at_first(rates.record))
    batch_id = await yard.prepared(lines(5))
    engine = pool.start()
    await done(yard, batch_id, 1)
    assert engine.starts == 1


def away_at_first(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, which fails the first three times."""
    tried = 0

    async def tried_again(*args: Any, **values: Any) -> Any:
        nonlocal tried
        tried += 1
        if tried <= 3:
            raise StoreUnavailable("The database is away.")
        return await call(*args, **values)

    return tried_again


async def test_a_chunk_whose_claim_got_no_answer_is_run_when_its_lease_has_run_out(
    yard: Yard, pool: PoolRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner that has it in the database does not know, so it must not renew it."""
    chunks = yard.services.store.chunks
    claim = chunks.claim
    claims = 0

    async def answer_but_once(**wanted: Any) -> Any:
        nonlocal claims
        leases = await claim(**wanted)
        claims += bool(leases)
        if claims == 2 and leases:
            raise StoreUnavailable("The connection was lost after the commit.")
        return leases

    monkeypatch.setattr(chunks, "claim", answer_but_once)
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.01)
    yard.set(lease_seconds=0.6)
    batch_id = await yard.prepared(lines(20))
    pool.start()
    await done(yard, batch_id, 2)


async def test_a_chunk_that_is_stopped_before_it_is_admitted_lets_the_next_in(
    yard: Yard, pool: PoolRunner
) -> None:
    slow = await yard.prepared(lines(10, "slow"))
    quick = await yard.prepared(lines(3, "quick"))
    await yard.services.store.batch_schedule.set_priority(slow, 10)
    engine = pool.start(max_num_seqs=2, latency=lambda body: 3600.0 if b"of slow" in body else 0.0)
    await until(lambda: engine.running == 2)
    await yard.services.store.batches.cancel(slow)
    await done(yard, quick, 1)


async def test_the_end_of_a_lost_claim_leaves_a_newer_one_alone(yard: Yard) -> None:
    """Of the same chunk, by the same runner: it may have been the first to see it free."""
    yard.use(StubEngine(MODEL, max_num_seqs=8, latency=3600.0))
    yard.set(lease_seconds=60.0)
    batch_id = await yard.prepared(lines(3))
    async with Runner(yard.services, MODEL) as runner:
        leases = runner.leases()
        old = await anext(leases)
        running = asyncio.create_task(runner.run(old.batch_id, old.index))
        await until(lambda: yard.engine.running == 3)

        async def run_out(connection: Any) -> None:
            await connection.exec_driver_sql("UPDATE chunks SET lease_expires_at = 1")

        await yard.services.store.database.write(run_out)
        (new,) = await yard.services.store.chunks.claim(
            model=MODEL, owner=runner._held.owner, lease_seconds=60
        )
        runner._held.leases[batch_id, 0] = new
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            assert await running is None
        assert runner._held.leases[batch_id, 0] is new
        assert runner.figures().counters[LEASES_LOST.name] == {"chunk": 1}
        await leases.aclose()  # type: ignore[attr-defined] # it is a generator


async def test_a_runner_that_is_cancelled_gives_its_chunks_back(
    yard: Yard, pool: PoolRunner
) -> None:
    await yard.prepared(lines(3))
    engine = pool.start(max_num_seqs=8, latency=3600.0)
    await until(lambda: engine.running == 3)
    await pool.cancel()
    others = await yard.services.store.chunks.claim(model=MODEL, owner="other", lease_seconds=60)
    assert [lease.epoch for lease in others] == [2]


async def test_a_runners_numbers_are_those_of_its_engine_while_it_serves(yard: Yard) -> None:
    """And there are some before it serves, and after."""
    yard.use(StubEngine(MODEL, max_num_seqs=8, latency=3600.0))
    batch_id = await yard.prepared(lines(3))
    runner = Runner(yard.services, MODEL, batch_id=batch_id)
    names = [each.name for each in (READY, INFLIGHT, QUEUED, WINDOW, REFUSING)]
    nothing = dict.fromkeys(names, 0)
    assert runner.figures().gauges == nothing
    async with runner:
        serving = asyncio.create_task(runner.serve())
        await until(lambda: yard.engine.running == 3)
        now = dict(zip(names, (1, 3, 0, 16, 0), strict=True))
        assert runner.figures().gauges == now
        serving.cancel()
        await asyncio.wait([serving])
    assert runner.figures().gauges == nothing
