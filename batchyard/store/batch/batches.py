"""The life of a batch, from its row to its end. The transitions are in ``lifecycle``.

What every transition does is in ``moves``, the owner in ``leases``, the order in ``schedule``,
where files come from and go to in ``places``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace
from sqlalchemy import and_, select, update

from batchyard.batch.prices import NO_PRICES
from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock
from batchyard.database.columns import usage_values
from batchyard.database.leasing import renewed
from batchyard.errors import IllegalTransition, RecordNotFound, TransitionConflict
from batchyard.lifecycle import STOPPABLE, TERMINAL, BatchStatus, check_transition
from batchyard.plan.roots import NO_ROOTS
from batchyard.store.batch.moves import check_epoch, end_batch, insert_batch, move_batch
from batchyard.store.batch.pages import LiveBatch, batch_not_found, load_batch, read_live, read_page
from batchyard.store.delivery.outbox import insert_file_deliveries
from batchyard.store.file.files import insert_file
from batchyard.store.tables.audit import note_action
from batchyard.store.tables.batch import BATCHES, BatchRecord
from batchyard.store.tables.batch_roots import insert_roots
from batchyard.store.tables.chunk import CHUNKS, IS_OPEN, insert_chunks, summarise
from batchyard.store.tenant.idempotency import claim
from batchyard.store.tenant.tenants import Quota, hold_pace, hold_quota
from batchyard.store.turns.candidates import is_runnable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.batch.prices import Prices
    from batchyard.batch_error import BatchError
    from batchyard.database.database import Database
    from batchyard.database.page import Page
    from batchyard.plan.lengths import LengthClass
    from batchyard.plan.roots import Roots
    from batchyard.results.line_errors import ErrorCount
    from batchyard.store.tables.batch import NewBatch
    from batchyard.store.tables.chunk import NewChunk
    from batchyard.store.tables.file import NewFile
    from batchyard.store.tenant.idempotency import IdempotencyKey
    from batchyard.wire import BatchUsage, RequestCounts


NO_LIMIT: Final = Quota()
_IS_OVERDUE: Final = and_(BATCHES.c.status.in_(STOPPABLE), BATCHES.c.expires_at <= clock())


class Batches(Aggregate):
    """Writes all columns of ``batches`` but those of its lease, of its schedule and of its places.

    Those have writers of their own, :class:`.BatchLeases`, :class:`.BatchSchedule` and
    :class:`.BatchPlaces`. They are set here as the row is made; lease and schedule are cleared by
    the move that leaves nothing to lease or to forecast, and what could not be delivered is noted
    by the move that ends the batch, for each of these must be one statement.
    ``message_requests`` is cleared by :class:`.MessageBatches`, and ``awaited_requests`` set by
    :class:`.QueueRoom`.

    Every change of status is compare-and-set: of many callers at once one succeeds, and the others
    get :class:`~batchyard.errors.TransitionConflict`. Methods that name a batch raise
    :class:`~batchyard.errors.RecordNotFound` where there is none, or it is not the ``tenant``'s.
    """

    def __init__(self, database: Database, prices: Prices = NO_PRICES) -> None:
        super().__init__(database)
        self._prices = prices

    @writes
    async def create(
        self,
        connection: AsyncConnection,
        new: NewBatch,
        *,
        input_file: NewFile | None = None,
        quota: Quota = NO_LIMIT,
        batches_per_hour: int | None = None,
        owner: str | None = None,
        lease_seconds: float = 0.0,
        flow_run_id: str | None = None,
        idempotency: IdempotencyKey | None = None,
    ) -> BatchRecord:
        """Record a new batch, ``validating``; on return it is durable.

        ``input_file``: its input, of which there is no row yet, and whose bytes are durable; it is
        recorded with the batch or not at all. ``quota`` is for a tenant that has none of its own,
        ``batches_per_hour`` for all; None: no limit. With an ``owner``, the batch is leased to it
        from the start, and belongs to its ``flow_run_id``. With an ``idempotency`` key that the
        tenant has used before, nothing is created: the earlier batch is returned, as it is now.
        Raises :class:`~batchyard.errors.TransitionConflict` for a taken id,
        :class:`~batchyard.errors.QuotaExceeded`, :class:`~batchyard.errors.BatchRateExceeded` and
        :class:`~batchyard.errors.IdempotencyConflict`.
        """
        lease: dict[str, Any] = {}
        if owner is not None:
            lease = {"owner": owner, "epoch": 1, **renewed(lease_seconds)}
            lease["flow_run_id"] = flow_run_id
        if idempotency is not None:
            # Before the quota, which is no reason to refuse what was accepted already.
            batch_id = await claim(connection, new.tenant, idempotency, new.id)
            if batch_id != new.id:
                return await load_batch(connection, batch_id, prices=self._prices)
        if batches_per_hour is not None:
            await hold_pace(connection, new.tenant, batches_per_hour)
        stored_bytes = 0 if input_file is None else input_file.size_bytes
        await hold_quota(connection, new.tenant, quota, batches=1, stored_bytes=stored_bytes)
        await insert_batch(connection, new, input_file, lease)
        return await load_batch(connection, new.id)

    @reads
    async def get(
        self, connection: AsyncConnection, batch_id: str, tenant: str | None = None
    ) -> BatchRecord:
        """The batch, without its locations, its counts and its cost live."""
        return await load_batch(connection, batch_id, tenant, self._prices)

    @writes
    async def set_flow_run(
        self, connection: AsyncConnection, batch_id: str, flow_run_id: str
    ) -> None:
        """Record the flow run that now works on the batch.

        Raises :class:`~batchyard.errors.RecordNotFound`.
        """
        updated = await connection.execute(
            update(BATCHES).where(BATCHES.c.id == batch_id).values(flow_run_id=flow_run_id)
        )
        if updated.rowcount == 0:
            raise batch_not_found(batch_id)

    @writes
    async def cancel(
        self, connection: AsyncConnection, batch_id: str, tenant: str | None = None
    ) -> BatchRecord:
        """Cancel the batch: it is ``cancelling`` at once, if it waits or runs.

        One that is being cancelled, was cancelled, or whose files are being made already stays
        as it is. Raises :class:`~batchyard.errors.TransitionConflict` for one that has ended in
        another way.
        """
        if tenant is not None:
            # A batch never changes hands: what is true now stays true.
            await load_batch(connection, batch_id, tenant)
        try:
            await move_batch(connection, batch_id, STOPPABLE, BatchStatus.CANCELLING)
        except TransitionConflict:
            batch = await load_batch(connection, batch_id, prices=self._prices)
            if batch.status in TERMINAL - {BatchStatus.CANCELLED}:
                raise TransitionConflict(
                    f"Cannot cancel a batch with status '{batch.status.value}'."
                ) from None
            return batch
        batch = await load_batch(connection, batch_id, prices=self._prices)
        await note_action(connection, "batch.cancelled", batch_id, tenant=batch.tenant)
        return batch

    @reads
    async def overdue(self, connection: AsyncConnection, limit: int) -> list[str]:
        """The first batches to :meth:`expire`, the one first whose window ended first."""
        statement = (
            select(BATCHES.c.id)
            .where(_IS_OVERDUE)
            .order_by(BATCHES.c.expires_at, BATCHES.c.id)
            .limit(limit)
        )
        return list((await connection.execute(statement)).scalars())

    @writes
    async def expire(self, connection: AsyncConnection, batch_id: str) -> BatchRecord | None:
        """Stop the batch if its window has ended; returns it as it is then.

        One that runs becomes ``finalizing``, for what is finished is kept; one that was never
        planned becomes ``expired`` at once, without files. None: its window has not ended, or
        another process is stopping it.
        """
        found = await connection.execute(
            select(BATCHES.c.status)
            .where(BATCHES.c.id == batch_id, _IS_OVERDUE)
            .with_for_update(skip_locked=True)
        )
        status = found.scalar_one_or_none()
        if status is None:
            return None
        if status == BatchStatus.IN_PROGRESS:
            source, target = BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING
            await move_batch(connection, batch_id, {source}, target)
            return await load_batch(connection, batch_id)
        return await end_batch(connection, batch_id, BatchStatus.EXPIRED, self._prices)

    @reads
    async def of_flow_run(self, connection: AsyncConnection, flow_run_id: str) -> str:
        """The id of the batch that this flow run worked on last.

        Raises :class:`~batchyard.errors.RecordNotFound`.
        """
        # A person can run a flow run again: it makes another batch.
        newest = BATCHES.c.created_at.desc(), BATCHES.c.id
        statement = (
            select(BATCHES.c.id).where(BATCHES.c.flow_run_id == flow_run_id).order_by(*newest)
        )
        batch_id = (await connection.execute(statement)).scalars().first()
        if batch_id is None:
            raise RecordNotFound(f"No batch was run by flow run {flow_run_id}.")
        return str(batch_id)

    @reads
    async def in_progress_of(self, connection: AsyncConnection, model: str) -> list[str]:
        """The batches that have requests to run of this model now.

        Not those that are paused, nor chains that only wait for the models of later stages.
        """
        is_open = CHUNKS.c.batch_id == BATCHES.c.id, CHUNKS.c.model == model, IS_OPEN
        statement = select(BATCHES.c.id).where(
            is_runnable(), select(CHUNKS.c.index).where(*is_open).exists()
        )
        return sorted((await connection.execute(statement)).scalars())

    @reads
    async def page(
        self,
        connection: AsyncConnection,
        tenant: str | None = None,
        *,
        unfinished: bool = False,
        limit: int = 20,
        after: str | None = None,
    ) -> Page[BatchRecord]:
        """Batches, of one tenant or of all, newest first, behind the batch ``after``."""
        return await read_page(
            connection,
            tenant=tenant,
            unfinished=unfinished,
            limit=limit,
            after=after,
            prices=self._prices,
        )

    @reads
    async def live(
        self, connection: AsyncConnection, batch_ids: Collection[str]
    ) -> dict[str, LiveBatch]:
        """Those of these batches that exist, by their ids, in a constant number of queries."""
        return await read_live(connection, batch_ids, self._prices)

    @writes
    async def advance(
        self, connection: AsyncConnection, batch_id: str, expected: BatchStatus, target: BatchStatus
    ) -> BatchRecord:
        """Move to ``finalizing`` or ``cancelling``; methods for the other moves are below.

        Raises :class:`~batchyard.errors.IllegalTransition`.
        """
        check_transition(expected, target)
        if target is BatchStatus.IN_PROGRESS or target in TERMINAL:
            raise IllegalTransition(
                f"A batch becomes {target.value} by begin, finish or fail, not by advance."
            )
        await move_batch(connection, batch_id, {expected}, target)
        return await load_batch(connection, batch_id)

    @writes
    async def begin(
        self,
        connection: AsyncConnection,
        batch_id: str,
        *,
        model: str | None,
        total: int,
        plan_key: str,
        chunks: Sequence[NewChunk],
        adapters: Sequence[str] = (),
        fields: Mapping[str, Mapping[str, int]] | None = None,
        length_classes: Sequence[LengthClass] = (),
        roots: Roots = NO_ROOTS,
        refused: int = 0,
        quota: Quota = NO_LIMIT,
    ) -> BatchRecord:
        """From ``validating`` to ``in_progress`` with its plan: all of it or none.

        ``total`` is the number of lines, ``plan_key`` where the plan's bytes already are,
        ``adapters`` are those of the model that lines name, ``fields`` how many lines have each
        field, by endpoint,
        ``length_classes`` those of its requests by the numbers that they have there, ``roots``
        what its prompts begin with, ``refused`` how many lines of ``total`` are bad, with their
        error lines in segments of chunk 0; ``quota`` for a tenant that has none of its own;
        what its tenant does not see was accepted before. Raises
        :class:`~batchyard.errors.QuotaExceeded`, and :class:`~batchyard.errors.QueueFull` where
        the batch is to wait: then call
        :meth:`.QueueRoom.record`.
        """
        tokens = sum(chunk.token_estimate for chunk in chunks)
        await move_batch(
            connection,
            batch_id,
            {BatchStatus.VALIDATING},
            BatchStatus.IN_PROGRESS,
            model=model,
            total=total,
            plan_key=plan_key,
            token_estimate=tokens,
            awaited_requests=None,
            length_classes=length_classes or None,
        )
        record = await load_batch(connection, batch_id)
        options = replace(
            record.options,
            adapters=tuple(adapters),
            fields={url: {**found} for url, found in (fields or {}).items()},
        )
        if options != record.options:
            statement = update(BATCHES).where(BATCHES.c.id == batch_id).values(options=options)
            await connection.execute(statement)
            record = record.model_copy(update={"options": options})
        kept = record.options.kept
        # After the move: to begin a second time is a conflict, whatever the quota says.
        if not record.is_hidden:
            own = {"requests": total - refused - kept.requests, "tokens": tokens}
            await hold_quota(connection, record.tenant, quota, **own, batch_id=batch_id)
        done = {"completed": kept.completed, "failed": kept.failed + refused}
        await insert_chunks(connection, batch_id, record.expires_at, chunks, **done)
        await insert_roots(connection, batch_id, roots)
        return record

    @writes
    async def fail(
        self,
        connection: AsyncConnection,
        batch_id: str,
        errors: Sequence[BatchError],
        *,
        epoch: int | None = None,
    ) -> BatchRecord:
        """End as ``failed`` without files: the input is refused.

        A batch that may have finished lines is stopped by :meth:`stop_early` instead. What its
        chunks have counted by now is frozen into the batch. Raises
        :class:`~batchyard.errors.LeaseLost` where ``epoch`` is no longer the batch's: an
        error of an earlier owner must not end the batch of the current one.
        """
        if epoch is not None:
            await check_epoch(connection, batch_id, epoch)
        so_far = await summarise(connection, batch_id)
        return await end_batch(
            connection,
            batch_id,
            BatchStatus.FAILED,
            self._prices,
            errors=tuple(errors),
            completed=so_far.completed,
            failed=so_far.failed,
            **usage_values(so_far.usage),
        )

    @writes
    async def stop_early(
        self,
        connection: AsyncConnection,
        batch_id: str,
        errors: Sequence[BatchError],
        *,
        epoch: int | None = None,
    ) -> BatchRecord:
        """Stop a batch in progress: it is ``finalizing``, and ends as ``failed`` with files.

        Its finished lines are published first; the ``errors`` say why the others were not run.
        Raises :class:`~batchyard.errors.LeaseLost` where ``epoch`` is no longer the batch's.
        """
        if epoch is not None:
            await check_epoch(connection, batch_id, epoch)
        source, target = BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING
        await move_batch(connection, batch_id, {source}, target, errors=tuple(errors))
        return await load_batch(connection, batch_id)

    @writes
    async def finish(
        self,
        connection: AsyncConnection,
        batch_id: str,
        *,
        target: BatchStatus,
        errors: Sequence[BatchError] | None = None,
        output: NewFile | None,
        error: NewFile | None,
        others: Sequence[NewFile] = (),
        counts: RequestCounts,
        error_counts: Sequence[ErrorCount] = (),
        usage: BatchUsage,
        deduplicated_requests: int = 0,
        undelivered: Mapping[str, str] | None = None,
        again: Mapping[str, str] | None = None,
        epoch: int | None = None,
    ) -> BatchRecord:
        """End as ``completed``, ``expired``, ``cancelled`` or ``failed``, with its files' rows.

        ``undelivered``: by ``output`` and ``error``, why that file is not where it was wanted;
        ``again``: those URLs of clients to which the outbox delivers it. ``others``: files
        that are recorded with them.

        The files' bytes are already durable. ``error_counts`` says why lines failed, ``errors``
        why the batch did. Of ``counts`` the total is not written again: it is what ``begin`` said.
        Raises :class:`~batchyard.errors.IllegalTransition` for a ``target`` that is no end, and
        :class:`~batchyard.errors.LeaseLost` where ``epoch`` is no longer the batch's: another
        process makes the files.
        """
        if target not in TERMINAL:
            raise IllegalTransition(f"To finish a batch is not to make it {target.value}.")
        if epoch is not None:
            await check_epoch(connection, batch_id, epoch)
        values: dict[str, Any] = {}
        if error_counts:
            options = (await load_batch(connection, batch_id)).options
            values = {"options": replace(options, error_counts=tuple(error_counts))}
        record = await end_batch(
            connection,
            batch_id,
            target,
            self._prices,
            **values,
            output_file_id=output and output.id,
            errors=None if errors is None else tuple(errors),
            error_file_id=error and error.id,
            completed=counts.completed,
            failed=counts.failed,
            deduplicated_requests=deduplicated_requests,
            undelivered=dict(undelivered) if undelivered else None,
            **usage_values(usage),
        )
        for file in filter(None, (output, error, *others)):
            await insert_file(connection, file)
        if again:
            await insert_file_deliveries(connection, record, again)
        return record
