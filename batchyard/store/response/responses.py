"""The life of a background response: accepted, collected into a batch, ended, deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import and_, delete, func, insert, select, update

from batchyard.batch.responses import ResponseStatus
from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock, clock_seconds, read_seconds
from batchyard.errors import RecordNotFound, TransitionConflict
from batchyard.store.batch.moves import insert_batch
from batchyard.store.delivery.outbox import insert_response_deliveries
from batchyard.store.tables.chunk import CHUNKS
from batchyard.store.tables.response import (
    IS_OPEN,
    RESPONSES,
    ResponseKind,
    ResponseRecord,
    Waiting,
    WaitingLine,
)
from batchyard.store.tenant.tenants import hold_quota

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.batch.responses import ResponseEnd, ResponseError
    from batchyard.store.tables.batch import NewBatch
    from batchyard.store.tables.file import NewFile
    from batchyard.store.tables.response import NewResponse
    from batchyard.store.tenant.tenants import Quota

_WAITS = and_(IS_OPEN, RESPONSES.c.batch_id.is_(None))


class Responses(Aggregate):
    """The only writer of ``responses``.

    Every end is compare-and-set: of several that end a response at once, one does. Methods that
    name a response raise :class:`~batchyard.errors.RecordNotFound` where there is none, or it is
    not the ``tenant``'s.
    """

    @writes
    async def create(
        self, connection: AsyncConnection, new: NewResponse, *, quota: Quota
    ) -> ResponseRecord:
        """Record a response that waits; on return it is durable.

        ``quota`` is for a tenant that has none of its own. Raises
        :class:`~batchyard.errors.QuotaExceeded`.
        """
        await hold_quota(
            connection,
            new.tenant,
            quota,
            requests=1,
            tokens=new.token_estimate,
            # It becomes a part of a file.
            stored_bytes=len(new.line),
        )
        await connection.execute(
            insert(RESPONSES).values(
                **new.model_dump(exclude={"window_seconds"}),
                status=ResponseStatus.QUEUED,
                created_at=clock(),
                expires_at=clock() + new.window_seconds,
            )
        )
        return await _load(connection, new.id)

    @reads
    async def get(
        self, connection: AsyncConnection, response_id: str, tenant: str | None = None
    ) -> ResponseRecord:
        """The response; ``in_progress`` once a runner has begun its batch."""
        return await _load(connection, response_id, tenant)

    @reads
    async def line(self, connection: AsyncConnection, response_id: str) -> bytes | None:
        """Its line of an input file; None: it is collected or has ended, or there is none."""
        found = await connection.execute(
            select(RESPONSES.c.line).where(RESPONSES.c.id == response_id)
        )
        line: bytes | None = found.scalar_one_or_none()
        return line

    @reads
    async def are_open(self, connection: AsyncConnection) -> bool:
        """Whether any response has not ended."""
        statement = select(RESPONSES.c.id).where(IS_OPEN).limit(1)
        return (await connection.execute(statement)).first() is not None

    # -- into batches -------------------------------------------------------------------------

    @reads
    async def waiting(self, connection: AsyncConnection) -> list[Waiting]:
        """What is in no batch yet, by kind."""
        kind = (RESPONSES.c.tenant, RESPONSES.c.model, RESPONSES.c.completion_window)
        idle = (
            select(*kind)
            .where(IS_OPEN, RESPONSES.c.batch_id.is_not(None), ~_has_begun())
            .distinct()
        )
        idle_kinds = {ResponseKind(*row) for row in await connection.execute(idle)}
        counted = (
            select(*kind, func.count(), clock() - func.min(RESPONSES.c.created_at))
            .where(_WAITS)
            .group_by(*kind)
        )
        return [
            Waiting(
                kind=found,
                count=int(count),
                oldest_seconds=float(seconds),
                has_idle_batch=found in idle_kinds,
            )
            for *names, count, seconds in await connection.execute(counted)
            for found in [ResponseKind(*names)]
        ]

    @reads
    async def lines(
        self, connection: AsyncConnection, kind: ResponseKind, *, limit: int, most_bytes: int
    ) -> list[WaitingLine]:
        """The oldest that wait of a kind: up to ``limit``, and one at least, of so many bytes."""
        sizes = await connection.execute(
            select(RESPONSES.c.id, func.length(RESPONSES.c.line))
            .where(_WAITS, *_is_of(kind))
            .order_by(RESPONSES.c.created_at, RESPONSES.c.id)
            .limit(limit)
        )
        ids: list[str] = []
        total = 0
        for response_id, size in sizes:
            total += size
            if ids and total > most_bytes:
                break
            ids.append(response_id)
        found = await connection.execute(
            select(RESPONSES.c.id, RESPONSES.c.line, RESPONSES.c.expires_at)
            .where(_WAITS, RESPONSES.c.id.in_(ids))
            .order_by(RESPONSES.c.created_at, RESPONSES.c.id)
        )
        return [WaitingLine(row.id, row.line, row.expires_at) for row in found]

    @writes
    async def collect(
        self, connection: AsyncConnection, ids: Sequence[str], file: NewFile, batch: NewBatch
    ) -> None:
        """Make a batch of these, which wait, with its input file: all of it or nothing.

        The file's bytes are already durable. Raises
        :class:`~batchyard.errors.TransitionConflict` where one of them no longer waits.
        """
        await insert_batch(connection, batch, file)
        taken = await connection.execute(
            update(RESPONSES)
            .where(_in_order(RESPONSES.c.id.in_(ids), _WAITS))
            .values(batch_id=batch.id, line=None)
        )
        if taken.rowcount != len(ids):
            raise TransitionConflict("Some of the responses no longer wait: look again.")

    # -- to their ends ------------------------------------------------------------------------

    @reads
    async def open_batches(self, connection: AsyncConnection) -> list[str]:
        """The batches that hold responses which have not ended."""
        statement = select(RESPONSES.c.batch_id).where(IS_OPEN, RESPONSES.c.batch_id.is_not(None))
        return sorted((await connection.execute(statement.distinct())).scalars())

    @writes
    async def end(
        self, connection: AsyncConnection, batch_id: str, ends: Sequence[ResponseEnd]
    ) -> list[str]:
        """End those of the batch's responses that have not ended, and notify: their ids."""
        ended = []
        # In one order, or two writers could wait for each other.
        for each in sorted(ends, key=lambda end: end.id):
            is_ours = and_(RESPONSES.c.id == each.id, RESPONSES.c.batch_id == batch_id)
            ended += await _end(connection, is_ours, each.status, each.error)
        return ended

    @writes
    async def end_all(
        self,
        connection: AsyncConnection,
        batch_id: str,
        status: ResponseStatus,
        error: ResponseError | None,
    ) -> list[str]:
        """End all of the batch's responses that have not ended, and notify: their ids."""
        return await _end(connection, RESPONSES.c.batch_id == batch_id, status, error)

    @writes
    async def end_overdue(self, connection: AsyncConnection, error: ResponseError) -> list[str]:
        """End those that were not collected before their window ended: their ids."""
        overdue = and_(RESPONSES.c.batch_id.is_(None), RESPONSES.c.expires_at <= clock())
        return await _end(connection, overdue, ResponseStatus.FAILED, error)

    @writes
    async def cancel(
        self, connection: AsyncConnection, response_id: str, tenant: str
    ) -> ResponseRecord:
        """Cancel the response, unless it has ended; as it is then."""
        before = await _load(connection, response_id, tenant)
        if before.ended_at is not None:
            return before
        is_it = RESPONSES.c.id == response_id
        await _end(connection, is_it, ResponseStatus.CANCELLED, None)
        return await _load(connection, response_id, tenant)

    @writes
    async def delete(
        self, connection: AsyncConnection, response_id: str, tenant: str
    ) -> ResponseRecord:
        """Delete the response; as it was.

        One that has not ended is not run, and no notification is sent.
        """
        record = await _load(connection, response_id, tenant)
        deleted = await connection.execute(
            delete(RESPONSES).where(RESPONSES.c.id == response_id).returning(RESPONSES.c.batch_id)
        )
        row = deleted.one_or_none()
        if row is None:
            raise _not_found(response_id)
        # Since it was read, it may have been collected.
        return record.model_copy(update={"batch_id": row.batch_id})

    @reads
    async def has_open(self, connection: AsyncConnection, batch_id: str) -> bool:
        """Whether a response of the batch has not ended.

        Ask it after the end of a response is written: of several that end at the same time, the
        last one must see the others' ends, which on PostgreSQL it does not in its transaction.
        """
        statement = select(RESPONSES.c.id).where(IS_OPEN, RESPONSES.c.batch_id == batch_id).limit(1)
        return (await connection.execute(statement)).first() is not None

    @reads
    async def has_any(self, connection: AsyncConnection, batch_id: str) -> bool:
        """Whether a response of the batch is left, ended or not."""
        statement = select(RESPONSES.c.id).where(RESPONSES.c.batch_id == batch_id).limit(1)
        return (await connection.execute(statement)).first() is not None

    @writes
    async def prune(self, connection: AsyncConnection, older_than_seconds: float) -> int:
        """Delete those that ended so long ago: how many."""
        over = RESPONSES.c.ended_at < clock_seconds() - int(older_than_seconds)
        return (await connection.execute(delete(RESPONSES).where(over))).rowcount


