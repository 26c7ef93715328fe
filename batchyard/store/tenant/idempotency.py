"""Idempotency keys: a request that a client sends again gets the answer that it got before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Index, delete, select
from sqlmodel import Field

from batchyard.errors import IdempotencyConflict
from batchyard.store.aggregate import Aggregate, reads, writes
from batchyard.store.clock import clock_seconds
from batchyard.store.columns import Row
from batchyard.store.upsert import upsert

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection


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
    async def prune(self, connection: AsyncConnection, older_than_seconds: float) -> int:
        """Forget keys that were first used longer ago than that: how many."""
        statement = delete(_KEYS).where(_KEYS.c.created_at < clock_seconds() - older_than_seconds)
        return (await connection.execute(statement)).rowcount


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
