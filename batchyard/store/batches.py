"""Every change of a batch. Which moves there are is ``lifecycle``'s to say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import insert, select, update

from batchyard.errors import IllegalTransition, RecordNotFound, TransitionConflict
from batchyard.lifecycle import TERMINAL, TRANSITIONS, BatchStatus, check_transition
from batchyard.store.batch_rows import BATCHES, BatchLocations, BatchRecord
from batchyard.store.chunk_rows import insert_chunks, summarise
from batchyard.store.clock import clock_seconds, read_seconds
from batchyard.store.columns import usage_values
from batchyard.store.files import insert_file

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.batch_rows import NewBatch
    from batchyard.store.chunk_rows import NewChunk
    from batchyard.store.database import Database
    from batchyard.store.files import NewFile
    from batchyard.wire import BatchError, BatchUsage, RequestCounts


_LOCATION_COLUMNS = ("input_location", "output_location", "error_location")
_LOCATIONS = [BATCHES.c[name] for name in _LOCATION_COLUMNS]
_RECORD = [column for column in BATCHES.c if column.name not in _LOCATION_COLUMNS]

_FINISHED: Final = frozenset({BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


class Batches:
    """The only writer of ``batches``.

    Every change of status is compare-and-set: of many who try at once one succeeds, and the
    others get :class:`~batchyard.errors.TransitionConflict`. Methods that name a batch raise
    :class:`~batchyard.errors.RecordNotFound` where there is none.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, new: NewBatch) -> BatchRecord:
        """Record a new batch, ``validating``; on return it is durable.

        Raises :class:`~batchyard.errors.TransitionConflict` for a taken id.
        """

        async def work(connection: AsyncConnection) -> BatchRecord:
            now = await read_seconds(connection)
            await connection.execute(
                insert(BATCHES).values(
                    status=BatchStatus.VALIDATING,
                    created_at=now,
                    expires_at=now + new.window_seconds,
                    **new.columns(),
                )
            )
            return await _load(connection, new.id)

        return await self._database.write(work)

    async def get(self, batch_id: str) -> BatchRecord:
        """The batch, without its locations, its counts live."""

        async def work(connection: AsyncConnection) -> BatchRecord:
            return await _load(connection, batch_id)

        return await self._database.read(work)

    async def locations(self, batch_id: str) -> BatchLocations:
        """Where the user keeps the input and wants the results: secrets, opened."""

        async def work(connection: AsyncConnection) -> BatchLocations:
            found = await connection.execute(select(*_LOCATIONS).where(BATCHES.c.id == batch_id))
            row = found.one_or_none()
            if row is None:
                raise _not_found(batch_id)
            return BatchLocations(*row)

        return await self._database.read(work)

    async def set_flow_run(self, batch_id: str, flow_run_id: str) -> None:
        """Name the flow run that now works on the batch."""

        async def work(connection: AsyncConnection) -> None:
            updated = await connection.execute(
                update(BATCHES).where(BATCHES.c.id == batch_id).values(flow_run_id=flow_run_id)
            )
            if updated.rowcount == 0:
                raise _not_found(batch_id)

        await self._database.write(work)

    async def advance(
        self, batch_id: str, expected: BatchStatus, target: BatchStatus
    ) -> BatchRecord:
        """Move to ``finalizing`` or ``cancelling``; the other moves carry more and are below.

        Raises :class:`~batchyard.errors.IllegalTransition`.
        """
        check_transition(expected, target)
        if target is BatchStatus.IN_PROGRESS or target in TERMINAL:
            raise IllegalTransition(
                f"A batch becomes {target.value} by begin, finish or fail, not by advance."
            )

        async def work(connection: AsyncConnection) -> BatchRecord:
            await _move(connection, batch_id, {expected}, target)
            return await _load(connection, batch_id)

        return await self._database.write(work)

    async def begin(
        self,
        batch_id: str,
        *,
        model: str | None,
        total: int,
        order_policy: str,
        plan_key: str,
        chunks: Sequence[NewChunk],
    ) -> BatchRecord:
        """From ``validating`` to ``in_progress`` with its plan: all of it or none.

        ``total`` is the number of lines, ``plan_key`` where the plan's bytes already are.
        """

        async def work(connection: AsyncConnection) -> BatchRecord:
            await _move(
                connection,
                batch_id,
                {BatchStatus.VALIDATING},
                BatchStatus.IN_PROGRESS,
                model=model,
                total=total,
                order_policy=order_policy,
                plan_key=plan_key,
            )
            record = await _load(connection, batch_id)
            await insert_chunks(connection, batch_id, record.expires_at, chunks)
            return record

        return await self._database.write(work)

    async def fail(self, batch_id: str, errors: Sequence[BatchError]) -> BatchRecord:
        """End as ``failed``: the input is refused, or the batch cannot be run at all.

        What its chunks have counted by now is frozen into the batch.
        """

        async def work(connection: AsyncConnection) -> BatchRecord:
            so_far = await summarise(connection, batch_id)
            return await _end(
                connection,
                batch_id,
                BatchStatus.FAILED,
                errors=tuple(errors),
                completed=so_far.completed,
                failed=so_far.failed,
                **usage_values(so_far.usage),
            )

        return await self._database.write(work)

    async def finish(
        self,
        batch_id: str,
        *,
        target: BatchStatus,
        output: NewFile | None,
        error: NewFile | None,
        counts: RequestCounts,
        usage: BatchUsage,
    ) -> BatchRecord:
        """End as ``completed``, ``expired`` or ``cancelled``, with its result files' rows.

        The files' bytes are already durable. Of ``counts`` the total is not written again: it
        is what ``begin`` said. Raises :class:`~batchyard.errors.IllegalTransition` for another
        ``target``.
        """
        if target not in _FINISHED:
            raise IllegalTransition(f"To finish a batch is not to make it {target.value}.")

        async def work(connection: AsyncConnection) -> BatchRecord:
            record = await _end(
                connection,
                batch_id,
                target,
                output_file_id=output and output.id,
                error_file_id=error and error.id,
                completed=counts.completed,
                failed=counts.failed,
                **usage_values(usage),
            )
            for file in filter(None, (output, error)):
                await insert_file(connection, file)
            return record

        return await self._database.write(work)


