"""Idempotency keys: a request that a client sends again gets the answer that it got before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from sqlalchemy import BigInteger, Index, and_, delete, or_, select, update
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock_seconds
from batchyard.database.columns import Row
from batchyard.database.upsert import upsert
from batchyard.errors import IdempotencyConflict
from batchyard.intervals import DAY_SECONDS

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy.ext.asyncio import AsyncConnection

NEW_FILES: Final = "submit-new-files"
"""The route of files that were found in a folder: a file may lie there for ever."""

_LAST_WRITE: Final = "last write"
"""The route under which each writer's last write has its name; see :func:`is_new_write`."""
_NEW_FILES_SECONDS: Final = 365 * DAY_SECONDS
_RENEWED_SECONDS: Final = DAY_SECONDS / 2
"""Well below the time after which code that does not know the route prunes its keys."""


class IdempotencyRow(Row, table=True):
    """One row for each key of a tenant on a route, until it is pruned."""

    __tablename__ = "idempotency"
    __table_args__ = (Index(None, "created_at"),)

    tenant: str = Field(primary_key=True)
    route: str = Field(primary_key=True)
    key: str = Field(primary_key=True)
    fingerprint: str
    answer_id: str
    created_at: int = Field(sa_type=BigInteger)


_KEYS = IdempotencyRow.metadata.tables["idempotency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyKey:
    """The name that a client gives its request.

    ``fingerprint`` is a hash of the request: the same for the same request, and for no other.
    """

    route: str
    key: str = field(repr=False)
    fingerprint: str


class Idempotency(Aggregate):
    """The keys of requests that were answered. :func:`claim` joins the write of the answer."""

    @reads
    async def find(
        self, connection: AsyncConnection, tenant: str, key: IdempotencyKey
    ) -> str | None:
        """The id that the same request was answered with; None: it is new.

        For checks that a repeated request need not pass again; :func:`claim` has the last word.
        Raises :class:`~batchyard.errors.IdempotencyConflict`.
        """
        return await _answer(connection, tenant, key)

    @writes
    async def renew(
        self, connection: AsyncConnection, tenant: str, route: str, keys: Collection[str]
    ) -> set[str]:
        """Those of the keys that were used before; for pruning, they were used today."""
        named = and_(_KEYS.c.tenant == tenant, _KEYS.c.route == route, _KEYS.c.key.in_(keys))
        now = clock_seconds()
        await connection.execute(
            update(_KEYS)
            .where(named, _KEYS.c.created_at < now - _RENEWED_SECONDS)
            .values(created_at=now)
        )
        return set((await connection.execute(select(_KEYS.c.key).where(named))).scalars())

    @writes
    async def prune(self, connection: AsyncConnection, older_than_seconds: float) -> int:
        """Forget keys that were first used longer ago than that: how many.

        Those of :data:`NEW_FILES` are forgotten a year after they were last renewed.
        """
        now = clock_seconds()
        is_of_file = _KEYS.c.route == NEW_FILES
        is_old = or_(
            and_(~is_of_file, _KEYS.c.created_at < now - older_than_seconds),
            and_(is_of_file, _KEYS.c.created_at < now - _NEW_FILES_SECONDS),
        )
        return (await connection.execute(delete(_KEYS).where(is_old))).rowcount


async def claim(
    connection: AsyncConnection, tenant: str, key: IdempotencyKey, answer_id: str
) -> str:
    """The id to answer with: ``answer_id``, or that of the same request before this one.

    Call it first in the transaction that makes ``answer_id``. Others with the same key wait
    until that has ended; where it is rolled back, the key is as new. Raises
    :class:`~batchyard.errors.IdempotencyConflict`.
    """
    row = {"tenant": tenant, "route": key.route, "key": key.key}
    answer = {"fingerprint": key.fingerprint, "answer_id": answer_id}
    # An update that changes nothing: it locks the row that is there against being pruned before
    # it is read.
    await upsert(
        connection,
        _KEYS,
        {**row, **answer, "created_at": clock_seconds()},
        {"created_at": _KEYS.c.created_at},
    )
    return await _answer(connection, tenant, key) or answer_id


async def is_new_write(connection: AsyncConnection, writer: str, name: str) -> bool:
    """Whether the writer's last write was not this one; then it is from now on.

    Call it first in a transaction that adds to sums. If the reply to its commit is lost, only this
    tells whether the write was made, so the writer sends it again under the same name. One writer
    makes one write at a time.
    """
    now = {"answer_id": name, "created_at": clock_seconds()}
    row = {"tenant": "", "route": _LAST_WRITE, "key": writer, "fingerprint": "", **now}
    # One statement: a write whose reply was lost may still be on its way to its commit, and is
    # waited for.
    return await upsert(connection, _KEYS, row, now, where=_KEYS.c.answer_id != name)


async def _answer(connection: AsyncConnection, tenant: str, key: IdempotencyKey) -> str | None:
    found = await connection.execute(
        select(_KEYS.c.fingerprint, _KEYS.c.answer_id).where(
            _KEYS.c.tenant == tenant, _KEYS.c.route == key.route, _KEYS.c.key == key.key
        )
    )
    row = found.one_or_none()
    if row is None:
        return None
    if row.fingerprint != key.fingerprint:
        raise IdempotencyConflict(
            "This idempotency key was used for another request before; send a new key."
        )
    return str(row.answer_id)
