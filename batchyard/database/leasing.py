"""What a lease is: its columns, and the SQL to ask for, claim, renew and release one.

A lease is an owner, an end by the database's clock, and an epoch that every claim raises. Each
write of an owner names its epoch, so that one who slept through its lease is refused. A lease
that has run out is still its owner's until another one claims the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Double, and_, or_, select
from sqlmodel import Field, SQLModel

from batchyard.database.clock import clock

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, FromClause, Table


class LeaseColumns(SQLModel):
    """The columns of a row that is leased. ``epoch`` counts its claims."""

    epoch: int = 0
    owner: str | None
    lease_expires_at: float | None = Field(sa_type=Double)


def is_free(table: FromClause) -> ColumnElement[bool]:
    """The row has no owner: it was never claimed, or was released, or its lease has expired."""
    end = table.c.lease_expires_at
    return or_(end.is_(None), end <= clock())


def is_held(table: FromClause) -> ColumnElement[bool]:
    """The row has an owner, and the lease has not expired."""
    return and_(table.c.owner.is_not(None), table.c.lease_expires_at > clock())


def is_claim(table: Table, owner: str, epoch: int) -> ColumnElement[bool]:
    """The row is still leased by this claim of it, whether that has run out or not."""
    return and_(table.c.owner == owner, table.c.epoch == epoch)


def in_one_order(table: Table, *where: ColumnElement[bool]) -> ColumnElement[bool]:
    """For an update of several rows: those, locked by id.

    In the same order for everybody, or two who change the same could wait for each other.
    """
    ids = select(table.c.id).where(*where).order_by(table.c.id)
    return table.c.id.in_(ids.with_for_update())


def claimed(table: Table, owner: str, seconds: float) -> dict[str, Any]:
    """The new values of a row that ``owner`` claims."""
    return {"epoch": table.c.epoch + 1, "owner": owner, **renewed(seconds)}


def renewed(seconds: float) -> dict[str, Any]:
    """The new values of a row whose lease is to last for ``seconds`` from now."""
    return {"lease_expires_at": clock() + seconds}


def released(*, after_seconds: float | None = None) -> dict[str, Any]:
    """The new values of a row that is free, at once or ``after_seconds`` from now."""
    return {
        "owner": None,
        "lease_expires_at": None if after_seconds is None else clock() + after_seconds,
    }
