"""Which chunk of a batch a runner gets, so that its engine has in its cache what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import and_, select

from batchyard.ranges import Piece, choose
from batchyard.roots import Roots  # noqa: TC001 - a value of Host, whose users may resolve it
from batchyard.store.batch.roots import read_roots
from batchyard.store.chunk.rows import ANSWER_BITS, CHUNKS, IS_LEASED, is_claimable, is_due
from batchyard.store.leasing import is_held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection


@dataclass(frozen=True, slots=True)
class Host:
    """A chunk whose requests go into the runner's engine now: its batch, and where it begins."""

    roots: Roots
    record: int


async def first_choice(
    connection: AsyncConnection,
    batch_id: str,
    model: str,
    owner: str,
    hosts: Sequence[Host],
    *,
    with_expired: bool,
) -> int | None:
    """The number of the chunk; None: whatever is first."""
    place = await _place(connection, batch_id, hosts) if hosts else None
    if place is None and not await _has_others(connection, batch_id, owner):
        return None
    statement = (
        select(
            CHUNKS.c.index,
            CHUNKS.c.first_record,
            CHUNKS.c.request_count,
            CHUNKS.c.token_estimate,
            and_(is_claimable(with_expired=with_expired), is_due()).label("is_free"),
            and_(IS_LEASED, is_held(CHUNKS)).label("is_held"),
            CHUNKS.c.owner,
            ANSWER_BITS,
        )
        .where(CHUNKS.c.batch_id == batch_id, CHUNKS.c.model == model)
        .order_by(CHUNKS.c.index)
    )
    pieces = [Piece(*row) for row in await connection.execute(statement)]
    chosen = choose(pieces, owner, place=place)
    return None if chosen is None else chosen.index


async def _place(connection: AsyncConnection, batch_id: str, hosts: Sequence[Host]) -> int | None:
    """The record of the batch's plan at which one of the hosts is; None: they share nothing."""
    roots = (await read_roots(connection, [batch_id])).get(batch_id)
    if roots is None:
        return None
    places = (roots.place_beside(host.roots, host.record) for host in hosts)
    return next((place for place in places if place is not None), None)


async def _has_others(connection: AsyncConnection, batch_id: str, owner: str) -> bool:
    others = select(CHUNKS.c.index).where(
        CHUNKS.c.batch_id == batch_id, IS_LEASED, is_held(CHUNKS), CHUNKS.c.owner != owner
    )
    return (await connection.execute(others.limit(1))).first() is not None