def _has_begun() -> ColumnElement[bool]:
    """A runner has had a chunk of its batch."""
    begun = select(CHUNKS.c.index).where(
        CHUNKS.c.batch_id == RESPONSES.c.batch_id, CHUNKS.c.epoch > 0
    )
    return begun.exists()


def _is_of(kind: ResponseKind) -> tuple[ColumnElement[bool], ...]:
    return (
        RESPONSES.c.tenant == kind.tenant,
        RESPONSES.c.model == kind.model,
        RESPONSES.c.completion_window == kind.completion_window,
    )


def _in_order(*where: ColumnElement[bool]) -> ColumnElement[bool]:
    ids = select(RESPONSES.c.id).where(*where).order_by(RESPONSES.c.id)
    return RESPONSES.c.id.in_(ids.with_for_update())


async def _end(
    connection: AsyncConnection,
    which: ColumnElement[bool],
    status: ResponseStatus,
    error: ResponseError | None,
) -> list[str]:
    """The only way to an end: the rows, and in the same transaction who is notified."""
    now = await read_seconds(connection)
    ended = await connection.execute(
        update(RESPONSES)
        .where(_in_order(which, IS_OPEN), IS_OPEN)
        .values(status=status, error=error, ended_at=now, line=None)
        .returning(RESPONSES.c.id, RESPONSES.c.tenant)
    )
    rows = ended.all()
    await insert_response_deliveries(connection, rows, f"response.{status.value}", now)
    return sorted(row.id for row in rows)


async def _load(
    connection: AsyncConnection, response_id: str, tenant: str | None = None
) -> ResponseRecord:
    statement = select(*ResponseRecord.columns(RESPONSES), _has_begun().label("has_begun")).where(
        RESPONSES.c.id == response_id
    )
    if tenant is not None:
        statement = statement.where(RESPONSES.c.tenant == tenant)
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise _not_found(response_id)
    record = ResponseRecord.read(row)
    if row["has_begun"] and record.ended_at is None:
        record = record.model_copy(update={"status": ResponseStatus.IN_PROGRESS})
    return record


def _not_found(response_id: str) -> RecordNotFound:
    return RecordNotFound(f"Response with id '{response_id[:100]}' not found.")
