"""Where a batch begins for a runner, so that its engine has in its cache what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.plan.roots import Roots  # noqa: TC001 - a value of Host, whose users may resolve it
from batchyard.store.tables.batch_roots import read_roots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection


@dataclass(frozen=True, slots=True)
class Host:
    """A chunk whose requests go into the runner's engine now: its batch, and where it begins."""

    roots: Roots
    record: int


async def place_beside(
    connection: AsyncConnection, batch_id: str, hosts: Sequence[Host]
) -> int | None:
    """The record of the batch's plan at which one of the hosts is; None: they share nothing."""
    if not hosts:
        return None
    roots = (await read_roots(connection, [batch_id])).get(batch_id)
    if roots is None:
        return None
    places = (roots.place_beside(host.roots, host.record) for host in hosts)
    return next((place for place in places if place is not None), None)
