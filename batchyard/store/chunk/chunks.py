"""Leases on chunks: which runner owns which part of which batch, until when.

See ``leasing``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, case, or_, select, tuple_, update

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock
from batchyard.database.columns import usage_values
from batchyard.database.leasing import claimed, is_claim, is_free, released, renewed
from batchyard.errors import LeaseLost
from batchyard.lifecycle import BatchStatus
from batchyard.plan.lengths import expectation_of
from batchyard.schedule.turns import Beside
from batchyard.store.batch.pages import batch_not_found
from batchyard.store.chunk.demand import read_demand
from batchyard.store.chunk.places import place_beside
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.batch_roots import read_for_engine, read_roots
from batchyard.store.tables.chunk import (
    CHUNKS,
    IS_LEASED,
    ChunkLease,
    ChunkStatus,
    ChunkSummary,
    LeaseKey,
    after_progress,
    deaths_after_expiry,
    summarise,
)
from batchyard.store.tenant.tenants import served
from batchyard.store.turns.candidates import batches_like, batches_to_run, free_chunks
from batchyard.store.turns.order import is_small_rest, read_queue_entries

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sqlalchemy import Select
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.plan.lengths import Expected
    from batchyard.schedule.turns import QueueEntry
    from batchyard.store.chunk.demand import ModelDemand
    from batchyard.store.chunk.places import Host
    from batchyard.wire import BatchUsage


_NOTHING: Final = Beside()
_PLANNED: Final = (CHUNKS.c.prompt_tokens, CHUNKS.c.outputs, CHUNKS.c.token_estimate)


class ChunkAction(StrEnum):
    """What the owner of a leased chunk must do with it."""

    RUN = "run"
    YIELD = "yield"
    """Its batch is paused: let what is in flight finish, and release it."""
    DROP = "drop"
    """Its batch is no longer in progress, or overdue: abort it, keep what is finished."""


@cache
def _held() -> Select[tuple[str, int, int, str]]:
    """What to do with each chunk of an owner. Made once: every runner asks each second."""
    drop = or_(BATCHES.c.status != BatchStatus.IN_PROGRESS, BATCHES.c.expires_at <= clock())
    action = case(
        (drop, ChunkAction.DROP),
        (BATCHES.c.paused_at.is_not(None), ChunkAction.YIELD),
        else_=ChunkAction.RUN,
    )
    return (
        select(CHUNKS.c.batch_id, CHUNKS.c.index, CHUNKS.c.epoch, action)
        .join(BATCHES, BATCHES.c.id == CHUNKS.c.batch_id)
        .where(CHUNKS.c.owner == bindparam("owner"), IS_LEASED)
    )


class Chunks(Aggregate):
    """The only writer of ``chunks``, once ``batches.begin`` has planned them."""

    @writes
    async def claim(
        self,
        connection: AsyncConnection,
        *,
        model: str,
        owner: str,
        lease_seconds: float,
        batch_id: str | None = None,
        without: Collection[str] = (),
        beside: Beside = _NOTHING,
        hosts: Sequence[Host] = (),
        limit: int = 1,
        with_expired: bool = True,
    ) -> list[ChunkLease]:
        """Lease up to ``limit`` chunks of ``model``, of one batch or of the first in order.

        The order is that of :mod:`.schedule.turns`, with the tenant first that was served longest
        ago. Of a batch's chunks those with the longest answers go first, by what :meth:`expect` has
        found; then they go by number, from where the runner's ``hosts`` are. An empty list: no
        chunk is free. Nothing is leased of a batch that is paused or overdue, in ``without``, or
        that is ``beside`` the runner. An owner whose lease ran out counts as a death of the chunk.
        Without ``with_expired``, such a chunk is not leased.
        """
        leases: list[ChunkLease] = []
        tenants: set[str] = set()
        batches = batches_to_run(model, batch_id, without, beside, with_expired=with_expired)
        candidates = await connection.execute(batches)
        for candidate, tenant in candidates.all():
            place = await place_beside(connection, candidate, hosts)
            most = limit - len(leases)
            free = free_chunks(candidate, model, most, place=place, with_expired=with_expired)
            leased = await _lease(connection, candidate, free, owner, lease_seconds)
            if leased:
                leases += leased
                tenants.add(tenant)
            if len(leases) == limit:
                break
        # All claims use the same order. Otherwise two could wait for each other's tenants.
        for tenant in sorted(tenants):
            await served(connection, tenant)
        return leases

    @writes
    async def renew(
        self,
        connection: AsyncConnection,
        owner: str,
        lease_seconds: float,
        keys: Collection[LeaseKey],
    ) -> set[LeaseKey]:
        """Extend those leases of ``owner`` that are still needed, and return their keys.

        Drop a lease that is missing from the result: the chunk has another owner, or its batch is
        no longer in progress (cancelled, overdue, failed). What it has finished may still be
        recorded until another owner claims the chunk.
        """
        # Not all leases of the owner: after a claim whose answer was lost, it has some unknowingly.
        in_progress = select(BATCHES.c.id).where(
            BATCHES.c.id == CHUNKS.c.batch_id, BATCHES.c.status == BatchStatus.IN_PROGRESS
        )
        claim = tuple_(CHUNKS.c.batch_id, CHUNKS.c.index, CHUNKS.c.epoch)
        wanted = [(key.batch_id, key.index, key.epoch) for key in keys]
        statement = (
            update(CHUNKS)
            .where(CHUNKS.c.owner == owner, IS_LEASED, claim.in_(wanted), in_progress.exists())
            .values(renewed(lease_seconds))
            .returning(CHUNKS.c.batch_id, CHUNKS.c.index, CHUNKS.c.epoch)
        )
        return {LeaseKey(*row) for row in await connection.execute(statement)}

    async def record_progress(
        self,
        lease: ChunkLease,
        *,
        completed: int,
        failed: int,
        usage: BatchUsage,
        clears: bool = True,
        left_share: float | None = None,
    ) -> None:
        """Record the requests and tokens of the whole chunk so far, earlier epochs included.

        ``left_share``: of the chunk's work, what is left; None: as of its requests.
        ``clears``: requests have run since the last time, so the chunk is less of a suspect.
        Raises :class:`~batchyard.errors.LeaseLost`.
        """
        progress: dict[str, Any] = {"completed": completed, "failed": failed, **usage_values(usage)}
        progress["left_share"] = left_share
        if clears:
            progress |= after_progress()
        await self._update_leased(lease, progress)

    async def complete(
        self, lease: ChunkLease, *, completed: int, failed: int, usage: BatchUsage
    ) -> None:
        """Record the chunk as done, with its final figures. A second call changes nothing.

        Raises :class:`~batchyard.errors.LeaseLost`.
        """
        final = {"completed": completed, "failed": failed, **usage_values(usage)}
        await self._update_leased(
            lease,
            {"status": ChunkStatus.DONE, "lease_expires_at": None, "trouble": None, **final},
            unless_already=ChunkStatus.DONE,
        )

    async def release(self, lease: ChunkLease, *, trouble: str | None = None) -> None:
        """Release the chunk, with its progress. Raises :class:`~batchyard.errors.LeaseLost`.

        ``trouble``: why it could not go on here.
        """
        values = {"status": ChunkStatus.PENDING, "trouble": trouble, **released()}
        await self._update_leased(lease, values)

    async def record_trouble(self, lease: ChunkLease, trouble: str | None) -> None:
        """Record why nothing of the chunk goes on; None: it does. Raises :class:`LeaseLost`."""
        await self._update_leased(lease, {"trouble": trouble})

    async def strike(self, lease: ChunkLease, *, pause_seconds: float) -> None:
        """Release the chunk after an error in it; it is not leased again for ``pause_seconds``.

        Raises :class:`~batchyard.errors.LeaseLost`.
        """
        await self._update_leased(
            lease,
            {
                "status": ChunkStatus.PENDING,
                **released(),
                "strikes": CHUNKS.c.strikes + 1,
                "not_before": clock() + pause_seconds,
            },
        )

    async def clear(self, lease: ChunkLease) -> None:
        """Forget the errors and lost owners of the chunk. Raises :class:`LeaseLost`."""
        await self._update_leased(lease, {"strikes": 0, "deaths": 0})

    @writes
    async def expect(
        self, connection: AsyncConnection, batch_id: str, expected: Mapping[int, Expected]
    ) -> dict[int, int]:
        """Estimate the batch's chunks anew; returns how many requests it has of each class.

        ``expected`` goes by the number of a class; of one that is missing the plan's estimate is
        kept. Chunks with longer answers are leased first from now on.
        """
        # What is locked is being renewed or ended. It is estimated the next time.
        planned = (
            select(CHUNKS.c.index, *_PLANNED, CHUNKS.c.answer_bits)
            .where(CHUNKS.c.batch_id == batch_id, CHUNKS.c.outputs.is_not(None))
            .where(CHUNKS.c.prompt_tokens.is_not(None))
            .order_by(CHUNKS.c.index)
            .with_for_update(skip_locked=True)
        )
        changed = []
        all_runs: Counter[int] = Counter()
        for row in (await connection.execute(planned)).all():
            all_runs.update({number: count for number, (count, _) in row.outputs.items()})
            new = expectation_of(row.prompt_tokens, row.outputs, expected)
            if new != (row.token_estimate, row.answer_bits):
                changed.append({"chunk": row.index, "tokens": new.tokens, "bits": new.answer_bits})
        if changed:
            one = (
                update(CHUNKS)
                .where(CHUNKS.c.batch_id == batch_id, CHUNKS.c.index == bindparam("chunk"))
                .values(token_estimate=bindparam("tokens"), answer_bits=bindparam("bits"))
            )
            await connection.execute(one, changed)
        return dict(all_runs)

    @reads
    async def is_any_free(
        self,
        connection: AsyncConnection,
        model: str,
        *,
        without: Collection[str] = (),
        beside: Beside = _NOTHING,
        with_expired: bool = True,
    ) -> bool:
        """Whether :meth:`claim` would find one, for those who ask often."""
        first = batches_to_run(model, None, without, beside, with_expired=with_expired)
        return (await connection.execute(first.limit(1))).first() is not None

    @reads
    async def joinable(
        self,
        connection: AsyncConnection,
        model: str,
        of: Sequence[QueueEntry],
        *,
        without: Collection[str] = (),
        with_expired: bool = True,
    ) -> str | None:
        """A batch that has a chunk to lease and is better run beside one ``of`` these than after.

        The order says nothing of the two but age, and most of its work is what they share.
        """
        for host in of:
            if host.roots is None:
                continue
            alike = batches_like(model, host, without, with_expired=with_expired)
            candidates = await connection.execute(alike)
            for candidate in candidates.scalars().all():
                roots = (await read_roots(connection, [candidate]))[candidate]
                if roots.is_worth_joining(host.roots):
                    return str(candidate)
        return None

    @reads
    async def entry(self, connection: AsyncConnection, batch_id: str) -> QueueEntry:
        """When the batch has its turn in an engine. Raises RecordNotFound."""
        entries = await read_queue_entries(connection, [batch_id], is_small_rest())
        if batch_id not in entries:
            raise batch_not_found(batch_id)
        found = await read_for_engine(connection, batch_id)
        return replace(
            entries[batch_id],
            roots=found.roots,
            adapters=frozenset(found.options.adapters),
            planned_at=found.in_progress_at or 0,
        )

    @reads
    async def summary(self, connection: AsyncConnection, batch_id: str) -> ChunkSummary:
        """The batch's chunks by state; all zeros for a batch that has none."""
        return await summarise(connection, batch_id)

    @reads
    async def held(self, connection: AsyncConnection, owner: str) -> dict[LeaseKey, ChunkAction]:
        """What to do with each chunk of ``owner``; a missing one has another owner or none."""
        rows = await connection.execute(_held(), {"owner": owner})
        return {LeaseKey(*row[:3]): ChunkAction(row[3]) for row in rows}

    @reads
    async def demand(self, connection: AsyncConnection) -> list[ModelDemand]:
        """The models that have something to run now, the earliest deadline first."""
        return await read_demand(connection)

    @writes
    async def put_back(self, connection: AsyncConnection) -> int:
        """Make chunks pending whose lease has expired; returns how many.

        A claim need not wait for it: a chunk with an expired lease is free.
        """
        # What is locked is being renewed or ended. Two who each change several chunks and wait
        # could wait for each other.
        abandoned = (
            select(CHUNKS.c.batch_id, CHUNKS.c.index)
            .where(IS_LEASED, is_free(CHUNKS))
            .with_for_update(skip_locked=True)
            .cte("abandoned")
        )
        key = tuple_(CHUNKS.c.batch_id, CHUNKS.c.index)
        statement = (
            update(CHUNKS)
            .where(key.in_(select(abandoned.c.batch_id, abandoned.c.index)))
            .values(status=ChunkStatus.PENDING, deaths=deaths_after_expiry(), **released())
            .returning(CHUNKS.c.index)
        )
        # SQLite's driver does not count the rows of an update with a CTE.
        return len((await connection.execute(statement)).all())

    @writes
    async def _update_leased(
        self,
        connection: AsyncConnection,
        lease: ChunkLease,
        values: dict[str, Any],
        *,
        unless_already: ChunkStatus | None = None,
    ) -> None:
        is_same_claim = (
            CHUNKS.c.batch_id == lease.batch_id,
            CHUNKS.c.index == lease.index,
            is_claim(CHUNKS, lease.owner, lease.epoch),
        )
        updated = await connection.execute(
            update(CHUNKS).where(*is_same_claim, IS_LEASED).values(**values)
        )
        if updated.rowcount == 1:
            return
        found = await connection.execute(select(CHUNKS.c.status).where(*is_same_claim))
        status = found.scalar_one_or_none()
        if status is None or status != unless_already:
            raise LeaseLost(
                f"Epoch {lease.epoch} no longer holds chunk {lease.index} of "
                f"{lease.batch_id}; drop what is left of it."
            )


async def _lease(
    connection: AsyncConnection,
    batch_id: str,
    free: Select[Any],
    owner: str,
    lease_seconds: float,
) -> list[ChunkLease]:
    # As a CTE the locking select runs once; as a sub-select PostgreSQL may run it again and
    # lease more than its limit.
    picked = free.cte("picked")
    leased = await connection.execute(
        update(CHUNKS)
        .where(CHUNKS.c.batch_id == batch_id, CHUNKS.c.index.in_(select(picked.c.index)))
        .values(
            status=ChunkStatus.LEASED,
            deaths=deaths_after_expiry(),
            **claimed(CHUNKS, owner, lease_seconds),
        )
        .returning(*ChunkLease.columns(CHUNKS))
    )
    leases = [ChunkLease.read(row) for row in leased.mappings()]
    return sorted(leases, key=lambda lease: lease.index)
