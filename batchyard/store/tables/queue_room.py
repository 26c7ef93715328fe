"""Which batches wait for room in their tenant's quota, and which of them wait for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, and_, exists, literal_column, or_

from batchyard.database.leasing import is_held
from batchyard.store.tables.batch import BATCHES

if TYPE_CHECKING:
    from sqlalchemy import FromClause

AWAITS_ROOM: ColumnElement[bool] = and_(
    BATCHES.c.status == literal_column("'validating'"), BATCHES.c.awaited_requests.is_not(None)
)
"""Its tenant's quota had no room for it when it was to begin."""


def waits_behind(table: FromClause) -> ColumnElement[bool]:
    """Whether another batch of its tenant, created before it, waits for room in the queue."""
    first = BATCHES.alias("first")
    is_earlier = or_(
        first.c.created_at < table.c.created_at,
        and_(first.c.created_at == table.c.created_at, first.c.id < table.c.id),
    )
    return exists().where(
        first.c.tenant == table.c.tenant,
        first.c.status == literal_column("'validating'"),
        first.c.awaited_requests.is_not(None),
        is_earlier,
        # Nobody looks for room for an inline one that was stopped.
        or_(~first.c.is_inline, is_held(first)),
    )