async def _end(
    connection: AsyncConnection, batch_id: str, target: BatchStatus, **values: Any
) -> BatchRecord:
    """The only way into a terminal status: what must happen with it joins this transaction."""
    sources = {status for status, targets in TRANSITIONS.items() if target in targets}
    await _move(connection, batch_id, sources, target, **values)
    return await _load(connection, batch_id)


async def _move(
    connection: AsyncConnection,
    batch_id: str,
    sources: Collection[BatchStatus],
    target: BatchStatus,
    **values: Any,
) -> None:
    # No status is entered twice, so a timestamp that is set on entry is set once.
    if target.timestamp_field is not None:
        values[target.timestamp_field] = clock_seconds()
    moved = await connection.execute(
        update(BATCHES)
        .where(BATCHES.c.id == batch_id, BATCHES.c.status.in_(sources))
        .values(status=target, **values)
    )
    if moved.rowcount == 0:
        found = await connection.execute(select(BATCHES.c.status).where(BATCHES.c.id == batch_id))
        status = found.scalar_one_or_none()
        if status is None:
            raise _not_found(batch_id)
        raise TransitionConflict(
            f"{batch_id} is {status} and cannot become {target.value} now "
            f"(only from: {', '.join(sorted(sources))}); read it again."
        )


async def _load(connection: AsyncConnection, batch_id: str) -> BatchRecord:
    found = await connection.execute(select(*_RECORD).where(BATCHES.c.id == batch_id))
    row = found.mappings().one_or_none()
    if row is None:
        raise _not_found(batch_id)
    record = BatchRecord.from_row(row)
    if record.status in TERMINAL:
        return record
    live = await summarise(connection, batch_id)
    return record.counting(completed=live.completed, failed=live.failed)


def _not_found(batch_id: str) -> RecordNotFound:
    return RecordNotFound(f"No batch found with id '{batch_id}'.")
