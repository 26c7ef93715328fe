"""What decides when a batch runs: its priority, whether it is paused, how much is left of it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import and_, bindparam, delete, func, or_, select, update

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock, clock_seconds, read_seconds
from batchyard.database.leasing import in_one_order, is_held
from batchyard.errors import TransitionConflict
from batchyard.lifecycle import STOPPABLE, TERMINAL, UNFINISHED, BatchStatus
from batchyard.schedule.forecast import OpenWork
from batchyard.schedule.turns import BACKGROUND_WINDOW, SMALL_REQUESTS
from batchyard.store.batch.pages import load_batch
from batchyard.store.tables.audit import note_action
from batchyard.store.tables.batch import BATCHES, IS_PARENT
from batchyard.store.tables.batch_roots import BATCH_ROOTS
from batchyard.store.tables.chunk import (
    CHUNKS,
    IS_LEASED,
    IS_OPEN,
    UNANSWERED,
    ChunkStatus,
    remaining_prompts,
    remaining_tokens,
    remaining_work,
)
from batchyard.store.turns.order import is_background

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import ColumnElement, FromClause
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.tables.batch import BatchRecord


LATE_SECONDS: Final = 300.0
"""How long every forecast must be late before the batch is reported to be at risk."""
_AT_RISK_AT_ONCE: Final = 1000
"""A database that was stopped for long has more of them; the others are reported by the next."""
_MOVED_SECONDS: Final = 5
_MOVED_SHARE: Final = 0.01
"""A forecast is written again once it has moved by this share of the time that is left. The speed
of engines is measured all the time, and each measurement changes every forecast a little."""
_FORECAST_COLUMNS = [
    BATCHES.c[name]
    for name in ("id", "eta_at", "late_since", "at_risk_at", "expires_at", "created_at")
]
_BEHIND: Final = "other batches of its model go first: it is a background batch"


class BatchSchedule(Aggregate):
    """Writes a batch's priority and :class:`.ScheduleColumns`, and deletes its roots.

    The other writers of ``batches`` are :class:`.Batches` and :class:`.BatchLeases`.

    Methods that name a batch raise :class:`~batchyard.errors.RecordNotFound` where there is
    none, and :class:`~batchyard.errors.TransitionConflict` where nothing is left to run of it.
    """

    async def pause(self, batch_id: str) -> BatchRecord:
        """Start none of its requests until :meth:`unpause`; its window continues.

        A second time changes nothing.
        """
        return await self._steer(
            "batch.paused", batch_id, paused_at=func.coalesce(BATCHES.c.paused_at, clock_seconds())
        )

    async def unpause(self, batch_id: str) -> BatchRecord:
        """Undo :meth:`pause`; a second time changes nothing."""
        return await self._steer("batch.unpaused", batch_id, paused_at=None)

    async def set_priority(self, batch_id: str, priority: int) -> BatchRecord:
        """Set its priority, from its next chunk on."""
        return await self._steer("batch.priority", batch_id, priority=priority)

    @reads
    async def open_work(self, connection: AsyncConnection) -> list[OpenWork]:
        """What is left to run of every batch in progress, for a forecast."""
        statement = (
            select(
                BATCHES.c.id.label("batch_id"),
                CHUNKS.c.model,
                BATCHES.c.tenant,
                BATCHES.c.expires_at.label("deadline"),
                BATCHES.c.priority,
                BATCHES.c.created_at,
                func.sum(remaining_tokens()).label("remaining_tokens"),
                func.sum(remaining_work()).label("remaining_work"),
                func.sum(remaining_prompts()).label("remaining_prompts"),
                BATCHES.c.paused_at.is_not(None).label("is_paused"),
                (func.sum(UNANSWERED) <= SMALL_REQUESTS).label("is_small"),
                func.coalesce(BATCHES.c.tail_tokens, 0.0).label("tail_tokens"),
                is_background().label("is_background"),
            )
            .join(CHUNKS, CHUNKS.c.batch_id == BATCHES.c.id)
            .where(BATCHES.c.status == BatchStatus.IN_PROGRESS, IS_OPEN)
            .group_by(BATCHES.c.id, CHUNKS.c.model)
        )
        rows = (await connection.execute(statement)).mappings()
        return [OpenWork(**row) for row in rows]

    @writes
    async def forget_roots(self, connection: AsyncConnection) -> int:
        """Delete the roots of batches that have ended, which have no turn any more: how many."""
        over = select(BATCHES.c.id).where(
            BATCHES.c.id == BATCH_ROOTS.c.batch_id, BATCHES.c.status.in_(TERMINAL)
        )
        return (await connection.execute(delete(BATCH_ROOTS).where(over.exists()))).rowcount

    @writes
    async def record_tail(
        self, connection: AsyncConnection, batch_id: str, tail_tokens: float
    ) -> None:
        """Record how many tokens the last answer will lack when all others have ended."""
        running = BATCHES.c.status == BatchStatus.IN_PROGRESS
        await connection.execute(
            update(BATCHES).where(BATCHES.c.id == batch_id, running).values(tail_tokens=tail_tokens)
        )

    async def record_forecast(
        self, etas: Mapping[str, int], *, hold_seconds: float = LATE_SECONDS
    ) -> list[BatchRecord]:
        """Record when batches will probably be done; returns those that have just become at risk.

        ``etas`` are Unix seconds. A batch in progress that is not named has no forecast; one whose
        forecast has hardly moved keeps the one that it had. A batch is at risk once every forecast
        of ``hold_seconds`` has said that its window ends first, or of a tenth of its window where
        that is less: a single odd measurement has no effect. A background batch is never at risk,
        because nothing was promised.
        """
        now, late = await self._write_forecast(etas, hold_seconds)
        # In a transaction of its own: it would lock these after others that come later by id, and
        # whoever renews the leases of both, by id, could wait for it while it waits for them.
        return await self._name_at_risk(late[:_AT_RISK_AT_ONCE], now) if late else []

    @writes
    async def _write_forecast(
        self, connection: AsyncConnection, etas: Mapping[str, int], hold_seconds: float
    ) -> tuple[int, list[str]]:
        """When it was written, and those late for long enough that were not named before."""
        running = BATCHES.c.status == BatchStatus.IN_PROGRESS
        # One after the other by id: the order of everybody who changes several batches.
        is_parent = IS_PARENT.label("is_parent")
        columns = (*_FORECAST_COLUMNS, is_background().label("is_background"), is_parent)
        known = select(*columns).where(running).order_by(BATCHES.c.id)
        one = update(BATCHES).where(running, BATCHES.c.id == bindparam("batch_id"))
        now = await read_seconds(connection)
        changed, at_risk = [], []
        for row in (await connection.execute(known)).all():
            # Of its parts not all are known, so there is nothing to say.
            eta_at = None if row.is_parent else etas.get(row.id)
            late_since = row.late_since if row.late_since is not None else now
            if eta_at is None or eta_at <= row.expires_at or row.is_background:
                late_since = None
            if late_since != row.late_since or _has_moved(row.eta_at, eta_at, now):
                changed.append({"batch_id": row.id, "eta": eta_at, "since": late_since})
            hold = min(hold_seconds, (row.expires_at - row.created_at) / 10)
            if late_since is not None and now - late_since >= hold and row.at_risk_at is None:
                at_risk.append(row.id)
        if changed:
            new = one.values(eta_at=bindparam("eta"), late_since=bindparam("since"))
            await connection.execute(new, changed)
        return now, at_risk

    @writes
    async def _name_at_risk(
        self, connection: AsyncConnection, batch_ids: list[str], now: int
    ) -> list[BatchRecord]:
        """The batches that no other process has named meanwhile."""
        running = BATCHES.c.status == BatchStatus.IN_PROGRESS
        unnamed = BATCHES.c.id.in_(batch_ids), running, BATCHES.c.at_risk_at.is_(None)
        named = await connection.execute(
            update(BATCHES)
            # Asked of the row itself once more: another process may have named it in between.
            .where(in_one_order(BATCHES, *unnamed), *unnamed)
            .values(at_risk_at=now)
            .returning(BATCHES.c.id)
        )
        return [await load_batch(connection, batch_id) for batch_id in sorted(named.scalars())]

    async def record_waits(self, reasons: Mapping[str, str]) -> None:
        """Record why batches in progress wait, by their model; the others wait for nothing.

        Background batches also wait while other batches of their model are there, and a batch with
        chunks in trouble waits if none of its chunks runs without. A chain whose first stage is
        done waits if all its parts in progress do.
        """
        # Asked every few seconds, and nearly always there is nothing to write.
        changed = await self._changed_waits(reasons)
        if changed:
            await self._write_waits(changed)

    async def record_wait(self, batch_id: str, reason: str | None) -> None:
        """Record why one batch in progress waits, if no process does it for all; None: no more."""
        await self._write_waits([{"batch_id": batch_id, "new_reason": reason}])

    @writes
    async def record_step_wait(
        self, connection: AsyncConnection, batch_id: str, reason: str
    ) -> None:
        """Record why the step of a batch that is not in progress is put off, until it moves on."""
        steps = UNFINISHED - {BatchStatus.IN_PROGRESS}
        await connection.execute(
            update(BATCHES)
            .where(BATCHES.c.id == batch_id, BATCHES.c.status.in_(steps))
            .values(wait_reason=reason)
        )

    @reads
    async def _changed_waits(
        self, connection: AsyncConnection, reasons: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        running = BATCHES.c.status == BatchStatus.IN_PROGRESS
        known = (
            select(
                BATCHES.c.id,
                BATCHES.c.model,
                BATCHES.c.part_of,
                BATCHES.c.wait_reason,
                and_(is_background(), _others_of_model()).label("is_behind"),
                _trouble().label("trouble"),
                and_(IS_PARENT, ~_has_open_chunks(BATCHES)).label("has_parts_only"),
            )
            .where(running)
            .order_by(BATCHES.c.id)
        )
        rows = (await connection.execute(known)).all()
        waits: dict[str, str | None] = {}
        of_parts: defaultdict[str | None, list[str | None]] = defaultdict(list)
        for row in rows:
            new = reasons.get(row.model) or row.trouble or (_BEHIND if row.is_behind else None)
            waits[row.id] = new
            of_parts[row.part_of].append(new)
        for row in rows:
            if row.has_parts_only:
                found = [each for each in of_parts[row.id] if each is not None]
                waits[row.id] = found[0] if len(found) == len(of_parts[row.id]) > 0 else None
        return [
            {"batch_id": row.id, "new_reason": waits[row.id]}
            for row in rows
            if waits[row.id] != row.wait_reason
        ]

    @writes
    async def _write_waits(
        self, connection: AsyncConnection, changed: list[dict[str, Any]]
    ) -> None:
        running = BATCHES.c.status == BatchStatus.IN_PROGRESS
        one = update(BATCHES).where(running, BATCHES.c.id == bindparam("batch_id"))
        await connection.execute(one.values(wait_reason=bindparam("new_reason")), changed)

    @writes
    async def _steer(
        self, connection: AsyncConnection, action: str, /, batch_id: str, **values: Any
    ) -> BatchRecord:
        parts = and_(BATCHES.c.part_of == batch_id, BATCHES.c.status.in_(STOPPABLE))
        # A chain among its parts by id: in this order their owner renews the leases of all of them.
        all_by_id = select(BATCHES.c.id).where(or_(BATCHES.c.id == batch_id, parts))
        await connection.execute(all_by_id.order_by(BATCHES.c.id).with_for_update())
        steered = await connection.execute(
            update(BATCHES)
            .where(BATCHES.c.id == batch_id, BATCHES.c.status.in_(STOPPABLE))
            .values(**values)
        )
        # What holds for a chain holds for its parts, also for those that have just been added.
        await connection.execute(
            update(BATCHES).where(in_one_order(BATCHES, parts)).values(**values)
        )
        batch = await load_batch(connection, batch_id)
        if steered.rowcount == 0:
            raise TransitionConflict(
                f"{batch_id} is {batch.status.value}: nothing is left to run of it."
            )
        details = {"tenant": batch.tenant}
        if "priority" in values:
            details["priority"] = values["priority"]
        await note_action(connection, action, batch_id, **details)
        return batch


def _trouble() -> ColumnElement[str | None]:
    """Why nothing of the batch goes on, if none of its chunks runs without trouble.

    A batch that waits for its turn has the trouble of its model's chunks, if all that run have one.
    """
    of_model = and_(_trouble_in(CHUNKS.c.model, BATCHES.c.model), IS_LEASED)
    return func.coalesce(
        *(
            select(func.min(CHUNKS.c.trouble)).where(each).correlate(BATCHES).scalar_subquery()
            for each in (_trouble_in(CHUNKS.c.batch_id, BATCHES.c.id), of_model)
        )
    )


def _trouble_in(column: ColumnElement[str], value: ColumnElement[str]) -> ColumnElement[bool]:
    """The chunk is in trouble, and none runs without that has this value too."""
    running = CHUNKS.alias("running")
    runs_well = (
        select(running.c.index)
        .where(
            running.c[column.name] == value,
            running.c.status == ChunkStatus.LEASED,
            running.c.trouble.is_(None),
            is_held(running),
        )
        .correlate(BATCHES)
    )
    return and_(column == value, CHUNKS.c.trouble.is_not(None), ~runs_well.exists())


def _others_of_model() -> ColumnElement[bool]:
    """Whether batches of the same model that are not background batches may run now."""
    others = BATCHES.alias("others")
    return (
        select(others.c.id)
        .where(
            others.c.status == BatchStatus.IN_PROGRESS,
            others.c.paused_at.is_(None),
            others.c.expires_at > clock(),
            others.c.completion_window != BACKGROUND_WINDOW,
            others.c.model == BATCHES.c.model,
            _has_open_chunks(others),
        )
        .correlate(BATCHES)
        .exists()
    )


def _has_open_chunks(batches: FromClause) -> ColumnElement[bool]:
    is_open = CHUNKS.c.batch_id == batches.c.id, IS_OPEN
    return select(CHUNKS.c.index).where(*is_open).correlate(batches).exists()


def _has_moved(before: int | None, eta_at: int | None, now: int) -> bool:
    if before is None or eta_at is None:
        return before != eta_at
    return abs(eta_at - before) >= max(_MOVED_SECONDS, _MOVED_SHARE * (eta_at - now))
