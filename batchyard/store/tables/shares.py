"""What batches come to by their chunks, for each of their models: so far, and at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Double, and_, bindparam, case, cast, func, select

from batchyard.database.columns import USAGE_COLUMNS
from batchyard.store.tables.chunk import CHUNKS
from batchyard.wire import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import Select
    from sqlalchemy.ext.asyncio import AsyncConnection


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a batch has of one model."""

    completed: int
    failed: int
    estimate: float
    """Tokens of the requests that have an answer or an error: prompts as the plan estimated them,
    answers as they are or, where the engine says nothing of them, as planned too."""
    usage: TokenUsage

    @property
    def requests(self) -> int:
        """The number of requests with an answer or an error."""
        return self.completed + self.failed


def _of_batches() -> Select[Any]:
    answered = cast(CHUNKS.c.completed + CHUNKS.c.failed, Double) / CHUNKS.c.request_count
    is_counted = and_(CHUNKS.c.output_tokens > 0, CHUNKS.c.prompt_tokens.is_not(None))
    estimate = case(
        (is_counted, CHUNKS.c.prompt_tokens * answered + CHUNKS.c.output_tokens),
        else_=CHUNKS.c.token_estimate * answered,
    )
    names = ("completed", "failed", *USAGE_COLUMNS)
    return (
        select(
            CHUNKS.c.batch_id,
            CHUNKS.c.model,
            func.sum(estimate).label("estimate"),
            *(func.sum(CHUNKS.c[name]).label(name) for name in names),
        )
        .where(CHUNKS.c.batch_id.in_(bindparam("batches", expanding=True)))
        .group_by(CHUNKS.c.batch_id, CHUNKS.c.model)
        .order_by(CHUNKS.c.batch_id, CHUNKS.c.model)
    )


_OF_BATCHES: Final = _of_batches()
"""Made once: it is in every look at a batch, and to make it takes longer than to run it."""


async def shares_of(
    connection: AsyncConnection, batch_ids: Collection[str]
) -> dict[str, dict[str, Share]]:
    """The shares by batch, and then by model, in one query. A batch without chunks is not in it."""
    if not batch_ids:
        return {}
    shares: dict[str, dict[str, Share]] = {}
    found = await connection.execute(_OF_BATCHES, {"batches": list(batch_ids)})
    for row in found.mappings():
        # PostgreSQL adds 64-bit integers up to a Decimal.
        shares.setdefault(row["batch_id"], {})[row["model"]] = Share(
            completed=int(row["completed"]),
            failed=int(row["failed"]),
            estimate=float(row["estimate"]),
            usage=TokenUsage(*(int(row[name]) for name in USAGE_COLUMNS)),
        )
    return shares
