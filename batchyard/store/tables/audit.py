"""The audit log: what operators did, written in the transaction that does it. Never a secret."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Index, insert, select
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock_seconds
from batchyard.database.columns import JsonText, Record, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

_ACTOR: ContextVar[str | None] = ContextVar("actor", default=None)
"""The operator for whom this task or command works; None: it works for no operator, and nothing is
recorded. In the context, and no parameter: only the way in (a command, an API key) knows it, and
every step and aggregate down to the writer of the row would have to pass it on."""


class AuditRecord(Record):
    """One action. ``at``: Unix seconds."""

    id: str = Field(primary_key=True)
    at: int = Field(sa_type=BigInteger)
    actor: str
    """Who: a key's id, or the user and the machine of a command."""
    action: str
    """The name of the action, such as ``key.created``."""
    subject: str
    """What it was done to: an id, or the name of a tenant."""
    details: dict[str, Any] = Field(sa_type=JsonText(dict[str, Any]))


class AuditRow(Row, AuditRecord, table=True):
    """One row for each action, never changed and never deleted."""

    __tablename__ = "audit_log"
    __table_args__ = (Index(None, "at", "id"),)


_LOG = AuditRow.metadata.tables["audit_log"]


@contextmanager
def acting_as(actor: str | None) -> Iterator[None]:
    """Within the block, what is done is recorded as this operator's. None: it is not recorded."""
    token = _ACTOR.set(actor)
    try:
        yield
    finally:
        _ACTOR.reset(token)


def act_as(actor: str) -> None:
    """From now on, in this task, what is done is recorded as this operator's."""
    _ACTOR.set(actor)


async def note_action(
    connection: AsyncConnection, action: str, subject: str, /, **details: Any
) -> None:
    """Record it, if an operator does it; ``details`` are JSON values, and no secrets."""
    actor = _ACTOR.get()
    if actor is None:
        return
    row = {"id": f"audit_{secrets.token_hex(12)}", "actor": actor, "action": action}
    await connection.execute(
        insert(_LOG).values(at=clock_seconds(), subject=subject, details=details, **row)
    )


class AuditLog(Aggregate):
    """The reader of ``audit_log``, and a writer of what changes no other table."""

    @writes
    async def note(
        self, connection: AsyncConnection, action: str, subject: str, /, **details: Any
    ) -> None:
        """Do what :func:`note_action` does, in a transaction of its own."""
        await note_action(connection, action, subject, **details)

    @reads
    async def newest(
        self,
        connection: AsyncConnection,
        *,
        limit: int,
        action: str | None = None,
    ) -> Sequence[AuditRecord]:
        """The newest first. ``action``: only those whose name begins with this."""
        statement = select(_LOG).order_by(_LOG.c.at.desc(), _LOG.c.id.desc()).limit(limit)
        if action is not None:
            statement = statement.where(_LOG.c.action.startswith(action, autoescape=True))
        return [AuditRecord.read(row) for row in (await connection.execute(statement)).mappings()]
